"""Absorbed decode as a schedule cuts it: programs of equal work take tile after tile, request after request.

A request that one program takes whole is finished there. The others leave parts in float32 for `decode_merge`.
"""

from __future__ import annotations

import math
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from reference.interfaces import DECODE_TILE, max_invariant_splits, most_invariant_splits

from .decode_tiles import LN_2, attend_tiles, load_queries
from .schedule import invariant_split_tiles


@triton.jit(
    do_not_specialize=[
        "num_tokens", "num_blocks", "num_requests", "table_width", "row_blocks", "request_rows", "num_slots",
        "request_slots", "table_row_stride",
    ],
    do_not_specialize_on_alignment=["block_table", "seq_lens", "query_start_loc", "visible_lens"],
)  # fmt: skip
@no_type_check
def _scheduled_decode_kernel(
    ql_nope, q_pe, kv_cache, latent_pages, rope_pages, block_table, seq_lens, query_start_loc, visible_lens,
    tile_ranges, split_offsets, out, lse, part_out, part_lse,
    num_tokens, num_blocks, num_requests, table_width, row_blocks, request_rows, num_slots, request_slots, scale_log2,
    latent_token_stride, latent_head_stride, latent_element_stride,
    rope_token_stride, rope_head_stride, rope_element_stride,
    block_stride, entry_stride, element_stride, table_row_stride, table_stride,
    HEADS: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    LATENT_PAD: tl.constexpr, ROPE_PAD: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    PIECE_COLUMNS: tl.constexpr, PAGED_COPY: tl.constexpr, SCHEDULE_TILE: tl.constexpr, MAX_SPLITS: tl.constexpr,
):  # fmt: skip
    """The range of one program of the schedule, for ROWS of each request's rows.

    part_out [slots, rows of a request, Lkv] is a sum of values by exp2(score - largest), not divided yet; part_lse
    [2, slots, rows] has `largest`, in base 2, and the sum of those weights. Splits lie in the order of `split_offsets`.
    With MAX_SPLITS (requests cut by their own length) a request has `request_slots`, one for each split.
    """
    program, row_block = tl.program_id(0) // row_blocks, tl.program_id(0) % row_blocks
    request = tl.maximum(tl.load(tile_ranges + program * 5), 0)
    last_request = tl.minimum(tl.load(tile_ranges + program * 5 + 1), num_requests - 1)
    first_tile = tl.maximum(tl.load(tile_ranges + program * 5 + 2), 0)
    range_end = tl.load(tile_ranges + program * 5 + 3)
    split = tl.maximum(tl.load(tile_ranges + program * 5 + 4), 0)
    if MAX_SPLITS > 0:
        split = tl.minimum(split, MAX_SPLITS)
    request_row = row_block * ROWS + tl.arange(0, ROWS)
    head = request_row % HEADS
    columns = tl.arange(0, LATENT_PAD)
    PER_TILE: tl.constexpr = SCHEDULE_TILE // TILE
    while request <= last_request:
        query_start = tl.minimum(tl.maximum(tl.load(query_start_loc + request), 0), num_tokens)
        query_end = tl.minimum(tl.load(query_start_loc + request + 1), num_tokens)
        token = query_start + request_row // HEADS
        real = (token < query_end) & (request_row < request_rows)
        length = tl.maximum(tl.load(seq_lens + request), 0)
        request_tiles = (tl.maximum(length, 1) - 1) // SCHEDULE_TILE + (length > 0).to(tl.int32)  # as it was planned
        length = tl.minimum(length, table_width * BLOCK_SIZE)  # as it can be read
        own_end = request_tiles
        if request == last_request:
            own_end = tl.minimum(range_end, request_tiles)
        last_tile = own_end
        if MAX_SPLITS > 0:
            last_tile = tl.minimum(own_end, (split + 1) * invariant_split_tiles(request_tiles, MAX_SPLITS))
        there = first_tile < last_tile
        if MAX_SPLITS > 0:  # of a length beyond the table, what cannot be read has no slot
            there = there & (split < request_slots)
        if there & (query_start + row_block * ROWS // HEADS < query_end):
            q_latent, q_rope = load_queries(
                ql_nope, q_pe, token, head, real, latent_token_stride, latent_head_stride, latent_element_stride,
                rope_token_stride, rope_head_stride, rope_element_stride, LATENT, ROPE, LATENT_PAD, ROPE_PAD,
            )  # fmt: skip
            visible = tl.minimum(tl.load(visible_lens + token, mask=real, other=0), length)
            key_end = tl.maximum(tl.max(visible, 0), 0)
            full_tiles = tl.maximum(tl.min(tl.where(real, visible, key_end), 0), 0) // TILE  # seen whole by every row
            table_row = block_table + request.to(tl.int64) * table_row_stride
            largest, total, values = attend_tiles(
                q_latent, q_rope, visible, key_end, full_tiles, first_tile * PER_TILE,
                tl.minimum(last_tile * PER_TILE, tl.cdiv(key_end, TILE)), table_row, table_stride, num_blocks,
                kv_cache, latent_pages, rope_pages, block_stride, entry_stride, element_stride, scale_log2,
                LATENT, ROPE, BLOCK_SIZE, TILE, LATENT_PAD, ROPE_PAD, PIECE_COLUMNS, PAGED_COPY,
            )  # fmt: skip
            first_split = tl.load(split_offsets + request)
            if tl.load(split_offsets + request + 1) - first_split <= 1:
                divisor = tl.where(total == 0, 1.0, total)  # a row that saw nothing: values 0, largest -inf
                values = values / divisor[:, None]
                lse_row = lse + head.to(tl.int64) * num_tokens + token
                tl.store(lse_row, (largest + tl.log2(divisor)) * LN_2, mask=real)
                offsets = (token.to(tl.int64) * HEADS + head) * LATENT
                tl.store(
                    out + offsets[:, None] + columns[None, :],
                    values.to(out.dtype.element_ty),
                    mask=real[:, None] & (columns < LATENT)[None, :],
                )
            else:
                slot = first_split + split
                if MAX_SPLITS > 0:
                    slot = request * request_slots + split
                slot = tl.minimum(tl.maximum(slot, 0), num_slots - 1)  # those that nobody planned may lie anywhere
                part_row = slot.to(tl.int64) * request_rows + request_row
                tl.store(part_lse + part_row, largest, mask=real)
                tl.store(part_lse + num_slots.to(tl.int64) * request_rows + part_row, total, mask=real)
                tl.store(
                    part_out + (part_row * LATENT)[:, None] + columns[None, :],
                    values,
                    mask=real[:, None] & (columns < LATENT)[None, :],
                )
        if MAX_SPLITS > 0:
            done = last_tile >= own_end
            split = tl.where(done, 0, split + 1)
            first_tile = tl.where(done, 0, last_tile)
            request = tl.where(done, request + 1, request)
        else:
            first_tile, split = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
            request += 1


def launch_scheduled(
    inputs: tuple,
    strides: tuple[int, ...],
    constants: dict[str, Any],
    tile_ranges: Tensor,
    split_offsets: Tensor,
    batch_invariant: bool,
    out: Tensor,
    lse: Tensor,
    request_rows: int,
    row_blocks: int,
    softmax_scale: float,
) -> tuple[Tensor, Tensor]:
    """Attend as a schedule says: into `out` and `lse` where a request has one part, else into parts.

    Args:
        inputs: queries, cache, its descriptors, and the tensors of the plan, as the kernel takes them.
        strides: of queries, cache and block table.
        constants: of the kernel: dims and launch shape.
        tile_ranges: [programs, 5].
        split_offsets: [B + 1].
        batch_invariant: requests are cut by their own length.
        out: [T, N, Lkv], contiguous.
        lse: [N, T], contiguous.
        request_rows: most rows of a request.
        row_blocks: programs side by side that share a request's rows.
        softmax_scale: multiplies the scores.

    Returns:
        The parts: out [slots, rows, Lkv] and lse [2, slots, rows].
    """
    _, _, kv_cache, _, _, block_table, _, _, _ = inputs
    tokens, heads, latent = out.shape
    requests, table_width = block_table.shape
    programs, block_size = tile_ranges.shape[0], kv_cache.shape[1]
    # every program leaves at most one request unfinished
    max_splits, request_slots, slots = 0, 0, requests + programs
    if batch_invariant:
        max_splits = max_invariant_splits(heads)
        widest = triton.cdiv(table_width * block_size, DECODE_TILE)
        request_slots = most_invariant_splits(widest, heads)
        slots = requests * request_slots
    part_out = torch.empty(slots, request_rows, latent, dtype=torch.float32, device=out.device)
    part_lse = torch.empty(2, slots, request_rows, dtype=torch.float32, device=out.device)
    with torch.cuda.device_of(out):
        _scheduled_decode_kernel[(programs * row_blocks,)](
            *inputs, tile_ranges, split_offsets, out, lse, part_out, part_lse,
            tokens, kv_cache.shape[0], requests, table_width, row_blocks, request_rows, slots, request_slots,
            softmax_scale / math.log(2), *strides, **constants, SCHEDULE_TILE=DECODE_TILE, MAX_SPLITS=max_splits,
        )  # fmt: skip
    return part_out, part_lse
