"""Tests of the GPU suite and of the benchmarks that run without a GPU."""
