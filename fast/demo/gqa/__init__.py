"""The main job for grouped-query attention: `python -m fast --family gqa`."""
