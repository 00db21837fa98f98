"""Attention of any family."""
