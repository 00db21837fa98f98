"""Attention of any family: varlen softmax attention with LSE, merging of states, rotary embedding."""
