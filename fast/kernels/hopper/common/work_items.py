"""Work items: which tiles of which request a program takes, one item after the other.

The producer walks the work items and writes each to shared memory before the consumers need it.

An item of a request that is split by its own length is a run of splits. If the item begins with the request's first
split, its program combines each split with those before. Of any other item each split is a partial output by itself:
only the program with the splits before may combine it with them. So the order of the sums does not depend on how many
programs there are.
"""

from __future__ import annotations

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .arrivals import arrive
from .own_length import TILE, ceil_div, own_splits, planned_tiles, record_progress
from .records import FoundItem, RequestLens, RowBlock, Walk, WorkItem

ITEMS_HELD = gl.constexpr(2)  # in shared memory: this item and the next
ITEM_FIELDS = gl.constexpr(9)


@gluon.jit
@no_type_check
def start_walk(plan, sizes, SCHEDULED: gl.constexpr, SLICES: gl.constexpr):
    """Return where a program begins.

    With a schedule, a place is a request. Otherwise every request has equally many splits, a place is one split of one
    row block, and programs take places in turn, SLICES programs each.
    """
    place = gl.program_id(0) // SLICES
    first_tile, split = place * 0, place * 0
    if SCHEDULED:
        row = plan.tile_ranges + place // sizes.row_blocks * 5
        place = gl.maximum(gl.load(row), 0)
        first_tile = gl.maximum(gl.load(row + 2), 0)
        split = gl.maximum(gl.load(row + 4), 0)
    return Walk(place, first_tile, split, place <= _last_place(plan, sizes, SCHEDULED))


@gluon.jit
@no_type_check
def _last_place(plan, sizes, SCHEDULED: gl.constexpr):
    """Return the last place of this program (scheduled) or of the grid.

    Reloaded for every work item: keeping it would cost a register.
    """
    if SCHEDULED:
        row = plan.tile_ranges + gl.program_id(0) // sizes.row_blocks * 5
        last_place = gl.minimum(gl.load(row + 1), sizes.num_requests - 1)
    else:
        last_place = sizes.num_requests * plan.num_splits * sizes.row_blocks - 1
    return last_place


