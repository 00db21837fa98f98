"""Planning of the decode schedule on the GPU, in one launch.

The host reads no value back, so a captured CUDA graph can contain this launch.

Imagine all requests laid end to end on a line. The length of a request on this line is its number of tiles plus
`request_cost`; a batch-invariant schedule adds `split_cost` for each split after the first. The line is divided into
segments of equal length, one for each program of the decode. Each program of the kernels below finds where the segments
of a few programs of the decode begin and end. The kernels process CHUNK requests at a time, not one by one.
"""

from __future__ import annotations

from typing import Any, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from reference.interfaces import DECODE_TILE, InvariantSplitRule

from ...backends import launch
from ..device import device_facts, device_of
from ..integers import cdiv

PROGRAMS = 4  # programs of the decode whose ranges one program of these kernels computes
SHAPES = ((256, 1), (1024, 4))  # (CHUNK, warps): for up to 256 requests, and for more requests


class SplitRule(NamedTuple):
    """The four numbers of `InvariantSplitRule`, which size the splits of a request, as values inside a kernel."""

    small_tiles: Any
    small_splits: Any
    large_tiles: Any
    max_splits: Any


class RequestTiles(NamedTuple):
    """Tiles of CHUNK requests.

    Attributes:
        tiles: [CHUNK], tiles of each request.
        split_tiles: [CHUNK], tiles of one split of each request.
        splits: [CHUNK], splits of each request.
        length: [CHUNK], length of each request on the line.
    """

    tiles: Any
    split_tiles: Any
    splits: Any
    length: Any


class SegmentBounds(NamedTuple):
    """The requests at both ends of the segments of PROGRAMS programs; each field is [PROGRAMS].

    Attributes:
        first_request: request in which the segment begins.
        first_start: where `first_request` starts on the line.
        last_request: request in which the segment ends.
        last_start: where `last_request` starts on the line.
        last_end: where `last_request` ends on the line.
    """

    first_request: Any
    first_start: Any
    last_request: Any
    last_start: Any
    last_end: Any


class LineSums(NamedTuple):
    """Sums over the chunks of requests that were added so far.

    Attributes:
        before: sum of the lengths of these requests on the line.
        splits_before: number of splits of these requests.
        bounds: `SegmentBounds`, as far as these requests determine them.
    """

    before: Any
    splits_before: Any
    bounds: Any


