"""Checks that a docstring of `fast` names the docstring of `reference` that has the explanation.

A docstring of `fast` has the summary, the arguments, the errors, and what differs from the twin in `reference`.
"""

from __future__ import annotations

import ast
import pkgutil
import re
from pathlib import Path

import pytest

from .test_structure import MODULES, ROOT, parse

SECTION = re.compile(r"[A-Z][a-z]+:$")  # title of a section such as `Args:`; the lines of the section are indented


def docstrings(path: Path) -> dict[str, str]:
    """Return the docstring of a module (under the name ""), and of its public functions, classes and methods."""
    tree = parse(path)
    found = {"": ast.get_docstring(tree)}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = ast.get_docstring(node)
        if isinstance(node, ast.ClassDef):
            methods = [method for method in node.body if isinstance(method, ast.FunctionDef)]
            found |= {f"{node.name}.{method.name}": ast.get_docstring(method) for method in methods}
    public = {name: text for name, text in found.items() if not any(part.startswith("_") for part in name.split("."))}
    return {name: text for name, text in public.items() if text}


def explanation(docstring: str) -> list[str]:
    """Return the lines of a docstring that are neither in the summary nor in a section such as `Args:`."""
    lines, in_section = [], False
    for line in docstring.splitlines()[1:]:
        if line and not line.startswith(" "):
            in_section = SECTION.match(line) is not None
        if line and not in_section:
            lines.append(line)
    return lines


@pytest.mark.parametrize("module", MODULES)
def test_twins_name_the_explanation(module):
    """Compare the docstrings of twins -> if `reference` explains something, `fast` refers to it."""
    ours, theirs = (docstrings(ROOT / package / f"{module}.py") for package in ("reference", "fast"))
    silent = [
        f"{module}: {name or 'the module'}" for name in ours.keys() & theirs.keys()
        if explanation(ours[name]) and "`reference." not in theirs[name]
    ]  # fmt: skip
    assert not silent


@pytest.mark.parametrize("module", MODULES)
def test_names_exist(module):
    """Look up the names `reference.<...>` in the docstrings in `fast` -> each is a module or a name in a module."""
    for text in docstrings(ROOT / "fast" / f"{module}.py").values():
        for name in re.findall(r"`(reference(?:\.\w+)+)`", text):
            pkgutil.resolve_name(name)


def test_explanation():
    """Read docstrings -> lines between the summary and the sections count, and lines after a section too."""
    assert not explanation("Summary.")
    assert not explanation("Summary.\n\nArgs:\n    x: a number.\n\nRaises:\n    ValueError: y.")
    assert explanation("Summary.\n\nWhy.\n\nArgs:\n    x: a number.\n\nMore.") == ["Why.", "More."]
    assert explanation("Summary.\n\nThe steps are:\n\n1. One.\n   Two.") == ["The steps are:", "1. One.", "   Two."]
