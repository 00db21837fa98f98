"""Register backends (sets of kernels) for the duration of one test or of one `with` block."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch

from fast.backends import OWN_BACKENDS, Backend, register, unregister
from fast.backends import registered as registered_backends
from fast.backends.checked_calls import forget_calls
from fast.backends.own import CPU, HOPPER
from fast.kernels import cpu
from reference.interfaces import wide_dtype


def with_backends(monkeypatch, *wanted: Backend) -> None:
    """Register the backends `wanted`, and unregister all other backends, until the test ends."""
    registry = sys.modules["fast.backends.registry"]
    monkeypatch.setattr(registry, "_REGISTERED", {backend.name: backend for backend in wanted})
    monkeypatch.setattr(registry, "_ENTRY_POINTS_READ", [True])
    forget_calls()  # `fast` remembers the backend of each checked call
    plans = sys.modules["fast.mla.device_choices"]  # its functions cache results that depend on the backends
    for kept in ("_of_device", "_programs_of_device", "_costs_of_device"):
        function = getattr(plans, kept)
        # replace the cached function by the function without a cache, unless an earlier call has done this
        monkeypatch.setattr(plans, kept, getattr(function, "__wrapped__", function))


def own_backends() -> list[Backend]:
    """Return the registered backends whose kernels belong to `fast`; installed libraries give further backends."""
    return [backend for backend in registered_backends() if backend.name in OWN_BACKENDS]


@contextlib.contextmanager
def registered(backend: Backend) -> Iterator[None]:
    """Register a further backend, and remove it at the end of the `with` block."""
    register(backend)
    try:
        yield
    finally:
        unregister(backend.name)


def cpu_backend(kernels: Mapping[str, Callable]) -> Backend:
    """Return a backend for CPU tensors; `kernels` maps the name of an op to the function that launches its kernels.

    The backend declares the same formats and dtypes as the backend "cpu" of `fast`.
    """
    return Backend("cpu", 0, "cpu", {op: replace(CPU.ops[op], launcher=launch) for op, launch in kernels.items()})


def hopper_on_cpu(kernels: Mapping[str, Callable]) -> Backend:
    """Return the backend "hopper", but for CPU tensors and with other launchers, for tests that record launches.

    Args:
        kernels: mapping from the name of an op to its launcher.
    """
    ops = {op: replace(support, launcher=kernels[op]) for op, support in HOPPER.ops.items()}
    return replace(HOPPER, device_type="cpu", ops=ops, capability=None, capability_end=None, missing_package=None)


def noting_kernels(launched: set[str]) -> dict[str, Callable]:
    """Return the kernels of the CPU backend; each adds its name to `launched` when it runs.

    To save time, `mla_decode` returns zeros for more than two requests.
    """

    def noting(name, launch):
        def call(*args):
            launched.add(name)
            if name == "mla_decode" and len(args[4]) > 2:
                (tokens, heads, _), out_dtype, out = args[0].shape, args[10], args[17] if len(args) > 17 else None
                out = torch.empty_like(args[0], dtype=out_dtype) if out is None else out
                return out.zero_(), torch.zeros(heads, tokens, dtype=wide_dtype(out_dtype))
            return launch(*args)

        return call

    return {name: noting(name, launch) for name, launch in cpu.KERNELS.items()}
