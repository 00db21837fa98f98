"""Tests of the functions that several Hopper kernels use."""
