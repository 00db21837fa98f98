"""Says which kernel Triton compiles, before it does, and how long that took."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from triton import knobs

logger = logging.getLogger("fast.kernels")
_AHEAD: ContextVar[list[str] | None] = ContextVar("ahead", default=None)  # where `compiling_ahead` collects
_STARTED: ContextVar[float] = ContextVar("started", default=0.0)


@contextlib.contextmanager
def compiling_ahead() -> Iterator[list[str]]:
    """Within it compilations are expected: told at level INFO, and collected, a line each, in the list it gives.

    Elsewhere each is a WARNING, for a request waits for it.
    """
    lines: list[str] = []
    token = _AHEAD.set(lines)
    try:
        yield lines
    finally:
        _AHEAD.reset(token)


def install() -> None:
    """Ask Triton to tell of compilations (or loads from its cache on disk); hooks already there are still called."""
    runtime = knobs.runtime
    runtime.jit_cache_hook = _chained(_before, runtime.jit_cache_hook)
    runtime.jit_post_compile_hook = _chained(_after, runtime.jit_post_compile_hook)


@functools.cache
def install_once() -> None:
    """As `install`, for every package of kernels that may be the first one imported."""
    install()


def _chained(ours, theirs):
    def hook(**facts: Any) -> bool | None:
        if facts["fn"].module.startswith("fast.kernels."):
            ours(**facts)
        return theirs(**facts) if theirs is not None else None

    return hook


def _before(*, fn, compile, **_: Any) -> None:
    kernel = describe(fn.name, compile["signature"], compile["constants"])
    if (lines := _AHEAD.get()) is not None:
        lines.append(kernel)
        logger.info("compiling %s", kernel)
    else:
        logger.warning("compiling %s on first use; fast.warmup(config) does it ahead", kernel)
    _STARTED.set(time.perf_counter())


def _after(*, fn, **_: Any) -> None:
    logger.info("compiled %s in %.1f s", fn.name.strip("_"), time.perf_counter() - _STARTED.get())


def describe(name: str, signature: Mapping[str, Any], constants: Mapping) -> str:
    """A kernel in words: its name, the types of its data, its upper-case constants.

    Args:
        name: of the kernel's function.
        signature: parameter name to Triton type; a tuple of types where the parameter is a record.
        constants: (path of a parameter's position) to value; a record's fields count as constants of their own.
    """
    parameters = list(signature)
    types = dict.fromkeys(kind.lstrip("*") for kind in _types_in(signature.values()) if kind.startswith(("*fp", "*bf")))
    sizes: dict[str, Any] = {}
    for path, value in constants.items():
        if len(path) == 1:
            sizes |= value._asdict() if hasattr(value, "_asdict") else {parameters[path[0]]: value}
    told = [f"{key} {value}" for key, value in sizes.items() if key.isupper()]
    return f"{name.strip('_')} ({', '.join([*types, *told])})"


def _types_in(kinds: Iterable[Any]) -> Iterator[str]:
    """Yield the Triton types of parameters, and of the fields of parameters that are records."""
    for kind in kinds:
        if isinstance(kind, str):
            yield kind
        else:
            yield from _types_in(kind)
