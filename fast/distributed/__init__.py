"""Exchanges between context-parallel ranks: merge of attention states, and reordering of gathered context."""
