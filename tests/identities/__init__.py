"""Tests of mathematical identities in float64; no test compares `fast` with `reference`."""
