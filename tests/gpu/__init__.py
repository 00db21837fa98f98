"""Tests of the GPU suite and of the benchmarks, as far as these run without a GPU."""
