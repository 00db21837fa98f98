"""Costs of the GPU kernels: `plan_decode` computes schedules from them, and builders estimate the time of a cascade.

The costs were measured on an H200. A cost of a schedule is time that a kernel needs in addition to the time of its
tiles. The unit is the time of one tile (64 keys).
"""

from __future__ import annotations

import torch

from reference.interfaces import CascadeCosts, InvariantSplitRule, ScheduleCosts

# `invariant_starts`: `choose_schedule` multiplies `request_cost` by this factor when it estimates the time of a
# batch-invariant schedule. The factor is above 1, because the times of the programs differ more in such a schedule.
STARTS = 4
# the arguments are request_cost, split_cost, split_rule, invariant_starts and splits_per_tile
FEW_HEADS = ScheduleCosts(5, 1, InvariantSplitRule(4, 32, 16, 128), STARTS, 64)  # 16 heads or fewer
FEW_HEADS_E4M3 = ScheduleCosts(5, 6, InvariantSplitRule(8, 16, 16, 128), STARTS, 64)  # the same, cache in e4m3
SOME_HEADS = ScheduleCosts(5, 4, InvariantSplitRule(16, 8, 32, 64), STARTS, 64)  # 17 to 32 heads
MANY_HEADS = ScheduleCosts(8, 4, InvariantSplitRule(16, 8, 32, 64), STARTS, 10)  # more than 32 heads

# `flops_per_byte`: FLOPs in bfloat16 in the time of reading a byte, a round number (150 to 300 on H100 to B200).
# `kernel_bytes`: the fixed time of a kernel of grouped-query attention, as the number of bytes that an H200 reads in
# this time, 5.7 us. `docs/log.md` has the measurements; every number from 22 to 27 million made the same choices.
GPU_CASCADE_COSTS = CascadeCosts(flops_per_byte=200, kernel_bytes=24_000_000)


def measured_schedule_costs(num_heads: int, e4m3: bool = False) -> ScheduleCosts:
    """Return the costs of a decode with this number of heads; `docs/log.md` has the measurements.

    - `request_cost`: 8 tiles for more than 32 heads. For 32 heads or fewer, costs from 1 to 5 tiles gave equally fast
      schedules.
    - `split_cost`, the cost of a further split in a batch-invariant schedule: with 16 heads or fewer over a cache in 16
      bits, the Hopper decode keeps its softmax state in shared memory from one split to the next, so the cost is low.
      With more heads, a part of the state goes through global memory. Over a cache in e4m3, the sums of every number of
      heads go through global memory, and the consumers exchange their sums after each split. With 16 heads or fewer,
      this takes 5 to 8 us, which is the time of about 6 tiles.
    - `split_rule`: few large splits suit a large batch, and many small splits suit one short request. For 16 heads or
      fewer over a cache in e4m3, the rule was chosen from estimated times. It was not measured.
    - `splits_per_tile`, the number of splits whose partial outputs the combine kernel adds up in the time of one tile:
      chosen so that a single request of 128 tiles is divided into parts of the fastest size. This size is 2 tiles for
      16 and 32 heads, and 4 tiles for 128 heads.

    The costs were measured with the decode of the backend "hopper". The backend "triton" uses the numbers of caches in
    16 bits for every format.

    Args:
        num_heads: N.
        e4m3: whether the cache is in the format `fp8_e4m3`. It changes the costs for 16 heads or fewer alone.
    """
    if num_heads <= 16:
        return FEW_HEADS_E4M3 if e4m3 else FEW_HEADS
    return SOME_HEADS if num_heads <= 32 else MANY_HEADS


def cascade_costs_of(device: torch.device | str | None) -> CascadeCosts:
    """Return the costs from which a builder estimates the time of a cascade on a device.

    The result is the same for every GPU. For other devices, the result is the defaults of `CascadeCosts`.

    Args:
        device: device of the layers; None means PyTorch's default device (`torch.get_default_device`).
    """
    device = torch.get_default_device() if device is None else torch.device(device)
    return GPU_CASCADE_COSTS if device.type == "cuda" else CascadeCosts()
