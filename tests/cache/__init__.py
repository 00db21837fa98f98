"""Paged caches."""
