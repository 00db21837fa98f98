"""Backends that are registered for the duration of one test or of one block."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping

from fast.backends import Backend, OpSupport, register, unregister
from fast.backends.checked_calls import forget_calls


def with_backends(monkeypatch, *wanted: Backend) -> None:
    """Register these backends and no others until the test ends."""
    registry = sys.modules["fast.backends.registry"]
    monkeypatch.setattr(registry, "_REGISTERED", {backend.name: backend for backend in wanted})
    monkeypatch.setattr(registry, "_ENTRY_POINTS_READ", [True])
    forget_calls()  # earlier backends served them; the fixture `no_earlier_calls` forgets the calls of this test
    plans = sys.modules["fast.mla.device_choices"]  # this module caches choices: remove the caches until the test ends
    for kept in ("_of_device", "_programs_of_device", "_costs_of_device"):
        function = getattr(plans, kept)
        # no __wrapped__: an earlier call of `with_backends` in the same test has removed the cache
        monkeypatch.setattr(plans, kept, getattr(function, "__wrapped__", function))


@contextlib.contextmanager
def registered(backend: Backend) -> Iterator[None]:
    """Register a backend beside the others, and remove it at the end of the block."""
    register(backend)
    try:
        yield
    finally:
        unregister(backend.name)


def cpu_backend(kernels: Mapping[str, Callable]) -> Backend:
    """Return a backend that serves CPU tensors with the given launchers (op name to launcher)."""
    return Backend("cpu", 0, "cpu", {op: OpSupport(launch) for op, launch in kernels.items()})
