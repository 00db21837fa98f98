"""Exchanges between context-parallel ranks, for any attention family."""
