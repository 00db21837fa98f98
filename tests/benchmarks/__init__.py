"""Benchmarks: each prints a table of medians and spread, and writes JSON where asked; none is a test."""
