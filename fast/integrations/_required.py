"""Ask for the packages of an extra with one line that names the pip command."""

from __future__ import annotations

import importlib
import re

TRANSFORMERS = "5.17"  # the least version; the extra `hf` of pyproject.toml asks for the same


def missing_transformers() -> str | None:
    """Return one line that names what to install, or None where transformers is there and new enough.

    The line says what `fast.integrations.transformers` expects, the pip command, and what was found.
    """
    expected = f'expected transformers {TRANSFORMERS} or later; pip install "mla-twins[hf]"'
    try:
        found = importlib.import_module("transformers").__version__
    except ModuleNotFoundError as error:
        if error.name != "transformers":  # transformers is there, and a package that it needs is not
            raise
        return f"{expected}, got none"
    numbers = [[int(part) for part in re.findall(r"\d+", version)[:2]] for version in (found, TRANSFORMERS)]
    return None if numbers[0] >= numbers[1] else f"{expected}, got {found}"
