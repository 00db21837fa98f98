"""Tests of the main job for grouped-query attention."""
