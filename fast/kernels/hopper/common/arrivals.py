"""Arrival at an mbarrier, once for a whole warp group, after all its warps have finished with the shared data."""

from __future__ import annotations

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .gluon_versions import partition_barrier

# True only under racecheck (`tests/sanitizers.py`). Racecheck takes only the memory accesses of the arriving thread for
# ordered, even if a barrier has ordered the accesses of the other threads. Tests set this constant before Triton hashes
# any kernel, because the cache key of a compiled kernel depends on the constant.
EVERY_THREAD_ARRIVES = gl.constexpr(False)


@gluon.jit
@no_type_check
def arrive(bar, pred=True):
    """Arrive at `bar` once for the warp group, after all its warps have reached this call; return nothing.

    Triton inserts a barrier of the warps after their last access to shared memory. If each thread executes a fence,
    this barrier may come before the fence. A caller with a fence therefore calls `partition_barrier` between the fence
    and `arrive`.

    Args:
        bar: the mbarrier.
        pred: arrive only if this is true.
    """
    if EVERY_THREAD_ARRIVES:
        if pred:
            async_copy.mbarrier_arrive(bar)  # raises the expected arrivals by one per thread; every thread arrives
        partition_barrier()
    mbarrier.arrive(bar, pred=pred)
