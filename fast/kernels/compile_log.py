"""Log the name of each kernel before Triton compiles the kernel, and log the compile time afterwards.

`fast.warmup` compiles kernels in several threads. If two threads need the same kernel, one thread compiles the kernel.
The other thread waits, and then loads the compiled kernel from Triton's cache on disk.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from triton import knobs

from .cache_keys import hash_callees_first

logger = logging.getLogger("fast.kernels")
_AHEAD: ContextVar[list[str] | None] = ContextVar("ahead", default=None)  # the list that `compiling_ahead` yields
_STARTED: ContextVar[float] = ContextVar("started", default=0.0)


class SharedCompilations:
    """Registry of compilations, so that several threads compile each kernel variant only once.

    A kernel variant is a kernel with its argument types and constants. Each of these threads runs in a copy of the
    `contextvars` context of the thread that called `share_compilations`, and calls `give_up` at its end.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._compiling: dict[Any, int] = {}  # from kernel variant to the thread that compiles it
        self._compiled: set[Any] = set()

    def claim(self, variant: Any) -> bool:
        """Return whether this thread must compile the variant; wait first if another thread is compiling it."""
        with self._changed:
            while self._compiling.get(variant, threading.get_ident()) != threading.get_ident():
                self._changed.wait()
            if variant in self._compiled:
                return False
            self._compiling[variant] = threading.get_ident()
            return True

    def finish(self, variant: Any) -> bool:
        """Record that the variant is compiled; return True if this thread has compiled it."""
        with self._changed:
            if self._compiling.get(variant) != threading.get_ident():
                return False
            del self._compiling[variant]
            self._compiled.add(variant)
            self._changed.notify_all()
            return True

    def give_up(self) -> None:
        """Release the variants whose compilation failed in this thread, so that another thread can compile them."""
        with self._changed:
            mine = [variant for variant, thread in self._compiling.items() if thread == threading.get_ident()]
            for variant in mine:
                del self._compiling[variant]
            self._changed.notify_all()


_SHARED: ContextVar[SharedCompilations | None] = ContextVar("shared", default=None)


@contextlib.contextmanager
def share_compilations() -> Iterator[SharedCompilations]:
    """Let threads that run in a copy of this `contextvars` context share their compilations."""
    shared = SharedCompilations()
    token = _SHARED.set(shared)
    try:
        yield shared
    finally:
        _SHARED.reset(token)


@contextlib.contextmanager
def compiling_ahead() -> Iterator[list[str]]:
    """Log each compilation inside this context as INFO, and append a line for the kernel to the yielded list.

    Outside this context, each compilation is logged as a WARNING, because a user's request waits for the compilation.
    """
    lines: list[str] = []
    token = _AHEAD.set(lines)
    try:
        yield lines
    finally:
        _AHEAD.reset(token)


def install() -> None:
    """Add hooks to Triton that log each compilation and each load of a compiled kernel from Triton's disk cache.

    Hooks that were installed before are still called.
    """
    runtime = knobs.runtime
    runtime.jit_cache_hook = _chained(_before, runtime.jit_cache_hook)
    runtime.jit_post_compile_hook = _chained(_after, runtime.jit_post_compile_hook)


@functools.cache
def install_once() -> None:
    """Call `install` on the first call only; every package with Triton kernels calls this function."""
    install()


def _chained(ours, theirs):
    def hook(**facts: Any) -> bool | None:
        if facts["fn"].module.startswith("fast.kernels."):
            ours(**facts)
        return theirs(**facts) if theirs is not None else None

    return hook


def _before(*, fn, compile, key=None, **_: Any) -> None:
    hash_callees_first(fn.jit_function)  # before Triton looks for the kernel on disk
    shared = _SHARED.get()
    if shared is not None and not shared.claim(_variant(fn, key, compile)):
        return  # another thread has compiled the kernel, and Triton loads the kernel from the disk
    kernel = describe(fn.name, compile["signature"], compile["constants"])
    if (lines := _AHEAD.get()) is not None:
        lines.append(kernel)
        logger.info("compiling %s", kernel)
    else:
        advice = "" if ".gqa." in fn.module else "; for MLA, fast.warmup(config) compiles it ahead"
        logger.warning("compiling %s on first use%s", kernel, advice)
    _STARTED.set(time.perf_counter())


def _after(*, fn, compile, key=None, **_: Any) -> None:
    shared = _SHARED.get()
    if shared is not None and not shared.finish(_variant(fn, key, compile)):
        return
    logger.info("compiled %s in %.1f s", fn.name.strip("_"), time.perf_counter() - _STARTED.get())


def _variant(fn, key: Any, compile: Mapping[str, Any]) -> tuple:
    """Return a key that identifies a kernel variant on a device."""
    return fn.module, fn.name, str(key), compile.get("device")


def describe(name: str, signature: Mapping[str, Any], constants: Mapping) -> str:
    """Return a description of a kernel: its name, the dtypes of its data and its upper-case constants.

    A record is a named tuple. The upper-case fields of a constant record are listed like upper-case constants.

    Args:
        name: name of the kernel's function.
        signature: mapping from parameter name to Triton type; the type of a record is a tuple of types.
        constants: mapping from a tuple of integers to a value. The tuple (i,) stands for parameter i; a longer tuple,
            which starts with i too, stands for a field of parameter i.
    """
    parameters = list(signature)
    types = dict.fromkeys(kind.lstrip("*") for kind in _types_in(signature.values()) if kind.startswith(("*fp", "*bf")))
    sizes: dict[str, Any] = {}
    for path, value in constants.items():
        if len(path) == 1:
            sizes |= value._asdict() if hasattr(value, "_asdict") else {parameters[path[0]]: value}
    shown = [f"{key} {value}" for key, value in sizes.items() if key.isupper()]
    return f"{name.strip('_')} ({', '.join([*types, *shown])})"


def _types_in(kinds: Iterable[Any]) -> Iterator[str]:
    """Yield the Triton types of parameters, and of the fields of parameters that are records."""
    for kind in kinds:
        if isinstance(kind, str):
            yield kind
        else:
            yield from _types_in(kind)
