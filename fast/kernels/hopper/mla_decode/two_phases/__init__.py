"""Decode in two phases: a batch-invariant decode for so few requests that multiprocessors would be idle otherwise.

1. A program computes at most one score block: the probabilities of a pair of tiles (64 keys each) for 64 rows. It
   writes the probabilities to global memory (`score_blocks`).
2. A program computes column blocks. A column block is an eighth of the latent columns of the output of one split, for
   64 rows (`column_blocks`).

README.md explains the phases, and has the measured times and the barriers.
"""
