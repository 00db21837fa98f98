"""Attention of any family: softmax attention with LSE over packed sequences, merge of states, rotary embedding."""
