"""Search for a module or folder that hides the package `reference`, before `fast` imports from this package."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys


def shadow_of_reference() -> str | None:
    """Return the path of another module or folder that Python finds under the name `reference`, or None.

    The folder of a user's script comes first on `sys.path`. A file `reference.py` in this folder, or a folder
    `reference` with an `__init__.py`, therefore hides the package. The function does not run the file that it finds,
    because this file may be the user's script.

    Returns:
        The path; None if the found package is the right one (it has the subpackage `interfaces`), or if no module of
        this name is found.
    """
    imported = sys.modules.get("reference")
    spec = importlib.util.find_spec("reference") if imported is None else imported.__spec__
    if spec is None:
        return None
    folders = spec.submodule_search_locations
    if folders is not None and importlib.machinery.PathFinder.find_spec("reference.interfaces", folders) is not None:
        return None
    return spec.origin or ", ".join(folders or ())
