"""How warps that work together tell others, by an mbarrier, that they are done with what all of them share."""

from __future__ import annotations

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .gluon_versions import partition_barrier

# For racecheck (`tests/sanitizers.py`), which takes none but the arriving thread for ordered, whatever barrier it met
# the others at. Only tests set it, before any kernel is hashed: the key of what is compiled has it then.
EVERY_THREAD_ARRIVES = gl.constexpr(False)


@gluon.jit
@no_type_check
def arrive(bar, pred=True):
    """One arrival for all warps of the group, once each of them is here.

    Triton puts a barrier before it, but behind what touched shared memory: where each thread fences, another is needed.
    """
    if EVERY_THREAD_ARRIVES:
        if pred:
            async_copy.mbarrier_arrive(bar)  # each thread adds itself to who is waited for, and the count stays
        partition_barrier()
    mbarrier.arrive(bar, pred=pred)
