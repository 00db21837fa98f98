"""What the decode kernels for GPUs cost beside their tiles, measured on an H200; schedules reckon with it."""

from __future__ import annotations

from reference.interfaces import InvariantCut, ScheduleCosts

STARTS = 4  # of a batch-invariant schedule: each program starts in the midst of a request
FEW_HEADS = ScheduleCosts(5, 1, InvariantCut(4, 32, 16, 128), STARTS)  # up to 16
SOME_HEADS = ScheduleCosts(5, 4, InvariantCut(16, 8, 32, 64), STARTS)  # up to 32
MANY_HEADS = ScheduleCosts(8, 4, InvariantCut(16, 8, 32, 64), STARTS)


def measured_schedule_costs(num_heads: int) -> ScheduleCosts:
    """Return the costs of a decode with so many heads (`docs/log.md` has the measurements).

    For more than 32 heads 8 tiles a request were measured; up to 32, whose tiles take longer beside the rest, anything
    from 1 to 5 served as well. Of a batch-invariant split, up to 16 heads a Hopper kernel keeps the state in shared
    memory for the next split; with more rows it keeps half of it or nothing, and what goes through memory costs. The
    portable kernels were not measured apart.
    """
    return FEW_HEADS if num_heads <= 16 else SOME_HEADS if num_heads <= 32 else MANY_HEADS
