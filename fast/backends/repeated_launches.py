"""Reuse the compiled kernels of an earlier call of an op, so that Triton need not search for them again.

For each launch, Triton looks at every argument to find the compiled kernel. Two calls with the same signature (the same
shapes, dtypes and values, see `checked_calls`) launch the same compiled kernels in the same order.
The first call therefore keeps its compiled kernels, and the second call launches them directly. The second call is also
recorded. If the record can be replayed, later calls run the replay (`replayed_calls`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from .direct_launches import CannotReplay
from .replayed_calls import MISFIT, Launch, Recorder, Replay

_PER_THREAD = threading.local()


class Launches:
    """The kernel launches of all calls of one op with one signature.

    Args:
        replays: whether the calls may be replayed. Pass False if the host code of the op may do things that the
            recorder does not see.

    Attributes:
        compiled: mapping from the number of a launch in the call to a pair. The first element is the compiled kernel.
            The second element has those `constants` of `launch` that are parameters of the kernel, in the kernel's
            order.
        replay: replay of these calls; None if no call was recorded, or if the record cannot be replayed.
        no_replay: why these calls cannot be replayed; None if there is no known reason.
    """

    def __init__(self, replays: bool = True):
        self.compiled: dict[int, tuple[Any, tuple]] = {}
        self.replay: Replay | None = None
        self.no_replay: str | None = None if replays else "a backend of another project"

    def run(self, function: Callable, *arguments: Any) -> Any:
        """Call a function, or replay its recorded call.

        In the function, `launch` keeps the compiled kernels of a first call, and reuses them in later calls.
        """
        if self.replay is not None:
            result = self.replay.run(*arguments)
            if result is not MISFIT:
                return result
        elif self.compiled and self.no_replay is None:
            return self._record(function, arguments)
        return self._call(function, arguments, None)

    def _call(self, function: Callable, arguments: tuple, recorder: Recorder | None) -> Any:
        outer = getattr(_PER_THREAD, "call", None)
        _PER_THREAD.call = _Call(self.compiled, recorder)
        try:
            return function(*arguments)
        finally:
            _PER_THREAD.call = outer

    def _record(self, function: Callable, arguments: tuple) -> Any:
        """Call a function, record the call, and make a replay of the record."""
        recorder = Recorder(arguments)
        try:
            with recorder:
                result = self._call(function, arguments, recorder)
            self.replay = Replay(recorder, arguments, result)
        except CannotReplay as reason:
            self.no_replay = str(reason)
        finally:
            recorder.forget()  # free the recorded tensors now; the garbage collector may free them much later
        return result


class _Call:
    """State of a running call: the kept kernels, the number of the next launch, and the recorder of the call."""

    __slots__ = ("compiled", "number", "recorder")

    def __init__(self, compiled: dict[int, tuple[Any, tuple]], recorder: Recorder | None):
        self.compiled, self.number, self.recorder = compiled, 0, recorder


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch a Triton or Gluon kernel; reuse its compiled kernel if an earlier call with the same signature kept it.

    Args:
        kernel: the kernel.
        grid: number of programs.
        arguments: values of the first parameters, in order.
        constants: values of the other parameters, and launch options such as `num_warps`.
    """
    call = getattr(_PER_THREAD, "call", None)
    if call is None:
        kernel[grid](*arguments, **constants)
        return
    number = call.number
    call.number = number + 1
    kept = call.compiled.get(number)
    if kept is not None:
        compiled, rest = kept
        whole_grid = (*grid, 1, 1)[:3]
        if call.recorder is not None:
            call.recorder.launches.append(Launch(compiled, whole_grid, (*arguments, *rest)))
        compiled[whole_grid](*arguments, *rest)
        return
    compiled = kernel[grid](*arguments, **constants)
    if hasattr(compiled, "packed_metadata"):  # Triton's interpreter compiles nothing
        rest = tuple([constants[name] for name in kernel.arg_names[len(arguments) :]])
        call.compiled[number] = (compiled, rest)
        if call.recorder is not None:  # the earlier call failed before this launch, so it did not keep this kernel
            call.recorder.launches.append(Launch(compiled, (*grid, 1, 1)[:3], (*arguments, *rest)))
    elif call.recorder is not None:
        call.recorder.other_op = "a launch without a compiled kernel"


def note_other_launch() -> None:
    """Let a recorder of the running op know of a launch outside of `launch`, so that the op is not replayed."""
    call = getattr(_PER_THREAD, "call", None)
    if call is not None and call.recorder is not None:
        call.recorder.other_op = "a launch that the record does not have"
