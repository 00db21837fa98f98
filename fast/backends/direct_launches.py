"""Launch a compiled kernel by the C function of Triton, without Triton's Python code."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

KNOWN_VERSIONS = ((3, 6), (3, 7))  # versions of Triton whose C function is known


class CannotReplay(Exception):
    """Raised for a call that a replay cannot repeat."""


class DirectCall(NamedTuple):
    """A call of the C function of Triton that launches a compiled kernel.

    The arguments of the call are the grid, the stream, the constants, and then the arguments of the kernel.

    Attributes:
        start: the C function.
        grid: number of programs in three dimensions.
        constants: the arguments of the C function after the stream.
        in_one_tuple: whether the C function takes the arguments of the kernel as one tuple.
    """

    start: Callable
    grid: tuple[int, int, int]
    constants: tuple
    in_one_tuple: bool


def direct_call(compiled: Any, grid: tuple[int, int, int]) -> DirectCall:
    """Return the call that launches a compiled kernel without Triton's Python code.

    Triton has no public function for such a launch. The call is that of Triton 3.6 or 3.7.

    Raises:
        CannotReplay: Triton has another version, the GPU is not an NVIDIA GPU, or the kernel needs scratch memory.
    """
    launcher = getattr(compiled, "run", None)
    version = tuple(int(part) for part in triton_version().split(".")[:2])
    if version not in KNOWN_VERSIONS or type(launcher).__name__ != "CudaLauncher":
        raise CannotReplay(f"launches of Triton {triton_version()} by {type(launcher).__name__}")
    if compiled.metadata.global_scratch_size or compiled.metadata.profile_scratch_size:
        raise CannotReplay("a kernel that needs scratch memory")
    start = launcher.launch
    names = getattr(getattr(start, "__code__", None), "co_freevars", ())
    if "launcher" in names:  # take the C function out of the Python function that encodes descriptors
        start = start.__closure__[names.index("launcher")].cell_contents
    kernel = compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl
    packed = compiled.packed_metadata
    if version == (3, 6):
        return DirectCall(start, grid, (*kernel, None, None, packed, None, None, None), False)
    constants = packed, None, None, None, None, None, launcher.arg_annotations, launcher.kernel_signature
    return DirectCall(start, grid, (*kernel, *constants), True)


def direct_launch(compiled: Any, grid: tuple[int, int, int]) -> Callable[[int, tuple], None]:
    """Return a function of (stream, arguments) that launches a compiled kernel by `direct_call`."""
    call = direct_call(compiled, grid)
    start, before, after = call.start, call.grid, call.constants  # a closure reads a name faster than a field
    if call.in_one_tuple:
        return lambda stream, arguments: start(*before, stream, *after, arguments)
    return lambda stream, arguments: start(*before, stream, *after, *arguments)


@functools.cache
def triton_version() -> str:
    """Return the version of Triton."""
    import triton

    return triton.__version__
