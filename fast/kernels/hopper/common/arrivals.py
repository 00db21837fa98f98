"""Arrive at an mbarrier once for a whole warp group, when its warps are done with what they share."""

from __future__ import annotations

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .gluon_versions import partition_barrier

# For racecheck (`tests/sanitizers.py`), which orders only the thread that arrives, whatever barrier the others passed.
# Only tests set it, before any kernel is hashed: a compiled kernel's key depends on it.
EVERY_THREAD_ARRIVES = gl.constexpr(False)


@gluon.jit
@no_type_check
def arrive(bar, pred=True):
    """Arrive once for all warps of the group, when each of them is here.

    Triton puts a barrier before the arrival, but behind the last access to shared memory: after a fence of each
    thread, the caller needs another barrier.
    """
    if EVERY_THREAD_ARRIVES:
        if pred:
            async_copy.mbarrier_arrive(bar)  # each thread adds itself to the arrivals waited for; the count stays
        partition_barrier()
    mbarrier.arrive(bar, pred=pred)
