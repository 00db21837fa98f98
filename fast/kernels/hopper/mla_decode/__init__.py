"""The absorbed decode on Hopper. README.md of this folder shows what the groups of warps do, and lists the barriers."""
