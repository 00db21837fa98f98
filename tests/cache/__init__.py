"""Tests of the paged caches and their formats."""
