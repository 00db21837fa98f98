"""Calls whose checks have passed: a later call with the same signature skips the checks, the choice and the dispatcher.

A *signature* is everything about the arguments that the checks, the choice of a backend and the launcher read on the
host: shape, strides, dtype, device and alignment of each tensor, and every other value with its type. The values inside
a tensor on a GPU are not part of the signature, because no check reads them. Checks of values on the CPU run at every
call: in each op's launch function, or in the function that calls the op (`check_eager_offsets`).

A function that calls several ops keeps the checks of its own arguments in the same way (`CheckedOnce`).

These calls are always checked in full, and torch's dispatcher always sees them:

- calls that `torch.compile`, a dispatch mode, a functorch transform or a profiler must see;
- calls with a tensor that needs a gradient, a subclass of `Tensor` other than `Parameter`, or a plain mapping as
  `backend=`;
- calls inside `check_every_call()`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .own import OWN_BACKENDS
from .registry import on_change
from .repeated_launches import Launches
from .selection import BoundOps

MOST_SIGNATURES = 512  # of each op; a decode that grows by one token in each step adds one signature in each step
MOST_CONFIGS = 4096
_PER_THREAD = threading.local()
_KEEPING = threading.RLock()
_ALL_CALLS: list[CheckedCalls | CheckedOnce] = []
_PROPERTIES = operator.attrgetter("shape", "dtype", "device", "requires_grad")


class CheckedCalls:
    """The signatures with which one op was called, each with its backend and its compiled kernels.

    Args:
        dispatched: the op in torch's dispatcher; its last argument is the name of a backend.
        launch: the function behind the op.
        mutates: positions of the arguments that the op writes in place.
    """

    def __init__(self, dispatched: Callable, launch: Callable, mutates: tuple[int, ...] = ()):
        self._dispatched, self._launch, self._mutates = dispatched, launch, mutates
        self._known: dict[tuple, tuple[str, Launches]] = {}
        _ALL_CALLS.append(self)

    def forget(self) -> None:
        """Forget all signatures, so that the next call is checked and chooses its backend again."""
        self._known.clear()

    def signature(self, *arguments: Any) -> tuple | None:
        """Return the signature of a call, or None if the call must be checked and dispatched."""
        if must_be_dispatched():
            return None
        try:
            signature = (torch.is_grad_enabled(), signature_of(arguments))
            if signature not in self._known and _needs_dispatcher(arguments, signature[0]):
                return None
        except (NoSignature, TypeError, RuntimeError):  # the argument cannot be hashed, or the tensor has no strides
            return None
        return signature

    def backend_of(self, signature: tuple | None) -> str | None:
        """Return the name of the backend that served this signature; None if the call must be checked."""
        known = None if signature is None else self._known.get(signature)
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
        known = self._known.get(signature)
        if known is None:
            # a launcher of another project may launch kernels or count calls without the recorder seeing it
            known = (backend, Launches(replays=backend in OWN_BACKENDS))
            _keep(self._known, signature, known)
        result = known[1].run(self._launch, *arguments, backend)
        for position in self._mutates:
            written = arguments[position]
            if written is not None and not written.is_inference():
                torch.autograd.graph.increment_version(written)
        return result


class CheckedOnce:
    """A check of a function's arguments, which runs once for each signature.

    The check must read only what a signature has; it must not read values of tensors. A record with tensors, such as a
    plan, counts as the same argument only if it is the same object: all layers of a step get the same plan.

    Args:
        check: function that raises an error if an argument is wrong. Its result must hold no tensor.
    """

    def __init__(self, check: Callable):
        self._check, self._results = check, dict[tuple, Any]()
        _ALL_CALLS.append(self)

    def forget(self) -> None:
        """Forget all signatures, so that the check runs again."""
        self._results.clear()

    def __call__(self, *arguments: Any) -> Any:
        """Run the check unless it has passed with this signature; return its result."""
        if must_be_dispatched():
            return self._check(*arguments)
        try:
            signature = tuple([_IDENTITY_OF.get(type(each), _identity_of_new_kind)(each) for each in arguments])
            result = self._results.get(signature, _MISSING)
        except (NoSignature, TypeError, RuntimeError):  # as in `CheckedCalls.signature`
            return self._check(*arguments)
        if result is _MISSING:
            result = self._check(*arguments)
            _keep(self._results, signature, result)
        return result


def _keep(kept: dict[tuple, Any], signature: tuple, value: Any) -> None:
    """Keep a value for a signature, in place of the oldest signature if there are too many."""
    with _KEEPING:  # another thread may add a signature while this thread looks for the oldest one
        if len(kept) >= MOST_SIGNATURES:
            kept.pop(next(iter(kept)), None)
        kept[signature] = value


def forget_calls() -> None:
    """Forget the signatures of all ops and checks."""
    with _KEEPING:
        for calls in _ALL_CALLS:
            calls.forget()
        _CONFIGS.clear()
        _CONFIG_TOKENS.clear()


on_change(forget_calls)


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


def with_wanted_checks(method: Callable) -> Callable:
    """Let the ops that a method calls check all arguments in every call if `check_every_call` of the object is True."""

    @functools.wraps(method)
    def run(self: Any, *arguments: Any, **options: Any) -> Any:
        if not self.check_every_call or torch.compiler.is_compiling():
            return method(self, *arguments, **options)
        with check_every_call():
            return method(self, *arguments, **options)

    return run


def must_be_dispatched() -> bool:
    """Return whether torch's dispatcher must see the calls of this moment, or every call must be checked."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd._profiler_enabled()
        or getattr(_PER_THREAD, "checked", False)
    )


