"""What several Hopper kernels use: work items, loads, synchronisation between warp groups, and epilogues."""
