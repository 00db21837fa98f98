"""Tests of the main job (`python -m fast`) and its serving loop."""
