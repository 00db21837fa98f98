"""Tests of Hopper's attention over packed requests."""
