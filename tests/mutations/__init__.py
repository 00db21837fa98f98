"""Tests with planted mistakes, and tests of the tool that plants random faults (tests/mutants.py)."""
