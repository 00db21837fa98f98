"""Calls whose checks have passed: a later call with the same signature skips the checks, the choice and the dispatcher.

A *signature* is everything about the arguments that the checks, the choice of a backend and the launcher read on the
host: shape, strides, dtype, device and alignment of each tensor, and every other value with its type. The values inside
a tensor on a GPU are not part of the signature, because no check reads them. The checks of values on the CPU are part
of each op's launch function, so they run at every call.

These calls are always checked in full, and torch's dispatcher always sees them:

- calls that `torch.compile`, a dispatch mode, a functorch transform or a profiler must see;
- calls with a tensor that needs a gradient, a subclass of `Tensor`, or a plain mapping as `backend=`;
- calls inside `check_every_call()`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .registry import on_change
from .repeated_launches import Launches
from .selection import BoundOps

MOST_SIGNATURES = 512  # of each op; a decode that grows by one token in each step adds one signature in each step
PLAIN_TENSORS = (Tensor, torch.nn.Parameter)
_PER_THREAD = threading.local()
_FIELDS: dict[type, tuple[str, ...] | None] = {}  # fields of each kind of record; None for a kind that is no record


class CheckedCalls:
    """The signatures with which one op was called, each with its backend and its compiled kernels.

    Args:
        dispatched: the op in torch's dispatcher; its last argument is the name of a backend.
        launch: the function behind the op.
        mutates: position of the argument that the op writes in place, if there is one.
    """

    def __init__(self, dispatched: Callable, launch: Callable, mutates: int | None = None):
        self._dispatched, self._launch, self._mutates = dispatched, launch, mutates
        self._known: dict[tuple, tuple[str, Launches]] = {}
        on_change(self._known.clear)

    def signature(self, *arguments: Any) -> tuple | None:
        """Return the signature of a call, or None if the call must be checked and dispatched."""
        if must_be_dispatched():
            return None
        try:
            return _signature(arguments, torch.is_grad_enabled())
        except _NoSignature:
            return None

    def backend_of(self, signature: tuple | None) -> str | None:
        """Return the name of the backend that served this signature; None if the call must be checked."""
        if signature is None:
            return None
        try:
            known = self._known.get(signature)
        except TypeError:  # an argument that cannot be hashed, which a check reports
            return None
        return None if known is None else known[0]

    def run(self, signature: tuple | None, backend: str, *arguments: Any) -> Any:
        """Run a call whose checks have passed.

        Args:
            signature: result of `signature`.
            backend: name of the backend.
            arguments: arguments of the op, without the name of the backend.
        """
        if signature is None:
            return self._dispatched(*arguments, backend)
        try:
            known = self._known.get(signature)
        except TypeError:
            return self._dispatched(*arguments, backend)
        if known is None:
            if len(self._known) >= MOST_SIGNATURES:
                self._known.pop(next(iter(self._known)), None)
            known = self._known[signature] = (backend, Launches())
        result = known[1].run(self._launch, *arguments, backend)
        if self._mutates is not None and not (written := arguments[self._mutates]).is_inference():
            torch.autograd.graph.increment_version(written)
        return result


@contextlib.contextmanager
def check_every_call(wanted: bool = True) -> Iterator[None]:
    """Check every call of the current thread in full while the context is open; do nothing if `wanted` is False."""
    if not wanted:
        yield
        return
    before = getattr(_PER_THREAD, "checked", False)
    _PER_THREAD.checked = True
    try:
        yield
    finally:
        _PER_THREAD.checked = before


def must_be_dispatched() -> bool:
    """Return whether torch's dispatcher must see the calls of this moment, or every call must be checked."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd._profiler_enabled()
        or getattr(_PER_THREAD, "checked", False)
    )


class _NoSignature(Exception):
    """An argument has no signature."""


def _signature(arguments: tuple, grad: bool) -> tuple:
    parts = []
    for argument in arguments:
        kind = type(argument)
        if kind in PLAIN_TENSORS:
            if argument.layout is not torch.strided or (grad and argument.requires_grad) or argument.is_neg():
                raise _NoSignature
            parts.append(
                (argument.shape, argument.stride(), argument.dtype, argument.device, argument.data_ptr() % 16)
            )
        elif kind is BoundOps:
            parts.append(argument.pairs)
        elif isinstance(argument, Tensor):
            raise _NoSignature
        elif (names := _fields_of(kind)) is not None:
            parts.append((kind, _signature(tuple([getattr(argument, name) for name in names]), grad)))
        else:
            parts.append((kind, argument))
    return tuple(parts)


def _fields_of(kind: type) -> tuple[str, ...] | None:
    """Return the names of the fields of a record; None for another type, or a record without tensors."""
    if kind not in _FIELDS:
        names = None
        if hasattr(kind, "_fields"):
            names = kind._fields
        elif dataclasses.is_dataclass(kind) and kind.__eq__ is object.__eq__:  # a record with tensors has no equality
            names = tuple(field.name for field in dataclasses.fields(kind))
        _FIELDS[kind] = names
    return _FIELDS[kind]
