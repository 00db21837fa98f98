"""Tests of the cpu kernels."""
