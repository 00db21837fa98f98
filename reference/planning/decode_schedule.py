"""Cut the keys of a decode over programs, so that all take about as long."""

from __future__ import annotations

import torch
from jaxtyping import Int32
from torch import Tensor

from ..interfaces import (
    DECODE_TILE,
    DecodeSchedule,
    check_flag,
    check_int,
    check_not_negative,
    check_tensor,
    fold_overhead,
    invariant_split_tiles,
    piece_overhead,
)


def plan_decode(
    seq_lens: Int32[Tensor, " B"],
    num_programs: int,
    num_heads: int,
    fixed_overhead: int | None = None,
    batch_invariant: bool = False,
) -> DecodeSchedule:
    """Cut the keys of a decode over programs, so that all take about as long.

    Lay the requests end to end, each as long as its tiles and the overhead of starting on it, and cut the line into
    pieces of Q = ceil(length / programs): program p takes the tiles in [p Q, (p + 1) Q). It pays the overhead of a
    request that it continues once more, so that none carries more than Q and one overhead. A request without keys lies
    nowhere and has no split; the combine writes its empty row.

    With `batch_invariant` a request is cut every `invariant_split_tiles` tiles, by its own length and N alone, whatever
    stands beside it. Splits are laid end to end, each with `fold_overhead` of the overhead (at most all), the first
    with all of it; a program takes those that start in its piece of the line.

    Args:
        seq_lens: [B], keys of each request.
        num_programs: that run at once.
        num_heads: N.
        fixed_overhead: what starting on a request costs, in tiles, or None for `piece_overhead`.
        batch_invariant: see above.

    Returns:
        The schedule, on the device of `seq_lens`.

    Raises:
        ValueError: a number below its least value; a negative length.
    """
    check_tensor("seq_lens", seq_lens, ("B",), (torch.int32,))
    check_int("num_programs", num_programs, 1, "at least 1")
    check_int("num_heads", num_heads, 1, "at least 1")
    check_flag("batch_invariant", batch_invariant)
    if fixed_overhead is None:
        fixed_overhead = piece_overhead(num_heads)
    check_int("fixed_overhead", fixed_overhead, 0, "an int >= 0 or None")
    check_not_negative("seq_lens", seq_lens)
    lens = seq_lens.tolist()

    overheads = (fixed_overhead, 0)  # of a request, and of each split
    if batch_invariant:
        fold = min(fixed_overhead, fold_overhead(num_heads))
        overheads = (fixed_overhead - fold, fold)
    line = []  # what stands at each place of the line: (request, tile, split by its own length, where that starts)
    for request, length in enumerate(lens):
        tiles = -(-length // DECODE_TILE)
        split_tiles = invariant_split_tiles(tiles, num_heads) if batch_invariant else max(1, tiles)
        line += [None] * (overheads[0] if tiles else 0)
        for tile in range(tiles):
            if tile % split_tiles == 0:
                split_start = len(line)
                line += [None] * overheads[1]
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
    )
