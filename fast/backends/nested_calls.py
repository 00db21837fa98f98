"""Calls inside a function whose signature is known: each call inside follows the order of an earlier call.

A layer calls several checks and ops. Their arguments are views, slices and products of the layer's own arguments, so
the signature of the layer's call (`checked_calls`) determines the signatures of all calls inside it. A first call
notes, in order, each check with its result and each op with its backend and its launches. In a later call with the same
signature, a check takes its result and an op takes its launches from these notes, without a signature of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class _PerThread(threading.local):
    """What the current thread is doing.

    Attributes:
        checked: whether every call must be checked in full (`check_every_call`).
        order: the order that the calls of this moment note or follow; None outside of such a function.
    """

    checked: bool = False
    order: Order | None = None


PER_THREAD = _PerThread()


class Entry:
    """One note: a check with its result, or an op with its backend and launches.

    Attributes:
        owner: the check or op.
        value: what the check or op keeps for the signature of this call.
    """

    __slots__ = ("owner", "value")

    def __init__(self, owner: Any, value: Any):
        self.owner, self.value = owner, value


class Order:
    """The calls inside one function call: a context manager in which they are noted, or follow earlier notes.

    A call that does not fit the notes ends them: this call and the calls after it compute their own signatures.

    Args:
        entries: notes of an earlier call with the same signature; None makes notes.
        end: function that gets the new notes, or None if the call did not follow its notes.
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
        """Return the note of the next call; None if `owner` must compute its own signature."""
        entries, place = self._entries, self._place
        if entries is None or self._failed:
            return None
        if place < len(entries) and entries[place].owner is owner:
            self._place = place + 1
            return entries[place]
        self._failed = True
        return None

    def note(self, owner: Any, value: Any) -> None:
        """Note one call."""
        if self._entries is None:
            self._found.append(Entry(owner, value))

    def confirm(self, parts: tuple) -> None:
        """Compare the signatures of tensors with those of the earlier call; note them if there was none."""
        if self._entries is None:
            self._found.append(Entry(confirmed, parts))
        elif not self._failed:
            entry = self.next(confirmed)
            if entry is None or entry.value != parts:
                self._failed = True

    def give_up(self) -> None:
        """Make no notes of this call, or follow no more notes: the signature of a call inside is not known."""
        self._failed = True


class CallsOfOthers:
    """A context manager around code of another project, such as a projection: its calls are no part of any notes."""

    __slots__ = ("_order",)

    def __enter__(self) -> None:
        self._order, PER_THREAD.order = PER_THREAD.order, None

    def __exit__(self, *_: object) -> None:
        PER_THREAD.order = self._order


def confirmed() -> None:
    """The owner of notes about tensors."""
