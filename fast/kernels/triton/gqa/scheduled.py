"""Decode of grouped-query attention that follows a schedule, or whose splits depend on lengths alone.

A schedule (`DecodeSchedule`) assigns to each program consecutive tiles of `DECODE_TILE` keys. The tiles of one request
that a program attends are a split of the request. A program that attends all tiles of a request writes the output. If
several programs attend a request, each program writes the partial output of its split in float32, and
`fast.kernels.combine` adds the partial outputs.

The tiles of a request begin at the tile with the first key that the request attends
(`reference.planning.visible_lens.scheduled_lens`), which is the tile of key 0 without a window.

A batch-invariant decode gives a request the same bits in every batch. It computes the splits of each request from the
request's length alone, with or without a schedule, and every split has a partial output of its own.
"""

from __future__ import annotations

from typing import Any, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from reference.interfaces import DECODE_TILE, InvariantSplitRule, most_invariant_splits

from ....backends import launch
from ...combine import rows_of_a_request
from ...device import device_of
from ...integers import cdiv
from ..schedule import SplitRule
from ..scheduled_decode import number_of_tiles, split_by_length
from .launch_arguments import PagedCall
from .records import Boxes, Outputs, RowBlock, Scores
from .row_blocks import (
    cached_keys,
    cached_source,
    offset_of,
    rows_from,
    write_padding,
    write_partial,
    write_rows,
)
from .sizes import PADDING_TOKENS, LaunchSizes
from .tiles import attend_tiles, load_queries


class TileRange(NamedTuple):
    """Tiles of a program: from tile `first_tile` of `request` to tile `end` of `last_request`.

    Attributes:
        request: first request.
        last_request: last request; less than `request` if the program has no tiles.
        first_tile: first tile in `request`, counted from the first tile of this request.
        end: index after the last tile in `last_request`.
        split: split of `request` to which the first tile belongs.
    """

    request: Any
    last_request: Any
    first_tile: Any
    end: Any
    split: Any


@triton.jit
@no_type_check
def _scheduled_range(tile_ranges, program, num_requests):
    """Return the `TileRange` of a program of a schedule; wrong numbers in the schedule are clamped."""
    row = tile_ranges + program * 5
    return TileRange(
        tl.maximum(tl.load(row), 0), tl.minimum(tl.load(row + 1), num_requests - 1), tl.maximum(tl.load(row + 2), 0),
        tl.load(row + 3), tl.maximum(tl.load(row + 4), 0),
    )  # fmt: skip


