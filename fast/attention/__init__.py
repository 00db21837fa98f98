"""Ops for any kind of attention: softmax attention with LSE, merge of attention states, rotary embedding."""
