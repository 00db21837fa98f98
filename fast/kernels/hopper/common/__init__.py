"""Functions that several Hopper kernels use: work items, loads, synchronisation of warp groups, and epilogues."""
