"""Compute the schedule of a decode: assign tiles of `DECODE_TILE` keys to programs, which then take similar times.

All requests are laid end to end on a line, whose unit is the time of one tile. Each request consists of parts, and a
part is consecutive tiles. The length of a request on the line is the number of its tiles plus its costs. The line is
divided into segments of equal length, one segment for each program. A program takes the parts that start in its
segment. There are three kinds of parts:

- In a balanced schedule, a part is one tile.
- In a schedule of whole parts, a part is a whole request, or one of the equal parts of a long request.
- In a batch-invariant schedule, a part is one split, whose size depends on the length of the request alone.

`reference.plan_decode` explains the costs, and how the kind of schedule is chosen.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from reference.interfaces import DECODE_TILE, InvariantSplitRule


class _ProgramRanges(NamedTuple):
    """The columns of `DecodeSchedule.tile_ranges`, in the order of the tensor; each column is [programs]."""

    first_request: Tensor
    last_request: Tensor
    first_tile: Tensor
    last_tile: Tensor
    first_split: Tensor


class _Line(NamedTuple):
    """Parts of all requests, laid end to end on a line; positions and lengths are in units of one tile.

    Attributes:
        part_tiles: [B], tiles of one part of a request; the last part may have fewer tiles.
        parts: [B], number of parts of a request.
        stride: [B], distance from the start of a part to the start of the next part of the request.
        starts: [B], where the first part starts on the line.
        ends: [B], where the request ends on the line.
        segment: length of the segment of each program.
    """

    part_tiles: Tensor
    parts: Tensor
    stride: Tensor
    starts: Tensor
    ends: Tensor
    segment: int


class _Assignment(NamedTuple):
    """Assignment of the parts on a line to programs.

    Attributes:
        works: [programs], True if a program has tiles; ignore the range of any other program.
        ranges: first and last tile of each program.
        splits: [B], number of splits of each request.
    """

    works: Tensor
    ranges: _ProgramRanges
    splits: Tensor


def plan_decode(
    seq_lens: Tensor,
    num_programs: int,
    request_cost: int,
    split_cost: int,
    splits_per_tile: int,
    split_rule: InvariantSplitRule,
    batch_invariant: bool,
) -> tuple[Tensor, Tensor]:
    """Return the tile ranges [programs, 5] and the split offsets [B + 1] of a `DecodeSchedule`, both int32.

    Args:
        seq_lens: [B], keys of each request.
        num_programs: number of programs of the decode kernel, among which the tiles are divided.
        request_cost: time to start a request, in units of one tile.
        split_cost: time to start a further split of a request in a batch-invariant schedule, in units of one tile. If
            `split_cost` is larger than `request_cost`, the function uses `request_cost` instead.
        splits_per_tile: number of splits of one request whose outputs the combine kernel adds in the time of one tile.
        split_rule: rule by which a batch-invariant schedule splits a request.
        batch_invariant: if True, the splits of each request depend on its length alone.
    """
    requests = seq_lens.shape[0]
    tiles = (seq_lens.long() + (DECODE_TILE - 1)) // DECODE_TILE
    ranges = torch.tensor([requests, requests - 1, 0, 0, 0], device=seq_lens.device).expand(num_programs, 5)  # no work
    splits = tiles
    if requests > 0:
        if batch_invariant:
            part_tiles = _invariant_split_tiles(tiles, split_rule)
            part_cost = min(request_cost, split_cost)
            line = _lay_out(tiles, part_tiles, request_cost - part_cost, part_cost, num_programs, shorter_last=True)
        else:
            line = _cheaper_line(tiles, num_programs, request_cost, splits_per_tile)
        found = _assign_parts(tiles, line, num_programs, batch_invariant)
        ranges = torch.where(found.works[:, None], torch.stack(found.ranges, 1), ranges)
        splits = found.splits
    offsets = torch.nn.functional.pad(splits.cumsum(0), (1, 0))
    return ranges.to(torch.int32).contiguous(), offsets.to(torch.int32)


def _lay_out(
    tiles: Tensor, part_tiles: Tensor, request_cost: int, part_cost: int, num_programs: int, shorter_last: bool = False
) -> _Line:
    """Return the `_Line` of requests that are divided into parts of `part_tiles` tiles.

    Args:
        tiles: [B], tiles of each request.
        part_tiles: [B], tiles of one part.
        request_cost: length that each request with tiles has in addition to its parts.
        part_cost: length that each part has in addition to its tiles.
        num_programs: number of segments of the line.
        shorter_last: if True, a last part with fewer tiles is shorter on the line; if False, all parts of a request
            have the same length on the line.
    """
    parts = (tiles + part_tiles - 1) // part_tiles
    stride = part_tiles + part_cost
    lengths = (tiles + parts * part_cost if shorter_last else parts * stride) + (tiles > 0) * request_cost
    ends = lengths.cumsum(0)
    segment = max(1, -(-int(ends[-1]) // num_programs))
    return _Line(part_tiles, parts, stride, ends - lengths + request_cost, ends, segment)


def _cheaper_line(tiles: Tensor, num_programs: int, request_cost: int, splits_per_tile: int) -> _Line:
    """Return the line of whole parts or the line of single tiles: the one with the shorter estimated time.

    The estimate is an upper bound of the time of the slowest program, plus the time to combine the splits of the
    request with the largest number of splits. If both estimates are equal, the line of whole parts is returned.
    """
    balanced = _lay_out(tiles, torch.ones_like(tiles), request_cost, 0, num_programs)
    parts = (num_programs * tiles // tiles.sum().clamp(min=1)).clamp(min=1)
    part_tiles = torch.maximum((tiles + parts - 1) // parts, _least_part_tiles(tiles, splits_per_tile))
    whole = _lay_out(tiles, part_tiles, 0, request_cost, num_programs)
    lengths = whole.stride[tiles > 0]
    if lengths.numel() == 0:
        return balanced
    shortest, longest = int(lengths.min()), int(lengths.max())
    most_time = min(whole.segment - 1 + longest, longest * -(-whole.segment // shortest))
    most_splits = -(-(int(tiles.max()) - 1) // balanced.segment) + 1
    time_of_whole = most_time * splits_per_tile + int(whole.parts.max())
    return whole if time_of_whole <= (balanced.segment + request_cost) * splits_per_tile + most_splits else balanced


def _least_part_tiles(tiles: Tensor, splits_per_tile: int) -> Tensor:
    """Return the least size of a part, in tiles: sqrt(tiles / splits_per_tile), rounded up to 1 or an even number."""
    below = ((tiles + splits_per_tile - 1) // splits_per_tile - 1).clamp(min=0)
    root = below.double().sqrt().long() + 1  # exact: the numbers are below 2^52
    return torch.where(root > 1, root + root % 2, root)


def _invariant_split_tiles(tiles: Tensor, split_rule: InvariantSplitRule) -> Tensor:
    """Return the number of tiles of one split of each request [B]; it depends on `tiles` of this request alone."""
    grown = ((tiles + (split_rule.small_splits - 1)) // split_rule.small_splits).clamp_(
        split_rule.small_tiles, split_rule.large_tiles
    )
    split_tiles = torch.maximum(grown, (tiles + (split_rule.max_splits - 1)) // split_rule.max_splits)
    return split_tiles + split_tiles % 2


def _assign_parts(tiles: Tensor, line: _Line, num_programs: int, batch_invariant: bool) -> _Assignment:
    """Assign to each program the parts that start in its segment.

    With `batch_invariant`, each part is one split. Without it, all parts of a request that one program takes are
    together one split.
    """
    part_ends, last_request, segment = line.parts.cumsum(0), tiles.shape[0] - 1, line.segment
    part_starts = part_ends - line.parts
    bounds = torch.arange(num_programs + 1, device=tiles.device) * segment
    request = torch.searchsorted(line.ends, bounds, right=True).clamp_(max=last_request)
    stride = line.stride[request]
    number = ((bounds - line.starts[request] + stride - 1) // stride).clamp_(min=0)
    # for each segment boundary, the number of parts of all requests that start before the boundary
    first_parts = part_starts[request] + torch.minimum(number, line.parts[request])
    low, high = first_parts[:-1], first_parts[1:]
    first = torch.searchsorted(part_ends, low, right=True).clamp_(max=last_request)
    last = torch.searchsorted(part_ends, high - 1, right=True).clamp_(max=last_request)
    first_part = low - part_starts[first]
    first_tile = first_part * line.part_tiles[first]
    last_tile = torch.minimum((high - part_starts[last]) * line.part_tiles[last], tiles[last])
    splits, first_split = line.parts, first_part
    if not batch_invariant:
        apart = line.stride >= segment  # each segment contains the start of at most one part of this request
        first_program = line.starts // segment
        last_program = (line.starts + (line.parts - 1) * line.stride) // segment
        splits = torch.where(apart, line.parts, last_program - first_program + 1) * (tiles > 0)
        program = torch.arange(num_programs, device=tiles.device)
        first_split = torch.where(apart[first], first_part, program - first_program[first])
    return _Assignment(low < high, _ProgramRanges(first, last, first_tile, last_tile, first_split), splits)
