"""Tests of the choice of backends."""
