"""Tests of the GPU suite and of the benchmarks; these tests need no GPU."""
