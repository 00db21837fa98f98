"""Arrival at an mbarrier (a barrier in shared memory): one arrival for all warps that run the same function."""

from __future__ import annotations

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .gluon_versions import partition_barrier

# True only in tests with racecheck, NVIDIA's detector of data races (`tests/sanitizers.py`). Racecheck assumes that an
# mbarrier synchronises only the threads that arrive at it. If one thread arrived for all threads, racecheck would
# report races of the other threads. Tests set this constant before Triton computes the cache key of a kernel, because
# the key contains the constant.
EVERY_THREAD_ARRIVES = gl.constexpr(False)


@gluon.jit
@no_type_check
def arrive(bar, pred=True):
    """Arrive at `bar` once for all warps that call this function, after their last accesses to shared memory.

    Triton inserts a barrier of the warps between these accesses and the arrival. Triton does not count a fence as an
    access, so it may insert the barrier before the fence. After a fence, the caller must therefore call
    `partition_barrier` before `arrive`.

    Args:
        bar: the mbarrier.
        pred: if false, do not arrive.
    """
    if EVERY_THREAD_ARRIVES:
        if pred:
            async_copy.mbarrier_arrive(bar)  # each thread adds one expected arrival, and arrives
        partition_barrier()
    mbarrier.arrive(bar, pred=pred)
