"""The GPU suite and the benchmarks, as far as they run without a GPU."""
