"""Pages, notebooks and the wheel."""
