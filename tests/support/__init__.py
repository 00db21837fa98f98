"""Helpers that several test modules use: random inputs, slow computations of expected results, ranks, processes."""
