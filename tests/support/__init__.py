"""Helpers that several test modules use: inputs, oracles, ranks, processes."""
