"""Load what a work item multiplies: rows of queries and pages of the cache, and which keys each row sees."""

from __future__ import annotations

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

from .own_length import TILE, ceil_div
from .records import PageWalk, Rows, Visibility
from .work_items import row_block_of


@gluon.jit
@no_type_check
def rows_at(block, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the rows [ROWS] of a row block."""
    number = gl.arange(0, ROWS, LAYOUT)
    first = block.number * ROWS
    if block.num_heads % ROWS == 0:  # all of one token: a thread computes one row, and steps to the others
        token = block.query_start + first // block.num_heads + number * 0
        head, bounded = first % block.num_heads + number, first + number * 0
    else:
        token = block.query_start + (first + number) // block.num_heads
        head, bounded = (first + number) % block.num_heads, first + number
    return Rows(first + number, token, head, (token < block.query_end) & (bounded < block.request_rows))


@gluon.jit
@no_type_check
def prefetch_queries(
    item, queries, sizes, ROWS: gl.constexpr, HEADS: gl.constexpr, FIRST: gl.constexpr, COLUMNS: gl.constexpr,
    ROPE: gl.constexpr,
):  # fmt: skip
    """Issue the loads of a work item's queries into shared memory: COLUMNS latent columns from FIRST on, and ROPE more.

    They pass no register, so that a warp group goes on meanwhile; `async_copy.wait_group` waits for them.
    """
    SPAN: gl.constexpr = COLUMNS if COLUMNS < 256 else 256
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // SPAN, SPAN // 8], [4, 1], [1, 0])
    NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    block, strides = row_block_of(item, sizes, HEADS), queries.strides
    latents = queries.q_latent.index(0).slice(FIRST, COLUMNS, dim=1)
    _copy_rows(queries.ql_nope, latents, block, strides.latent_token, strides.latent_head, ROWS, FIRST, COLUMNS, WIDE)
    if ROPE > 0:
        _copy_rows(
            queries.q_pe, queries.q_rope.index(0), block, strides.rope_token, strides.rope_head, ROWS, 0, ROPE, NARROW
        )
    async_copy.commit_group()


@gluon.jit
@no_type_check
def _copy_rows(
    source, shared, block, token_stride, head_stride, ROWS: gl.constexpr, FIRST: gl.constexpr, COLUMNS: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Copy COLUMNS columns of the rows from FIRST on; zeros for padding rows."""
    rows = rows_at(block, ROWS, gl.SliceLayout(1, LAYOUT))
    columns = FIRST + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    offsets = rows.token.to(gl.int64) * token_stride + rows.head.to(gl.int64) * head_stride
    pointers = source + offsets[:, None] + columns[None, :]
    async_copy.async_copy_global_to_shared(shared, pointers, mask=gl.expand_dims(rows.real, 1))


@gluon.jit
@no_type_check
def page_walk_of(item, block_table, strides):
    """Return where the pages of a work item stand in the block table."""
    table_row = block_table + item.request.to(gl.int64) * strides.table_row
    return PageWalk(table_row, strides.table_entry, gl.minimum(item.stop * TILE, item.length))


@gluon.jit
@no_type_check
def visible_keys(
    item, inputs, sizes, strides, ROWS: gl.constexpr, HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Load how many keys each row of a work item sees (all readable ones for padding rows), and its first pages."""
    rows = rows_at(row_block_of(item, sizes, HEADS), ROWS, LAYOUT)
    visible = gl.where(rows.real, gl.load(inputs.visible_lens + rows.token, mask=rows.real, other=0), item.length)
    table_row = inputs.block_table + gl.maximum(item.request, 0).to(gl.int64) * strides.table_row
    end_key = gl.minimum(item.stop * TILE, item.length)  # the table may end within a tile
    pages = PageWalk(table_row, strides.table_entry, end_key)
    return visible, _span_of_pages(item.begin * TILE // BLOCK_SIZE, pages, BLOCK_SIZE, 4)


@gluon.jit
@no_type_check
def _span_of_pages(start, pages, BLOCK_SIZE: gl.constexpr, NUM_WARPS: gl.constexpr):
    """Load as many page numbers as there are threads, from number `start` on."""
    entry = start + gl.arange(0, 32 * NUM_WARPS, gl.BlockedLayout([1], [32], [NUM_WARPS], [0]))
    last = ceil_div(pages.end_key, BLOCK_SIZE)
    return gl.load(pages.table_row + entry.to(gl.int64) * pages.table_stride, mask=entry < last, other=0)


@gluon.jit
@no_type_check
def visibility_of(
    item, visible, first_pages, table_row, sizes, strides, BLOCK_SIZE: gl.constexpr, BOUNDED: gl.constexpr
):
    """Return which keys the rows of a work item see; BOUNDED keeps the plain tiles within the item."""
    plain = gl.maximum(gl.min(visible, 0), 0) // TILE  # tiles that all rows see whole
    pages = PageWalk(table_row, strides.table_entry, gl.minimum(item.stop * TILE, item.length))
    in_cache = _all_in_cache(first_pages, item.begin, pages, sizes.num_blocks, BLOCK_SIZE, 4)
    if BOUNDED:
        plain = gl.minimum(plain, item.stop)
    plain = gl.where(in_cache, plain, item.begin)
    unsure = gl.where(in_cache, 0, item.length)
    return Visibility(visible, item.length, pages.table_row, pages.table_stride, sizes.num_blocks, unsure, plain)


@gluon.jit
@no_type_check
def _all_in_cache(first_pages, begin, pages, num_blocks, BLOCK_SIZE: gl.constexpr, NUM_WARPS: gl.constexpr):
    """Return whether all pages from a tile on, of which `first_pages` are loaded, lie in the cache."""
    SPAN: gl.constexpr = 32 * NUM_WARPS
    in_cache = ((first_pages >= 0) & (first_pages < num_blocks)).to(gl.int32)
    for start in range(begin * TILE // BLOCK_SIZE + SPAN, ceil_div(pages.end_key, BLOCK_SIZE), SPAN):
        first_pages = _span_of_pages(start, pages, BLOCK_SIZE, NUM_WARPS)
        in_cache = gl.where((first_pages >= 0) & (first_pages < num_blocks), in_cache, 0)
    return gl.min(in_cache, 0) > 0


@gluon.jit
@no_type_check
def page_of(key, pages, BLOCK_SIZE: gl.constexpr):
    """Return the page of a key; -1, which the copy engine fills with zeros, from `end_key` on."""
    page = gl.to_tensor(-1)
    if (key >= 0) & (key < pages.end_key):  # keys of tiles that only a hostile plan has may wrap
        page = gl.load(pages.table_row + gl.to_tensor(key // BLOCK_SIZE).to(gl.int64) * pages.table_stride)
    return page


@gluon.jit
@no_type_check
def load_columns(
    tile, page, pages, descriptor, buffers, first_buffer, full, BLOCK_SIZE: gl.constexpr, first_column,
    COLUMNS: gl.constexpr,
):  # fmt: skip
    """Issue the loads of some columns of a tile whose first key lies in `page`; zeros for keys in no page.

    A box of the descriptor holds one page, or 64 keys of it. Boxes lie in the buffers column by column, as the matrix
    unit takes a tile.
    """
    BOX_KEYS: gl.constexpr = descriptor.block_shape[1]
    BOX_COLUMNS: gl.constexpr = descriptor.block_shape[2]
    BOXES: gl.constexpr = TILE // BOX_KEYS
    for part in gl.static_range(BOXES):
        key = tile * TILE + part * BOX_KEYS
        if part > 0:
            page = page_of(key, pages, BLOCK_SIZE)
        for box in gl.static_range(COLUMNS // BOX_COLUMNS):
            tma.async_copy_global_to_shared(
                descriptor, [page, key % BLOCK_SIZE, first_column + box * BOX_COLUMNS], full,
                buffers.index(first_buffer + box * BOXES + part),
            )  # fmt: skip


@gluon.jit
@no_type_check
def zero_from(columns, first_row):
    """Write zeros to 64 columns in shared memory from a row on: nobody owns those bytes, and 0 * NaN is NaN."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, columns.shape[0], gl.SliceLayout(1, LAYOUT))
    columns.store(gl.where((row < first_row)[:, None], columns.load(LAYOUT), 0.0))
