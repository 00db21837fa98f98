"""Find the modules of other libraries: which of them are installed, and which is the first that can be imported.

Several packages have the same kernels, for example flash-attn-3 and vLLM. A `Source` names the module of one package.
The adapter uses the first source that can be imported. Nothing is imported before `loaded` or `missing_artifacts` is
called.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from reference.interfaces import UnsupportedConfiguration

from ..error_texts import in_one_line


class Source(NamedTuple):
    """A module with the kernels of a library.

    Attributes:
        package: name of the package that has the module, as in `pip install`.
        module: import name of the module.
        available: name of a variable of the module that is False if a part of the module did not load; the variable
            that ends in "UNAVAILABLE_REASON" in place of "AVAILABLE" says why. None if the import fails in that case.
        parameters: parameters that `flash_attn_varlen_func` of the module must have; an older version lacks them.
    """

    package: str
    module: str
    available: str | None = None
    parameters: tuple[str, ...] = ()


def is_installed(module: str) -> bool:
    """Return whether a file of the module is on the search path; import neither the module nor its package."""
    root, *inner = module.split(".")
    try:
        spec = importlib.util.find_spec(root)
    except Exception:  # a search hook of another package may raise any error
        return False
    if spec is None or not inner:
        return spec is not None
    paths = [Path(folder, *inner) for folder in spec.submodule_search_locations or ()]
    return any(path.is_dir() or any(path.parent.glob(f"{path.name}.*")) for path in paths)


def missing_package(sources: tuple[Source, ...]) -> str | None:
    """Return the name of the first package if no source is installed; None if a source is installed."""
    return None if any(is_installed(each.module) for each in sources) else sources[0].package


def missing_artifacts(sources: tuple[Source, ...]) -> list[str]:
    """Return why each installed source cannot be imported; an empty list if a source can be imported."""
    found, failures = _first_that_loads(sources)
    return [] if found else list(failures)


def loaded(sources: tuple[Source, ...]) -> tuple[Source, ModuleType]:
    """Return the first source that can be imported, and its module.

    Raises:
        UnsupportedConfiguration: no source can be imported; the error says why.
    """
    found, failures = _first_that_loads(sources)
    if found is None:
        names = ", ".join(each.module for each in sources)
        raise UnsupportedConfiguration(list(failures) or [f"needs one of the modules {names}; none is installed"])
    return found


@functools.cache
def _first_that_loads(sources: tuple[Source, ...]) -> tuple[tuple[Source, ModuleType] | None, tuple[str, ...]]:
    """Import the installed sources in their order until one import succeeds; return it, and the failures before it."""
    failures = []
    for source in sources:
        if not is_installed(source.module):
            continue
        try:
            module = importlib.import_module(source.module)
            failure = _fault(source, module)
        except (Exception, SystemExit) as error:  # a library that does not fit the machine may raise any error
            failures.append(f"the module {source.module} cannot be imported: {in_one_line(error)}")
            continue
        if failure is None:
            return (source, module), tuple(failures)
        failures.append(failure)
    return None, tuple(failures)


def _fault(source: Source, module: ModuleType) -> str | None:
    """Return why an imported module cannot serve as the source; None if it can."""
    if source.available is not None and not getattr(module, source.available, True):
        why = getattr(module, source.available.replace("AVAILABLE", "UNAVAILABLE_REASON"), "no reason given")
        return f"the kernels of {source.module} do not load: {why}"
    if source.parameters:
        known = inspect.signature(module.flash_attn_varlen_func).parameters
        lacking = [each for each in source.parameters if each not in known]
        if lacking:
            return f"{source.module} is too old: flash_attn_varlen_func has no parameter {', '.join(lacking)}"
    return None
