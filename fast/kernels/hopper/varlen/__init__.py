"""Attention over packed requests of different lengths on Hopper GPUs (`flash_attn_varlen`)."""
