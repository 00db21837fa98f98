"""Reuse the results of checks, and the launches of ops, that were recorded in an earlier call of a function.

A signature has the shapes, strides and dtypes of tensors, and the values of other arguments (`checked_calls`). A layer
calls several checks and ops. Their arguments are computed from the layer's own arguments, so the signature of the
layer's call determines the signatures of all these checks and ops.

The first call of a layer records a list: the result of each check, and the backend and the launches of each op. A later
call of the layer with the same signature goes through this list (`Order`). Each check takes its result from the list,
and each op takes its launches from the list. No check or op then computes a signature.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class _PerThread(threading.local):
    """State of the current thread.

    Attributes:
        checked: whether every call must be checked in full (`check_every_call`).
        order: the `Order` of the running function, if its checks and ops are recorded or reused; otherwise None.
    """

    checked: bool = False
    order: Order | None = None


PER_THREAD = _PerThread()


class Entry:
    """One entry of the recorded list: a check with its result, or an op with its backend and launches.

    Attributes:
        owner: the check or op that was called.
        value: result of the check, or backend and launches of the op.
    """

    __slots__ = ("owner", "value")

    def __init__(self, owner: Any, value: Any):
        self.owner, self.value = owner, value


class Order:
    """Context manager for one call of a function: record the checks and ops inside the function, or reuse a record.

    If a check or op does not match the record, this check or op and all that follow compute their own signatures.

    Args:
        entries: record of an earlier call of the function with the same signature; None makes a new record.
        end: function that is called with the new record, or with None if a check or op did not match the record.
    """

    __slots__ = ("_end", "_entries", "_failed", "_found", "_place")

    def __init__(self, entries: tuple[Entry, ...] | None, end: Callable[[tuple[Entry, ...] | None], None]):
        self._entries, self._end = entries, end
        self._found: list[Entry] = []
        self._place, self._failed = 0, False

    def __enter__(self) -> None:
        PER_THREAD.order = self

    def __exit__(self, kind: type | None, *_: object) -> None:
        PER_THREAD.order = None
        if self._entries is None:
            if kind is None and not self._failed:
                self._end(tuple(self._found))
        elif self._failed:
            self._end(None)

    def next(self, owner: Any) -> Entry | None:
        """Return the next entry of the reused record if it belongs to the check or op `owner`, otherwise None.

        With None, `owner` must compute its own signature.
        """
        entries, place = self._entries, self._place
        if entries is None or self._failed:
            return None
        if place < len(entries) and entries[place].owner is owner:
            self._place = place + 1
            return entries[place]
        self._failed = True
        return None

    def note(self, owner: Any, value: Any) -> None:
        """Add a call of the check or op `owner` to the new record; do nothing if an earlier record is reused."""
        if self._entries is None:
            self._found.append(Entry(owner, value))

    def confirm(self, parts: tuple) -> bool:
        """Compare `parts`, signatures of tensors, with the next entry of a reused record, or add it to a new record.

        Return whether a record is reused and everything matched it until now.
        """
        if self._entries is None:
            self._found.append(Entry(confirmed, parts))
        elif not self._failed:
            entry = self.next(confirmed)
            if entry is None or entry.value != parts:
                self._failed = True
        return self.repeats()

    def repeats(self) -> bool:
        """Return whether a record is reused and everything matched it until now."""
        return self._entries is not None and not self._failed

    def give_up(self) -> None:
        """Stop recording and reusing calls, because a call inside the function has no signature."""
        self._failed = True


class CallsOfOthers:
    """Context manager for code of another project, such as a projection: calls inside are not recorded or reused."""

    __slots__ = ("_order",)

    def __enter__(self) -> None:
        self._order, PER_THREAD.order = PER_THREAD.order, None

    def __exit__(self, *_: object) -> None:
        PER_THREAD.order = self._order


def confirmed() -> None:
    """Serve as `owner` of the entries that `Order.confirm` records; this function is never called."""
