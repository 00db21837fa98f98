"""Tests of the Hopper decode."""
