"""The version of the distribution mla-twins, which both packages export and pyproject.toml reads from this file."""

__version__ = "0.1.0"
