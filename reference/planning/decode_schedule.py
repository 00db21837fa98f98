"""Cut the keys of a decode over programs, so that all take about as long."""

from __future__ import annotations

import torch
from jaxtyping import Int32
from torch import Tensor

from ..interfaces import (
    DECODE_TILE,
    DecodeSchedule,
    ScheduleCosts,
    check_flag,
    check_int,
    check_not_negative,
    check_schedule_costs,
    check_tensor,
    invariant_split_tiles,
)


def plan_decode(
    seq_lens: Int32[Tensor, " B"],
    num_programs: int,
    costs: ScheduleCosts | None = None,
    batch_invariant: bool = False,
) -> DecodeSchedule:
    """Cut the keys of a decode over programs, so that all take about as long.

    Lay the requests end to end, each as long as its tiles and the cost of starting on it (`request_cost`), and cut the
    line into pieces of Q = ceil(length / programs): program p takes the tiles in [p Q, (p + 1) Q). It pays the cost of
    a request that it continues once more, so that none carries more than Q and one such cost. A request without keys
    lies nowhere and has no split; the combine writes its empty row.

    With `batch_invariant` a request is cut every `invariant_split_tiles` tiles, by its own length and the cut of
    `costs` alone, whatever stands beside it. Splits are laid end to end, each with `split_cost` of the costs (at most
    `request_cost`), the first with all of `request_cost`; a program takes those that start in its piece of the line.

    Args:
        seq_lens: [B], keys of each request.
        num_programs: that run at once.
        costs: of the kernel that decodes, beside its tiles; None for the neutral ones.
        batch_invariant: see above.

    Returns:
        The schedule, on the device of `seq_lens`.

    Raises:
        TypeError: costs of another type.
        ValueError: a number below its least value; a negative length.
    """
    check_tensor("seq_lens", seq_lens, ("B",), (torch.int32,))
    check_int("num_programs", num_programs, 1, "at least 1")
    check_flag("batch_invariant", batch_invariant)
    costs = check_schedule_costs(costs)
    check_not_negative("seq_lens", seq_lens)
    lens = seq_lens.tolist()

    request_cost, split_cost = costs.request_cost, 0
    if batch_invariant:
        split_cost = min(request_cost, costs.split_cost)
        request_cost -= split_cost
    line = []  # what stands at each place of the line: (request, tile, split by its own length, where that starts)
    for request, length in enumerate(lens):
        tiles = -(-length // DECODE_TILE)
        split_tiles = invariant_split_tiles(tiles, costs.cut) if batch_invariant else max(1, tiles)
        line += [None] * (request_cost if tiles else 0)
        for tile in range(tiles):
            if tile % split_tiles == 0:
                split_start = len(line)
                line += [None] * split_cost
            line.append((request, tile, tile // split_tiles, split_start))
    piece = max(1, -(-len(line) // num_programs))
    taken: list[list[tuple[int, int, int]]] = [[] for _ in range(num_programs)]
    for place, item in enumerate(line):
        if item is not None:
            *tile, split_start = item
            taken[(split_start if batch_invariant else place) // piece].append(tuple(tile))

    ranges, splits = [], [0] * len(lens)
    for items in taken:
        if not items:
            ranges.append([len(lens), len(lens) - 1, 0, 0, 0])
            continue
        (first, first_tile, own_split), (last, last_tile, _) = items[0], items[-1]
        ranges.append([first, last, first_tile, last_tile + 1, own_split if batch_invariant else splits[first]])
        for request in sorted({request for request, _, _ in items}):
            own = {split for other, _, split in items if other == request}
            splits[request] += len(own) if batch_invariant else 1
    offsets = [sum(splits[:request]) for request in range(len(lens) + 1)]
    device = seq_lens.device
    return DecodeSchedule(
        tile_ranges=torch.tensor(ranges, dtype=torch.int32, device=device),
        split_offsets=torch.tensor(offsets, dtype=torch.int32, device=device),
        batch_invariant=batch_invariant,
        cut=costs.cut,
    )
