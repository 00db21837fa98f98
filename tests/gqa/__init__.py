"""Tests of grouped-query attention: caches, attention, plans, graphs, context parallelism and layers."""
