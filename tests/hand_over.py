"""The smallest hand-over between two warp groups, to show what racecheck makes of one.

    compute-sanitizer --tool racecheck python -m tests.hand_over

One group stores to shared memory and arrives at an mbarrier, the other waits for it, loads, and arrives at a second one
that the first waits for: the order of every hand-over in `fast/kernels/hopper`. Every thread arrives; with
`--one-arrives` one for all, as in what is served. `--racing` leaves the waits out, and then values are lost.
"""

from __future__ import annotations

import sys
from typing import no_type_check

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from fast.kernels.hopper.common import arrivals

ROUNDS = 64
WIDTH = gl.constexpr(128)


@gluon.jit
@no_type_check
def _take(out, shared, full, free, ROUNDS: gl.constexpr, ORDERED: gl.constexpr):
    column = gl.arange(0, WIDTH, gl.BlockedLayout([1], [32], [4], [0]))
    for turn in range(ROUNDS):
        if ORDERED:
            mbarrier.wait(full, turn & 1)
        gl.store(out + turn * WIDTH + column, shared.load(gl.BlockedLayout([1], [32], [4], [0])))
        arrivals.arrive(free)


@gluon.jit
@no_type_check
def _give(source, shared, full, free, ROUNDS: gl.constexpr, ORDERED: gl.constexpr):
    column = gl.arange(0, WIDTH, gl.BlockedLayout([4], [32], [1], [0]))
    for turn in range(ROUNDS):
        if ORDERED:
            mbarrier.wait(free, (turn & 1) ^ 1)
        shared.store(gl.load(source + turn * WIDTH + column))
        arrivals.arrive(full)


@gluon.jit
@no_type_check
def _hand_over_kernel(source, out, ROUNDS: gl.constexpr, ORDERED: gl.constexpr):
    shared = gl.allocate_shared_memory(gl.float32, [WIDTH], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, 1)
    mbarrier.init(free, 1)
    gl.warp_specialize(
        [
            (_take, (out, shared, full, free, ROUNDS, ORDERED)),
            (_give, (source, shared, full, free, ROUNDS, ORDERED)),
        ],
        [1],
        [24],
    )


def let_every_thread_arrive() -> None:
    """From now on, in this process: before any kernel is hashed, and so before a module keeps kernels in a table."""
    arrivals.EVERY_THREAD_ARRIVES = gl.constexpr(True)


def main(argv: list[str]) -> int:
    """Hand `ROUNDS` spans over, and say whether all came."""
    if "--one-arrives" not in argv:
        let_every_thread_arrive()
    source = torch.randn(ROUNDS, WIDTH.value, device="cuda")
    out = torch.zeros_like(source)
    _hand_over_kernel[(1,)](source, out, ROUNDS=ROUNDS, ORDERED="--racing" not in argv, num_warps=4)
    lost = int((out != source).any(dim=1).sum())
    print("hand-over: every value came" if lost == 0 else f"hand-over: {ROUNDS - lost} of {ROUNDS} came")
    return lost > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
