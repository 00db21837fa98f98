"""The main job and its serving loop."""
