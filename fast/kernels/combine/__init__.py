"""Combine partial outputs: the last launch of a decode that splits requests, in the Triton and the Hopper backend."""

from .launch import SplitDecode, combine_partial_outputs, readable_keys, rows_of_a_request, whole_tiles

__all__ = ["SplitDecode", "combine_partial_outputs", "readable_keys", "rows_of_a_request", "whole_tiles"]
