"""Decode of row blocks of 64 where programs would be idle: all of them score first, then they multiply.

In phase 1 a program takes at most one score block, a pair of tiles (`score_blocks`), and writes its probabilities,
sums and references to memory. In phase 2 it takes column blocks, eighths of a split's columns (`column_blocks`). One
consumer multiplies; a producer of one warp loads, and waits for what other programs write. README.md has its gain.
"""
