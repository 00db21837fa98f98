"""Backends that exist for the length of a test."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping

from fast.backends import Backend, OpSupport


def with_backends(monkeypatch, *wanted: Backend) -> None:
    """These backends and no others are registered until the test ends."""
    registry = sys.modules["fast.backends.registry"]
    monkeypatch.setattr(registry, "_REGISTERED", {backend.name: backend for backend in wanted})
    monkeypatch.setattr(registry, "_ENTRY_POINTS_READ", [True])
    plans = sys.modules["fast.mla.device_choices"]  # what it keeps of a choice outlives no test
    for kept in ("_of_device", "_programs_of_device", "_costs_of_device"):
        function = getattr(plans, kept)
        monkeypatch.setattr(plans, kept, getattr(function, "__wrapped__", function))  # twice in one test too


def cpu_backend(kernels: Mapping[str, Callable]) -> Backend:
    """A backend that serves tensors on a CPU with these launchers."""
    return Backend("cpu", 0, "cpu", {op: OpSupport(launch) for op, launch in kernels.items()})
