"""Triton kernels of grouped-query attention, and their launchers."""
