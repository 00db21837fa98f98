"""Tests of the planners, which compute all integers of a step."""
