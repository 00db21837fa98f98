"""Repeated launches: a call that was made before takes the compiled kernels that the first call found.

For each launch, Triton's launcher looks at every argument to find the compiled kernel. Two calls with the same
signature (`checked_calls`) launch the same compiled kernels in the same order, so the second call need
not search. The second call is recorded, and later calls are replays of the record if it can be replayed
(`replayed_calls`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from .replayed_calls import MISFIT, CannotReplay, Launch, Recorder, Replay

_PER_THREAD = threading.local()


class Launches:
    """The launches of the calls with one signature.

    Args:
        replays: whether the calls may be replayed: the host code of the op does nothing that the recorder cannot see.

    Attributes:
        compiled: compiled kernels and their compile-time arguments, by the number of the launch.
        replay: replay of these calls; None if no call was recorded yet.
        no_replay: why these calls cannot be replayed; None if they can, or if no call was recorded yet.
    """

    def __init__(self, replays: bool = True):
        self.compiled: dict[int, tuple[Any, tuple]] = {}
        self.replay: Replay | None = None
        self.no_replay: str | None = None if replays else "a backend of another project"

    def run(self, function: Callable, *arguments: Any) -> Any:
        """Call a function; its `launch` calls use the kernels of earlier calls, and keep the kernels of this call."""
        if self.replay is not None:
            result = self.replay.run(arguments)
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
        """Call a function and make the replay of the call."""
        recorder = Recorder(arguments)
        try:
            with recorder:
                result = self._call(function, arguments, recorder)
            self.replay = Replay(recorder, arguments, result)
        except CannotReplay as reason:
            self.no_replay = str(reason)
        finally:
            recorder.forget()  # at once, and not when Python's garbage collector finds it
        return result


class _Call:
    """One call that is running: the kept kernels, the number of the next launch, and who records the call."""

    __slots__ = ("compiled", "number", "recorder")

    def __init__(self, compiled: dict[int, tuple[Any, tuple]], recorder: Recorder | None):
        self.compiled, self.number, self.recorder = compiled, 0, recorder


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch a Triton or Gluon kernel.

    Args:
        kernel: the kernel.
        grid: number of programs.
        arguments: the arguments of the first parameters, in order.
        constants: the other parameters, and launch options such as `num_warps`.
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
        if call.recorder is not None:  # an error ended the first call before this launch
            call.recorder.launches.append(Launch(compiled, (*grid, 1, 1)[:3], (*arguments, *rest)))
    elif call.recorder is not None:
        call.recorder.other_op = "a launch without a compiled kernel"
