"""The modules of the main job, `python -m fast`: check options, serve prompts, measure, compare, print the results."""
