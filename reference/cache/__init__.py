"""Paged caches: allocate, write, gather, copy and swap."""
