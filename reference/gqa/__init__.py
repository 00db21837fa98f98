"""Grouped-query attention (GQA) over a paged cache of keys and values: attention, cascade, builder and layer."""
