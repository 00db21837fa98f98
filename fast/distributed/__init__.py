"""Ops for context-parallel ranks: merge attention states over ranks, and reorder context gathered from all ranks."""
