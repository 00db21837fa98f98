"""Tests of the batch-invariant Hopper decode in two phases."""
