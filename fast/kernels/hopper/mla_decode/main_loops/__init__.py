"""Decode kernels with one main loop: a kernel for row blocks of 16 and 32 rows, and a kernel for 64 rows."""
