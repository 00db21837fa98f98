"""Tests of the GPU suite and of the benchmarks, and tests of memory, replays and CUDA graphs on a GPU."""
