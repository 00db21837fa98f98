"""The integers of a step."""
