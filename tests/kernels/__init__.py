"""Tests of kernels that call the launchers of a backend instead of the public functions."""
