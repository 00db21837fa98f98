"""The absorbed decode on Hopper. README.md shows the timeline of its warp groups and lists their barriers."""
