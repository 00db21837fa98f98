"""Functions that compute the integers of a step, for any attention family."""
