"""Which tiles of which request a program takes, and how they come into shared memory.

All warp groups of a program walk the same pieces, each for itself.
"""

from __future__ import annotations

import math
from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

TILE = gl.constexpr(64)  # keys
LN_2 = gl.constexpr(math.log(2))
LEAST = gl.constexpr(-3.4028234663852886e38)  # before any score: finite, so that no infinity is taken from another


@gluon.jit
@no_type_check
def ceil_div(a, b):
    """The quotient, rounded up."""
    return (a + b - 1) // b


@gluon.jit
@no_type_check
def follow_kernel():
    """Let the next kernel be launched already, and wait for the one before, whose launch let this one begin."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // dummy $0", "=r", [], gl.int32, is_pure=False, pack=1
    )
    gl.inline_asm_elementwise("griddepcontrol.wait; // dummy $0", "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
@no_type_check
def shift_of(largest, scale_log2):
    """What is taken from scaled scores; 0 where no key was seen yet, for LEAST may become an infinity when scaled."""
    return gl.where(largest == LEAST, 0.0, largest * scale_log2)


@gluon.jit
@no_type_check
def first_piece(cut, num_requests, row_blocks, MAX_SPLITS: gl.constexpr, SCHEDULED: gl.constexpr):
    """Where a program begins: place, first tile, split, and whether there is anything at all.

    A place is a request where a schedule says what each program takes. Else every request is cut into equally many
    parts, a place is one part of one block of rows, and programs take them in turn.
    """
    tile_ranges, _, _, _, _ = cut
    place = gl.program_id(0)
    first_tile, split = place * 0, place * 0
    if SCHEDULED:
        row = tile_ranges + place // row_blocks * 5
        place = gl.maximum(gl.load(row), 0)
        first_tile = gl.maximum(gl.load(row + 2), 0)
        split = gl.minimum(gl.maximum(gl.load(row + 4), 0), MAX_SPLITS)
    return place, first_tile, split, place <= _last_place(cut, num_requests, row_blocks, SCHEDULED)


@gluon.jit
@no_type_check
def _last_place(cut, num_requests, row_blocks, SCHEDULED: gl.constexpr):
    """Of the program, or of all; asked anew for each piece, as a register that is held through one is dear."""
    tile_ranges, _, num_splits, _, _ = cut
    if SCHEDULED:
        last_place = gl.minimum(gl.load(tile_ranges + gl.program_id(0) // row_blocks * 5 + 1), num_requests - 1)
    else:
        last_place = num_requests * num_splits * row_blocks - 1
    return last_place


@gluon.jit
@no_type_check
def _planned_end(place, length, cut, num_requests, row_blocks):
    """The tile at which the program's part of a request ends, as it was planned."""
    tiles = _planned_tiles(length)
    if place == _last_place(cut, num_requests, row_blocks, True):
        tiles = gl.minimum(gl.load(cut[0] + gl.program_id(0) // row_blocks * 5 + 3), tiles)
    return tiles


@gluon.jit
@no_type_check
def piece_at(
    walk, cut, lens, sizes, BLOCK_SIZE: gl.constexpr, EVEN_TILES: gl.constexpr, MAX_SPLITS: gl.constexpr,
    SCHEDULED: gl.constexpr,
):  # fmt: skip
    """A run of tiles of one request.

    Args:
        walk: place, first tile, split, and whether there is more.
        cut: tile ranges, split offsets, number of splits, slots of a request, all slots.
        lens: seq_lens and query_start_loc.
        sizes: tokens, requests, width of the block table, blocks of rows.
        BLOCK_SIZE: keys a page.
        EVEN_TILES: cuts lie at multiples of so many tiles; not those by a request's own length.
        MAX_SPLITS: of a request that is cut by its own length, or 0.
        SCHEDULED: whether a schedule cuts.

    Returns:
        Request, block of rows, split, its query tokens [start, end), its readable keys, tiles [begin, end), and whether
        the piece is one at all: such a one may still have no tiles, and writes that it found nothing.
    """
    place, first_tile, split, _ = walk
    _, _, num_splits, request_slots, _ = cut
    seq_lens, query_start_loc = lens
    num_tokens, num_requests, table_width, row_blocks = sizes
    if SCHEDULED:
        request, row_block = place, gl.program_id(0) % row_blocks
    else:
        request, row_block = place // row_blocks // num_splits, place % row_blocks
        split = place // row_blocks % num_splits
    query_start = gl.minimum(gl.maximum(gl.load(query_start_loc + request), 0), num_tokens)
    query_end = gl.minimum(gl.load(query_start_loc + request + 1), num_tokens)
    length = gl.maximum(gl.load(seq_lens + request), 0)
    readable = gl.minimum(length, table_width * BLOCK_SIZE)
    there = request >= 0
    if SCHEDULED:
        begin = first_tile
        end = _planned_end(place, length, cut, num_requests, row_blocks)
        if MAX_SPLITS > 0:
            end = gl.minimum(end, (split + 1) * _split_tiles(_planned_tiles(length), MAX_SPLITS))
            there = (begin < end) & (split < request_slots)  # of a length beyond the table, what lies there has no slot
        else:
            there = begin < end
            # those on both sides of a cut move it alike
            begin = begin // EVEN_TILES * EVEN_TILES
            end = gl.where(end < _planned_tiles(length), end // EVEN_TILES * EVEN_TILES, end)
    else:
        tiles = ceil_div(readable, TILE)
        split_tiles = EVEN_TILES * ceil_div(tiles, EVEN_TILES * num_splits)
        begin = gl.minimum(split * split_tiles, tiles)
        end = gl.minimum(begin + split_tiles, tiles)
    return request, row_block, split, query_start, query_end, readable, begin, end, there


@gluon.jit
@no_type_check
def next_piece(walk, cut, lens, sizes, end, MAX_SPLITS: gl.constexpr, SCHEDULED: gl.constexpr):
    """The walk after a piece that ended at tile `end`."""
    place, first_tile, split, _ = walk
    _, num_requests, _, row_blocks = sizes
    if SCHEDULED and MAX_SPLITS > 0:
        length = gl.maximum(gl.load(lens[0] + place), 0)
        done = end >= _planned_end(place, length, cut, num_requests, row_blocks)
        split = gl.where(done, 0, split + 1)
        first_tile = gl.where(done, 0, end)
        place = gl.where(done, place + 1, place)
    elif SCHEDULED:
        first_tile = first_tile * 0
        place += 1
    else:
        place += gl.num_programs(0)
    return place, first_tile, split, place <= _last_place(cut, num_requests, row_blocks, SCHEDULED)


@gluon.jit
@no_type_check
def _planned_tiles(length):
    """As `plan_decode` counts them; the longest length does not overflow."""
    return (gl.maximum(length, 1) - 1) // TILE + (length > 0).to(gl.int32)


@gluon.jit
@no_type_check
def _split_tiles(tiles, MAX_SPLITS: gl.constexpr):
    """Tiles of a split of a request that is cut by its own length, as `invariant_split_tiles` counts them."""
    return gl.maximum(ceil_div(tiles, MAX_SPLITS), gl.maximum(gl.minimum(ceil_div(tiles, 8), 32), 16))


@gluon.jit
@no_type_check
def rows_at(where, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """Rows of a request [ROWS], their tokens and heads, and which are real.

    `where` is query start and end, block of rows, rows of a request, all tokens, heads.
    """
    query_start, query_end, row_block, request_rows, _, num_heads = where
    row = row_block * ROWS + gl.arange(0, ROWS, LAYOUT)
    token = query_start + row // num_heads
    return row, token, row % num_heads, (token < query_end) & (row < request_rows)


@gluon.jit
@no_type_check
def load_queries(
    source, where, token_stride, head_stride, ROWS: gl.constexpr, FIRST: gl.constexpr, COLUMNS: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """COLUMNS columns of the rows' queries from FIRST on; rows that are nobody's are zeros."""
    _, token, head, real = rows_at(where, ROWS, gl.SliceLayout(1, LAYOUT))
    columns = FIRST + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    offsets = token.to(gl.int64) * token_stride + head.to(gl.int64) * head_stride
    return gl.load(source + offsets[:, None] + columns[None, :], mask=real[:, None], other=0.0)


@gluon.jit
@no_type_check
def slot_of(request, first_tile, split, row_blocks, request_slots, MAX_SPLITS: gl.constexpr):
    """Where a scheduled part lies for the merge (`fast.kernels.triton.decode_merge`)."""
    slot = 2 * (gl.program_id(0) // row_blocks) + (first_tile == 0).to(gl.int32)
    if MAX_SPLITS > 0:
        slot = request * request_slots + split
    return slot


@gluon.jit
@no_type_check
def part_rows(slot, where, ROWS: gl.constexpr, LAYOUT: gl.constexpr, SCHEDULED: gl.constexpr):
    """Where a part's rows lie among those of all parts, how many a slot has, and which are real."""
    request_rows, num_tokens, num_heads = where[3], where[4], where[5]
    row, token, head, real = rows_at(where, ROWS, LAYOUT)
    if SCHEDULED:
        slot_rows = request_rows
    else:
        row, slot_rows = token * num_heads + head, num_tokens * num_heads
    return slot.to(gl.int64) * slot_rows + row, slot_rows, real


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
    BLOCK_SIZE: gl.constexpr, FIRST_COLUMN: gl.constexpr, COLUMNS: gl.constexpr,
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
                pages, [page, key % BLOCK_SIZE, FIRST_COLUMN + box * BOX_COLUMNS], full,
                buffers.index(first_buffer + box * PARTS + part),
            )  # fmt: skip


@gluon.jit
@no_type_check
def pages_held(
    begin, end, table_row, table_stride, num_blocks, BLOCK_SIZE: gl.constexpr, NUM_WARPS: gl.constexpr
):  # fmt: skip
    """Of all pages of the tiles [begin, end): 1 for those that lie in the cache, 0 for others, folded to one span."""
    SPAN: gl.constexpr = 32 * NUM_WARPS
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [NUM_WARPS], [0])
    first, last = begin * TILE // BLOCK_SIZE, ceil_div(end * TILE, BLOCK_SIZE)
    held = gl.full([SPAN], 1, gl.int32, layout)
    for start in range(first, last, SPAN):
        entry = start + gl.arange(0, SPAN, layout)
        page = gl.load(table_row + entry.to(gl.int64) * table_stride, mask=entry < last, other=0)
        held = gl.where((page >= 0) & (page < num_blocks), held, 0)
    return held
