"""Functions of the attention kernels of grouped-query attention: find the rows of a program, and write results."""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from ...combine.states import LN_2, RowState, add_sinks
from .records import KeySource, RowBlock
from .tiles import keys_of_rows


@triton.jit
@no_type_check  # otherwise the tests' type checker wraps the kernel, and Triton's interpreter finds no module globals
def offset_of(offsets, request, limit):
    """Return the first token of a request, clamped to [0, limit], so that a wrong offset stays inside the tensors."""
    return tl.minimum(tl.maximum(tl.load(offsets + request), 0), limit)


@triton.jit
@no_type_check
def find_request(query_start_loc, num_requests, num_tokens, number, c):
    """Return the request that a row block belongs to, and the first row of the row block in this request.

    The row blocks of all requests are numbered. The first row block of request b has the number
    query_start_loc[b] * GROUP // ROWS + b. With these numbers, a request gets the row blocks that its rows fill, and
    sometimes one more, which stays empty. The numbers increase with b, so a bisection finds the last request whose
    first row block has at most the number `number`.
    """
    low = 0
    high = num_requests - 1
    while low < high:
        middle = (low + high + 1) // 2
        if offset_of(query_start_loc, middle, num_tokens) * c.GROUP // c.ROWS + middle <= number:
            low = middle
        else:
            high = middle - 1
    return low, (number - (offset_of(query_start_loc, low, num_tokens) * c.GROUP // c.ROWS + low)) * c.ROWS


@triton.jit
@no_type_check
def rows_from(first_row, query_start, query_end, kv_head, c):
    """Return the `RowBlock` of a request whose tokens are [query_start, query_end), from row `first_row` on."""
    row = first_row + tl.arange(0, c.ROWS)
    token = query_start + row // c.GROUP
    return RowBlock(token, kv_head * c.GROUP + row % c.GROUP, (row >= 0) & (token < query_end), kv_head)


@triton.jit
@no_type_check
def cached_keys(rows, visible_lens, first_visible, readable, query_start, max_query_len, c):
    """Return the `RowKeys` of rows that attend cached keys.

    Args:
        rows: the row block.
        visible_lens: pointer to the index after the last key of each query token.
        first_visible: pointer to the first key of each query token; None without windows.
        readable: number of keys of the request that may be read.
        query_start: first query token of the request.
        max_query_len: query tokens of the request from this number on attend no key.
        c: compile-time constants of the kernel.
    """
    attends = rows.real & (rows.token - query_start < max_query_len)
    visible = tl.load(visible_lens + rows.token, mask=attends, other=0)
    first = tl.zeros_like(visible)
    if first_visible is not None:
        first = tl.load(first_visible + rows.token, mask=attends, other=0)
    return keys_of_rows(first, tl.minimum(visible, readable), visible - 1, rows.real, c)


@triton.jit
@no_type_check
def cached_source(sources, block_table, request, kv_head, num_blocks, row_stride, table_stride, strides):
    """Return the `KeySource` of a request and a KV head in the paged cache."""
    head = kv_head.to(tl.int64)
    return KeySource(
        sources.k + head * strides.k_head, sources.v + head * strides.v_head,
        block_table + request.to(tl.int64) * row_stride, table_stride, num_blocks, 0, kv_head,
    )  # fmt: skip


@triton.jit
@no_type_check
def _with_value_scale(state, scores, c):
    """Return a state whose values are multiplied by the scale of the values."""
    weighted = state.weighted
    if c.E4M3:
        weighted = weighted * tl.load(scores.v_scale)
    return RowState(state.largest, state.total, weighted)


@triton.jit
@no_type_check
def write_rows(state, rows, outputs, num_tokens, scores, strides, c):
    """Write the output and the LSE of a row block, from the state over all keys; add the attention sinks first."""
    state = _with_value_scale(state, scores, c)
    if scores.sinks is not None:
        state = add_sinks(state, scores.sinks, rows.head, rows.real)
    divisor = tl.where(state.total == 0, 1.0, state.total)  # a row without keys gets output 0 and LSE -inf
    columns = tl.arange(0, c.COLUMNS)
    places = rows.token.to(tl.int64) * strides.out_token + rows.head.to(tl.int64) * strides.out_head
    tl.store(
        outputs.out + places[:, None] + (columns.to(tl.int64) * strides.out_column)[None, :],
        (state.weighted / divisor[:, None]).to(outputs.out.dtype.element_ty),
        mask=rows.real[:, None] & (columns < c.DIM)[None, :],
    )
    natural = (state.largest + tl.log2(divisor)) * LN_2
    tl.store(outputs.lse + rows.head.to(tl.int64) * num_tokens + rows.token, natural, mask=rows.real)


@triton.jit
@no_type_check
def write_partial(state, rows, row, num_rows, outputs, scores, c):
    """Write the partial output and the partial LSE of one split.

    Args:
        state: state of the rows over the keys of the split.
        rows: the row block.
        row: [ROWS], row of the partial outputs in which each result is stored, as a 64-bit integer.
        num_rows: number of rows of all partial outputs, as a 64-bit integer.
        outputs: the `Outputs` of the kernel, with partial outputs of `num_rows` rows.
        scores: the `Scores` of the kernel.
        c: compile-time constants of the kernel.
    """
    state = _with_value_scale(state, scores, c)
    columns = tl.arange(0, c.COLUMNS)
    tl.store(outputs.partial_lse + row, state.largest, mask=rows.real)
    tl.store(outputs.partial_lse + num_rows + row, state.total, mask=rows.real)
    tl.store(
        outputs.partial_out + (row * c.DIM)[:, None] + columns[None, :],
        state.weighted,
        mask=rows.real[:, None] & (columns < c.DIM)[None, :],
    )


@triton.jit
@no_type_check
def write_padding(number, query_end, num_tokens, outputs, strides, c, TOKENS: tl.constexpr):
    """Write output 0 and LSE -inf of the tokens [number * TOKENS, (number + 1) * TOKENS) behind the last request.

    Args:
        number: number of the program among the programs that write padding tokens.
        query_end: end of the last request; the padding tokens follow.
        num_tokens: number of all tokens.
        outputs: the `Outputs` of the kernel.
        strides: strides of the output.
        c: compile-time constants of the kernel.
        TOKENS: tokens of a program.
    """
    columns = tl.arange(0, c.COLUMNS)
    heads = tl.arange(0, c.ROWS)
    zeros = tl.zeros([heads.shape[0], columns.shape[0]], outputs.out.dtype.element_ty)
    empty = tl.full([heads.shape[0]], float("-inf"), tl.float32)
    for token in tl.range(tl.maximum(query_end, number * TOKENS), tl.minimum(num_tokens, (number + 1) * TOKENS)):
        for first in range(0, c.GROUP * c.KV_HEADS, c.ROWS):
            head = first + heads
            inside = head < c.GROUP * c.KV_HEADS
            same_token = (token + tl.zeros_like(head)).to(tl.int64)
            places = same_token * strides.out_token + head.to(tl.int64) * strides.out_head
            pointers = outputs.out + places[:, None] + (columns.to(tl.int64) * strides.out_column)[None, :]
            tl.store(pointers, zeros, mask=inside[:, None] & (columns < c.DIM)[None, :])
            tl.store(outputs.lse + head.to(tl.int64) * num_tokens + same_token, empty, mask=inside)