# The parameters of the lists below are in no record, because Triton specialises each field of a record (`..arguments`).
@triton.jit(
    do_not_specialize=[
        "num_tokens", "num_requests", "num_blocks", "max_query_len", "max_keys", "row_blocks", "request_rows",
        "num_partials", "num_programs", "programs_per_request", "small_tiles", "small_splits", "large_tiles",
        "max_splits", "table_row_stride",
    ],
    do_not_specialize_on_alignment=[
        "block_table", "seq_lens", "query_start_loc", "visible_lens", "first_visible", "slopes", "sinks", "k_scale",
        "v_scale", "q_scale", "tile_ranges", "split_offsets",
    ],
)  # fmt: skip
@no_type_check
def _gqa_scheduled_kernel(
    sources, block_table, seq_lens, query_start_loc, visible_lens, first_visible,
    factors, slopes, sinks, k_scale, v_scale, q_scale, outputs, tile_ranges, split_offsets,
    num_tokens, num_requests, num_blocks, max_query_len, max_keys, row_blocks, request_rows,
    num_partials, num_programs, programs_per_request, small_tiles, small_splits, large_tiles, max_splits,
    strides, table_row_stride, table_stride,
    SCHEDULE_TILE: tl.constexpr, BY_LENGTH: tl.constexpr, PADDING_TOKENS: tl.constexpr, c: tl.constexpr,
):  # fmt: skip
    """Attend the tile range of one program for one row block of each request, or write padding tokens.

    Without a schedule (`tile_ranges` is None), `programs_per_request` programs share the splits of each request.
    """
    program = tl.program_id(0)
    if program >= num_programs:
        query_end = offset_of(query_start_loc, num_requests, num_tokens)
        write_padding(program - num_programs, query_end, num_tokens, outputs, strides, c, PADDING_TOKENS)
        return
    scores = Scores(factors, slopes, sinks, k_scale, v_scale, q_scale)
    rule = SplitRule(small_tiles, small_splits, large_tiles, max_splits)
    PER_TILE: tl.constexpr = SCHEDULE_TILE // c.TILE  # a tile of the schedule is PER_TILE tiles of this kernel
    heads: tl.constexpr = c.GROUP * c.KV_HEADS
    kv_head, first_row = program % c.KV_HEADS, program // c.KV_HEADS % row_blocks * c.ROWS
    number = program // c.KV_HEADS // row_blocks
    if tile_ranges is not None:
        tiles = _scheduled_range(tile_ranges, number, num_requests)
        request, last_request, first_tile, range_end = tiles.request, tiles.last_request, tiles.first_tile, tiles.end
        split = tiles.split
    else:
        request = number // programs_per_request
        last_request, first_tile, range_end = request, request * 0, request * 0
        split = number % programs_per_request
    while request <= last_request:
        # 1. find the rows, and the tiles that this program attends in the request; with BY_LENGTH, of one split
        query_start = offset_of(query_start_loc, request, num_tokens)
        query_end = tl.maximum(offset_of(query_start_loc, request + 1, num_tokens), query_start)
        rows = rows_from(first_row, query_start, query_end, kv_head, c)
        length = tl.maximum(tl.load(seq_lens + request), 0)
        begin_tile = 0
        if first_visible is not None:
            begin = tl.load(first_visible + query_start, mask=query_start < query_end, other=0)
            begin_tile = tl.minimum(tl.maximum(begin, 0), length) // SCHEDULE_TILE
        counted = length - begin_tile * SCHEDULE_TILE
        request_tiles = number_of_tiles(counted, SCHEDULE_TILE)
        request_end = request_tiles
        if tile_ranges is not None:
            request_end = tl.where(request == last_request, tl.minimum(range_end, request_tiles), request_tiles)
        last_tile = request_end
        if BY_LENGTH:
            readable = tl.minimum(length, max_keys) - begin_tile * SCHEDULE_TILE
            split_tiles, splits = split_by_length(counted, tl.maximum(readable, 0), rule, SCHEDULE_TILE)
            if tile_ranges is None:
                first_tile = split * split_tiles
            last_tile = tl.minimum(request_end, (split + 1) * split_tiles)
            has_tiles = split < splits
            if tile_ranges is not None:
                has_tiles = has_tiles & (first_tile < last_tile)
            index = request * (num_partials // num_requests) + split
            whole = splits <= 1
        else:
            has_tiles = first_tile < last_tile
            first_split = tl.load(split_offsets + request)
            whole = tl.load(split_offsets + request + 1) - first_split <= 1
            # clamp the index, because the caller may pass a schedule with wrong numbers
            index = tl.minimum(tl.maximum(first_split + split, 0), num_partials - 1)
        # 2. attend the tiles, and write the output or a partial output
        if has_tiles & (query_start + first_row // c.GROUP < query_end):
            queries = load_queries(sources.q, rows, scores, strides, c)
            keys = cached_keys(
                rows, visible_lens, first_visible, tl.minimum(length, max_keys), query_start, max_query_len, c
            )
            source = cached_source(
                sources, block_table, request, kv_head, num_blocks, table_row_stride, table_stride, strides
            )
            state = attend_tiles(
                queries, keys, source, Boxes(None, None), (begin_tile + first_tile) * PER_TILE,
                (begin_tile + last_tile) * PER_TILE, scores, strides, c,
            )  # fmt: skip
            if whole:
                write_rows(state, rows, outputs, num_tokens, scores, strides, c)
            else:
                request_row = (rows.token - query_start) * heads + rows.head
                row = index.to(tl.int64) * request_rows + request_row
                num_rows = num_partials.to(tl.int64) * request_rows
                inside = RowBlock(rows.token, rows.head, rows.real & (request_row < request_rows), kv_head)
                write_partial(state, inside, row, num_rows, outputs, scores, c)
            if BY_LENGTH:
                # for the combine kernel: each partial output has one split; and the number of splits of the request
                recorded = (split == 0) & (first_row == 0) & (kv_head == 0)
                progress = outputs.partial_lse + 2 * num_partials.to(tl.int64) * request_rows + 2 * request
                progress = progress.to(tl.pointer_type(tl.int32), bitcast=True)
                tl.store(progress, 1, mask=recorded)
                tl.store(progress + 1, splits, mask=recorded)
        # 3. continue with the next split or the next request
        if BY_LENGTH:
            if tile_ranges is None:
                split += programs_per_request
                request = tl.where(split < splits, request, request + 1)
            else:
                done = (last_tile >= request_end) | (split + 1 >= splits)
                split = tl.where(done, 0, split + 1)
                first_tile = tl.where(done, 0, last_tile)
                request = tl.where(done, request + 1, request)
        else:
            first_tile, split = first_tile * 0, split * 0
            request += 1


def launch_scheduled(
    call: PagedCall,
    sizes: LaunchSizes,
    tile_ranges: Tensor | None,
    split_offsets: Tensor | None,
    batch_invariant: bool,
    split_rule: InvariantSplitRule,
    row_blocks: int,
    max_query_len: int,
    max_keys: int,
) -> tuple[Tensor, Tensor]:
    """Launch the kernel of this module.

    For a request with one split, the kernel writes `call.out` and `call.lse`. For a request with several splits, it
    writes partial outputs and partial LSEs.

    Args:
        call: tensors, scores and strides.
        sizes: launch sizes.
        tile_ranges: [programs, 5], from the `DecodeSchedule`; None without a schedule.
        split_offsets: [B + 1], from the `DecodeSchedule`; None without a schedule.
        batch_invariant: if True, the splits of each request depend on its length alone.
        split_rule: rule by which a batch-invariant decode splits a request.
        row_blocks: number of row blocks of a request and a KV head.
        max_query_len: upper bound of the query tokens of a request.
        max_keys: upper bound of the keys of a request.

    Returns:
        Partial outputs and partial LSEs, flat; `fast.kernels.combine.kernels` defines their layout.
    """
    tokens, heads, width = call.sources.q.shape
    requests, kv_heads = call.batch.block_table.shape[0], sizes.constants.KV_HEADS
    request_rows = rows_of_a_request(tokens, heads, max_query_len)
    most_splits = most_invariant_splits(cdiv(max_keys, DECODE_TILE), split_rule) if batch_invariant else 0
    programs_per_request, progress = 1, 2 * requests if batch_invariant else 0
    if tile_ranges is None:
        programs_per_request = max(1, min(most_splits, sizes.resident // max(1, requests * row_blocks * kv_heads)))
        ranges = requests * programs_per_request
    else:
        ranges = tile_ranges.shape[0]
        tile_ranges, split_offsets = tile_ranges.contiguous(), split_offsets.contiguous()
    # upper bound of the splits: one for each request, and one more for each program that continues a request
    num_partials = requests * max(1, most_splits) if batch_invariant else requests + ranges
    partial_out = torch.empty(num_partials * request_rows * width, dtype=torch.float32, device=call.out.device)
    partial_lse = torch.empty(2 * num_partials * request_rows + progress, dtype=torch.float32, device=call.out.device)
    programs = ranges * row_blocks * kv_heads
    with device_of(call.out):
        launch(
            _gqa_scheduled_kernel, (programs + cdiv(tokens, PADDING_TOKENS),),
            call.sources, *call.batch, *call.scores, Outputs(call.out, call.lse, partial_out, partial_lse),
            tile_ranges, split_offsets, tokens, requests, call.sources.k.shape[0], max_query_len, max_keys,
            row_blocks, request_rows, num_partials, programs, programs_per_request, *split_rule.numbers,
            call.strides, *call.batch.block_table.stride(),
            SCHEDULE_TILE=DECODE_TILE, BY_LENGTH=batch_invariant, PADDING_TOKENS=PADDING_TOKENS, **sizes.options,
        )  # fmt: skip
    return partial_out, partial_lse
