"""Tests of the Triton kernels of grouped-query attention."""
