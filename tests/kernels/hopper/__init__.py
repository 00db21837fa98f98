"""Tests of the Hopper kernels. Most of them need a Hopper GPU."""
