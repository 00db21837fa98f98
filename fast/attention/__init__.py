"""Ops for attention of any family: softmax attention with LSE, merge of attention states, rotary embedding."""
