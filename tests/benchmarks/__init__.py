"""Benchmarks: each benchmark prints a table of medians and quartiles, and writes JSON if `--json` is given.

This package contains no tests; pytest does not collect its modules.
"""
