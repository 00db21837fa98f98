"""The modules of `python -m fast`: they check options, serve prompts, measure, compare ops and print the results."""
