"""Compute the schedule of a decode: assign the keys of all requests to the programs of a kernel.

A tile is `DECODE_TILE` consecutive keys of a request. The tiles of one request that a program attends together are a
split. A combine kernel then adds the partial outputs of all splits of a request.
"""

from __future__ import annotations

import math
from typing import NamedTuple

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

    A schedule makes a decode faster if the requests have very different lengths (`choose_schedule` estimates the gain).
    It changes results by rounding alone.

    All requests are placed one after another on a line. One unit of the line is the time of one tile. Each request is
    divided into parts. The line is cut into segments of Q = ceil(length of the line / num_programs) units. Program p
    gets the parts that start in segment p, the units p Q to (p + 1) Q - 1. A request without keys has no split and no
    length on the line.

    Without `batch_invariant`, all parts of one request that a program gets form one split. The function lays out two
    lines, computes an upper bound of the time for each line, and takes the line with the smaller upper bound:

    - *Balanced*: a part is one tile. A request has `request_cost` units, then one unit for each tile. A program that
      continues a request of the previous program needs another `request_cost`. Therefore no program takes longer than
      Q + `request_cost`.
    - *Whole parts*: a part is a whole request, or one of the equal parts of a long request (`_equal_part_tiles`). Each
      part has `request_cost` units, then one unit for each tile. (A last part with fewer tiles gets the same length.)
      Let *shortest* and *longest* be the lengths of the shortest and the longest part. A program gets at most
      ceil(Q / shortest) parts, which start within Q units. Therefore no program takes longer than
      min(Q - 1 + longest, longest * ceil(Q / shortest)).

    To each upper bound, the function adds the time of the combine kernel for the request with the most splits. The
    combine kernel adds `splits_per_tile` splits in one unit. On the balanced line, a request of t tiles has at most
    ceil((t - 1) / Q) + 1 splits. On the line of whole parts, a request has at most as many splits as parts. If both
    sums are equal, the function takes the line of whole parts, because it needs fewer partial outputs.

    With `batch_invariant` there is one line. A part is one split of `invariant_split_tiles` tiles, so the splits depend
    on the length of the request alone. The first split of a request has `request_cost` units in addition to its tiles.
    Every further split has min(`split_cost`, `request_cost`) units in addition to its tiles. A program may get several
    splits of one request.

    Args:
        seq_lens: [B], keys of each request.
        num_programs: number of programs of the decode kernel, which run at the same time.
        costs: costs of the decode kernel, such as `request_cost`; None means the defaults of `ScheduleCosts`.
        batch_invariant: whether a request gets the same bits in every batch.

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

    tiles, request_cost = [-(-length // DECODE_TILE) for length in lens], costs.request_cost
    if batch_invariant:
        split_tiles = [invariant_split_tiles(count, costs.split_rule) for count in tiles]
        split_cost = min(request_cost, costs.split_cost)
        line = _lay_out(tiles, split_tiles, request_cost - split_cost, split_cost, num_programs, shorter_last=True)
    else:
        line = _lay_out(tiles, [1] * len(tiles), request_cost, 0, num_programs)
        per_tile = costs.splits_per_tile
        part_tiles = _equal_part_tiles(tiles, num_programs, per_tile)
        part_lengths = [size + request_cost for count, size in zip(tiles, part_tiles, strict=True) if count]
        if part_lengths:
            whole = _lay_out(tiles, part_tiles, 0, request_cost, num_programs)
            shortest, longest = min(part_lengths), max(part_lengths)
            most_time = min(whole.segment - 1 + longest, longest * -(-whole.segment // shortest))
            most_parts = max(-(-count // size) for count, size in zip(tiles, part_tiles, strict=True))
            most_splits = -(-(max(tiles) - 1) // line.segment) + 1
            if most_time * per_tile + most_parts <= (line.segment + request_cost) * per_tile + most_splits:
                line = whole
    taken: list[list[_Part]] = [[] for _ in range(num_programs)]
    for part in line.parts:
        taken[part.start // line.segment].append(part)

    ranges, splits = [], [0] * len(lens)
    for parts in taken:
        if not parts:
            ranges.append([len(lens), len(lens) - 1, 0, 0, 0])
            continue
        first, last = parts[0], parts[-1]
        first_split = first.number if batch_invariant else splits[first.request]
        ranges.append([first.request, last.request, first.first_tile, last.last_tile, first_split])
        requests = [part.request for part in parts]
        for request in requests if batch_invariant else set(requests):
            splits[request] += 1
    offsets = [sum(splits[:request]) for request in range(len(lens) + 1)]
    device = seq_lens.device
    return DecodeSchedule(
        tile_ranges=torch.tensor(ranges, dtype=torch.int32, device=device),
        split_offsets=torch.tensor(offsets, dtype=torch.int32, device=device),
        batch_invariant=batch_invariant,
        split_rule=costs.split_rule,
    )


class _Part(NamedTuple):
    """Consecutive tiles of one request that one program attends.

    Attributes:
        request: index of the request.
        number: index of the part within the request.
        first_tile: first tile of the part.
        last_tile: index behind the last tile of the part.
        start: unit of the line at which the part starts.
    """

    request: int
    number: int
    first_tile: int
    last_tile: int
    start: int


class _Line(NamedTuple):
    """The parts of all requests in the order of the line, and Q, the units of the line for each program."""

    parts: list[_Part]
    segment: int


def _lay_out(
    tiles: list[int],
    part_tiles: list[int],
    request_cost: int,
    part_cost: int,
    num_programs: int,
    shorter_last: bool = False,
) -> _Line:
    """Divide each request into parts, and place the parts on a line (see `plan_decode`).

    Args:
        tiles: tiles of each request.
        part_tiles: tiles of one part of each request; the last part of a request may have fewer tiles.
        request_cost: length that each request with tiles has in addition to its parts.
        part_cost: length that each part has in addition to its tiles.
        num_programs: number of programs, which get equal segments of the line.
        shorter_last: if True, a last part with fewer tiles is shorter on the line; if False, it has the length of the
            other parts.
    """
    parts, length = [], 0
    for request, (count, size) in enumerate(zip(tiles, part_tiles, strict=True)):
        length += request_cost if count else 0
        for number, first in enumerate(range(0, count, size)):
            last = min(first + size, count)
            parts.append(_Part(request, number, first, last, length))
            length += part_cost + (last - first if shorter_last else size)
    return _Line(parts, max(1, -(-length // num_programs)))


def _equal_part_tiles(tiles: list[int], num_programs: int, splits_per_tile: int) -> list[int]:
    """Return the number of tiles of one part of each request, if long requests are divided into equal parts.

    A request with t of the T tiles of all requests gets max(1, floor(num_programs * t / T)) parts of equal size. Very
    small parts take too long to combine: with parts of s tiles, the time of one part and of the combine kernel is
    s + t / (s * splits_per_tile), in units of the time of one tile. This time is lowest at
    s = sqrt(t / splits_per_tile). No part is therefore smaller than this root, rounded up to 1 or to an even number.
    (Kernels process tiles in pairs.)
    """
    total = max(1, sum(tiles))
    parts = [max(1, num_programs * count // total) for count in tiles]
    roots = [math.isqrt(max(0, -(-count // splits_per_tile) - 1)) + 1 for count in tiles]
    least = [root + root % 2 if root > 1 else 1 for root in roots]
    return [max(size, -(-count // number)) for count, number, size in zip(tiles, parts, least, strict=True)]
