"""Functions that several Hopper kernels use: for work items, loads, synchronisation of warps, and outputs."""
