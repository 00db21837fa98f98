"""Tests of the main job, `python -m fast`, and of its serving loop."""
