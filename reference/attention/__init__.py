"""Functions for any kind of attention: softmax attention, merge of attention states, rotary position embedding."""
