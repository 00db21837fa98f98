"""Ops on paged caches: allocate, write, gather, copy and swap."""
