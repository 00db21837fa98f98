"""Decode of row blocks of 64 rows in two phases, for so few requests that multiprocessors would be idle otherwise.

1. A program computes at most one score block: the probabilities of a pair of tiles (`score_blocks`). The program writes
   the probabilities to global memory, with the sums of weights and the reference scores of the rows. The reference
   score of a row is the number that is subtracted from the row's scores before exp2.
2. A program computes column blocks. A column block is an eighth of the latent columns of a split's output
   (`column_blocks`).

In both phases one consumer multiplies. A producer (one warp) loads, and waits for the score blocks of other programs.
README.md has the measured times and the barriers.
"""
