"""The parts of `python -m fast`: check options, serve prompts, measure, compare op by op, print the results."""
