"""Loads for a work item: rows of queries, tiles of the cache, and the number of keys that each row sees.

A work item is consecutive tiles (64 keys each) of one request, for one row block (16, 32 or 64 rows). A row is one
(query token, head) pair. Tiles are loaded with TMA, the GPU's bulk copy engine. TMA copies boxes: 3-D regions of the
cache whose shape a descriptor fixes.
"""

from __future__ import annotations

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

from .own_length import TILE, ceil_div
from .records import BlockTableRow, Rows, Visibility
from .work_items import row_block_of


@gluon.jit
@no_type_check
def rows_at(block, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the `Rows` of a row block: tensors of shape [ROWS] in the layout LAYOUT."""
    number = gl.arange(0, ROWS, LAYOUT)
    first = block.number * ROWS
    if block.num_heads % ROWS == 0:  # all rows have the same token, so one division gives the token of all rows
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
    ROPE: gl.constexpr, FIRST_ROW: gl.constexpr,
):  # fmt: skip
    """Issue the loads of a work item's queries into shared memory.

    The copies are asynchronous: the calling warps continue, and wait for the copies later (`async_copy.wait_group`).
    Rows behind the last row of the request become zeros.

    Args:
        item: `WorkItem`.
        queries: `Queries`.
        sizes: `Sizes`.
        ROWS: rows to load: all rows of a row block, or an equal part of them, which `item.row_block` then counts.
        HEADS: N.
        FIRST: first latent column to load.
        COLUMNS: number of latent columns to load.
        ROPE: number of rope columns to load; 0 loads none.
        FIRST_ROW: row of the shared memory in which the first row is stored.
    """
    SPAN: gl.constexpr = COLUMNS if COLUMNS < 256 else 256
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // SPAN, SPAN // 8], [4, 1], [1, 0])
    NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    block, strides = row_block_of(item, sizes, HEADS), queries.strides
    latents = _some_rows(queries.q_latent.index(0), FIRST_ROW, ROWS).slice(FIRST, COLUMNS, dim=1)
    _copy_rows(queries.ql_nope, latents, block, strides.latent_token, strides.latent_head, ROWS, FIRST, COLUMNS, WIDE)
    if ROPE > 0:
        rope_parts = _some_rows(queries.q_rope.index(0), FIRST_ROW, ROWS)
        _copy_rows(queries.q_pe, rope_parts, block, strides.rope_token, strides.rope_head, ROWS, 0, ROPE, NARROW)
    async_copy.commit_group()


@gluon.jit
@no_type_check
def _some_rows(shared, FIRST_ROW: gl.constexpr, ROWS: gl.constexpr):
    """Return ROWS rows of shared memory, from row FIRST_ROW on."""
    if shared.shape[0] > ROWS:
        shared = shared.slice(FIRST_ROW, ROWS, dim=0)
    return shared


@gluon.jit
@no_type_check
def _copy_rows(
    source, shared, block, token_stride, head_stride, ROWS: gl.constexpr, FIRST: gl.constexpr, COLUMNS: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Issue the copy of COLUMNS columns, from column FIRST on; rows behind the last row of the request become zeros."""
    rows = rows_at(block, ROWS, gl.SliceLayout(1, LAYOUT))
    columns = FIRST + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    offsets = rows.token.to(gl.int64) * token_stride + rows.head.to(gl.int64) * head_stride
    pointers = source + offsets[:, None] + columns[None, :]
    async_copy.async_copy_global_to_shared(shared, pointers, mask=gl.expand_dims(rows.real, 1))


@gluon.jit
@no_type_check
def block_table_row_of(item, block_table, strides):
    """Return the `BlockTableRow` of the request of a work item; `end_key` is the end of the work item's keys."""
    table_row = block_table + item.request.to(gl.int64) * strides.table_row
    return BlockTableRow(table_row, strides.table_entry, gl.minimum(item.stop * TILE, item.length))


@gluon.jit
@no_type_check
def visible_keys(
    item, inputs, sizes, strides, ROWS: gl.constexpr, HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Load how many keys each row of a work item sees, and the numbers of the item's first 128 cache blocks.

    A row behind the last row of the request gets the number of all keys of the request, so that no tile is masked
    because of this row. Each of the 128 threads of the consumer loads the number of one cache block;
    `visibility_of` checks these numbers.
    """
    rows = rows_at(row_block_of(item, sizes, HEADS), ROWS, LAYOUT)
    visible = gl.where(rows.real, gl.load(inputs.visible_lens + rows.token, mask=rows.real, other=0), item.length)
    table_row = inputs.block_table + gl.maximum(item.request, 0).to(gl.int64) * strides.table_row
    end_key = gl.minimum(item.stop * TILE, item.length)  # the last tile may extend beyond the block table
    blocks = BlockTableRow(table_row, strides.table_entry, end_key)
    return visible, _load_block_numbers(item.begin * TILE // BLOCK_SIZE, blocks, BLOCK_SIZE, 4)


@gluon.jit
@no_type_check
def _load_block_numbers(start, blocks, BLOCK_SIZE: gl.constexpr, NUM_WARPS: gl.constexpr):
    """Load one entry of the block table per thread, from entry `start` on; entries behind the last key become 0."""
    entry = start + gl.arange(0, 32 * NUM_WARPS, gl.BlockedLayout([1], [32], [NUM_WARPS], [0]))
    last = ceil_div(blocks.end_key, BLOCK_SIZE)
    return gl.load(blocks.entries + entry.to(gl.int64) * blocks.stride, mask=entry < last, other=0)


@gluon.jit
@no_type_check
def visibility_of(
    item, visible, first_blocks, table_row, sizes, strides, BLOCK_SIZE: gl.constexpr, BOUNDED: gl.constexpr
):
    """Return the `Visibility` of a work item: the keys that its rows see, and the first tile whose scores need a mask.

    Args:
        item: `WorkItem`.
        visible: number of keys that each row sees, from `visible_keys`.
        first_blocks: numbers of the first cache blocks, from `visible_keys`.
        table_row: pointer to the request's row of the block table.
        sizes: `Sizes`.
        strides: `Strides`.
        BLOCK_SIZE: tokens of a cache block.
        BOUNDED: True limits `first_masked` of the result to the end of the work item.
    """
    first_masked = gl.maximum(gl.min(visible, 0), 0) // TILE  # number of tiles that every row sees completely
    blocks = BlockTableRow(table_row, strides.table_entry, gl.minimum(item.stop * TILE, item.length))
    in_cache = _all_in_cache(first_blocks, item.begin, blocks, sizes.num_blocks, BLOCK_SIZE, 4)
    if BOUNDED:
        first_masked = gl.minimum(first_masked, item.stop)
    first_masked = gl.where(in_cache, first_masked, item.begin)
    checked_keys = gl.where(in_cache, 0, item.length)
    return Visibility(visible, item.length, blocks.entries, blocks.stride, sizes.num_blocks, checked_keys, first_masked)


@gluon.jit
@no_type_check
def _all_in_cache(first_blocks, begin, blocks, num_blocks, BLOCK_SIZE: gl.constexpr, NUM_WARPS: gl.constexpr):
    """Return whether all block numbers of a work item are valid; this function loads those behind `first_blocks`."""
    SPAN: gl.constexpr = 32 * NUM_WARPS
    in_cache = ((first_blocks >= 0) & (first_blocks < num_blocks)).to(gl.int32)
    for start in range(begin * TILE // BLOCK_SIZE + SPAN, ceil_div(blocks.end_key, BLOCK_SIZE), SPAN):
        first_blocks = _load_block_numbers(start, blocks, BLOCK_SIZE, NUM_WARPS)
        in_cache = gl.where((first_blocks >= 0) & (first_blocks < num_blocks), in_cache, 0)
    return gl.min(in_cache, 0) > 0


@gluon.jit
@no_type_check
def cache_block_of(key, blocks, BLOCK_SIZE: gl.constexpr):
    """Return the number of the cache block that contains a key, or -1 if the key is `end_key` or later.

    A TMA load of block -1 fills shared memory with zeros.
    """
    cache_block = gl.to_tensor(-1)
    if (key >= 0) & (key < blocks.end_key):  # with invalid lengths, `key` may overflow int32 and become negative
        cache_block = gl.load(blocks.entries + gl.to_tensor(key // BLOCK_SIZE).to(gl.int64) * blocks.stride)
    return cache_block


@gluon.jit
@no_type_check
def load_columns(
    tile, cache_block, blocks, descriptor, buffers, first_buffer, full, BLOCK_SIZE: gl.constexpr, first_column,
    COLUMNS: gl.constexpr,
):  # fmt: skip
    """Issue the TMA loads of some columns of a tile into shared memory.

    A box holds all keys of one cache block, or 64 keys of a larger block. Keys without a cache block become zeros. In
    shared memory, all boxes of the first columns come first, then all boxes of the next columns. The matrix unit reads
    a tile in this layout.

    Args:
        tile: index of the tile.
        cache_block: cache block of the tile's first key.
        blocks: `BlockTableRow`, from which the other cache blocks of the tile are read.
        descriptor: TMA descriptor of the cache.
        buffers: shared memory, one box per index.
        first_buffer: index of the tile's first box.
        full: mbarrier that counts the bytes that TMA has written.
        BLOCK_SIZE: tokens of a cache block.
        first_column: first column of the cache to load.
        COLUMNS: number of columns to load.
    """
    BOX_KEYS: gl.constexpr = descriptor.block_shape[1]
    BOX_COLUMNS: gl.constexpr = descriptor.block_shape[2]
    BOXES: gl.constexpr = TILE // BOX_KEYS
    for key_box in gl.static_range(BOXES):
        key = tile * TILE + key_box * BOX_KEYS
        if key_box > 0:
            cache_block = cache_block_of(key, blocks, BLOCK_SIZE)
        for column_box in gl.static_range(COLUMNS // BOX_COLUMNS):
            tma.async_copy_global_to_shared(
                descriptor, [cache_block, key % BLOCK_SIZE, first_column + column_box * BOX_COLUMNS], full,
                buffers.index(first_buffer + column_box * BOXES + key_box),
            )  # fmt: skip


@gluon.jit
@no_type_check
def zero_from(columns, first_row):
    """Overwrite the rows of `columns` (64 columns of a tile in shared memory) with zeros, from `first_row` on.

    Each row of `columns` is one key. The keys from `first_row` on lie behind the end of the request. The cache may
    contain NaN there, and NaN times the probability 0 of such a key would be NaN.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, columns.shape[0], gl.SliceLayout(1, LAYOUT))
    ZERO: gl.constexpr = 0 if columns.dtype.is_int() else 0.0
    columns.store(gl.where((row < first_row)[:, None], columns.load(LAYOUT), ZERO))
