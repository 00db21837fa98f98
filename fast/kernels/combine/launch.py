"""Launcher of the combine kernels, and upper bounds of keys and rows that decode launchers use too."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from reference.interfaces import DECODE_TILE

from ...backends import launch
from ..device import device_facts, device_of
from ..integers import cdiv, next_power_of_2
from .kernels import CombineTile, _combine_invariant_kernel, _combine_scheduled_kernel, _combine_splits_kernel

# In the names below, "many splits" are more than MANY_SPLITS splits of a row, "many heads" are at least MANY_HEADS
# heads, and "many rows" are at least MANY_ROWS rows of one request. CombineTile takes rows, columns, splits and warps.
MANY_SPLITS = 16
MANY_HEADS = 64
MANY_ROWS = 128
# A tile that loads all splits of a row at once waits once for the memory. With FOR_FEW_SPLITS for up to 16 splits,
# decodes without a schedule took, in a step on an H200: 7.9 instead of 6.1 us (1 x 1024, N 16), 17.3 instead of 12.7
# (1 x 4096, N 128), 28.2 instead of 23.4 (4 x 4096, N 128), 37.0 instead of 35.3 (16 x 4096, N 64).
FOR_FEW_SPLITS = (CombineTile(2, 512, 4, 4), CombineTile(1, 512, 4, 2))  # (few heads, many heads)
# several requests with more splits: the most splits of a row, and the tile
FOR_SPLITS = {8: CombineTile(1, 256, 8, 2), MANY_SPLITS: CombineTile(1, 128, 16, 1), 32: CombineTile(1, 64, 16, 1)}
FOR_MANY_SPLITS = CombineTile(1, 32, 128, 4)  # several requests with more splits than any key of FOR_SPLITS
FOR_ONE_REQUEST = CombineTile(1, 64, 16, 1)  # one request with at most MANY_SPLITS splits
FOR_ONE_WITH_MANY_SPLITS = CombineTile(1, 32, 64, 1)  # one request with many splits
FEW_SPLITS = 4  # most splits of a row for FOR_FEW_SPLITS
# "Planned" means: with a schedule. The number of splits is then an average over the requests.
FOR_PLANNED = CombineTile(1, 512, 16, 4)
FEW_PLANNED_SPLITS = (4, 6)  # up to this many splits, FOR_FEW_SPLITS is faster: (few heads, many heads)
# With more splits, and at most SOME_PLANNED_SPLITS, this tile is faster than FOR_PLANNED: with 9 splits 36.2 instead of
# 39.3 us (16 x 4096, N 64), 31.3 instead of 33.4 (8 x 4096, N 128). With 17 splits it is slower: 29.4 instead of 28.5.
FOR_SOME_PLANNED_SPLITS = CombineTile(1, 128, 8, 1)
SOME_PLANNED_SPLITS = 12
# With at least as many requests as programs, most requests have one split. A program processes several tiles one after
# another, so tiles of several rows are faster if there are many rows.
FOR_ONE_PLANNED_SPLIT = CombineTile(4, 512, 2, 4)
MOST_PLANNED_SPLITS = 48  # with more splits and under MANY_HEADS rows, FOR_MANY_SPLITS is faster (more programs)
# batch-invariant decodes
FOR_ONE_INVARIANT = (CombineTile(1, 32, 32, 1), CombineTile(1, 64, 16, 1))  # one request: (few rows, many rows)
FOR_INVARIANT = (CombineTile(1, 128, 16, 1), CombineTile(1, 512, 4, 2))  # several requests: (few heads, many heads)
FOR_PLANNED_INVARIANT = CombineTile(4, 512, 2, 4)  # with a schedule, few requests have partial outputs
# With a schedule, the grid has at most this number of warps for each multiprocessor. More programs would not run at the
# same time, and the launch of a program takes time even if the program has no work. If a request has fewer than two
# splits on average, most requests need no combining, and fewer programs suffice.
WARPS_OF_A_PROCESSOR = (16, 32)  # (fewer than two splits on average, at least two)
# With these tiles, a request has several splits on average, and there are hardly more tiles than programs that run at
# the same time. So there is one program for each tile, and warm-up has fewer kernel variants to compile.
ONE_TILE_EACH = (FOR_PLANNED, FOR_SOME_PLANNED_SPLITS, FOR_MANY_SPLITS, FOR_ONE_WITH_MANY_SPLITS)
CHUNK = 256  # requests that a program examines at a time to find the requests to combine


class SplitDecode(NamedTuple):
    """Outputs and partial outputs of a decode before its combine kernel.

    Attributes:
        out: [T, N, Lkv], complete for rows with one split.
        lse: [N, T], complete for rows with one split.
        partial_out: flat, float32, or bfloat16 (`partial_dtype` of the Hopper decode); partial outputs of rows with
            several splits; empty if no row has several splits.
        partial_lse: flat, float32; partial LSEs of rows with several splits.
    """

    out: Tensor
    lse: Tensor
    partial_out: Tensor
    partial_lse: Tensor


def combine_partial_outputs(
    partial_out: Tensor,
    partial_lse: Tensor,
    query_start_loc: Tensor,
    max_query_len: int,
    tile_ranges: Tensor | None,
    split_offsets: Tensor | None,
    batch_invariant: bool,
    out: Tensor,
    lse: Tensor,
    sinks: Tensor | None = None,
    padding_tokens: bool = False,
) -> None:
    """Combine the partial outputs of a decode into `out` and `lse`; do nothing if there is no partial output.

    `fast.kernels.combine.kernels` defines the layout of the partial outputs. The decode kernel must be the last kernel
    that was launched on the stream. A decode kernel that lets the combine kernel begin early must first wait for the
    end of the kernel that was launched before the decode kernel.

    Args:
        partial_out: flat, float32; empty if there is no partial output. If all requests have the same number of
            splits, the dtype can be bfloat16. The Hopper decode stores further values behind the partial outputs; this
            function does not read these values.
        partial_lse: partial LSEs, flat. In a batch-invariant decode, two int32 for each request follow (numbers of
            splits, see `fast.kernels.combine.kernels`).
        query_start_loc: [B + 1], first query token of each request.
        max_query_len: upper bound of the query tokens of a request; it determines the rows of a request.
        tile_ranges: [programs, 5] of a schedule (`DecodeSchedule`), or None.
        split_offsets: [B + 1] of the same schedule, or None.
        batch_invariant: True if the splits of each request depend on the length of this request alone. If it is False
            and there is no schedule, all requests have the same number of splits.
        out: [T, N, Lkv], contiguous, written in place.
        lse: [N, T], contiguous, written in place.
        sinks: [N], contiguous; attention sinks that are added to the rows which this function writes. None adds none.
        padding_tokens: if True and all requests have the same number of splits, tokens behind the last request get
            output 0 and LSE -inf. With a schedule or in a batch-invariant decode, this function never writes the rows
            of these tokens. In the remaining case, their values are undefined.
    """
    if partial_out.numel() == 0:
        return
    tokens, heads, latent = out.shape
    requests = query_start_loc.shape[0] - 1
    facts = device_facts(out.device)
    following = facts.following
    written = {"HEADS": heads, "LATENT": latent}
    whole = next_power_of_2(latent)
    # with few rows and many splits for each row, small tiles give enough programs to fill the GPU
    if tile_ranges is None and not batch_invariant:
        splits = partial_out.numel() // out.numel()
        tile = _tile_for(splits, heads, requests)
        columns = min(tile.columns, whole)
        with device_of(out):
            launch(
                _combine_splits_kernel, (cdiv(tokens * heads, tile.rows) * cdiv(latent, columns),),
                partial_out, partial_lse, out, lse, sinks, query_start_loc.contiguous() if padding_tokens else None,
                tokens, splits, requests,
                COLUMNS=columns, ROWS=tile.rows, SPLITS=tile.splits, num_warps=tile.warps, **written, **following,
            )  # fmt: skip
        return
    request_rows = rows_of_a_request(tokens, heads, max_query_len)
    partials = partial_out.numel() // (request_rows * latent)
    if batch_invariant:
        partials = (partial_lse.numel() - 2 * requests) // (2 * request_rows)
        if tile_ranges is None and partials <= requests:  # each request had only one program, which wrote the output
            return
        tile = FOR_PLANNED_INVARIANT
        if requests == 1:
            tile = FOR_ONE_INVARIANT[request_rows >= MANY_ROWS]
        elif tile_ranges is None:
            tile = FOR_INVARIANT[heads >= MANY_HEADS]
    else:
        splits = cdiv(tile_ranges.shape[0], requests)  # estimate: programs per request, if they are spread evenly
        tile = _tile_of_a_schedule(splits, request_rows, heads, requests)
    columns = min(tile.columns, whole)
    row_tiles = cdiv(request_rows, tile.rows)
    grid = (requests * row_tiles * cdiv(latent, columns),)
    tiles = {"COLUMNS": columns, "ROWS": tile.rows, "SPLITS": tile.splits, "num_warps": tile.warps}
    query_start_loc = query_start_loc.contiguous()
    offsets = query_start_loc if split_offsets is None else split_offsets.contiguous()
    with device_of(out):
        if batch_invariant:
            launch(
                _combine_invariant_kernel, grid,
                offsets, query_start_loc, partial_out, partial_lse, out, lse, sinks, tokens, request_rows, partials,
                requests, row_tiles, SCHEDULED=tile_ranges is not None, AHEAD=requests == 1 and tile_ranges is None,
                **tiles, **written, **following,
            )  # fmt: skip
        else:
            programs, one_tile = grid[0], tile in ONE_TILE_EACH
            if not one_tile:
                warps = WARPS_OF_A_PROCESSOR[tile_ranges.shape[0] >= 2 * requests]
                programs = min(programs, facts.processors * (warps // tile.warps))
                # this tile is rare for few requests: it always has the loop over tiles, so warm-up compiles one variant
                one_tile = programs == grid[0] and tile != FOR_ONE_PLANNED_SPLIT
            launch(
                _combine_scheduled_kernel, (programs,),
                offsets, query_start_loc, partial_out, partial_lse, out, lse, sinks, tokens, request_rows, partials,
                requests, row_tiles, CHUNK=CHUNK, ONE_TILE=one_tile, **tiles, **written, **following,
            )  # fmt: skip


def _tile_for(splits: int, heads: int, requests: int) -> CombineTile:
    """Return the sizes of a combine tile for requests that have about `splits` splits."""
    if requests == 1:
        return FOR_ONE_REQUEST if splits <= MANY_SPLITS else FOR_ONE_WITH_MANY_SPLITS
    if splits <= FEW_SPLITS:
        return FOR_FEW_SPLITS[heads >= MANY_HEADS]
    return next((tile for most, tile in FOR_SPLITS.items() if splits <= most), FOR_MANY_SPLITS)


def _tile_of_a_schedule(splits: int, rows: int, heads: int, requests: int) -> CombineTile:
    """Return the sizes of a combine tile in a decode with a schedule; `splits` is an average over the requests."""
    if requests == 1:
        return FOR_PLANNED if splits <= MANY_SPLITS else _tile_for(splits, heads, 1)
    if splits == 1 and rows >= MANY_ROWS:
        return FOR_ONE_PLANNED_SPLIT
    if splits <= FEW_PLANNED_SPLITS[heads >= MANY_HEADS]:
        return FOR_FEW_SPLITS[heads >= MANY_HEADS]
    if FEW_PLANNED_SPLITS[1] < splits <= SOME_PLANNED_SPLITS:
        return FOR_SOME_PLANNED_SPLITS
    if splits > MOST_PLANNED_SPLITS and rows < MANY_HEADS:
        return FOR_MANY_SPLITS
    return FOR_PLANNED


def rows_of_a_request(tokens: int, heads: int, max_query_len: int) -> int:
    """Return an upper bound of the rows of a request, without reading a length from the GPU."""
    return max(1, min(max_query_len, tokens)) * heads


def readable_keys(max_seq_len: int, table_width: int, block_size: int) -> int:
    """Return an upper bound of the keys of a request, without reading a length from the GPU.

    The sum of the upper bound and one tile (64 keys) fits into int32.
    """
    return min(max_seq_len, table_width * block_size, 2**31 - 2 * DECODE_TILE)


def whole_tiles(keys: int) -> int:
    """Round a number of keys up to a multiple of a tile (64 keys).

    Functions with an `lru_cache` take the rounded number. A growing request then adds one entry to this `lru_cache` for
    every 64 keys.
    """
    return -(-keys // DECODE_TILE) * DECODE_TILE
