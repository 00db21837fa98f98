"""Paged caches: write cache entries, gather cache entries, and copy whole blocks."""
