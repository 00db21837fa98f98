"""Tests of the pages of the site, of the notebooks and of the wheel."""
