"""The version of the distribution mla-twins: both packages show it, and pyproject.toml reads it from here."""

__version__ = "0.1.0"
