"""What the decode kernels for GPUs cost beside their tiles, measured on an H200; schedules reckon with it."""

from __future__ import annotations

from reference.interfaces import InvariantCut, ScheduleCosts

FEW_HEADS = ScheduleCosts(request_cost=5, split_cost=1, cut=InvariantCut(4, 32, 16, 128))  # up to 16
SOME_HEADS = ScheduleCosts(request_cost=5, split_cost=4, cut=InvariantCut(16, 8, 32, 64))  # up to 32
MANY_HEADS = ScheduleCosts(request_cost=8, split_cost=4, cut=InvariantCut(16, 8, 32, 64))


def measured_schedule_costs(num_heads: int) -> ScheduleCosts:
    """Return the costs of a decode with so many heads (`docs/log.md` has the measurements).

    For more than 32 heads 8 tiles a request were measured; up to 32, whose tiles take longer beside the rest, anything
    from 1 to 5 served as well. Of a batch-invariant split, up to 16 heads a Hopper kernel keeps the state in shared
    memory for the next split; with more rows it keeps half of it or nothing, and what goes through memory costs. The
    portable kernels were not measured apart.
    """
    return FEW_HEADS if num_heads <= 16 else SOME_HEADS if num_heads <= 32 else MANY_HEADS
