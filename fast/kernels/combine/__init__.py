"""Combine the partial outputs of a decode that splits requests; the backends `triton` and `hopper` use this package."""

from .launch import SplitDecode, combine_partial_outputs, readable_keys, rows_of_a_request, whole_tiles

__all__ = ["SplitDecode", "combine_partial_outputs", "readable_keys", "rows_of_a_request", "whole_tiles"]
