"""Run a small kernel that hands data from one warp group to another, to show what racecheck reports about it.

    compute-sanitizer --tool racecheck python -m tests.hand_over

racecheck is the tool of compute-sanitizer that finds data races in shared memory. In this kernel the producer warps
store to shared memory and arrive at the mbarrier `full`. The consumer warps wait on `full`, load the data, and arrive
at the mbarrier `empty`. The producer waits on `empty` before its next store. The kernels of `fast/kernels/hopper` use
their mbarriers in the same way.

By default every thread arrives at an mbarrier. With `--one-arrives` one thread arrives for its warp group, as in
`fast/kernels/hopper`. With `--racing` no warp group waits, so the consumer misses values.
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
def _consume(out, shared, full, empty, ROUNDS: gl.constexpr, ORDERED: gl.constexpr):
    column = gl.arange(0, WIDTH, gl.BlockedLayout([1], [32], [4], [0]))
    for turn in range(ROUNDS):
        if ORDERED:
            mbarrier.wait(full, turn & 1)
        gl.store(out + turn * WIDTH + column, shared.load(gl.BlockedLayout([1], [32], [4], [0])))
        arrivals.arrive(empty)


@gluon.jit
@no_type_check
def _produce(source, shared, full, empty, ROUNDS: gl.constexpr, ORDERED: gl.constexpr):
    column = gl.arange(0, WIDTH, gl.BlockedLayout([4], [32], [1], [0]))
    for turn in range(ROUNDS):
        if ORDERED:
            mbarrier.wait(empty, (turn & 1) ^ 1)
        shared.store(gl.load(source + turn * WIDTH + column))
        arrivals.arrive(full)


@gluon.jit
@no_type_check
def _hand_over_kernel(source, out, ROUNDS: gl.constexpr, ORDERED: gl.constexpr):
    shared = gl.allocate_shared_memory(gl.float32, [WIDTH], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, 1)
    mbarrier.init(empty, 1)
    gl.warp_specialize(
        [
            (_consume, (out, shared, full, empty, ROUNDS, ORDERED)),
            (_produce, (source, shared, full, empty, ROUNDS, ORDERED)),
        ],
        [1],
        [24],
    )


def let_every_thread_arrive() -> None:
    """Make every thread arrive at the mbarriers in the kernels of this process.

    Call this function before the import of the modules that contain kernels. Triton hashes a kernel together with the
    constant `EVERY_THREAD_ARRIVES`, and raises an error if the constant changes later.
    """
    arrivals.EVERY_THREAD_ARRIVES = gl.constexpr(True)


def main(argv: list[str]) -> int:
    """Hand over `WIDTH` values `ROUNDS` times, print whether all values arrived, and return 1 if values are missing."""
    if "--one-arrives" not in argv:
        let_every_thread_arrive()
    source = torch.randn(ROUNDS, WIDTH.value, device="cuda")
    out = torch.zeros_like(source)
    _hand_over_kernel[(1,)](source, out, ROUNDS=ROUNDS, ORDERED="--racing" not in argv, num_warps=4)
    lost = int((out != source).any(dim=1).sum())
    print("hand-over: every value came" if lost == 0 else f"hand-over: {ROUNDS - lost} of {ROUNDS} rounds came")
    return lost > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
