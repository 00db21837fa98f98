"""Decode that follows a schedule: each program attends its range of tiles, one request after another.

A schedule (`DecodeSchedule`) assigns to each program consecutive tiles of `DECODE_TILE` keys. The tiles of one request
that a program attends are a split of the request. A program that attends all tiles of a request writes the output. If
several programs attend a request, each program writes the partial output of its split in float32, and
`fast.kernels.combine` adds the partial outputs.

A batch-invariant decode gives a request the same bits in every batch. It uses the same kernel, with or without a
schedule, but computes the splits of each request from the length of the request alone.
"""

from __future__ import annotations

import math
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from reference.interfaces import DECODE_TILE, InvariantSplitRule, most_invariant_splits

from ...backends import launch
from ..combine.states import Partials, add_partial, load_partial
from ..device import device_of
from ..integers import cdiv
from .arguments import DecodeInputs, DecodeOutputs, DecodeStrides
from .decode_fp8_tiles import attend
from .decode_tiles import LN_2, Cache, Queries, RowKeys, load_queries
from .schedule import SplitRule, invariant_split_tiles


@triton.jit(
    do_not_specialize=[
        "q_scale_stride", "num_tokens", "num_blocks", "num_requests", "max_keys", "programs_per_request", "row_blocks",
        "request_rows", "num_partials", "small_tiles", "small_splits", "large_tiles", "max_splits", "table_row_stride",
    ],
    do_not_specialize_on_alignment=[
        "block_table", "seq_lens", "query_start_loc", "visible_lens", "kv_scale", "q_scale", "tile_ranges",
        "split_offsets",
    ],
)  # fmt: skip
@no_type_check
def _scheduled_decode_kernel(
    sources, latent_pages, rope_pages, block_table, seq_lens, query_start_loc, visible_lens,
    kv_scale, q_scale, q_scale_stride, tile_ranges, split_offsets, outputs,
    num_tokens, num_blocks, num_requests, max_keys, programs_per_request, row_blocks, request_rows, num_partials,
    small_tiles, small_splits, large_tiles, max_splits, scale_log2,
    strides, table_row_stride, table_stride,
    HEADS: tl.constexpr, ROWS: tl.constexpr, SCHEDULE_TILE: tl.constexpr, BY_LENGTH: tl.constexpr,
    SCHEDULED: tl.constexpr, c: tl.constexpr,
):  # fmt: skip
    """Attend the tile range of one program, for ROWS rows of each request; write outputs or partial outputs.

    A row is one (query token, head) pair. With BY_LENGTH, the splits of each request depend on its length alone.
    Without a schedule (SCHEDULED is False), `programs_per_request` programs share the splits of each request.
    """
    # 1. find the tile range of this program: from tile `first_tile` of `request` to tile `range_end` of `last_request`
    program, row_block = tl.program_id(0) // row_blocks, tl.program_id(0) % row_blocks
    rule = SplitRule(small_tiles, small_splits, large_tiles, max_splits)
    first_tile = 0
    if SCHEDULED:
        row = tile_ranges + program * 5
        request, last_request = tl.maximum(tl.load(row), 0), tl.minimum(tl.load(row + 1), num_requests - 1)
        first_tile, range_end = tl.maximum(tl.load(row + 2), 0), tl.load(row + 3)
        split = tl.maximum(tl.load(row + 4), 0)
        if BY_LENGTH:
            split = tl.minimum(split, max_splits)
        has_first_split = split == 0
    else:
        request, last_request, range_end = program // programs_per_request, program // programs_per_request, 0
        length = tl.maximum(tl.load(seq_lens + request), 0)
        split_tiles, splits = split_by_length(length, tl.minimum(length, max_keys), rule, SCHEDULE_TILE)
        split = program % programs_per_request * tl.cdiv(splits, programs_per_request)
        first_tile, range_end = split * split_tiles, (split + tl.cdiv(splits, programs_per_request)) * split_tiles
        has_first_split = program % programs_per_request == 0
    request_row = row_block * ROWS + tl.arange(0, ROWS)
    head = request_row % HEADS
    columns = tl.arange(0, c.LATENT_PAD)
    PER_TILE: tl.constexpr = SCHEDULE_TILE // c.TILE  # a tile of the schedule is PER_TILE tiles of this kernel
    # 2. attend this program's tiles, one request (with BY_LENGTH, one split) in each pass of the loop
    while request <= last_request:
        query_start = tl.minimum(tl.maximum(tl.load(query_start_loc + request), 0), num_tokens)
        query_end = tl.minimum(tl.load(query_start_loc + request + 1), num_tokens)
        token = query_start + request_row // HEADS
        real = (token < query_end) & (request_row < request_rows)
        length = tl.maximum(tl.load(seq_lens + request), 0)
        readable = tl.minimum(length, max_keys)
        request_tiles = number_of_tiles(length, SCHEDULE_TILE)
        request_end = request_tiles  # end (exclusive) of the program's tiles in this request
        if request == last_request:
            request_end = tl.minimum(range_end, request_tiles)
        last_tile = request_end
        has_tiles = first_tile < last_tile
        splits = 1
        if BY_LENGTH:
            split_tiles, splits = split_by_length(length, readable, rule, SCHEDULE_TILE)
            last_tile = tl.minimum(request_end, (split + 1) * split_tiles)
            has_tiles = split < splits
            if SCHEDULED:
                has_tiles = has_tiles & (first_tile < last_tile)
        if has_tiles & (query_start + row_block * ROWS // HEADS < query_end):
            row_queries = load_queries(
                Queries(
                    sources.ql_nope, sources.q_pe, strides.latent_token, strides.latent_head, strides.latent_element,
                    strides.rope_token, strides.rope_head, strides.rope_element, q_scale, q_scale_stride,
                ),
                token, head, real, c,
            )  # fmt: skip
            visible = tl.minimum(tl.load(visible_lens + token, mask=real, other=0), readable)
            key_end = tl.maximum(tl.max(visible, 0), 0)
            # every row sees every key of the first `full_tiles` tiles of the request (a tile has c.TILE keys)
            full_tiles = tl.maximum(tl.min(tl.where(real, visible, key_end), 0), 0) // c.TILE
            table_row = block_table + request.to(tl.int64) * table_row_stride
            state = attend(
                row_queries, RowKeys(visible, key_end, full_tiles, table_row, table_stride),
                first_tile * PER_TILE, tl.minimum(last_tile * PER_TILE, tl.cdiv(key_end, c.TILE)),
                Cache(
                    sources.kv_cache, latent_pages, rope_pages, num_blocks, strides.block, strides.entry,
                    strides.element, kv_scale,
                ),
                scale_log2,
                c,
            )  # fmt: skip
            if BY_LENGTH:
                # A partial index says where a partial output is stored. A program that attends the first split of a
                # request may attend the next splits too. The program adds the partial outputs of all its splits of
                # the request, and stores the sum at the first partial index of the request.
                index = request * (num_partials // num_requests) + tl.where(has_first_split, 0, split)
                whole = has_first_split & (split + 1 >= splits)
                if has_first_split & (split > 0):
                    tl.debug_barrier()  # wait until all threads have written the sum of the earlier splits
                    partials = Partials(outputs.partial_out, outputs.partial_lse, num_partials, request_rows)
                    before = load_partial(partials, index, real, request_row, columns, c.LATENT)
                    state = add_partial(before, state)
                    tl.debug_barrier()
                # for the combine kernel: the number of splits in this sum, and the number of all splits of the request
                recorded = has_first_split & (row_block == 0)
                progress = outputs.partial_lse + 2 * num_partials.to(tl.int64) * request_rows + 2 * request
                progress = progress.to(tl.pointer_type(tl.int32), bitcast=True)
                tl.store(progress, split + 1, mask=recorded)
                tl.store(progress + 1, splits, mask=recorded)
            else:
                first_split = tl.load(split_offsets + request)
                whole = tl.load(split_offsets + request + 1) - first_split <= 1
                # clamp the index, because the caller may pass a schedule with wrong numbers
                index = tl.minimum(tl.maximum(first_split + split, 0), num_partials - 1)
            if whole:
                divisor = tl.where(state.total == 0, 1.0, state.total)  # in a row without keys, `state.weighted` is 0
                weighted = state.weighted * (1.0 / divisor)[:, None]
                lse_row = outputs.lse + head.to(tl.int64) * num_tokens + token
                tl.store(lse_row, (state.largest + tl.log2(divisor)) * LN_2, mask=real)
                offsets = (token.to(tl.int64) * HEADS + head) * c.LATENT
                tl.store(
                    outputs.out + offsets[:, None] + columns[None, :],
                    weighted.to(outputs.out.dtype.element_ty),
                    mask=real[:, None] & (columns < c.LATENT)[None, :],
                )
            else:
                partial_row = index.to(tl.int64) * request_rows + request_row
                tl.store(outputs.partial_lse + partial_row, state.largest, mask=real)
                partial_total = outputs.partial_lse + num_partials.to(tl.int64) * request_rows + partial_row
                tl.store(partial_total, state.total, mask=real)
                tl.store(
                    outputs.partial_out + (partial_row * c.LATENT)[:, None] + columns[None, :],
                    state.weighted,
                    mask=real[:, None] & (columns < c.LATENT)[None, :],
                )
        # 3. continue with the next split or request
        if BY_LENGTH:
            done = (last_tile >= request_end) | (split + 1 >= splits)
            has_first_split = has_first_split | done
            split = tl.where(done, 0, split + 1)
            first_tile = tl.where(done, 0, last_tile)
            request = tl.where(done, request + 1, request)
        else:
            first_tile, split = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
            request += 1


@triton.jit
@no_type_check
def split_by_length(length, readable, rule, TILE: tl.constexpr):
    """Return for a request of a batch-invariant decode the number of tiles of one split, and the number of splits.

    `length` is the length of the request, and determines the tiles of one split. `readable` is the number of keys that
    the kernel reads, and determines the number of splits. A request without keys has one split.
    """
    split_tiles = invariant_split_tiles(number_of_tiles(length, TILE), rule)
    return split_tiles, tl.maximum(tl.cdiv(number_of_tiles(readable, TILE), split_tiles), 1)


@triton.jit
@no_type_check
def number_of_tiles(length, TILE: tl.constexpr):
    """Return the number of tiles of a request, cdiv(length, TILE), without overflow for a length near 2^31."""
    return (tl.maximum(length, 1) - 1) // TILE + (length > 0).to(tl.int32)


def launch_scheduled(
    inputs: DecodeInputs,
    strides: DecodeStrides,
    constants: dict[str, Any],
    tile_ranges: Tensor | None,
    split_offsets: Tensor | None,
    batch_invariant: bool,
    split_rule: InvariantSplitRule,
    out: Tensor,
    lse: Tensor,
    request_rows: int,
    row_blocks: int,
    programs_per_request: int,
    max_keys: int,
    softmax_scale: float,
) -> tuple[Tensor, Tensor]:
    """Launch the kernel of this module.

    For a request with one split, the kernel writes `out` and `lse`. For a request with several splits, it writes
    partial outputs and partial LSEs.

    Args:
        inputs: tensors and TMA descriptors in the order of the kernel's parameters.
        strides: strides of the tensors in the order of the kernel's parameters.
        constants: compile-time constants of the kernel: dims and launch shape.
        tile_ranges: [programs, 5], from the `DecodeSchedule`; None without a schedule.
        split_offsets: [B + 1], from the `DecodeSchedule`; None without a schedule.
        batch_invariant: if True, the splits of each request depend on its length alone.
        split_rule: rule by which a batch-invariant decode splits a request.
        out: [T, N, Lkv], contiguous.
        lse: [N, T], contiguous.
        request_rows: upper bound of the rows of a request.
        row_blocks: number of blocks of ROWS rows in a request.
        programs_per_request: number of programs that share the splits of a request; not used with a schedule.
        max_keys: upper bound of the keys of a request.
        softmax_scale: factor of the scores.

    Returns:
        Partial outputs and partial LSEs, flat; `fast.kernels.combine.kernels` defines their layout.
    """
    tokens, _, latent = out.shape
    requests, scheduled = inputs.block_table.shape[0], tile_ranges is not None
    programs = tile_ranges.shape[0] if scheduled else requests * programs_per_request
    # upper bound of the splits: one for each request, and one more for each program that continues a request
    num_partials, progress = requests + programs, 0
    if batch_invariant:
        most_splits = most_invariant_splits(cdiv(max_keys, DECODE_TILE), split_rule)
        num_partials = requests * (most_splits if scheduled or programs_per_request > 1 else 1)
        progress = 2 * requests
    partial_out = torch.empty(num_partials * request_rows * latent, dtype=torch.float32, device=out.device)
    partial_lse = torch.empty(2 * num_partials * request_rows + progress, dtype=torch.float32, device=out.device)
    with device_of(out):
        launch(
            _scheduled_decode_kernel, (programs * row_blocks,),
            *inputs, tile_ranges if scheduled else inputs.seq_lens,
            split_offsets if scheduled else inputs.seq_lens,
            DecodeOutputs(out, lse, partial_out, partial_lse),
            tokens, inputs.sources.kv_cache.shape[0], requests, max_keys, programs_per_request, row_blocks,
            request_rows, num_partials, *split_rule.numbers, softmax_scale / math.log(2), *strides, **constants,
            SCHEDULE_TILE=DECODE_TILE, BY_LENGTH=batch_invariant, SCHEDULED=scheduled,
        )  # fmt: skip
    return partial_out, partial_lse
