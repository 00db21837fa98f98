"""Planning of the decode schedule, by binary search.

Imagine all requests laid end to end on a line. The length of a request on this line is its number of tiles plus its
costs. The line is divided into segments of equal length, one for each program.
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


class _ProgramCut(NamedTuple):
    """Division of the line of all requests into segments, one for each program.

    Attributes:
        works: [programs], whether a program has tiles; the range of a program without tiles has no meaning.
        ranges: first and last tiles of the programs.
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
    split_rule: InvariantSplitRule,
    batch_invariant: bool,
) -> tuple[Tensor, Tensor]:
    """Return the tile ranges [programs, 5] and the split offsets [B + 1] of a `DecodeSchedule`, both int32.

    Args:
        seq_lens: [B], keys of each request.
        num_programs: number of programs that share the tiles of the decode.
        request_cost: cost of a request in addition to its tiles, in tiles.
        split_cost: cost of a split of a batch-invariant schedule, in tiles. A value above `request_cost` is lowered to
            `request_cost`.
        split_rule: rule by which a batch-invariant schedule splits a request.
        batch_invariant: if True, the splits of each request depend on its length alone.
    """
    requests = seq_lens.shape[0]
    tiles = (seq_lens.long() + (DECODE_TILE - 1)) // DECODE_TILE
    ranges = torch.tensor([requests, requests - 1, 0, 0, 0], device=seq_lens.device).expand(num_programs, 5)  # no work
    splits = tiles
    if requests > 0:
        if batch_invariant:
            found = _cut_by_length(tiles, num_programs, request_cost, min(request_cost, split_cost), split_rule)
        else:
            found = _cut_by_program(tiles, num_programs, request_cost)
        ranges = torch.where(found.works[:, None], torch.stack(found.ranges, 1), ranges)
        splits = found.splits
    offsets = torch.nn.functional.pad(splits.cumsum(0), (1, 0))
    return ranges.to(torch.int32).contiguous(), offsets.to(torch.int32)


def _cut_by_program(tiles: Tensor, num_programs: int, request_cost: int) -> _ProgramCut:
    """Divide the line into segments of equal length, one for each program; a segment may end inside a request."""
    ends = torch.where(tiles > 0, tiles + request_cost, 0).cumsum(0)
    # where the first tile of each request starts on the line; a request without keys gets the value of the next request
    first_tile_at = ends - tiles
    first_tile_at += (tiles == 0) * request_cost
    total = int(ends[-1])
    segment = max(1, -(-total // num_programs))
    program = torch.arange(num_programs, device=tiles.device)
    low, high = program * segment, (program * segment + segment).clamp_(max=total)
    first = torch.searchsorted(ends, low, right=True).clamp_(max=tiles.shape[0] - 1)
    last = torch.searchsorted(first_tile_at, high) - 1
    works = (low < total) & (first <= last)
    last = last.clamp_(min=0)
    first_tile = (low - first_tile_at[first]).clamp_(min=0)
    last_tile = torch.minimum(high, ends[last]) - first_tile_at[last]
    first_split = program - first_tile_at[first] // segment
    splits = (ends - 1) // segment - first_tile_at // segment + 1
    return _ProgramCut(works, _ProgramRanges(first, last, first_tile, last_tile, first_split), splits * (tiles > 0))


def _cut_by_length(
    tiles: Tensor, num_programs: int, request_cost: int, split_cost: int, split_rule: InvariantSplitRule
) -> _ProgramCut:
    """Compute the splits of each request from its length alone, and assign the splits to programs.

    A program takes the splits that start in its segment of the line.
    """
    grown = ((tiles + (split_rule.small_splits - 1)) // split_rule.small_splits).clamp_(
        split_rule.small_tiles, split_rule.large_tiles
    )
    split_tiles = torch.maximum(grown, (tiles + (split_rule.max_splits - 1)) // split_rule.max_splits)
    split_tiles += split_tiles % 2
    splits = (tiles + split_tiles - 1) // split_tiles
    lengths = tiles + splits * split_cost + (tiles > 0) * (request_cost - split_cost)
    ends, split_ends = lengths.cumsum(0), splits.cumsum(0)
    starts, split_starts = ends - lengths + (request_cost - split_cost), split_ends - splits
    total, last_request = int(ends[-1]), tiles.shape[0] - 1
    segment = max(1, -(-total // num_programs))
    bounds = torch.arange(num_programs + 1, device=tiles.device) * segment
    request = torch.searchsorted(ends, bounds, right=True).clamp_(max=last_request)
    stride = split_tiles[request] + split_cost
    split_number = ((bounds - starts[request] + stride - 1) // stride).clamp_(min=0)
    # for each segment boundary, the number of splits of all requests that start before the boundary
    first_splits = split_starts[request] + torch.minimum(split_number, splits[request])
    low, high = first_splits[:-1], first_splits[1:]
    first = torch.searchsorted(split_ends, low, right=True).clamp_(max=last_request)
    last = torch.searchsorted(split_ends, high - 1, right=True).clamp_(max=last_request)
    first_split = low - split_starts[first]
    last_tile = torch.minimum((high - split_starts[last]) * split_tiles[last], tiles[last])
    first_tile = first_split * split_tiles[first]
    return _ProgramCut(low < high, _ProgramRanges(first, last, first_tile, last_tile, first_split), splits)
