"""Which module or folder Python finds in place of the package `reference`, before `fast` imports from it."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys


def shadow_of_reference() -> str | None:
    """Return the path of another module or folder that Python finds under the name `reference`, or None.

    A file `reference.py` beside a user's script, or a folder of that name with an `__init__.py`, comes first on
    `sys.path`. This function only looks for the module: it does not run the file, which may be the script itself.

    Returns:
        The path of the file, or None where `reference` has the subpackage `interfaces` or is not found at all.
    """
    imported = sys.modules.get("reference")
    spec = importlib.util.find_spec("reference") if imported is None else imported.__spec__
    if spec is None:
        return None
    folders = spec.submodule_search_locations
    if folders is not None and importlib.machinery.PathFinder.find_spec("reference.interfaces", folders) is not None:
        return None
    return spec.origin or ", ".join(folders or ())
