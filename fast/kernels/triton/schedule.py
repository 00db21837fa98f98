"""The decode schedule on the device: each program here finds where a few programs of the decode begin and end.

Nobody walks the requests one by one: sums over all of them say where a place of the line falls. One launch, no value
read back, so that it runs inside a captured graph.
"""

from __future__ import annotations

from typing import Any, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from reference.interfaces import DECODE_TILE, InvariantCut

from ..device import device_facts

PROGRAMS = 4  # of the decode, that one program of this kernel places
SHAPES = ((256, 1), (1024, 4))  # requests at a time, and warps


class SplitRule(NamedTuple):
    """The numbers of `InvariantCut`: how a request is split by its own length. The fields are values of a kernel."""

    small_tiles: Any
    small_splits: Any
    large_tiles: Any
    max_splits: Any


class RequestTiles(NamedTuple):
    """Of some requests each: tiles, tiles of a split, splits by own length, and length on the line."""

    tiles: Any
    split_tiles: Any
    splits: Any
    length: Any


class Placed(NamedTuple):
    """Of each program: the first request and where it starts on the line, the last request and both its ends."""

    first_request: Any
    first_start: Any
    last_request: Any
    last_start: Any
    last_end: Any


class Counted(NamedTuple):
    """The line and the splits before a request, and what is placed so far."""

    before: Any
    splits_before: Any
    placed: Any


