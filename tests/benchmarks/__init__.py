"""Benchmarks: each module prints a table of medians and quartiles, and writes JSON if `--json` is given.

No module of this package is a test.
"""
