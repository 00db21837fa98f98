"""Tests of the Triton kernels. Without a GPU they run in Triton's interpreter."""
