"""Tests of the planners: the functions that compute all integers that the attention of a step needs."""
