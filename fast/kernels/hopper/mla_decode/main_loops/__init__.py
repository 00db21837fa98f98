"""Decode kernels with a main loop over tiles: one for row blocks of 16 and 32 rows, and one for 64 rows."""
