"""Compute the schedule of a decode: assign the tiles of all requests to programs that take similar times."""

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
    """Compute the schedule of a decode: assign consecutive tiles to each program, so that programs take similar times.

    A schedule is optional. A schedule makes a decode faster if the requests have very different lengths
    (`choose_schedule` estimates the gain), and changes results by rounding alone. A decode always needs its plan
    (`DecodeMetadata`), with or without a schedule.

    Each program gets an equal part of a time line, whose unit is the time of one tile. The steps are:

    1. Put the requests on the line one after another. Each request has `request_cost` units for its start, then one
       unit for each tile. A request without keys is not on the line and has no split; the combine kernel writes output
       0 and LSE -inf for such a request.
    2. Divide the line into parts of Q = ceil(length / num_programs) units. Program p gets the tiles in
       [p Q, (p + 1) Q).

    A program that continues a request of the previous program needs `request_cost` once more. No program therefore
    takes longer than Q + `request_cost`.

    With `batch_invariant`, a request is divided into splits of `invariant_split_tiles` tiles, by its own length alone.
    On the line, the first split of a request has `request_cost` units in addition to its tiles. Every further split has
    `split_cost` units in addition to its tiles, or `request_cost` units if this number is smaller. A program gets the
    splits that start in its part of the line.

    Args:
        seq_lens: [B], keys of each request.
        num_programs: number of programs of the decode kernel, which run at the same time.
        costs: costs of the decode kernel; None means the defaults of `ScheduleCosts`.
        batch_invariant: whether the splits of a request depend on its own length alone.

    Returns:
        The schedule, on the device of `seq_lens`.

    Raises:
        TypeError: `costs` has another type.
        ValueError: `num_programs` is below 1; a length is negative.
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
    line = []  # for each unit of time: None (a cost), or a tile as (request, tile, split, start time of the split)
    for request, length in enumerate(lens):
        tiles = -(-length // DECODE_TILE)
        split_tiles = invariant_split_tiles(tiles, costs.split_rule) if batch_invariant else max(1, tiles)
        line += [None] * (request_cost if tiles else 0)
        for tile in range(tiles):
            if tile % split_tiles == 0:
                split_start = len(line)
                line += [None] * split_cost
            line.append((request, tile, tile // split_tiles, split_start))
    units_per_program = max(1, -(-len(line) // num_programs))
    taken: list[list[tuple[int, int, int]]] = [[] for _ in range(num_programs)]
    for time, entry in enumerate(line):
        if entry is not None:
            *tile, split_start = entry
            taken[(split_start if batch_invariant else time) // units_per_program].append(tuple(tile))

    ranges, splits = [], [0] * len(lens)
    for tiles_of_program in taken:
        if not tiles_of_program:
            ranges.append([len(lens), len(lens) - 1, 0, 0, 0])
            continue
        (first, first_tile, first_split), (last, last_tile, _) = tiles_of_program[0], tiles_of_program[-1]
        ranges.append([first, last, first_tile, last_tile + 1, first_split if batch_invariant else splits[first]])
        for request in sorted({request for request, _, _ in tiles_of_program}):
            new_splits = {split for other, _, split in tiles_of_program if other == request}
            splits[request] += len(new_splits) if batch_invariant else 1
    offsets = [sum(splits[:request]) for request in range(len(lens) + 1)]
    device = seq_lens.device
    return DecodeSchedule(
        tile_ranges=torch.tensor(ranges, dtype=torch.int32, device=device),
        split_offsets=torch.tensor(offsets, dtype=torch.int32, device=device),
        batch_invariant=batch_invariant,
        split_rule=costs.split_rule,
    )
