"""Kernels by themselves, below their public functions."""
