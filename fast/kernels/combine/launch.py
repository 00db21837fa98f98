"""Launch the combine kernel that fits a decode, and the bounds that decode and combine share."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from reference.interfaces import DECODE_TILE

from ..device import device_facts
from .kernels import CombineTile, _combine_invariant_kernel, _combine_scheduled_kernel, _combine_splits_kernel

MANY_SPLITS = 16  # of a row, on average
MANY_HEADS = 64
MANY_ROWS = 128  # of one request: enough programs also with larger tiles
FOR_FEW_SPLITS = (CombineTile(2, 512, 4, 4), CombineTile(1, 512, 4, 2))  # of few heads, and of more
FOR_MANY_SPLITS = CombineTile(1, 32, 128, 4)
FOR_MANY_ROWS = CombineTile(1, 64, 64, 2)
FOR_FEW_ROWS = CombineTile(1, 32, 64, 2)
# of requests that are split by their own length: one request, of few rows and of more; several, all of which have
# partial outputs, of few heads and of more; and planned ones, of which few have any
FOR_ONE_INVARIANT = (CombineTile(1, 32, 32, 1), CombineTile(1, 64, 16, 1))
FOR_INVARIANT = (CombineTile(1, 128, 16, 1), CombineTile(1, 512, 4, 2))
FOR_PLANNED_INVARIANT = CombineTile(4, 512, 2, 4)


class SplitDecode(NamedTuple):
    """What a decode has written before its combine: `out` and `lse` of whole rows, partial outputs of the others.

    Attributes:
        out: [T, N, Lkv].
        lse: [N, T].
        partial_out: flat, float32; no element where no row has a partial output.
        partial_lse: flat, float32.
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
) -> None:
    """Combine the partial outputs of a decode, where it has any, into `out` and `lse`.

    Args:
        partial_out: flat; no element where no row has a partial output. Values that Hopper's programs keep between
            splits lie behind, and are not read.
        partial_lse: flat; where requests are split by their own length, [B, 2] int32 behind.
        query_start_loc: [B + 1].
        max_query_len: bounds the rows of a request.
        tile_ranges: [programs, 5] of a schedule, or None.
        split_offsets: [B + 1] of that schedule.
        batch_invariant: requests are split by their own length; else, without a schedule, into equally many splits.
        out: [T, N, Lkv], contiguous.
        lse: [N, T], contiguous.
    """
    if partial_out.numel() == 0:
        return
    tokens, heads, latent = out.shape
    requests = query_start_loc.shape[0] - 1
    following = device_facts(out.device).following
    written = {"HEADS": heads, "LATENT": latent}
    whole = triton.next_power_of_2(latent)
    # few rows have many splits each and leave most of the device idle: then small tiles, many splits at a time
    if tile_ranges is None and not batch_invariant:
        splits = partial_out.numel() // out.numel()
        tile = _tile_for(splits, tokens * heads, heads, requests)
        columns = min(tile.columns, whole)
        with torch.cuda.device_of(out):
            _combine_splits_kernel[(triton.cdiv(tokens * heads, tile.rows) * triton.cdiv(latent, columns),)](
                partial_out, partial_lse, out, lse, tokens, splits,
                COLUMNS=columns, ROWS=tile.rows, SPLITS=tile.splits, num_warps=tile.warps, **written, **following,
            )  # fmt: skip
        return
    request_rows = rows_of_a_request(tokens, heads, max_query_len)
    partials = partial_out.numel() // (request_rows * latent)
    if batch_invariant:
        partials = (partial_lse.numel() - 2 * requests) // (2 * request_rows)
        if tile_ranges is None and partials <= requests:  # each request was one program's, which wrote whole rows
            return
        tile = FOR_PLANNED_INVARIANT
        if requests == 1:
            tile = FOR_ONE_INVARIANT[request_rows >= MANY_ROWS]
        elif tile_ranges is None:
            tile = FOR_INVARIANT[heads >= MANY_HEADS]
    else:
        many = tile_ranges.shape[0] > MANY_SPLITS * requests
        tile = FOR_MANY_SPLITS if many else FOR_FEW_SPLITS[heads >= MANY_HEADS]
    columns = min(tile.columns, whole)
    row_tiles = triton.cdiv(request_rows, tile.rows)
    grid = (requests * row_tiles * triton.cdiv(latent, columns),)
    tiles = {"COLUMNS": columns, "ROWS": tile.rows, "SPLITS": tile.splits, "num_warps": tile.warps}
    query_start_loc = query_start_loc.contiguous()
    offsets = query_start_loc if split_offsets is None else split_offsets.contiguous()
    with torch.cuda.device_of(out):
        if batch_invariant:
            _combine_invariant_kernel[grid](
                offsets, query_start_loc, partial_out, partial_lse, out, lse, tokens, request_rows, partials, requests,
                row_tiles, SCHEDULED=tile_ranges is not None, AHEAD=requests == 1 and tile_ranges is None, **tiles,
                **written, **following,
            )  # fmt: skip
        else:
            _combine_scheduled_kernel[grid](
                offsets, query_start_loc, partial_out, partial_lse, out, lse, tokens, request_rows, partials, row_tiles,
                **tiles, **written, **following,
            )  # fmt: skip


def _tile_for(splits: int, rows: int, heads: int, requests: int) -> CombineTile:
    """Choose what a program takes at a time where each row has equally many splits."""
    if splits <= MANY_SPLITS:
        return FOR_FEW_SPLITS[heads >= MANY_HEADS]
    if requests > 1:
        return FOR_MANY_SPLITS
    return FOR_MANY_ROWS if rows >= MANY_ROWS else FOR_FEW_ROWS


def rows_of_a_request(tokens: int, heads: int, max_query_len: int) -> int:
    """Most rows of a request, from bounds that the host knows."""
    return max(1, min(max_query_len, tokens)) * heads


def readable_keys(max_seq_len: int, table_width: int, block_size: int) -> int:
    """Most keys of a request that kernels read, from bounds that the host knows; no sum of it and a tile overflows."""
    return min(max_seq_len, table_width * block_size, 2**31 - 2 * DECODE_TILE)


def whole_tiles(keys: int) -> int:
    """Keys rounded up to whole tiles, so that choices that are kept by keys are made once in a tile's steps."""
    return -(-keys // DECODE_TILE) * DECODE_TILE
