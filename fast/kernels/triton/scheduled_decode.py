"""Absorbed decode as a schedule cuts it: programs of equal work take tile after tile, request after request.

A request that one program takes whole is finished there. The others leave parts in float32, and a second kernel merges
them by their maxima and sums of weights, as `decode` does.
"""

from __future__ import annotations

import math
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from reference.interfaces import DECODE_TILE, max_invariant_splits

from .decode_tiles import LN_2, attend_tiles, load_queries

MANY_PARTS = 8  # of a request, on average
FEW_PROGRAMS = 1024  # one compilation serves schedules up to so many


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
    [2, slots, rows] has `largest`, in base 2, and the sum of those weights. A program has two slots: 2 p for the end of
    a request that it continues, 2 p + 1 for the beginning of one that it leaves. With MAX_SPLITS (requests cut by their
    own length) a request has `request_slots`, one for each split.
    """
    program, row_block = tl.program_id(0) // row_blocks, tl.program_id(0) % row_blocks
    request = tl.maximum(tl.load(tile_ranges + program * 5), 0)
    last_request = tl.minimum(tl.load(tile_ranges + program * 5 + 1), num_requests - 1)
    first_tile = tl.maximum(tl.load(tile_ranges + program * 5 + 2), 0)
    range_end = tl.load(tile_ranges + program * 5 + 3)
    split = tl.minimum(tl.maximum(tl.load(tile_ranges + program * 5 + 4), 0), MAX_SPLITS)
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
            split_tiles = tl.maximum(tl.cdiv(request_tiles, MAX_SPLITS), 16)
            last_tile = tl.minimum(own_end, (split + 1) * split_tiles)
        if (first_tile < last_tile) & (query_start + row_block * ROWS // HEADS < query_end):
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
                slot = 2 * program + (first_tile == 0).to(tl.int32)
                if MAX_SPLITS > 0:
                    slot = request * request_slots + tl.minimum(split, request_slots - 1)
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
            first_tile = tl.full([], 0, tl.int32)
            request += 1


@triton.jit(do_not_specialize=["num_tokens", "num_programs", "request_rows", "num_slots", "request_slots", "row_tiles"])
@no_type_check
def _merge_scheduled_kernel(
    tile_ranges, split_offsets, query_start_loc, part_out, part_lse, out, lse,
    num_tokens, num_programs, request_rows, num_slots, request_slots, row_tiles,
    HEADS: tl.constexpr, LATENT: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr,
    PROGRAMS: tl.constexpr, MAX_SPLITS: tl.constexpr, OUT: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """Merge the parts of a request, ROWS of its rows by COLUMNS; of one without keys, write the empty rows.

    OUT and LSE say which of both is written: another kernel writes the rest.
    """
    column_tiles: tl.constexpr = (LATENT + COLUMNS - 1) // COLUMNS
    number = tl.program_id(0)
    request = number // (row_tiles * column_tiles)
    row_tile, column_tile = number // column_tiles % row_tiles, number % column_tiles
    first_slot = 0
    splits = tl.load(split_offsets + request + 1) - tl.load(split_offsets + request)
    if splits != 1:
        query_start = tl.minimum(tl.maximum(tl.load(query_start_loc + request), 0), num_tokens)
        query_end = tl.minimum(tl.load(query_start_loc + request + 1), num_tokens)
        if MAX_SPLITS > 0:
            first_slot = request * request_slots
            splits = tl.minimum(splits, request_slots)
        else:  # the first program that has some of it; the parts lie with that one and those that follow
            program = tl.arange(0, PROGRAMS)
            there = program < num_programs
            first_request = tl.load(tile_ranges + program * 5, mask=there, other=1)
            last_request = tl.load(tile_ranges + program * 5 + 1, mask=there, other=0)
            has_some = (first_request <= last_request) & (last_request >= request)
            first_slot = tl.min(tl.where(has_some, program, PROGRAMS), 0)
            splits = tl.minimum(splits, num_programs)
        row = row_tile * ROWS + tl.arange(0, ROWS)
        real = (row < request_rows) & (row < (query_end - query_start) * HEADS)
        columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
        largest = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        values = tl.zeros([ROWS, COLUMNS], tl.float32)
        for first in range(0, splits, SPLITS):
            split = first + tl.arange(0, SPLITS)
            if MAX_SPLITS > 0:
                slot = first_slot + split
            else:  # the beginning in the second slot of its program, every other part in the first of its own
                slot = tl.where(split == 0, 2 * first_slot + 1, 2 * (first_slot + split))
            used = (split < splits) & (slot >= 0) & (slot < num_slots)
            part_row = slot.to(tl.int64)[:, None] * request_rows + row[None, :]  # [SPLITS, ROWS]
            held = used[:, None] & real[None, :]
            part = tl.load(part_lse + part_row, mask=held, other=float("-inf"))
            weight = tl.load(part_lse + num_slots.to(tl.int64) * request_rows + part_row, mask=held, other=0.0)
            new_largest = tl.maximum(largest, tl.max(part, 0))
            shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
            decay, share = tl.exp2(largest - shift), tl.exp2(part - shift[None, :])
            if OUT:  # a part without keys was written too, as zeros, so that nothing here waits for its weight
                where = (part_row * LATENT)[:, :, None] + columns[None, None, :]
                piece = tl.load(part_out + where, mask=held[:, :, None] & (columns < LATENT)[None, None, :], other=0.0)
                values = values * decay[:, None] + tl.sum(piece * share[:, :, None], 0)
            total = total * decay + tl.sum(weight * share, 0)
            largest = new_largest
        divisor = tl.where(total == 0, 1.0, total)  # nothing seen at all: values 0, largest -inf
        token, head = query_start + row // HEADS, row % HEADS
        if OUT:
            offsets = (token.to(tl.int64) * HEADS + head) * LATENT
            merged = (values / divisor[:, None]).to(out.dtype.element_ty)
            held = real[:, None] & (columns < LATENT)[None, :]
            tl.store(out + offsets[:, None] + columns[None, :], merged, mask=held)
        if LSE and column_tile == 0:
            lse_row = lse + head.to(tl.int64) * num_tokens + token
            tl.store(lse_row, (largest + tl.log2(divisor)) * LN_2, mask=real)


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
    max_splits, request_slots, slots = 0, 0, 2 * programs
    if batch_invariant:
        max_splits = max_invariant_splits(heads)
        widest = triton.cdiv(table_width * block_size, DECODE_TILE)
        request_slots = max(1, min(max_splits, triton.cdiv(widest, 16)))
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


def merge_scheduled(
    part_out: Tensor,
    part_lse: Tensor,
    query_start_loc: Tensor,
    tile_ranges: Tensor,
    split_offsets: Tensor,
    batch_invariant: bool,
    out: Tensor,
    lse: Tensor,
    write_out: bool,
    write_lse: bool,
) -> None:
    """Merge what `launch_scheduled` left in parts, into `out`, into `lse`, or into both.

    Args:
        part_out: [slots, rows, Lkv].
        part_lse: [2, slots, rows].
        query_start_loc: [B + 1].
        tile_ranges: [programs, 5].
        split_offsets: [B + 1].
        batch_invariant: requests are cut by their own length.
        out: [T, N, Lkv], contiguous.
        lse: [N, T], contiguous.
        write_out: whether.
        write_lse: whether.
    """
    tokens, heads, latent = out.shape
    slots, request_rows = part_out.shape[:2]
    requests, programs = split_offsets.shape[0] - 1, tile_ranges.shape[0]
    # few requests have many parts each and leave most of the device idle: then small tiles, many parts at a time, but
    # not where the order of a sum may depend on nothing but the request
    many = programs > MANY_PARTS * requests and not batch_invariant
    rows, columns, splits = (1, 128, 32) if many else (4, 512, 4)
    whole = triton.next_power_of_2(latent)
    columns = min(columns, whole) if write_out else whole  # the lse takes one program, however wide the latent is
    row_tiles = triton.cdiv(request_rows, rows)
    with torch.cuda.device_of(out):
        _merge_scheduled_kernel[(requests * row_tiles * triton.cdiv(latent, columns),)](
            tile_ranges, split_offsets, query_start_loc, part_out, part_lse, out, lse,
            tokens, programs, request_rows, slots, slots // requests if batch_invariant else 0, row_tiles,
            HEADS=heads, LATENT=latent, COLUMNS=columns, ROWS=rows, SPLITS=splits,
            PROGRAMS=max(FEW_PROGRAMS, triton.next_power_of_2(programs)),
            MAX_SPLITS=max_invariant_splits(heads) if batch_invariant else 0, OUT=write_out, LSE=write_lse,
            num_warps=4,
        )  # fmt: skip
