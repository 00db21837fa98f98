"""Tests of the main job and of its serving loop."""
