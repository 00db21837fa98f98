"""The absorbed decode on Hopper. README.md shows what each group of warps does over time, and lists the barriers."""
