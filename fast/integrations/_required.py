"""Check whether the packages of the pip extra `hf` are installed."""

from __future__ import annotations

import importlib
import re

TRANSFORMERS = "5.17"  # lowest version, as in the extra `hf` of pyproject.toml


def missing_transformers() -> str | None:
    """Return one line that says what to install, or None if transformers is installed and new enough.

    The line contains the expected version, the pip command and the installed version.
    """
    expected = f'expected transformers {TRANSFORMERS} or later (pip install "mla-twins[hf]")'
    try:
        found = importlib.import_module("transformers").__version__
    except ModuleNotFoundError as error:
        if error.name != "transformers":  # transformers is installed, but a package that it needs is not
            raise
        return f"{expected}, got none"
    numbers = [[int(part) for part in re.findall(r"\d+", version)[:2]] for version in (found, TRANSFORMERS)]
    return None if numbers[0] >= numbers[1] else f"{expected}, got {found}"
