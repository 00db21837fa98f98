"""Costs of the GPU decode kernels that come on top of the time of their tiles.

The unit is the time of one tile. The costs were measured on an H200; schedules are planned with them.
"""

from __future__ import annotations

from reference.interfaces import InvariantSplitRule, ScheduleCosts

# `invariant_starts`: a batch-invariant schedule takes longer, because more of its programs begin within a request.
STARTS = 4
FEW_HEADS = ScheduleCosts(5, 1, InvariantSplitRule(4, 32, 16, 128), STARTS, 64)  # 16 heads or fewer
SOME_HEADS = ScheduleCosts(5, 4, InvariantSplitRule(16, 8, 32, 64), STARTS, 64)  # 17 to 32 heads
MANY_HEADS = ScheduleCosts(8, 4, InvariantSplitRule(16, 8, 32, 64), STARTS, 10)  # more than 32 heads


def measured_schedule_costs(num_heads: int) -> ScheduleCosts:
    """Return the costs of a decode with this number of heads; `docs/log.md` has the measurements.

    - Cost of a request: 8 tiles for more than 32 heads. For 32 heads or fewer, costs from 1 to 5 tiles gave equally
      fast schedules.
    - Cost of a batch-invariant split: with 16 heads or fewer, the Hopper decode keeps the softmax state in shared
      memory for the next split, so the cost is low. With 17 to 32 heads, half of the state goes through global memory.
      With more heads, the weighted sums of the state go through global memory.
    - Splits that the combine kernel adds in the time of a tile: for one request of 128 tiles, parts of 2 tiles were the
      fastest with 16 and 32 heads, and parts of 4 tiles with 128 heads.

    The costs were measured with the decode of the backend "hopper"; the backend "triton" uses the same numbers.
    """
    return FEW_HEADS if num_heads <= 16 else SOME_HEADS if num_heads <= 32 else MANY_HEADS
