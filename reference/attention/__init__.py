"""Functions for any attention family: varlen softmax attention with LSE, merge of states, rotary embedding."""
