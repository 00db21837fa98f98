"""Programmatic dependent launch: a kernel may begin while the previous kernel of its stream still runs.

A kernel that may begin early is launched with `launch_pdl=True`, and calls two functions in this order:

1. `await_previous` waits until the previous kernel has finished and its writes are visible.
2. `launch_next` allows the next kernel of the stream to begin.

The next kernel begins only after every program of this kernel has called `launch_next`. Because of the order above, all
kernels before this kernel have finished by then. The next kernel may therefore read the outputs of these earlier
kernels before it waits for this kernel. For example, the combine kernel reads the schedule of a single request before
it waits for the decode kernel.

`follow_kernel_early` calls both functions in the other order. The next kernel begins earlier, but must read nothing
before it waits.
"""

from __future__ import annotations

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LAUNCH = {"num_warps": 4, "launch_pdl": True}  # launch options of kernels that call both functions


@gluon.jit
@no_type_check
def launch_next():
    """Allow the next kernel of the stream to begin before this kernel ends."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // dummy $0", "=r", [], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
@no_type_check
def await_previous():
    """Wait until the previous kernel of the stream has finished; afterwards its outputs may be read."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // dummy $0", "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
@no_type_check
def follow_kernel():
    """Wait for the previous kernel of the stream, then allow the next kernel to begin."""
    await_previous()
    launch_next()


@gluon.jit
@no_type_check
def follow_kernel_early():
    """Allow the next kernel of the stream to begin, then wait for the previous kernel.

    The next kernel must wait for this kernel before it reads anything that an earlier kernel has written.
    """
    launch_next()
    await_previous()
