"""Comparisons of the two packages: structure, signatures, results and registered ops."""
