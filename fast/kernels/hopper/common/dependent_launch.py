"""Programmatic dependent launch: a kernel may begin while the previous kernel of its stream still runs.

The launch needs `launch_pdl=True`. The kernel then executes two instructions, in this order:

1. `await_previous` waits until the previous kernel has finished and its writes are visible.
2. `launch_next` allows the next kernel of the stream to begin.

The order matters to the next kernel. It begins only after every program of this kernel has executed `launch_next`, and
thus after all kernels before this kernel have finished. The next kernel may therefore read their outputs, for example a
schedule, before it waits for this kernel. The combine kernel of a schedule does so.

No function of this module returns a value.
"""

from __future__ import annotations

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LAUNCH = {"num_warps": 4, "launch_pdl": True}  # launch options of kernels that execute both instructions


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
    """Wait until the previous kernel of the stream has finished; only then may this kernel read the earlier outputs."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // dummy $0", "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
@no_type_check
def follow_kernel():
    """Wait for the previous kernel, then allow the next kernel to begin.

    The code after this call may read the outputs of the previous kernel.
    """
    await_previous()
    launch_next()