class NoSignature(Exception):
    """An argument has no signature."""


def signature_of(arguments: tuple) -> tuple:
    """Return the signature of some arguments.

    Raises:
        NoSignature: an argument is a subclass of `Tensor`, or a mapping that `bind` has not checked.
    """
    return tuple([_PART_OF.get(type(argument), _part_of_new_kind)(argument) for argument in arguments])


def _part_of_tensor(tensor: Tensor) -> tuple:
    return _PROPERTIES(tensor), tensor.stride(), tensor.data_ptr() % 16, tensor.is_neg()


def _part_of_value(value: Any) -> tuple:
    return type(value), value  # True and 1 are equal, but a check may allow only one of them


def _part_of_bound_ops(bound: BoundOps) -> tuple:
    return bound.pairs


_RECORDS: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # signature of each frozen record with tensors
_CONFIGS: dict[int, tuple[Any, object]] = {}  # by id: a frozen record without tensors, and its object in signatures
_CONFIG_TOKENS: dict[tuple[Any, str], object] = {}  # by value: the object in signatures, the same for equal records


def _part_of_record(record: Any) -> tuple:
    """Return the signature of a frozen record with tensors, such as a plan. It is computed once for each record."""
    kept = _RECORDS.get(record)
    if kept is None:
        fields = tuple([getattr(record, field.name) for field in dataclasses.fields(record)])
        kept = _RECORDS[record] = (type(record), _needs_dispatcher(fields, True), signature_of(fields))
    return kept


def _part_of_config(config: Any) -> tuple:
    """Return an object that stands for the value of a frozen record without tensors.

    The fields are hashed once for each record, because the hash takes longer than a check. `_CONFIGS` keeps the record,
    so that no other record gets its id. The text of the record tells the int 1 from the float 1.0.
    """
    kept = _CONFIGS.get(id(config))
    if kept is None:
        if len(_CONFIGS) >= MOST_CONFIGS:
            forget_calls()
        kept = _CONFIGS[id(config)] = config, _CONFIG_TOKENS.setdefault((config, repr(config)), object())
    return type(config), kept[1]


def _part_of_named_tuple(values: tuple) -> tuple:
    return type(values), signature_of(values)


def _no_part(argument: Any) -> tuple:
    raise NoSignature


_PART_OF: dict[type, Callable[[Any], tuple]] = {
    Tensor: _part_of_tensor,
    torch.nn.Parameter: _part_of_tensor,
    BoundOps: _part_of_bound_ops,
}


def _part_of_new_kind(argument: Any) -> tuple:
    """Return the signature of an argument of a type that was not seen before, and keep how it is computed."""
    kind = type(argument)
    _PART_OF[kind] = _part_for(kind)
    return _PART_OF[kind](argument)


def _part_for(kind: type) -> Callable[[Any], tuple]:
    """Return the function that computes the signature of an argument of some type."""
    if issubclass(kind, (Tensor, dict, list)):
        return _no_part
    if hasattr(kind, "_fields"):
        return _part_of_named_tuple
    if not dataclasses.is_dataclass(kind):
        return _part_of_value
    frozen, compared = kind.__dataclass_params__.frozen, kind.__dataclass_params__.eq
    return _no_part if not frozen else _part_of_config if compared else _part_of_record


_MISSING = object()  # in place of a result that may be None
_TOKENS: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # an object in place of each record with tensors


def _token_of(record: Any) -> object:
    """Return an object that stands for a record with tensors and does not keep the record alive."""
    token = _TOKENS.get(record)
    if token is None:
        token = _TOKENS[record] = object()
    return token


_IDENTITY_OF = dict(_PART_OF)


def _identity_of_new_kind(argument: Any) -> Any:
    """Return the part of an argument in a signature of `CheckedOnce`, and keep how it is computed."""
    kind = type(argument)
    part = _part_for(kind)
    _IDENTITY_OF[kind] = _token_of if part is _part_of_record else part
    return _IDENTITY_OF[kind](argument)


def _needs_dispatcher(arguments: tuple, grad: bool) -> bool:
    """Return whether a tensor needs what only torch's dispatcher gives: gradients, negated views, or shapes alone."""
    for argument in arguments:
        if isinstance(argument, Tensor):
            if argument.is_neg() or argument.is_meta or (grad and argument.requires_grad):
                return True
        elif isinstance(argument, tuple) and hasattr(argument, "_fields") and _needs_dispatcher(argument, grad):
            return True
        elif dataclasses.is_dataclass(argument) and type(argument).__eq__ is object.__eq__:
            fields = tuple([getattr(argument, field.name) for field in dataclasses.fields(argument)])
            if _needs_dispatcher(fields, grad):
                return True
    return False
