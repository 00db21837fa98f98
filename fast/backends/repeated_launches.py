"""Repeated launches: a call that was made before takes the compiled kernels that the first call found.

For each launch, Triton's launcher looks at every argument to find the compiled kernel. Two calls with the same
signature (`checked_calls`) launch the same compiled kernels in the same order, so the second call need
not search.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

_PER_THREAD = threading.local()


class Launches:
    """The compiled kernels of the calls with one signature, by the number of their launch."""

    def __init__(self):
        self.compiled: dict[int, tuple[Any, tuple]] = {}

    def run(self, function: Callable, *arguments: Any) -> Any:
        """Call a function; its `launch` calls use the kernels of earlier calls, and keep the kernels of this call."""
        outer = getattr(_PER_THREAD, "call", None)
        _PER_THREAD.call = _Call(self.compiled)
        try:
            return function(*arguments)
        finally:
            _PER_THREAD.call = outer


class _Call:
    """One call that is running: the kept kernels, and the number of the next launch."""

    __slots__ = ("compiled", "number")

    def __init__(self, compiled: dict[int, tuple[Any, tuple]]):
        self.compiled, self.number = compiled, 0


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
        compiled[(*grid, 1, 1)[:3]](*arguments, *rest)
        return
    compiled = kernel[grid](*arguments, **constants)
    if hasattr(compiled, "packed_metadata"):  # Triton's interpreter compiles nothing
        rest = tuple([constants[name] for name in kernel.arg_names[len(arguments) :]])
        call.compiled[number] = (compiled, rest)
