"""Let a kernel begin while the kernel before it ends."""

from __future__ import annotations

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LAUNCH = {"num_warps": 4, "launch_pdl": True}  # for kernels that call `follow_kernel`, or both of its steps


@gluon.jit
@no_type_check
def launch_next():
    """Let the next kernel be launched already."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // dummy $0", "=r", [], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
@no_type_check
def await_before():
    """Wait for the kernel before, whose launch let this one begin."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // dummy $0", "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
@no_type_check
def follow_kernel():
    """Let the next kernel be launched and wait for the one before: code behind this may read what that one wrote."""
    launch_next()
    await_before()
