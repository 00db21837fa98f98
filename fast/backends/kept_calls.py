"""Keep what an adapter found out about a call, for later calls with the same signature.

An adapter looks at shapes, strides, dtypes and alignments: whether a tensor is copied, how many columns are padded,
which function of the library takes the call. All calls with one signature (`checked_calls`) have the same answers. The
adapter therefore returns a function for later calls (`OpSupport.kept_call`), which only calls the library and converts
its results. The values inside tensors are not part of a signature; a check of such values stays in every call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .own import OWN_BACKENDS
from .registry import imported, support_of
from .repeated_launches import Launches


class KeptCall:
    """The calls of one op of another library's backend, with one signature.

    Args:
        keep: function that gets the arguments of a call, the name of the backend last, after the call has passed all
            checks. It returns a function with the same arguments for later calls, or None if each call must be checked.

    Attributes:
        again: the function for later calls; None before the first call, or if each call must be checked.
        allocates: whether `again` also serves calls that get no tensor for the output (`OpSupport.kept_call`).
    """

    __slots__ = ("_keep", "_launches", "again", "allocates")
    replay = None  # a call of another library is never replayed

    def __init__(self, keep: Callable[..., Callable | None]):
        self._keep: Callable[..., Callable | None] | None = keep
        self._launches = Launches(replays=False)  # a launcher of another project may do work that a replay leaves out
        self.again: Callable | None = None
        self.allocates = False

    def run(self, launch: Callable, *arguments: Any) -> Any:
        """Return the result of the kept function; in the first call, return the result of `launch`."""
        if self.again is not None:
            return self.again(*arguments)
        result = self._launches.run(launch, *arguments)
        keep = self._keep  # another thread may set the attribute to None
        if keep is not None:
            again = keep(*arguments)
            self.allocates = getattr(again, "allocates", False)
            self.again, self._keep = again, None
        return result


def kept_function(backend: str, op: str, *arguments: Any, **options: Any) -> Callable | None:
    """Return the function for later calls that a backend of another library declares; None if it declares none.

    Args:
        backend: name of the backend.
        op: name of the op.
        arguments: arguments of the launcher in a call that has passed all checks.
        options: arguments by name.
    """
    declared = None if backend in OWN_BACKENDS else support_of(backend, op).kept_call
    if declared is None:
        return None
    return (imported(declared) if isinstance(declared, str) else declared)(*arguments, **options)