@triton.jit
@no_type_check  # the interpreter needs the source and globals of the kernels themselves
def invariant_split_tiles(tiles, rule):
    """Return the tiles of a split of a request that is split by its own length, as the contract's function does."""
    size = (tiles + rule.small_splits - 1) // rule.small_splits
    size = tl.maximum(tl.minimum(size, rule.large_tiles), rule.small_tiles)
    size = tl.maximum(size, (tiles + rule.max_splits - 1) // rule.max_splits)
    return size + size % 2


@triton.jit
@no_type_check
def _sizes(seq_lens, first, num_requests, request_cost, split_cost, rule, CHUNK: tl.constexpr, TILE: tl.constexpr,
           BATCH_INVARIANT: tl.constexpr):  # fmt: skip
    """Count the tiles of CHUNK requests.

    A request has a cost, and each split one more.
    """
    request = first + tl.arange(0, CHUNK)
    lens = tl.load(seq_lens + request, mask=request < num_requests, other=0)
    tiles = (tl.maximum(lens, 1) - 1) // TILE + (lens > 0).to(tl.int32)  # the longest length does not overflow
    split_tiles, splits = tl.maximum(tiles, 1), tl.minimum(tiles, 1)
    if BATCH_INVARIANT:
        split_tiles = invariant_split_tiles(tiles, rule)
        splits = (tiles + split_tiles - 1) // split_tiles
    length = tiles + tl.minimum(tiles, 1) * request_cost + splits * split_cost
    return RequestTiles(tiles, split_tiles, splits, length)


@triton.jit
@no_type_check
def _place(tiles, length, before, splits_before, first, num_requests, low, high, piece, request_cost, placed,
           split_offsets, CHUNK: tl.constexpr):  # fmt: skip
    """Count CHUNK requests into what each program [PROGRAMS] finds before its ends of the line, and write their splits.

    `placed` is the first request (the one that `low` lies in) and its place, the last request and both its ends.
    """
    first_request, first_start, last_request = placed.first_request, placed.first_start, placed.last_request
    last_start, last_end = placed.last_start, placed.last_end
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
        splits = tl.where(tiles > 0, (ends - 1) // piece - (starts + request_cost) // piece + 1, 0)
        tl.store(split_offsets + 1 + request, splits_before + tl.cumsum(splits, 0), mask=real)
        splits_before += tl.sum(splits)
    placed = Placed(first_request, first_start, last_request, last_start, last_end)
    return Counted(before + tl.sum(length), splits_before, placed)


@triton.jit(do_not_specialize=["num_requests", "num_programs", "request_cost"])
@no_type_check
def _plan_decode_kernel(
    seq_lens, tile_ranges, split_offsets, num_requests, num_programs, request_cost,
    CHUNK: tl.constexpr, ONE_CHUNK: tl.constexpr, PROGRAMS: tl.constexpr, TILE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Programs cut the line where it falls."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    program = tl.program_id(0) * PROGRAMS + tl.arange(0, PROGRAMS)
    zeros = tl.zeros([PROGRAMS], tl.int32)
    placed = Placed(zeros, zeros, zeros - 1, zeros, zeros)
    zero = tl.zeros([], tl.int32)
    if tl.program_id(0) == 0:
        tl.store(split_offsets, 0)
    if ONE_CHUNK:
        counts = _sizes(seq_lens, 0, num_requests, request_cost, 0, 0, CHUNK, TILE, False)
        total = tl.sum(counts.length)
        piece = tl.maximum((total + num_programs - 1) // num_programs, 1)
        low = program * piece
        high = tl.minimum(low + piece, total)
        counted = _place(
            counts.tiles, counts.length, zero, zero, 0, num_requests, low, high, piece, request_cost,
            placed, split_offsets, CHUNK,
        )  # fmt: skip
        placed = counted.placed
    else:
        total = zero
        for first in range(0, num_requests, CHUNK):
            counts = _sizes(seq_lens, first, num_requests, request_cost, 0, 0, CHUNK, TILE, False)
            total += tl.sum(counts.length)
        piece = tl.maximum((total + num_programs - 1) // num_programs, 1)
        low = program * piece
        high = tl.minimum(low + piece, total)
        before, splits_before = zero, zero
        for first in range(0, num_requests, CHUNK):
            counts = _sizes(seq_lens, first, num_requests, request_cost, 0, 0, CHUNK, TILE, False)
            counted = _place(
                counts.tiles, counts.length, before, splits_before, first, num_requests, low, high, piece, request_cost,
                placed, split_offsets, CHUNK,
            )  # fmt: skip
            before, splits_before, placed = counted.before, counted.splits_before, counted.placed
    first_request, first_start, last_request = placed.first_request, placed.first_start, placed.last_request
    last_start, last_end = placed.last_start, placed.last_end
    works = (low < total) & (first_request <= last_request)
    first_tile = tl.maximum(low - first_start - request_cost, 0)
    last_tile = tl.minimum(high, last_end) - last_start - request_cost
    first_split = program - (first_start + request_cost) // piece
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
    """Requests are cut by their own length, and programs take the splits that start in their piece of the line."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    rule = SplitRule(small_tiles, small_splits, large_tiles, max_splits)
    first_cost = request_cost - split_cost
    program = tl.program_id(0) * PROGRAMS + tl.arange(0, PROGRAMS)
    end = CHUNK if ONE_CHUNK else num_requests  # known to the compiler, it loads and counts once
    total = tl.zeros([], tl.int32)
    for first in range(0, end, CHUNK):
        counts = _sizes(seq_lens, first, num_requests, first_cost, split_cost, rule, CHUNK, TILE, True)
        total += tl.sum(counts.length)
    piece = tl.maximum((total + num_programs - 1) // num_programs, 1)
    low = program * piece
    low_split = tl.zeros([PROGRAMS], tl.int32)  # splits of all requests that start before the program's piece
    high_split = tl.zeros([PROGRAMS], tl.int32)  # and before the next one's
    before, splits_before = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    if tl.program_id(0) == 0:
        tl.store(split_offsets, 0)
    for first in range(0, end, CHUNK):
        counts = _sizes(seq_lens, first, num_requests, first_cost, split_cost, rule, CHUNK, TILE, True)
        split_tiles, splits, length = counts.split_tiles, counts.splits, counts.length
        request = first + tl.arange(0, CHUNK)
        starts = before + tl.cumsum(length, 0) - length + first_cost
        stride = split_tiles + split_cost
        passed = (low[:, None] - starts[None, :] + stride[None, :] - 1) // stride[None, :]
        low_split += tl.sum(tl.minimum(tl.maximum(passed, 0), splits[None, :]), 1)
        passed = (low[:, None] + piece - starts[None, :] + stride[None, :] - 1) // stride[None, :]
        high_split += tl.sum(tl.minimum(tl.maximum(passed, 0), splits[None, :]), 1)
        if tl.program_id(0) == 0:
            tl.store(split_offsets + 1 + request, splits_before + tl.cumsum(splits, 0), mask=request < num_requests)
        before += tl.sum(length)
        splits_before += tl.sum(splits)

    first_request, last_request = tl.zeros([PROGRAMS], tl.int32), tl.zeros([PROGRAMS], tl.int32)
    first_split, first_tile = tl.zeros([PROGRAMS], tl.int32), tl.zeros([PROGRAMS], tl.int32)
    last_tile = tl.zeros([PROGRAMS], tl.int32)
    splits_before = tl.zeros([], tl.int32)
    for first in range(0, end, CHUNK):  # from the numbers of the first and the last split to their requests
        counts = _sizes(seq_lens, first, num_requests, first_cost, split_cost, rule, CHUNK, TILE, True)
        tiles, split_tiles, splits = counts.tiles, counts.split_tiles, counts.splits
        request = first + tl.arange(0, CHUNK)
        split_ends = splits_before + tl.cumsum(splits, 0)
        split_starts = split_ends - splits
        mine = (split_starts[None, :] <= low_split[:, None]) & (low_split[:, None] < split_ends[None, :])
        number = low_split[:, None] - split_starts[None, :]
        first_request += tl.sum(tl.where(mine, request[None, :], 0), 1)
        first_split += tl.sum(tl.where(mine, number, 0), 1)
        first_tile += tl.sum(tl.where(mine, number * split_tiles[None, :], 0), 1)
        mine = (split_starts[None, :] < high_split[:, None]) & (high_split[:, None] <= split_ends[None, :])
        number = high_split[:, None] - split_starts[None, :]
        last_request += tl.sum(tl.where(mine, request[None, :], 0), 1)
        last_tile += tl.sum(tl.where(mine, tl.minimum(number * split_tiles[None, :], tiles[None, :]), 0), 1)
        splits_before += tl.sum(splits)
    _write_ranges(tile_ranges, program, num_programs, num_requests, low_split < high_split, first_request,
                  last_request, first_tile, last_tile, first_split)  # fmt: skip


@triton.jit
@no_type_check
def _write_ranges(tile_ranges, program, num_programs, num_requests, works, first_request, last_request, first_tile,
                  last_tile, first_split):  # fmt: skip
    """Rows of `DecodeSchedule.tile_ranges`; those of programs without work say so."""
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
    invariant_cut: InvariantCut,
    batch_invariant: bool,
) -> tuple[Tensor, Tensor]:
    """Tile ranges [programs, 5] and split offsets [B + 1] of `DecodeSchedule`.

    A negative length counts as 0. Places on the line are 32-bit: 2^31 tiles, 137e9 keys in all.
    """
    requests = seq_lens.shape[0]
    tile_ranges = torch.empty(num_programs, 5, dtype=torch.int32, device=seq_lens.device)
    split_offsets = torch.empty(requests + 1, dtype=torch.int32, device=seq_lens.device)
    kernel, own = _plan_decode_kernel, ()
    chunk, warps = SHAPES[requests > SHAPES[0][0]]
    if batch_invariant:
        kernel = _plan_invariant_kernel
        own = (min(request_cost, split_cost), *invariant_cut.numbers)
        warps = 4  # splits of every request are counted for every program: many divisions
    following = device_facts(seq_lens.device).following
    with torch.cuda.device_of(seq_lens):
        kernel[(triton.cdiv(num_programs, PROGRAMS),)](
            seq_lens.contiguous(), tile_ranges, split_offsets, requests, num_programs, request_cost, *own,
            CHUNK=chunk, ONE_CHUNK=requests <= chunk, PROGRAMS=PROGRAMS, TILE=DECODE_TILE, num_warps=warps,
            **following,
        )  # fmt: skip
    return tile_ranges, split_offsets
