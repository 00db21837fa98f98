"""Skip the argument checks of a call if an earlier call with the same signature has passed them.

The checks, the choice of a backend and torch's dispatcher cost time on the host. A later call with the same signature
skips all three. A *signature* has everything that the checks and the choice of a backend read from the arguments:
shape, strides, dtype, device and alignment of each tensor, and type and value of every other argument. The values
inside tensors are not part of a signature. For CPU tensors, checks of these values run in every call.

- `CheckedCalls` keeps the signatures of one op.
- `CheckedOnce` keeps the signatures of the argument check of a function that calls several ops.
- `CallsInside` keeps the checks and ops that a function calls, in order. A check or op inside the function then need
  not compute its own signature (`nested_calls`).

The following calls are always checked in full. All except the last two kinds also go through torch's dispatcher:

- calls under `torch.compile`, a dispatch mode, a functorch transform or a profiler;
- calls with a tensor that needs a gradient, or with a subclass of `Tensor` other than `Parameter`;
- calls whose `backend=` is a mapping that `bind` has not checked;
- calls inside `check_every_call()`.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .direct_calls import DirectCalls, is_watched
from .kept_calls import KeptCall
from .nested_calls import PER_THREAD, Entry, Order
from .own import OWN_BACKENDS
from .registry import on_change
from .repeated_launches import Launches
from .replayed_calls import MISFIT
from .signatures import (
    NoSignature,
    forget_configs,
    identity_of,
    needs_dispatcher,
    part_of,
    signature_of,
    when_full,
)

MOST_SIGNATURES = 512  # signatures kept for each op; every step of a decode can add one, because `max_seq_len` grows
_MISSING = object()  # means "no result is kept", because None may be a result
_KEEPING = threading.RLock()  # a thread holds this lock while it adds or forgets signatures
_ALL_CALLS: list[CheckedCalls | CheckedOnce | CallsInside] = []


class CheckedCalls:
    """The signatures with which one op was called, each with its backend and its compiled kernels.

    Args:
        dispatched: the op in torch's dispatcher; its last argument is the name of a backend.
        launch: the Python function that implements the op, with the same arguments as `dispatched`.
        mutates: positions of the arguments that the op writes in place.
        keep: function for the calls of other libraries (`KeptCall`); None calls `launch` each time.
    """

    def __init__(
        self, dispatched: Callable, launch: Callable, mutates: tuple[int, ...] = (),
        keep: Callable[..., Callable | None] | None = None,
    ):  # fmt: skip
        self._launch, self._mutates, self._keep = launch, mutates, keep
        self._unkept = DirectCalls(dispatched, launch, mutates)  # for calls that are not kept
        self._known: dict[tuple, tuple[str, Launches | KeptCall]] = {}
        _ALL_CALLS.append(self)

    def forget(self) -> None:
        """Forget all signatures, so that the next call is checked and chooses its backend again."""
        self._known.clear()

    def signature(self, *arguments: Any) -> tuple | Entry | None:
        """Return the signature of a call; None if the call must be checked, and may need torch's dispatcher.

        Inside a function whose calls were recorded (`CallsInside`), return the recorded `Entry` of this call instead.
        """
        order = PER_THREAD.order
        if order is not None:
            entry = order.next(self)
            if entry is not None:
                return entry
        if must_be_checked():
            return None
        try:
            signature = (torch.is_grad_enabled(), signature_of(arguments))
            if signature not in self._known and needs_dispatcher(arguments, signature[0]):
                return None
        except (NoSignature, TypeError, RuntimeError):  # an argument cannot be hashed, or a tensor has no strides
            return None
        return signature

    def backend_of(self, signature: tuple | Entry | None) -> str | None:
        """Return the name of the backend that served this signature before; None if the call must be checked."""
        if type(signature) is Entry:
            return signature.value[0]
        known = None if signature is None else self._known.get(signature)
        return None if known is None else known[0]

    def run(self, signature: tuple | Entry | None, backend: str, *arguments: Any) -> Any:
        """Run a call whose checks have passed.

        Args:
            signature: result of the method `signature`.
            backend: name of the backend.
            arguments: arguments of the op, without the name of the backend.
        """
        order = PER_THREAD.order
        if signature is None:
            if order is not None:
                order.give_up()
            return self._unkept(*arguments, backend)
        if type(signature) is Entry:
            known = signature.value
        else:
            known = self._known.get(signature)
            if known is None:
                known = (backend, self._new_launches(backend))
                _keep(self._known, signature, known)
            if order is not None:
                order.note(self, known)
        replay = known[1].replay
        result = MISFIT if replay is None else replay.run(*arguments, backend)
        if result is MISFIT:
            PER_THREAD.order = None  # do not record calls inside this op: a replay of the op does not make these calls
            try:
                result = known[1].run(self._launch, *arguments, backend)
            finally:
                PER_THREAD.order = order
        # A backend of another project may return other strides in the next call, so `confirm` compares the strides.
        if order is not None and backend not in OWN_BACKENDS:
            confirm(
                *[each for each in (result if isinstance(result, tuple) else (result,)) if isinstance(each, Tensor)]
            )
        for position in self._mutates:
            written = arguments[position]
            if written is not None and not written.is_inference():
                torch.autograd.graph.increment_version(written)
        return result

    def _new_launches(self, backend: str) -> Launches | KeptCall:
        """Return what will run the calls of a backend with one signature."""
        if backend in OWN_BACKENDS:
            return Launches()
        # a launcher of another project may do work that a replay would leave out
        return Launches(replays=False) if self._keep is None else KeptCall(self._keep)


class CheckedOnce:
    """A check of a function's arguments, which runs once for each signature.

    The check must read only what a signature has; it must not read values inside tensors. A record is a frozen
    dataclass, such as the plan of a step (`MLAMetadata`). Two records with tensors have the same signature only if they
    are the same object. All layers of a step get the same plan, so the check runs once for all layers.

    Args:
        check: function that raises an error if an argument is wrong. The result of the function must hold no tensor.
    """

    def __init__(self, check: Callable):
        self._check, self._results = check, dict[tuple, Any]()
        _ALL_CALLS.append(self)

    def forget(self) -> None:
        """Forget all signatures, so that the check runs again."""
        self._results.clear()

    def __call__(self, *arguments: Any) -> Any:
        """Return the result of the check; run the check only if it has not passed with this signature before."""
        order = PER_THREAD.order
        if order is not None:
            entry = order.next(self)
            if entry is not None:
                return entry.value
        if must_be_checked():
            if order is not None:
                order.give_up()
            return self._check(*arguments)
        try:
            signature = identity_of(arguments)
            result = self._results.get(signature, _MISSING)
        except (NoSignature, TypeError, RuntimeError):  # as in `CheckedCalls.signature`
            if order is not None:
                order.give_up()
            return self._check(*arguments)
        if result is _MISSING:
            result = self._check(*arguments)
            _keep(self._results, signature, result)
        if order is not None:
            order.note(self, result)
        return result


class CallsInside:
    """For each signature of one function: the checks and ops that the function calls, in order.

    The function passes to `given` all arguments that determine the signatures of these calls. If code of another
    project computes a tensor, such as the output of a projection, the function passes this tensor to `confirm`.

    Args:
        returns_one_op: whether the function calls only one op and returns the op's result. Its later calls may then go
            straight to the kept call of this op (`find`).
    """

    def __init__(self, returns_one_op: bool = False):
        self._returns_one_op = returns_one_op
        self._orders: dict[tuple, tuple[Entry, ...]] = {}
        self._single: dict[tuple, KeptCall] = {}
        _ALL_CALLS.append(self)

    def forget(self) -> None:
        """Forget all signatures, so that the calls inside compute their own signatures again."""
        self._orders.clear()
        self._single.clear()

    def given(self, *arguments: Any) -> Order | contextlib.AbstractContextManager[None]:
        """Return a context manager for the calls inside the function.

        In the first call of the function with a signature, the context manager records the checks and ops inside. In
        later calls with this signature, the checks and ops inside reuse what was recorded. The context manager does
        nothing if the thread is already inside such a context manager, or if calls must be checked in full.
        """
        return self.find(*arguments).order

    def find(self, *arguments: Any) -> FoundCall:
        """Return what earlier calls of the function with the same signature have left.

        The caller may call the kept call alone: the checks inside have passed with this signature. If there is no kept
        call, the caller enters the context manager.
        """
        if PER_THREAD.order is not None or must_be_checked() or torch._C._is_any_autocast_enabled():
            # autocast is not in the signature, but changes the dtypes of products in the function
            return _NOTHING_FOUND
        try:
            signature = (torch.is_grad_enabled(), identity_of(arguments))
            kept = self._single.get(signature)
            if kept is not None:
                return FoundCall(kept, _NOTHING)
            entries = self._orders.get(signature)
        except (NoSignature, TypeError, RuntimeError):  # as in `CheckedCalls.signature`
            return _NOTHING_FOUND
        return FoundCall(None, Order(entries, lambda found: self._end(signature, found)))

    def _end(self, signature: tuple, found: tuple[Entry, ...] | None) -> None:
        """Keep the calls `found`; if `found` is None, forget what was recorded, because a call did not match."""
        if found is None:
            self._orders.pop(signature, None)
            self._single.pop(signature, None)
            return
        _keep(self._orders, signature, found)
        ops = [each.value for each in found if isinstance(each.owner, CheckedCalls)]
        if self._returns_one_op and len(ops) == 1 and isinstance(ops[0][1], KeptCall) and ops[0][1].again is not None:
            _keep(self._single, signature, ops[0][1])


def confirm(*tensors: Tensor) -> bool:
    """Declare tensors that determine the signatures of later calls inside a function (`CallsInside`).

    Returns:
        Whether an earlier call with the same signature, and with equal tensors of the same `confirm`, was recorded. All
        checks that read only these signatures passed in that call.
    """
    order = PER_THREAD.order
    if order is None:
        return False
    try:
        return order.confirm(tuple([part_of(each) for each in tensors]))
    except (NoSignature, TypeError, RuntimeError):  # a subclass of `Tensor`, or a tensor without strides
        order.give_up()
        return False


def repeats() -> bool:
    """Return whether the running function repeats a recorded call (`CallsInside`).

    If so, the function can skip checks that read only signatures: they passed in the recorded call. If not, the
    function makes these checks inside `CallsOfOthers`, so that they are not recorded one by one.
    """
    order = PER_THREAD.order
    return order is not None and order.repeats()


_NOTHING = contextlib.nullcontext()


class FoundCall(NamedTuple):
    """What earlier calls of a function have left (`CallsInside.find`).

    Attributes:
        kept: the kept call that runs the only op inside the function; None if there is none.
        order: context manager for the calls inside the function.
    """

    kept: KeptCall | None
    order: Order | contextlib.AbstractContextManager[None]


_NOTHING_FOUND = FoundCall(None, _NOTHING)


def _keep(kept: dict[tuple, Any], signature: tuple, value: Any) -> None:
    """Keep a value for a signature; drop the oldest signature if there are MOST_SIGNATURES."""
    with _KEEPING:  # another thread must add no signature while this thread looks for the oldest signature
        if len(kept) >= MOST_SIGNATURES:
            kept.pop(next(iter(kept)), None)
        kept[signature] = value


def forget_calls() -> None:
    """Forget the signatures of all ops and checks."""
    with _KEEPING:
        for calls in _ALL_CALLS:
            calls.forget()
        forget_configs()


on_change(forget_calls)
when_full(forget_calls)


@contextlib.contextmanager
def check_every_call(wanted: bool = True) -> Iterator[None]:
    """Check every call of the current thread in full inside this context; do nothing if `wanted` is False."""
    if not wanted:
        yield
        return
    before = PER_THREAD.checked, PER_THREAD.order
    PER_THREAD.checked, PER_THREAD.order = True, None
    try:
        yield
    finally:
        PER_THREAD.checked, PER_THREAD.order = before


def with_wanted_checks(method: Callable) -> Callable:
    """Decorate a method: if `self.check_every_call` is True, all ops inside the method check their arguments."""

    @functools.wraps(method)
    def run(self: Any, *arguments: Any, **options: Any) -> Any:
        if not self.check_every_call or torch.compiler.is_compiling():
            return method(self, *arguments, **options)
        with check_every_call():
            return method(self, *arguments, **options)

    return run


def without_gradients(method: Callable) -> Callable:
    """Decorate a method to run under `torch.no_grad`; unlike torch's decorator, do nothing if gradients are off."""
    under_no_grad = torch.no_grad()(method)

    @functools.wraps(method)
    def run(*arguments: Any, **options: Any) -> Any:
        return (under_no_grad if torch.is_grad_enabled() else method)(*arguments, **options)

    return run


def must_be_checked() -> bool:
    """Return whether a call at this moment must be checked in full."""
    return is_watched() or PER_THREAD.checked
