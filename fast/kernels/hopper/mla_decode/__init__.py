"""The absorbed decode on Hopper. README.md has the timeline of its warp groups and a table of their barriers."""