@triton.jit
@no_type_check  # the tests' type checker must not wrap a kernel: Triton's interpreter reads its source
def invariant_split_tiles(tiles, rule):
    """Return the number of tiles of one split; see `reference.interfaces.invariant_split_tiles` for the rule."""
    size = (tiles + rule.small_splits - 1) // rule.small_splits
    size = tl.maximum(tl.minimum(size, rule.large_tiles), rule.small_tiles)
    size = tl.maximum(size, (tiles + rule.max_splits - 1) // rule.max_splits)
    return size + size % 2


@triton.jit
@no_type_check
def _chunk_tiles(seq_lens, first, num_requests, request_cost, split_cost, rule, CHUNK: tl.constexpr,
                 TILE: tl.constexpr, BATCH_INVARIANT: tl.constexpr):  # fmt: skip
    """Return the `RequestTiles` of CHUNK requests, from request `first` on.

    A request number past the last request gets no tiles. The length of a request on the line is its number of tiles,
    plus `request_cost` if it has tiles, plus `split_cost` for each split.
    """
    request = first + tl.arange(0, CHUNK)
    lens = tl.load(seq_lens + request, mask=request < num_requests, other=0)
    tiles = (tl.maximum(lens, 1) - 1) // TILE + (lens > 0).to(tl.int32)  # lens + TILE - 1 could overflow 32 bits
    split_tiles, splits = tl.maximum(tiles, 1), tl.minimum(tiles, 1)
    if BATCH_INVARIANT:
        split_tiles = invariant_split_tiles(tiles, rule)
        splits = (tiles + split_tiles - 1) // split_tiles
    length = tiles + tl.minimum(tiles, 1) * request_cost + splits * split_cost
    return RequestTiles(tiles, split_tiles, splits, length)


@triton.jit
@no_type_check
def _add_chunk(tiles, length, before, splits_before, first, num_requests, low, high, segment, request_cost, bounds,
               split_offsets, CHUNK: tl.constexpr):  # fmt: skip
    """Add CHUNK requests to the sums, and write their split offsets.

    Args:
        tiles: [CHUNK], tiles of each request.
        length: [CHUNK], length of each request on the line.
        before: sum of the lengths of the earlier requests on the line.
        splits_before: number of splits of the earlier requests.
        first: number of the first request of the chunk.
        num_requests: number of requests.
        low: [PROGRAMS], where each program's segment begins.
        high: [PROGRAMS], where each program's segment ends.
        segment: length of a segment.
        request_cost: cost of a request in addition to its tiles.
        bounds: `SegmentBounds`, as far as the earlier requests determine them.
        split_offsets: [B + 1] of the schedule; program 0 writes it.
        CHUNK: number of requests.

    Returns:
        `LineSums` that include this chunk.
    """
    first_request, first_start, last_request = bounds.first_request, bounds.first_start, bounds.last_request
    last_start, last_end = bounds.last_start, bounds.last_end
    request = first + tl.arange(0, CHUNK)
    real = request < num_requests
    ends = before + tl.cumsum(length, 0)
    starts = ends - length
    passed = real[None, :] & (ends[None, :] <= low[:, None])
    first_request += tl.sum(passed.to(tl.int32), 1)
    first_start = tl.maximum(first_start, tl.max(tl.where(passed, ends[None, :], 0), 1))
    begun = real[None, :] & (starts[None, :] + request_cost < high[:, None])
    last_request += tl.sum(begun.to(tl.int32), 1)
    last_start = tl.maximum(last_start, tl.max(tl.where(begun, starts[None, :], 0), 1))
    last_end = tl.maximum(last_end, tl.max(tl.where(begun, ends[None, :], 0), 1))
    if tl.program_id(0) == 0:
        splits = tl.where(tiles > 0, (ends - 1) // segment - (starts + request_cost) // segment + 1, 0)
        tl.store(split_offsets + 1 + request, splits_before + tl.cumsum(splits, 0), mask=real)
        splits_before += tl.sum(splits)
    bounds = SegmentBounds(first_request, first_start, last_request, last_start, last_end)
    return LineSums(before + tl.sum(length), splits_before, bounds)


@triton.jit(do_not_specialize=["num_requests", "num_programs", "request_cost"])
@no_type_check
def _plan_decode_kernel(
    seq_lens, tile_ranges, split_offsets, num_requests, num_programs, request_cost,
    CHUNK: tl.constexpr, ONE_CHUNK: tl.constexpr, PROGRAMS: tl.constexpr, TILE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Plan a schedule that is not batch-invariant: a request is split wherever a segment of the line ends."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    program = tl.program_id(0) * PROGRAMS + tl.arange(0, PROGRAMS)
    zeros = tl.zeros([PROGRAMS], tl.int32)
    bounds = SegmentBounds(zeros, zeros, zeros - 1, zeros, zeros)
    zero = tl.zeros([], tl.int32)
    if tl.program_id(0) == 0:
        tl.store(split_offsets, 0)
    if ONE_CHUNK:
        counts = _chunk_tiles(seq_lens, 0, num_requests, request_cost, 0, 0, CHUNK, TILE, False)
        total = tl.sum(counts.length)
        segment = tl.maximum((total + num_programs - 1) // num_programs, 1)
        low = program * segment
        high = tl.minimum(low + segment, total)
        line_sums = _add_chunk(
            counts.tiles, counts.length, zero, zero, 0, num_requests, low, high, segment, request_cost,
            bounds, split_offsets, CHUNK,
        )  # fmt: skip
        bounds = line_sums.bounds
    else:
        total = zero
        for first in range(0, num_requests, CHUNK):
            counts = _chunk_tiles(seq_lens, first, num_requests, request_cost, 0, 0, CHUNK, TILE, False)
            total += tl.sum(counts.length)
        segment = tl.maximum((total + num_programs - 1) // num_programs, 1)
        low = program * segment
        high = tl.minimum(low + segment, total)
        before, splits_before = zero, zero
        for first in range(0, num_requests, CHUNK):
            counts = _chunk_tiles(seq_lens, first, num_requests, request_cost, 0, 0, CHUNK, TILE, False)
            line_sums = _add_chunk(
                counts.tiles, counts.length, before, splits_before, first, num_requests, low, high, segment,
                request_cost, bounds, split_offsets, CHUNK,
            )  # fmt: skip
            before, splits_before, bounds = line_sums.before, line_sums.splits_before, line_sums.bounds
    first_request, first_start, last_request = bounds.first_request, bounds.first_start, bounds.last_request
    last_start, last_end = bounds.last_start, bounds.last_end
    works = (low < total) & (first_request <= last_request)
    first_tile = tl.maximum(low - first_start - request_cost, 0)
    last_tile = tl.minimum(high, last_end) - last_start - request_cost
    first_split = program - (first_start + request_cost) // segment
    _write_ranges(tile_ranges, program, num_programs, num_requests, works, first_request, last_request, first_tile,
                  last_tile, first_split)  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "num_requests", "num_programs", "request_cost", "split_cost", "small_tiles", "small_splits", "large_tiles",
        "max_splits",
    ]
)  # fmt: skip
@no_type_check
def _plan_invariant_kernel(
    seq_lens, tile_ranges, split_offsets, num_requests, num_programs, request_cost, split_cost,
    small_tiles, small_splits, large_tiles, max_splits,
    CHUNK: tl.constexpr, ONE_CHUNK: tl.constexpr, PROGRAMS: tl.constexpr, TILE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Plan a batch-invariant schedule.

    The splits of each request depend on its length alone. A program takes the splits that start in its segment of the
    line.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    rule = SplitRule(small_tiles, small_splits, large_tiles, max_splits)
    first_cost = request_cost - split_cost
    program = tl.program_id(0) * PROGRAMS + tl.arange(0, PROGRAMS)
    end = CHUNK if ONE_CHUNK else num_requests  # with a constant end, the three loops load one chunk only once
    total = tl.zeros([], tl.int32)
    for first in range(0, end, CHUNK):
        counts = _chunk_tiles(seq_lens, first, num_requests, first_cost, split_cost, rule, CHUNK, TILE, True)
        total += tl.sum(counts.length)
    segment = tl.maximum((total + num_programs - 1) // num_programs, 1)
    low = program * segment
    # low_split, high_split: number of splits that start before the program's segment, and before the next segment
    low_split = tl.zeros([PROGRAMS], tl.int32)
    high_split = tl.zeros([PROGRAMS], tl.int32)
    before, splits_before = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    if tl.program_id(0) == 0:
        tl.store(split_offsets, 0)
    for first in range(0, end, CHUNK):
        counts = _chunk_tiles(seq_lens, first, num_requests, first_cost, split_cost, rule, CHUNK, TILE, True)
        split_tiles, splits, length = counts.split_tiles, counts.splits, counts.length
        request = first + tl.arange(0, CHUNK)
        starts = before + tl.cumsum(length, 0) - length + first_cost
        stride = split_tiles + split_cost
        passed = (low[:, None] - starts[None, :] + stride[None, :] - 1) // stride[None, :]
        low_split += tl.sum(tl.minimum(tl.maximum(passed, 0), splits[None, :]), 1)
        passed = (low[:, None] + segment - starts[None, :] + stride[None, :] - 1) // stride[None, :]
        high_split += tl.sum(tl.minimum(tl.maximum(passed, 0), splits[None, :]), 1)
        if tl.program_id(0) == 0:
            tl.store(split_offsets + 1 + request, splits_before + tl.cumsum(splits, 0), mask=request < num_requests)
        before += tl.sum(length)
        splits_before += tl.sum(splits)

    first_request, last_request = tl.zeros([PROGRAMS], tl.int32), tl.zeros([PROGRAMS], tl.int32)
    first_split, first_tile = tl.zeros([PROGRAMS], tl.int32), tl.zeros([PROGRAMS], tl.int32)
    last_tile = tl.zeros([PROGRAMS], tl.int32)
    splits_before = tl.zeros([], tl.int32)
    for first in range(0, end, CHUNK):  # find the requests that have the program's first and last split
        counts = _chunk_tiles(seq_lens, first, num_requests, first_cost, split_cost, rule, CHUNK, TILE, True)
        tiles, split_tiles, splits = counts.tiles, counts.split_tiles, counts.splits
        request = first + tl.arange(0, CHUNK)
        split_ends = splits_before + tl.cumsum(splits, 0)
        split_starts = split_ends - splits
        owned = (split_starts[None, :] <= low_split[:, None]) & (low_split[:, None] < split_ends[None, :])
        number = low_split[:, None] - split_starts[None, :]
        first_request += tl.sum(tl.where(owned, request[None, :], 0), 1)
        first_split += tl.sum(tl.where(owned, number, 0), 1)
        first_tile += tl.sum(tl.where(owned, number * split_tiles[None, :], 0), 1)
        owned = (split_starts[None, :] < high_split[:, None]) & (high_split[:, None] <= split_ends[None, :])
        number = high_split[:, None] - split_starts[None, :]
        last_request += tl.sum(tl.where(owned, request[None, :], 0), 1)
        last_tile += tl.sum(tl.where(owned, tl.minimum(number * split_tiles[None, :], tiles[None, :]), 0), 1)
        splits_before += tl.sum(splits)
    _write_ranges(tile_ranges, program, num_programs, num_requests, low_split < high_split, first_request,
                  last_request, first_tile, last_tile, first_split)  # fmt: skip


@triton.jit
@no_type_check
def _write_ranges(tile_ranges, program, num_programs, num_requests, works, first_request, last_request, first_tile,
                  last_tile, first_split):  # fmt: skip
    """Write PROGRAMS rows of `DecodeSchedule.tile_ranges`; a program without work gets (B, B - 1, 0, 0, 0)."""
    row = tile_ranges + program * 5
    inside = program < num_programs
    tl.store(row, tl.where(works, first_request, num_requests), mask=inside)
    tl.store(row + 1, tl.where(works, last_request, num_requests - 1), mask=inside)
    tl.store(row + 2, tl.where(works, first_tile, 0), mask=inside)
    tl.store(row + 3, tl.where(works, last_tile, 0), mask=inside)
    tl.store(row + 4, tl.where(works, first_split, 0), mask=inside)


def plan_decode(
    seq_lens: Tensor,
    num_programs: int,
    request_cost: int,
    split_cost: int,
    split_rule: InvariantSplitRule,
    batch_invariant: bool,
) -> tuple[Tensor, Tensor]:
    """Return the tile ranges [programs, 5] and the split offsets [B + 1] of a `DecodeSchedule`, both int32.

    A negative length counts as 0. Positions on the line are 32-bit integers, so the sum of all lengths on the line
    must stay below 2^31 tiles (137e9 keys).

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
    tile_ranges = torch.empty(num_programs, 5, dtype=torch.int32, device=seq_lens.device)
    split_offsets = torch.empty(requests + 1, dtype=torch.int32, device=seq_lens.device)
    kernel, own = _plan_decode_kernel, ()
    chunk, warps = SHAPES[requests > SHAPES[0][0]]
    if batch_invariant:
        kernel = _plan_invariant_kernel
        own = (min(request_cost, split_cost), *split_rule.numbers)
        warps = 4  # the kernel counts the splits of every request for every program, with many divisions
    following = device_facts(seq_lens.device).following
    with device_of(seq_lens):
        launch(
            kernel, (cdiv(num_programs, PROGRAMS),),
            seq_lens.contiguous(), tile_ranges, split_offsets, requests, num_programs, request_cost, *own,
            CHUNK=chunk, ONE_CHUNK=requests <= chunk, PROGRAMS=PROGRAMS, TILE=DECODE_TILE, num_warps=warps,
            **following,
        )  # fmt: skip
    return tile_ranges, split_offsets
