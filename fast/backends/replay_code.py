"""Write the Python function that replays one recorded call of an op (`replayed_calls`).

A loop over the recorded addresses, allocations and launch arguments takes most of the time of a replay. This module
therefore writes a function without loops, and Python compiles it. For a call with two inputs, one new tensor and one
launch, the function is:

    def run(a0, a1, a2):
        active, enter, leave = v0.active, v1.launch_enter_hook, v1.launch_exit_hook
        if (
            (a2,) != v2 or len({id(a0), id(a1)}) != 2 or active.get_current_device() != v3
            or getattr(enter, "calls", enter) or getattr(leave, "calls", leave)
        ):
            return v4
        stream = active.get_current_stream(v3)
        n0 = v5(v6, dtype=v7, device=v8)
        p0 = a0.data_ptr()
        p1 = n0.data_ptr()
        v9(v10, v11, v12, stream, v13, p0, p1, v14)
        return n0

The names v0, v1, ... stand for the recorded values. They are no part of the source, so that calls which differ only in
their numbers, such as the decodes of successive steps, share the compiled source.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

MOST_SOURCES = 1024  # compiled sources that are kept; each op has a few


class Code:
    """The lines of a function that is being written, and the values that the lines use."""

    def __init__(self):
        self.lines: list[str] = []
        self._values: list[Any] = []

    def value(self, value: Any) -> str:
        """Return the name of a value in the function."""
        self._values.append(value)
        return f"v{len(self._values) - 1}"

    def add(self, line: str) -> None:
        """Append a line; a line inside a block starts with four spaces."""
        self.lines.append(line)

    def function(self, parameters: Sequence[str]) -> Callable:
        """Return the function with these positional parameters."""
        body = "".join(f"        {line}\n" for line in self.lines)
        names = ", ".join(f"v{number}" for number in range(len(self._values)))
        source = f"def make({names}):\n    def run({', '.join(parameters)}):\n{body}    return run\n"
        return _maker(source)(*self._values)


@functools.lru_cache(MOST_SOURCES)
def _maker(source: str) -> Callable[..., Callable]:
    """Compile the source of a function `make`, and return this function."""
    found: dict[str, Any] = {}
    exec(compile(source, "<replayed call>", "exec"), found)
    return found["make"]


def tuple_of(names: Sequence[str]) -> str:
    """Return the source of a tuple."""
    return "(" + "".join(f"{name}, " for name in names).rstrip() + ")"


def differ(objects: Sequence[str], first: Sequence[int]) -> str | None:
    """Return a condition: whether some objects are the same although they were different, or the reverse.

    Args:
        objects: names of the objects.
        first: for each object, the first index at which the same object was recorded; empty if no object repeated.

    Returns:
        The source of the condition; None for less than two objects.
    """
    if len(objects) < 2:
        return None
    first = first or range(len(objects))
    own = [name for place, name in enumerate(objects) if first[place] == place]
    same = [f"{name} is not {objects[first[place]]}" for place, name in enumerate(objects) if first[place] != place]
    different = [f"len({{{', '.join(f'id({name})' for name in own)}}}) != {len(own)}"] if len(own) > 1 else []
    return " or ".join(same + different)
