"""Combine of partial outputs: the last launch of a decode that splits requests ("triton" and "hopper" use it)."""

from .launch import SplitDecode, combine_partial_outputs, readable_keys, rows_of_a_request, whole_tiles

__all__ = ["SplitDecode", "combine_partial_outputs", "readable_keys", "rows_of_a_request", "whole_tiles"]
