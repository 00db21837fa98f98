"""Tests with planted mistakes, and tests of the tool that makes random mutants."""
