"""Combine partial outputs: what every decode that splits its keys launches last, whatever backend it is of."""

from .launch import SplitDecode, combine_partial_outputs, readable_keys, rows_of_a_request, whole_tiles

__all__ = ["SplitDecode", "combine_partial_outputs", "readable_keys", "rows_of_a_request", "whole_tiles"]
