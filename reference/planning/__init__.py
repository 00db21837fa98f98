"""Plan a step: compute its integers, for any attention family."""
