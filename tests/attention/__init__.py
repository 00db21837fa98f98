"""Tests of the attention functions that every attention family uses."""
