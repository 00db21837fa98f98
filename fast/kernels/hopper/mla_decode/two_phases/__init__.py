"""Decode of many rows where programs would be idle: all of them score first, then they multiply by what they found.

In the first phase a program takes at most one unit, a pair of tiles (`units`), and leaves probabilities, row sums and
references in memory; in the second it takes shares, each an eighth of a split's columns (`shares`). One warp group
computes, and a second partition, one warp, fetches, and waits for what other programs leave.

All of it is computed as in `tile_pairs`, step for step: the bits do not tell which kernel it was. Programs wait for
each other in either direction, so all of them must run at once: the launch (`launch`) is a cooperative one.
"""
