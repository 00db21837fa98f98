"""What a piece multiplies and where its results go: rows of queries, pages of the cache, slots of parts."""

from __future__ import annotations

import math
from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

from ...combine.kernels import REFERENCE_GROWTH
from .work_items import TILE, ceil_div, rows_of, tiles_of

LN_2 = gl.constexpr(math.log(2))
STAYS = gl.constexpr("evict_last")  # what is read again soon: in the L2, while the cache streams by
LEAST = gl.constexpr(-3.4028234663852886e38)  # before any score: finite, so that no infinity is taken from another


@gluon.jit
@no_type_check
def shift_of(largest, scale_log2):
    """What is taken from scaled scores; 0 where no key was seen yet, for LEAST may become an infinity when scaled."""
    return gl.where(largest == LEAST, 0.0, largest * scale_log2)


@gluon.jit
@no_type_check
def rows_at(where, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """Rows of a request [ROWS], their tokens and heads, and which are real.

    `where` is query start and end, block of rows, rows of a request, all tokens, heads.
    """
    query_start, query_end, row_block, request_rows, _, num_heads = where
    number = gl.arange(0, ROWS, LAYOUT)
    first = row_block * ROWS
    if num_heads % ROWS == 0:  # all of one token: a thread works out one row, and steps to the others
        token = query_start + first // num_heads + number * 0
        head, bounded = first % num_heads + number, first + number * 0
    else:
        token = query_start + (first + number) // num_heads
        head, bounded = (first + number) % num_heads, first + number
    return first + number, token, head, (token < query_end) & (bounded < request_rows)


@gluon.jit
@no_type_check
def ask_queries(
    note, queries, sizes, ROWS: gl.constexpr, HEADS: gl.constexpr, FIRST: gl.constexpr, COLUMNS: gl.constexpr,
    ROPE: gl.constexpr,
):  # fmt: skip
    """Ask for a piece's queries into shared memory: COLUMNS columns of their latents from FIRST on, and ROPE others.

    They pass no register, so that a warp group goes on meanwhile; `async_copy.wait_group` waits for them.
    """
    ql_nope, q_pe, q_latent, q_rope, latent_token_stride, latent_head_stride, rope_token_stride, rope_head_stride = (
        queries
    )
    SPAN: gl.constexpr = COLUMNS if COLUMNS < 256 else 256
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // SPAN, SPAN // 8], [4, 1], [1, 0])
    NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    where = rows_of(note, sizes, HEADS)
    latents = q_latent.index(0).slice(FIRST, COLUMNS, dim=1)
    _copy_rows(ql_nope, latents, where, latent_token_stride, latent_head_stride, ROWS, FIRST, COLUMNS, WIDE)
    if ROPE > 0:
        _copy_rows(q_pe, q_rope.index(0), where, rope_token_stride, rope_head_stride, ROWS, 0, ROPE, NARROW)
    async_copy.commit_group()


@gluon.jit
@no_type_check
def _copy_rows(
    source, shared, where, token_stride, head_stride, ROWS: gl.constexpr, FIRST: gl.constexpr, COLUMNS: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Copy COLUMNS columns of the rows from FIRST on; zeros for rows that are nobody's."""
    _, token, head, real = rows_at(where, ROWS, gl.SliceLayout(1, LAYOUT))
    columns = FIRST + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    offsets = token.to(gl.int64) * token_stride + head.to(gl.int64) * head_stride
    pointers = source + offsets[:, None] + columns[None, :]
    async_copy.async_copy_global_to_shared(shared, pointers, mask=gl.expand_dims(real, 1))


@gluon.jit
@no_type_check
def partial_rows_of(slot, where, ROWS: gl.constexpr, LAYOUT: gl.constexpr, OF_REQUEST: gl.constexpr):
    """Where a part's rows lie among those of all parts, how many a slot has (a request's, or all), which are real."""
    request_rows, num_tokens, num_heads = where[3], where[4], where[5]
    row, token, head, real = rows_at(where, ROWS, LAYOUT)
    if OF_REQUEST:
        partial_rows = request_rows
    else:
        row, partial_rows = token * num_heads + head, num_tokens * num_heads
    return slot.to(gl.int64) * partial_rows + row, partial_rows, real


@gluon.jit
@no_type_check
def combine_weights(before, largest):
    """Of two parts of rows, one after the other: the new reference (base 2), and what the values of each are scaled by.

    Step for step as `add_partial` of `fast.kernels.combine`: the bits must not tell which of both folded.
    """
    grown = largest > before + REFERENCE_GROWTH
    reference = gl.where(grown, largest, before)
    old = gl.where(grown, gl.exp2(before - gl.where(grown, largest, 0.0)), 1.0)
    new = gl.where(grown, 1.0, gl.exp2(largest - gl.where(before == float("-inf"), 0.0, before)))
    return reference, old, new


@gluon.jit
@no_type_check
def seen_at(
    note, block_table, visible_lens, sizes, strides, ROWS: gl.constexpr, HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """How many keys the rows of a piece see, as many as are readable where a row is nobody's, and its first pages."""
    request, length, begin, stop = tiles_of(note)
    table_row_stride, table_stride = strides[4], strides[5]
    _, token, _, real = rows_at(rows_of(note, sizes, HEADS), ROWS, LAYOUT)
    visible = gl.where(real, gl.load(visible_lens + token, mask=real, other=0), length)
    table_row = block_table + gl.maximum(request, 0).to(gl.int64) * table_row_stride
    end_key = gl.minimum(stop * TILE, length)  # the table may end within a tile
    return visible, _span_of_pages(begin * TILE // BLOCK_SIZE, end_key, table_row, table_stride, BLOCK_SIZE, 4)


@gluon.jit
@no_type_check
def _span_of_pages(start, end_key, table_row, table_stride, BLOCK_SIZE: gl.constexpr, NUM_WARPS: gl.constexpr):
    entry = start + gl.arange(0, 32 * NUM_WARPS, gl.BlockedLayout([1], [32], [NUM_WARPS], [0]))
    last = ceil_div(end_key, BLOCK_SIZE)
    return gl.load(table_row + entry.to(gl.int64) * table_stride, mask=entry < last, other=0)


@gluon.jit
@no_type_check
def pages_held(
    pages, begin, end_key, table_row, table_stride, num_blocks, BLOCK_SIZE: gl.constexpr, NUM_WARPS: gl.constexpr
):  # fmt: skip
    """Whether all pages from a tile to a key, the first of which are `pages`, lie in the cache."""
    SPAN: gl.constexpr = 32 * NUM_WARPS
    held = ((pages >= 0) & (pages < num_blocks)).to(gl.int32)
    for start in range(begin * TILE // BLOCK_SIZE + SPAN, ceil_div(end_key, BLOCK_SIZE), SPAN):
        pages = _span_of_pages(start, end_key, table_row, table_stride, BLOCK_SIZE, NUM_WARPS)
        held = gl.where((pages >= 0) & (pages < num_blocks), held, 0)
    return gl.min(held, 0) > 0


@gluon.jit
@no_type_check
def page_of(key, end_key, table_row, table_stride, BLOCK_SIZE: gl.constexpr):
    """The page of a key; none, which the copy engine fills with zeros, from `end_key` on."""
    page = gl.to_tensor(-1)
    if (key >= 0) & (key < end_key):  # of tiles that only a hostile plan has, keys wrap
        page = gl.load(table_row + gl.to_tensor(key // BLOCK_SIZE).to(gl.int64) * table_stride)
    return page


@gluon.jit
@no_type_check
def load_columns(
    tile, end_key, page, table_row, table_stride, pages, buffers, first_buffer, full,
    BLOCK_SIZE: gl.constexpr, first_column, COLUMNS: gl.constexpr,
):  # fmt: skip
    """Fetch some columns of a tile, whose first key lies in `page`; zeros for keys from `end_key` and in no page.

    A box of the descriptor holds one page, or 64 keys of it. Boxes lie in the buffers column by column, as the matrix
    unit takes a tile.
    """
    BOX_KEYS: gl.constexpr = pages.block_shape[1]
    BOX_COLUMNS: gl.constexpr = pages.block_shape[2]
    PARTS: gl.constexpr = TILE // BOX_KEYS
    for part in gl.static_range(PARTS):
        key = tile * TILE + part * BOX_KEYS
        if part > 0:
            page = page_of(key, end_key, table_row, table_stride, BLOCK_SIZE)
        for box in gl.static_range(COLUMNS // BOX_COLUMNS):
            tma.async_copy_global_to_shared(
                pages, [page, key % BLOCK_SIZE, first_column + box * BOX_COLUMNS], full,
                buffers.index(first_buffer + box * PARTS + part),
            )  # fmt: skip


@gluon.jit
@no_type_check
def zero_from(part, first_row):
    """Zeros from a row on of 64 columns in shared memory: nobody owns those bytes, and 0 * NaN is NaN."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, part.shape[0], gl.SliceLayout(1, LAYOUT))
    part.store(gl.where((row < first_row)[:, None], part.load(LAYOUT), 0.0))
