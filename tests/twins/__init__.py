"""Tests that compare `fast` with `reference`: structure, signatures, results and registered ops."""
