"""Helpers of several test modules: random inputs, slow computations of expected results, ranks, processes."""
