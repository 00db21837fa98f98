"""Compute the schedule of a decode on the GPU, in one launch: assign tiles of keys to the programs of the decode.

The host reads no value back, so a CUDA graph can capture this launch.

All requests are laid end to end on a line, whose unit is the time of one tile. Each request consists of parts, and a
part is consecutive tiles. The length of a request on the line is the number of its tiles plus its costs (see the table
below). The line is divided into segments of equal length, one segment for each program of the decode. A program of the
decode takes the parts that start in its segment. The tiles of these parts are the *tile range* of the program.

There are three kinds of schedules:

| schedule | what a part is | cost of a request | cost of a part |
|---|---|---|---|
| balanced | one tile | `request_cost` | 0 |
| of whole parts | a request, or one of the equal parts of a long request | 0 | `request_cost` |
| batch-invariant | one split | `request_cost - split_cost` | `split_cost` |

The names in the table are arguments of `plan_decode`. In a schedule of whole parts, all parts of a request have
equal lengths on the line, even if the last part has fewer tiles. In a batch-invariant schedule, the splits of a request
depend on the length of the request alone. `reference.plan_decode` explains the costs, and how the kind of schedule is
chosen.

Each program of the kernels in this module computes the tile ranges of PROGRAMS programs of the decode. For this, it
reads all requests, CHUNK requests at a time.
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

PROGRAMS = 4  # programs of the decode whose tile ranges one program of these kernels computes
# (CHUNK, warps): the first shape whose CHUNK holds all requests, or the last shape. A program divides integers for each
# index of a chunk, also for an index without a request, so a CHUNK that is larger than needed takes longer.
SHAPES = ((64, 1), (128, 1), (256, 4), (1024, 8))


class SplitRule(NamedTuple):
    """The four numbers of `InvariantSplitRule`, which determine the size of a split, as values inside a kernel."""

    small_tiles: Any
    small_splits: Any
    large_tiles: Any
    max_splits: Any


class Line(NamedTuple):
    """How the line of all requests is divided into parts and segments; each field is a scalar.

    A batch-invariant schedule does not use `whole_parts`, `total_tiles` and `splits_per_tile`.

    Attributes:
        request_cost: length that each request with tiles has in addition to its parts ("cost of a request" in the table
            above).
        part_cost: length that each part has in addition to its tiles ("cost of a part" in the table above).
        segment: length of a segment.
        whole_parts: True for a schedule of whole parts, False for a balanced schedule.
        total_tiles: tiles of all requests.
        num_programs: number of programs of the decode.
        splits_per_tile: number of splits of one request whose outputs the combine kernel adds in the time of one tile.
    """

    request_cost: Any
    part_cost: Any
    segment: Any
    whole_parts: Any
    total_tiles: Any
    num_programs: Any
    splits_per_tile: Any


class RequestParts(NamedTuple):
    """Parts of some requests; each field has one value for each request.

    Attributes:
        part_tiles: tiles of one part; the last part may have fewer tiles.
        parts: number of parts.
        stride: distance on the line from the start of a part to the start of the next part.
        length: length of the request on the line.
    """

    part_tiles: Any
    parts: Any
    stride: Any
    length: Any


@triton.jit
@no_type_check  # otherwise the tests' type checker wraps the kernel, and Triton's interpreter finds no module globals
def invariant_split_tiles(tiles, rule):
    """Return the number of tiles in each split of a request with `tiles` tiles.

    See `reference.interfaces.invariant_split_tiles` for the rule.
    """
    size = (tiles + rule.small_splits - 1) // rule.small_splits
    size = tl.maximum(tl.minimum(size, rule.large_tiles), rule.small_tiles)
    size = tl.maximum(size, (tiles + rule.max_splits - 1) // rule.max_splits)
    return size + size % 2


@triton.jit
@no_type_check
def _load_tiles(seq_lens, request, num_requests, TILE: tl.constexpr):
    """Return the number of tiles of each request; a request number outside the batch gets 0 tiles."""
    lens = tl.load(seq_lens + request, mask=(request >= 0) & (request < num_requests), other=0)
    return (tl.maximum(lens, 1) - 1) // TILE + (lens > 0).to(tl.int32)  # lens + TILE - 1 could overflow 32 bits


@triton.jit
@no_type_check
def _least_part_tiles(tiles, splits_per_tile):
    """Return the least size of a part, in tiles: sqrt(tiles / splits_per_tile), rounded up to 1 or an even number.

    The float32 root, rounded down, is never too large and at most 2 too small. Therefore two lines of the function
    each add 1 if the size is still too small.
    """
    tiles_per_split = tiles.to(tl.float32) * (1.0 / splits_per_tile.to(tl.float32))
    size = tl.maximum((tl.sqrt(tiles_per_split) * 0.999999).to(tl.int32), 1)
    size += (size * size * splits_per_tile < tiles).to(tl.int32)
    size += (size * size * splits_per_tile < tiles).to(tl.int32)
    return tl.where(size > 1, size + size % 2, 1)


@triton.jit
@no_type_check
def _equal_parts(tiles, total_tiles, num_programs, splits_per_tile):
    """Return the tiles of one part and the number of parts, for requests that are divided into equal parts.

    A request with tiles has at most `num_programs * tiles / total_tiles` parts, but at least one part. Every part
    except the last part of a request has at least `_least_part_tiles` tiles.
    """
    total_tiles = tl.maximum(total_tiles, 1)
    if total_tiles <= 2147483647 // num_programs:  # nearly always true; a 64-bit division takes several times as long
        parts = tiles * num_programs // total_tiles
    else:
        parts = (tiles.to(tl.int64) * num_programs // total_tiles).to(tl.int32)
    parts = tl.maximum(parts, 1)
    part_tiles = tl.maximum((tiles + parts - 1) // parts, _least_part_tiles(tiles, splits_per_tile))
    return part_tiles, (tiles + part_tiles - 1) // part_tiles


@triton.jit
@no_type_check
def _request_parts(tiles, line, rule, BATCH_INVARIANT: tl.constexpr):
    """Return the `RequestParts` of requests from their numbers of tiles."""
    if BATCH_INVARIANT:
        part_tiles = invariant_split_tiles(tiles, rule)
        parts = (tiles + part_tiles - 1) // part_tiles
        stride = part_tiles + line.part_cost
        length = tiles + parts * line.part_cost
    else:
        part_tiles, parts = _equal_parts(tiles, line.total_tiles, line.num_programs, line.splits_per_tile)
        part_tiles, parts = tl.where(line.whole_parts, part_tiles, 1), tl.where(line.whole_parts, parts, tiles)
        stride = part_tiles + line.part_cost
        length = parts * stride  # the last part has the length of the other parts
    return RequestParts(part_tiles, parts, stride, length + tl.minimum(tiles, 1) * line.request_cost)


@triton.jit
@no_type_check
def _assign_parts(
    seq_lens, tile_ranges, split_offsets, num_requests, end, line, rule,
    CHUNK: tl.constexpr, PROGRAMS: tl.constexpr, TILE: tl.constexpr, BATCH_INVARIANT: tl.constexpr,
):  # fmt: skip
    """Assign to each program the parts that start in its segment; write `tile_ranges` and `split_offsets`.

    Args:
        seq_lens: [B], keys of each request.
        tile_ranges: [programs, 5], output; this program writes PROGRAMS rows.
        split_offsets: [B + 1], output; program 0 writes this tensor.
        num_requests: number of requests.
        end: end of the loop over requests: `num_requests`, or the constant CHUNK if there is one chunk.
        line: the `Line` of all requests.
        rule: `SplitRule` of a batch-invariant schedule; otherwise not used.
        CHUNK: number of requests that are processed at a time.
        PROGRAMS: number of programs of the decode whose ranges this program computes.
        TILE: keys of a tile.
        BATCH_INVARIANT: if True, each part is one split. If False, all parts of a request that one program takes are
            together one split.
    """
    program = tl.program_id(0) * PROGRAMS + tl.arange(0, PROGRAMS)
    segment = line.segment
    low = program * segment
    high = low + segment
    # 1. find the requests that have the first part and the last part of each program, and where these requests start
    first_request, first_start = tl.zeros([PROGRAMS], tl.int32) + num_requests, tl.zeros([PROGRAMS], tl.int32)
    last_request, last_start = tl.zeros([PROGRAMS], tl.int32) - 1, tl.zeros([PROGRAMS], tl.int32)
    before, splits_before = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    for first in range(0, end, CHUNK):
        request = first + tl.arange(0, CHUNK)
        tiles = _load_tiles(seq_lens, request, num_requests, TILE)
        held = _request_parts(tiles, line, rule, BATCH_INVARIANT)
        ends = before + tl.cumsum(held.length, 0)
        starts = ends - held.length
        first_part_start = starts + line.request_cost
        last_part_start = first_part_start + (held.parts - 1) * held.stride
        has_tiles = (tiles > 0)[None, :]
        passed = last_part_start[None, :] < low[:, None]
        first_request = tl.minimum(
            first_request, tl.min(tl.where(has_tiles & ~passed, request[None, :], num_requests), 1)
        )
        first_start = tl.maximum(first_start, tl.max(tl.where(has_tiles & passed, ends[None, :], 0), 1))
        begun = has_tiles & (first_part_start[None, :] < high[:, None])
        last_request = tl.maximum(last_request, tl.max(tl.where(begun, request[None, :], -1), 1))
        last_start = tl.maximum(last_start, tl.max(tl.where(begun, starts[None, :], 0), 1))
        if tl.program_id(0) == 0:
            splits = held.parts
            if not BATCH_INVARIANT:
                # if the stride is at least `segment`, no two parts start in the same segment, so each part is one split
                programs = last_part_start // segment - first_part_start // segment + 1
                splits = tl.where(tiles > 0, tl.where(held.stride >= segment, held.parts, programs), 0)
            split_ends = splits_before + tl.cumsum(splits, 0)
            tl.store(split_offsets + 1 + request, split_ends, mask=request < num_requests)
            splits_before += tl.sum(splits)
        before += tl.sum(held.length)
    if tl.program_id(0) == 0:
        tl.store(split_offsets, 0)
    # 2. find the program's first part in its first request, and the end of its parts in its last request
    held = _request_parts(_load_tiles(seq_lens, first_request, num_requests, TILE), line, rule, BATCH_INVARIANT)
    first_part_start = first_start + line.request_cost
    first_part = (tl.maximum(low - first_part_start, 0) + held.stride - 1) // held.stride
    first_tile = first_part * held.part_tiles
    first_split = first_part
    if not BATCH_INVARIANT:
        first_split = tl.where(held.stride >= segment, first_part, program - first_part_start // segment)
    tiles = _load_tiles(seq_lens, last_request, num_requests, TILE)
    held = _request_parts(tiles, line, rule, BATCH_INVARIANT)
    last_part_end = (tl.maximum(high - last_start - line.request_cost, 0) + held.stride - 1) // held.stride
    last_tile = tl.minimum(tl.minimum(last_part_end, held.parts) * held.part_tiles, tiles)
    works = (first_request < last_request) | ((first_request == last_request) & (first_tile < last_tile))
    _write_ranges(tile_ranges, program, line.num_programs, num_requests, works, first_request, last_request,
                  first_tile, last_tile, first_split)  # fmt: skip


@triton.jit(do_not_specialize=["num_requests", "num_programs", "request_cost", "splits_per_tile"])
@no_type_check
def _plan_decode_kernel(
    seq_lens, tile_ranges, split_offsets, num_requests, num_programs, request_cost, splits_per_tile,
    CHUNK: tl.constexpr, ONE_CHUNK: tl.constexpr, PROGRAMS: tl.constexpr, TILE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Compute a schedule that is not batch-invariant: the faster of a schedule of whole parts and a balanced schedule.

    The estimated time of a schedule is an upper bound of the time of every program, plus the time to combine the
    request with the most splits. If both estimates are equal, the result is the schedule of whole parts.
    """
    if DEPENDENT:  # let the next kernel start early, and wait for the preceding kernel
        gdc_launch_dependents()
        gdc_wait()
    end = CHUNK if ONE_CHUNK else num_requests  # if `end` is constant, all loops share the loads of one chunk
    total_tiles, requests, most_tiles = tl.zeros([], tl.int32), tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    for first in range(0, end, CHUNK):
        tiles = _load_tiles(seq_lens, first + tl.arange(0, CHUNK), num_requests, TILE)
        total_tiles += tl.sum(tiles)
        requests += tl.sum(tl.minimum(tiles, 1))
        most_tiles = tl.maximum(most_tiles, tl.max(tiles))
    parts_length, longest, most_parts = tl.zeros([], tl.int32), tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    shortest = tl.full([], 2147483647, tl.int32)
    for first in range(0, end, CHUNK):
        tiles = _load_tiles(seq_lens, first + tl.arange(0, CHUNK), num_requests, TILE)
        part_tiles, parts = _equal_parts(tiles, total_tiles, num_programs, splits_per_tile)
        most_parts = tl.maximum(most_parts, tl.max(parts))
        part_length = part_tiles + request_cost
        parts_length += tl.sum(parts * part_length)
        longest = tl.maximum(longest, tl.max(tl.where(tiles > 0, part_length, 0)))
        shortest = tl.minimum(shortest, tl.min(tl.where(tiles > 0, part_length, 2147483647)))
    segment = tl.maximum((total_tiles + requests * request_cost + num_programs - 1) // num_programs, 1)
    parts_segment = tl.maximum((parts_length + num_programs - 1) // num_programs, 1)
    segment_parts = (parts_segment - 1) // shortest + 1
    longest = longest.to(tl.int64)
    most_time = tl.minimum(parts_segment - 1 + longest, longest * segment_parts)
    most_splits = (tl.maximum(most_tiles, 1) + segment - 2) // segment + 1
    balanced_time = (segment.to(tl.int64) + request_cost) * splits_per_tile + most_splits
    whole_parts = most_time * splits_per_tile + most_parts <= balanced_time
    line = Line(
        tl.where(whole_parts, 0, request_cost), tl.where(whole_parts, request_cost, 0),
        tl.where(whole_parts, parts_segment, segment), whole_parts, total_tiles, num_programs, splits_per_tile,
    )  # fmt: skip
    _assign_parts(seq_lens, tile_ranges, split_offsets, num_requests, end, line, 0, CHUNK, PROGRAMS, TILE, False)


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
    """Compute a batch-invariant schedule: each part is one split, whose size depends on its request alone."""
    if DEPENDENT:  # let the next kernel start early, and wait for the preceding kernel
        gdc_launch_dependents()
        gdc_wait()
    rule = SplitRule(small_tiles, small_splits, large_tiles, max_splits)
    zero = tl.zeros([], tl.int32)
    line = Line(request_cost - split_cost, split_cost, zero, zero, zero, num_programs, zero)
    end = CHUNK if ONE_CHUNK else num_requests  # if `end` is constant, all loops share the loads of one chunk
    total = zero
    for first in range(0, end, CHUNK):
        tiles = _load_tiles(seq_lens, first + tl.arange(0, CHUNK), num_requests, TILE)
        total += tl.sum(_request_parts(tiles, line, rule, True).length)
    segment = tl.maximum((total + num_programs - 1) // num_programs, 1)
    line = Line(request_cost - split_cost, split_cost, segment, zero, zero, num_programs, zero)
    _assign_parts(seq_lens, tile_ranges, split_offsets, num_requests, end, line, rule, CHUNK, PROGRAMS, TILE, True)


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
    splits_per_tile: int,
    split_rule: InvariantSplitRule,
    batch_invariant: bool,
) -> tuple[Tensor, Tensor]:
    """Return the tile ranges [programs, 5] and the split offsets [B + 1] of a `DecodeSchedule`, both int32.

    A negative length counts as 0. Positions on the line are 32-bit integers, so the line with all tiles and costs must
    be shorter than 2^31 tiles (137e9 keys). In a schedule of whole parts, the line can be about `num_programs` *
    (`request_cost` + 1) tiles longer than in a balanced schedule.

    Args:
        seq_lens: [B], keys of each request.
        num_programs: number of programs of the decode kernel, among which the tiles are divided.
        request_cost: time to start a request, in units of the time of one tile.
        split_cost: time to start a further split of a request in a batch-invariant schedule, in the same unit. If
            `split_cost` is larger than `request_cost`, the function uses `request_cost` instead.
        splits_per_tile: number of splits of one request whose outputs the combine kernel adds in the time of one tile.
        split_rule: rule by which a batch-invariant schedule splits a request.
        batch_invariant: if True, the splits of each request depend on its length alone.
    """
    requests = seq_lens.shape[0]
    tile_ranges = torch.empty(num_programs, 5, dtype=torch.int32, device=seq_lens.device)
    split_offsets = torch.empty(requests + 1, dtype=torch.int32, device=seq_lens.device)
    kernel, own = _plan_decode_kernel, (splits_per_tile,)
    chunk, warps = next((shape for shape in SHAPES if requests <= shape[0]), SHAPES[-1])
    if batch_invariant:
        kernel = _plan_invariant_kernel
        own = (min(request_cost, split_cost), *split_rule.numbers)
        warps = max(warps, 4)  # this kernel computes several integer divisions for each request, which are slow
    following = device_facts(seq_lens.device).following
    with device_of(seq_lens):
        launch(
            kernel, (cdiv(num_programs, PROGRAMS),),
            seq_lens.contiguous(), tile_ranges, split_offsets, requests, num_programs, request_cost, *own,
            CHUNK=chunk, ONE_CHUNK=requests <= chunk, PROGRAMS=PROGRAMS, TILE=DECODE_TILE, num_warps=warps,
            **following,
        )  # fmt: skip
    return tile_ranges, split_offsets
