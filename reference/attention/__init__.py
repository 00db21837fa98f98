"""Functions for any attention family: softmax attention with LSE, merge of attention states, rotary embedding."""