@gluon.jit
@no_type_check
def _planned_end(place, length, plan, sizes):
    """Return the tile at which the program's tiles of a request end, as the schedule has them."""
    tiles = planned_tiles(length)
    if place == _last_place(plan, sizes, True):
        tiles = gl.minimum(gl.load(plan.tile_ranges + gl.program_id(0) // sizes.row_blocks * 5 + 3), tiles)
    return tiles


@gluon.jit
@no_type_check
def lens_of(request, inputs, sizes):
    """Load the lengths of a request."""
    query_start = gl.minimum(gl.maximum(gl.load(inputs.query_start_loc + request), 0), sizes.num_tokens)
    query_end = gl.minimum(gl.load(inputs.query_start_loc + request + 1), sizes.num_tokens)
    length = gl.maximum(gl.load(inputs.seq_lens + request), 0)
    return RequestLens(query_start, query_end, length, gl.minimum(length, sizes.max_keys))


@gluon.jit
@no_type_check
def item_at(walk, plan, inputs, sizes, EVEN_TILES: gl.constexpr, BY_LENGTH: gl.constexpr, SCHEDULED: gl.constexpr):
    """Return the work item at a place, and whether it is one at all: an item may have no tiles and then writes zeros.

    Args:
        walk: the place.
        plan: how requests are split.
        inputs: for the lengths of requests.
        sizes: of the batch.
        EVEN_TILES: splits begin at multiples of so many tiles; not those by a request's own length.
        BY_LENGTH: whether requests are split by their own length.
        SCHEDULED: whether a schedule splits them.
    """
    split = walk.split
    if SCHEDULED:
        request, row_block = walk.place, gl.program_id(0) % sizes.row_blocks
    else:
        request, row_block = walk.place // sizes.row_blocks // plan.num_splits, walk.place % sizes.row_blocks
        split = walk.place // sizes.row_blocks % plan.num_splits
    if not BY_LENGTH:  # here, so that its loads wait together with the others
        partial = _partial_index(request, split, plan, SCHEDULED)
    lens = lens_of(request, inputs, sizes)
    there = request >= 0
    split_tiles = request * 0
    if BY_LENGTH:
        split_tiles, splits = own_splits(lens, plan)
        if SCHEDULED:
            begin = walk.first_tile
            end = gl.minimum(_planned_end(walk.place, lens.length, plan, sizes), splits * split_tiles)
            there = begin < end
        else:
            item_tiles = ceil_div(splits, plan.num_splits) * split_tiles
            begin, end = split * item_tiles, gl.minimum((split + 1) * item_tiles, splits * split_tiles)
            there = begin < end
        partial = record_progress(request, row_block, begin, end, there, split_tiles, splits, plan, sizes.num_requests)
    elif SCHEDULED:
        begin = walk.first_tile
        end = _planned_end(walk.place, lens.length, plan, sizes)
        there = begin < end
        # programs on both sides of a boundary move it alike
        begin = begin // EVEN_TILES * EVEN_TILES
        end = gl.where(end < planned_tiles(lens.length), end // EVEN_TILES * EVEN_TILES, end)
    else:
        tiles = ceil_div(lens.readable, TILE)
        split_tiles = EVEN_TILES * ceil_div(tiles, EVEN_TILES * plan.num_splits)
        begin = gl.minimum(split * split_tiles, tiles)
        end = gl.minimum(begin + split_tiles, tiles)
    return FoundItem(
        WorkItem(request, row_block, lens.query_start, lens.query_end, lens.readable, begin, end, partial, split_tiles),
        there,
    )


@gluon.jit
@no_type_check
def _partial_index(request, split, plan, SCHEDULED: gl.constexpr):
    """Return the partial index of a work item; -1 where its rows are whole."""
    if SCHEDULED:
        first_split = gl.load(plan.split_offsets + request)
        partial = first_split + split
        splits = gl.load(plan.split_offsets + request + 1) - first_split
        # offsets and splits that nobody planned may lie anywhere
        partial = gl.where(splits <= 1, -1, gl.minimum(gl.maximum(partial, 0), plan.num_partials - 1))
    else:
        partial = gl.where(plan.num_splits <= 1, -1, split)
    return partial


@gluon.jit
@no_type_check
def next_place(walk, plan, sizes, SCHEDULED: gl.constexpr, SLICES: gl.constexpr):
    """Return the walk after a place."""
    place, first_tile, split = walk.place, walk.first_tile, walk.split
    if SCHEDULED:
        first_tile, split = first_tile * 0, split * 0
        place += 1
    else:
        place += gl.num_programs(0) // SLICES
    return Walk(place, first_tile, split, place <= _last_place(plan, sizes, SCHEDULED))


@gluon.jit
@no_type_check
def seek_item(
    walk, plan, inputs, sizes, EVEN_TILES: gl.constexpr, ROWS: gl.constexpr, HEADS: gl.constexpr,
    BY_LENGTH: gl.constexpr, SCHEDULED: gl.constexpr, SLICES: gl.constexpr,
):  # fmt: skip
    """Return the first work item from a place on, and the walk there."""
    none = walk.place * 0  # no query tokens and no tiles, so that nothing is read for it
    item = WorkItem(none - 1, none, none, none, none, none, none, none, none)
    searching = walk.more
    while searching:
        found = item_at(walk, plan, inputs, sizes, EVEN_TILES, BY_LENGTH, SCHEDULED)
        new = found.item
        if found.there & (new.query_start + new.row_block * ROWS // HEADS < new.query_end):
            stop = gl.minimum(new.stop, ceil_div(new.length, TILE))  # a planned length may lie beyond `max_keys`
            item = WorkItem(
                new.request, new.row_block, new.query_start, new.query_end, new.length, new.begin, stop, new.partial,
                new.split_tiles,
            )  # fmt: skip
            searching = new.request < 0
        else:
            walk = next_place(walk, plan, sizes, SCHEDULED, SLICES)
            searching = walk.more
    return walk, item


@gluon.jit
@no_type_check
def write_item(items, number, item, item_written):
    """Hand work item `number` to the consumers."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    for i in gl.static_range(ITEM_FIELDS):
        items.index(number % ITEMS_HELD * ITEM_FIELDS + i).store(gl.full([1], item[i], gl.int32, layout))
    arrive(item_written)


@gluon.jit
@no_type_check
def read_item(items, number):
    """Return work item `number` in the consumers."""
    return WorkItem(
        _field(items, number, 0), _field(items, number, 1), _field(items, number, 2), _field(items, number, 3),
        _field(items, number, 4), _field(items, number, 5), _field(items, number, 6), _field(items, number, 7),
        _field(items, number, 8),
    )  # fmt: skip


@gluon.jit
@no_type_check
def _field(items, number, FIELD: gl.constexpr):
    place = number % ITEMS_HELD * ITEM_FIELDS + FIELD
    return gl.max(items.index(place).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
@no_type_check
def row_block_of(item, sizes, HEADS: gl.constexpr):
    """Return what `rows_at` needs to find the rows of a work item."""
    num_heads = gl.to_tensor(HEADS)
    return RowBlock(item.query_start, item.query_end, item.row_block, sizes.request_rows, sizes.num_tokens, num_heads)
