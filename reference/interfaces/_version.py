"""The version of the distribution mla-twins. Both packages export it, and pyproject.toml reads it from this file."""

__version__ = "0.1.0"
