"""Attention of a paged key/value cache: prefills, and decodes without a schedule.

A decode divides the keys of each request into the same number of splits, and different programs attend different splits
(flash-decoding). Each program writes the partial output of its split, and `fast.kernels.combine` adds the partial
outputs. A prefill with few rows and many keys has splits too. `scheduled` has the kernel for decodes with a schedule.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from reference.interfaces import COMPUTE_FORMAT, UNDIVIDED, CacheFormat, InvariantSplitRule

from ....backends import launch
from ...combine import combine_partial_outputs, readable_keys, whole_tiles
from ...device import device_facts, device_of
from ...integers import cdiv
from ..decode_shapes import best_splits
from .launch_arguments import PagedCall, box_descriptors, scores_of
from .records import Boxes, Outputs, Scores
from .row_blocks import (
    cached_keys,
    cached_source,
    find_request,
    offset_of,
    rows_from,
    write_padding,
    write_partial,
    write_rows,
)
from .scheduled import launch_scheduled
from .sizes import (
    LEAST_KEYS_OF_MANY,
    MOST_NARROW_COLUMNS,
    MOST_SPLIT_ROWS,
    PADDING_TOKENS,
    LaunchSizes,
    launch_sizes,
)
from .tiles import attend_tiles, load_queries

# Time that a program needs to start, load queries and store its output. The unit is the time to attend one key.
PROGRAM_COST = 160
COMBINE_COST = 128  # time to start the combine kernel, in the same unit
ROWS_COMBINED_PER_KEY = 64  # rows of partial outputs that the combine kernel adds in the time to attend one key


# The parameters of the lists below are in no record, because Triton specialises each field of a record (`..arguments`).
@triton.jit(
    do_not_specialize=[
        "num_tokens", "num_requests", "num_blocks", "max_query_len", "max_keys", "num_splits", "row_blocks",
        "num_programs", "table_row_stride",
    ],
    do_not_specialize_on_alignment=[
        "block_table", "seq_lens", "query_start_loc", "visible_lens", "first_visible", "slopes", "sinks", "k_scale",
        "v_scale", "q_scale",
    ],
)  # fmt: skip
@no_type_check
def _gqa_paged_kernel(
    sources, block_table, seq_lens, query_start_loc, visible_lens, first_visible,
    factors, slopes, sinks, k_scale, v_scale, q_scale, outputs, k_boxes, v_boxes,
    num_tokens, num_requests, num_blocks, max_query_len, max_keys, num_splits, row_blocks, num_programs,
    strides, table_row_stride, table_stride,
    FIND_REQUEST: tl.constexpr, SPLIT: tl.constexpr, PADDING_TOKENS: tl.constexpr, c: tl.constexpr,
):  # fmt: skip
    """Attend one split of one request for one row block, or write padding tokens.

    With FIND_REQUEST, `row_blocks` is the number of row blocks of all requests (`find_request`). Programs that run at
    the same time then have the same KV head and read the same keys, mostly from the L2 cache; the last row block of a
    request starts first, because it attends the most keys. Without FIND_REQUEST, each request has `row_blocks` row
    blocks. Programs that run at the same time then read the keys of all KV heads, which are close in memory.

    If each request has one split (SPLIT is False), the kernel writes output and LSE. Otherwise it writes partial
    outputs [splits, T, N, Dh] and partial LSEs [2, splits, T, N].
    """
    program = tl.program_id(0)
    if program >= num_programs:
        query_end = offset_of(query_start_loc, num_requests, num_tokens)
        write_padding(program - num_programs, query_end, num_tokens, outputs, strides, c, PADDING_TOKENS)
        return
    if FIND_REQUEST:
        kv_head, split = program // (row_blocks * num_splits), program % num_splits
        number = row_blocks - 1 - program // num_splits % row_blocks
        request, first_row = find_request(query_start_loc, num_requests, num_tokens, number, c)
    else:
        kv_head, split = program % c.KV_HEADS, program // c.KV_HEADS // row_blocks % num_splits
        request = program // c.KV_HEADS // row_blocks // num_splits
        first_row = program // c.KV_HEADS % row_blocks * c.ROWS
    query_start = offset_of(query_start_loc, request, num_tokens)
    query_end = tl.maximum(offset_of(query_start_loc, request + 1, num_tokens), query_start)
    if (first_row < 0) | (query_start + first_row // c.GROUP >= query_end):
        return
    scores = Scores(factors, slopes, sinks, k_scale, v_scale, q_scale)
    rows = rows_from(first_row, query_start, query_end, kv_head, c)
    queries = load_queries(sources.q, rows, scores, strides, c)
    readable = tl.maximum(0, tl.minimum(tl.load(seq_lens + request), max_keys))
    keys = cached_keys(rows, visible_lens, first_visible, readable, query_start, max_query_len, c)
    source = cached_source(sources, block_table, request, kv_head, num_blocks, table_row_stride, table_stride, strides)
    first_tile, last_tile = tl.minimum(keys.low, keys.high) // c.TILE, tl.cdiv(keys.high, c.TILE)
    if SPLIT:
        split_tiles = tl.cdiv(last_tile - first_tile, num_splits)
        first_tile = tl.minimum(first_tile + split * split_tiles, last_tile)
        last_tile = tl.minimum(first_tile + split_tiles, last_tile)
    boxes = Boxes(k_boxes, v_boxes)
    state = attend_tiles(queries, keys, source, boxes, first_tile, last_tile, scores, strides, c)
    if SPLIT:
        heads: tl.constexpr = c.GROUP * c.KV_HEADS
        split_rows = num_tokens.to(tl.int64) * heads
        row = split * split_rows + rows.token.to(tl.int64) * heads + rows.head
        write_partial(state, rows, row, num_splits * split_rows, outputs, scores, c)
    else:
        write_rows(state, rows, outputs, num_tokens, scores, strides, c)


def gqa_paged_attention(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    visible_lens: Tensor,
    first_visible: Tensor | None,
    max_query_len: int,
    max_seq_len: int,
    max_visible_len: int,
    softmax_scale: float,
    soft_cap: float | None,
    alibi_slopes: Sequence[float] | None,
    sinks: Tensor | None,
    out_dtype: torch.dtype,
    tile_ranges: Tensor | None,
    split_offsets: Tensor | None,
    batch_invariant: bool,
    split_rule: InvariantSplitRule,
    cache_format: CacheFormat = COMPUTE_FORMAT,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    q_scale: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend the cached keys of each request with its query tokens.

    A length is clamped to [0, min(max_seq_len, W * block_size)], and the tokens of a block outside the cache are
    masked. `max_query_len` determines the number of programs. `max_visible_len`, an upper bound of the keys that one
    query token attends, determines the number of splits. A schedule (`tile_ranges` and `split_offsets`) replaces these
    splits. If `batch_invariant` is True, the splits of each request depend on its length alone (`split_rule`). With
    the rule of `UNDIVIDED` and without a schedule, no request is divided, and each program has many rows, as in a
    prefill. See `fast.kernels.cpu.gqa.gqa_paged_attention` for the other arguments.

    Returns:
        out [T, N, Dh] and lse [N, T]. Padding tokens get output 0 and LSE -inf.

    Raises:
        UnsupportedConfiguration: no tile of the cache fits into the device's shared memory.
    """
    tokens, heads, width = q.shape
    num_blocks, block_size, kv_heads = kv_cache.shape[1:4]
    if out is None:
        out = torch.empty(q.shape, dtype=out_dtype, device=q.device)
    lse = torch.empty(heads, tokens, dtype=torch.float32, device=q.device)
    if tokens == 0:
        return out, lse
    if block_table.shape[0] == 0 or max_query_len == 0:  # every token is padding
        return out.zero_(), lse.fill_(-math.inf)
    group, query_len = heads // kv_heads, min(max_query_len, tokens)
    # the longest query determines the rows of a program, and it must not change a batch-invariant result
    undivided = batch_invariant and tile_ranges is None and split_rule == UNDIVIDED.split_rule
    if undivided:
        batch_invariant, query_len = False, MOST_SPLIT_ROWS + 1
    elif batch_invariant:
        query_len = 1
    scheduled = tile_ranges is not None or batch_invariant
    given = (
        group, kv_heads, width, query_len, block_size, first_visible is not None, soft_cap is not None,
        q.dtype, cache_format, q_scale is not None, device_facts(q.device), scheduled,
    )  # fmt: skip
    sizes = launch_sizes(*given)
    max_keys = readable_keys(max_seq_len, block_table.shape[1], block_size) if num_blocks else 0
    row_blocks = cdiv(min(max_query_len, tokens) * group, sizes.shape.rows)
    if sizes.finds_requests:
        row_blocks = tokens * group // sizes.shape.rows + block_table.shape[0]
    num_splits = 1
    if not scheduled:
        filled = row_blocks * block_table.shape[0]
        if sizes.finds_requests:  # estimate: the last row block of every second request is empty
            filled = cdiv(tokens * group, sizes.shape.rows) + (block_table.shape[0] - 1) // 2
        programs = filled * kv_heads
        # the tokens of a row block attend at most this number of keys
        keys = min(max_keys, max_visible_len + sizes.shape.rows // group)
        num_splits = 1 if undivided else _num_splits(programs, tokens * heads, whole_tiles(keys), sizes.resident)
        long_enough = keys >= LEAST_KEYS_OF_MANY or width <= MOST_NARROW_COLUMNS
        if num_splits == 1 and not sizes.finds_requests and long_enough:
            sizes = launch_sizes(*given, many=True)
    written = out
    if (scheduled or num_splits > 1) and not out.is_contiguous():  # the combine kernel needs a contiguous tensor
        written = torch.empty(q.shape, dtype=out_dtype, device=q.device)
    call = PagedCall.of(
        q, kv_cache, block_table, seq_lens, query_start_loc, visible_lens, first_visible, written, lse,
        scores_of(q, softmax_scale, soft_cap, alibi_slopes, sinks, k_scale, v_scale, q_scale), cache_format,
    )  # fmt: skip
    if scheduled:
        partials = launch_scheduled(
            call, sizes, tile_ranges, split_offsets, batch_invariant, split_rule, row_blocks, max_query_len, max_keys
        )
    else:
        partials = _launch(call, sizes, row_blocks, num_splits, max_query_len, max_keys)
    combine_partial_outputs(
        *partials, call.batch.query_start_loc, max_query_len, tile_ranges, split_offsets, batch_invariant, written, lse,
        call.scores.sinks, padding_tokens=True,
    )  # fmt: skip
    if written is not out:
        out.copy_(written)
    return out, lse


def _launch(
    call: PagedCall, sizes: LaunchSizes, row_blocks: int, num_splits: int, max_query_len: int, max_keys: int
) -> tuple[Tensor, Tensor]:
    """Launch the kernel of this module.

    Args:
        call: tensors, scores and strides.
        sizes: launch sizes.
        row_blocks: number of row blocks of all requests, or of each request (`_gqa_paged_kernel`).
        num_splits: number of splits of each request.
        max_query_len: upper bound of the query tokens of a request.
        max_keys: upper bound of the keys of a request.

    Returns:
        Partial outputs and partial LSEs, flat; empty if each request has one split. `fast.kernels.combine.kernels`
        defines their layout.
    """
    tokens, heads, width = call.sources.q.shape
    requests, kv_heads = call.batch.block_table.shape[0], sizes.constants.KV_HEADS
    programs = row_blocks * kv_heads * num_splits * (1 if sizes.finds_requests else requests)
    rows = num_splits * tokens * heads if num_splits > 1 else 0
    partial_out = torch.empty(rows * width, dtype=torch.float32, device=call.out.device)
    partial_lse = torch.empty(2 * rows, dtype=torch.float32, device=call.out.device)
    # with splits, the combine kernel writes the padding tokens
    padding_programs = cdiv(tokens, PADDING_TOKENS) if num_splits == 1 else 0
    k_boxes, v_boxes = box_descriptors(call.sources.k, call.sources.v, sizes.constants)
    sizes = sizes._replace(constants=sizes.constants._replace(BULK_COPY=k_boxes is not None))
    with device_of(call.out):
        launch(
            _gqa_paged_kernel, (programs + padding_programs,),
            call.sources, *call.batch, *call.scores, Outputs(call.out, call.lse, partial_out, partial_lse),
            k_boxes, v_boxes, tokens, requests, call.sources.k.shape[0], max_query_len, max_keys, num_splits,
            row_blocks, programs, call.strides, *call.batch.block_table.stride(),
            FIND_REQUEST=sizes.finds_requests, SPLIT=num_splits > 1, PADDING_TOKENS=PADDING_TOKENS, **sizes.options,
        )  # fmt: skip
    return partial_out, partial_lse


@functools.lru_cache(maxsize=4096)
def _num_splits(programs: int, rows: int, keys: int, resident: int) -> int:
    """Return `best_splits` with the costs of this kernel."""
    return best_splits(programs, rows, keys, resident, PROGRAM_COST, COMBINE_COST, ROWS_COMBINED_PER_KEY)
