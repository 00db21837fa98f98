"""Functions that find the work items of a program, one after another.

A work item is consecutive tiles (64 keys each) of one request, for one row block (16, 32 or 64 rows of the request).
The producer (the warp that loads) finds each work item and writes it to shared memory with `write_item`. The consumers
(the warps that multiply) read the work item with `read_item`.

A split is consecutive tiles of a request that are attended independently of the other tiles. In a batch-invariant
decode, a work item is one or more consecutive splits of a request:

- If the work item contains the first split of the request, the program combines all splits of the work item in order.
- Otherwise each split of the work item becomes a separate partial output. The combine kernel adds these partial outputs
  in order.

The splits of a request are thus always added from the first to the last. The number of programs changes no bit of the
result.
"""

from __future__ import annotations

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .arrivals import arrive
from .own_length import TILE, ceil_div, own_splits, planned_tiles, record_progress
from .records import CandidateItem, RequestLens, RowBlock, WorkItem, WorkPosition

ITEMS_HELD = gl.constexpr(2)  # work items in shared memory: the current item and the next item
ITEM_FIELDS = gl.constexpr(9)  # fields of a `WorkItem`


@gluon.jit
@no_type_check
def first_position(plan, sizes, SCHEDULED: gl.constexpr, SLICES: gl.constexpr):
    """Return the `WorkPosition` of a program's first candidate.

    A candidate is a possible work item. With a schedule, the candidates of a program are consecutive requests. Without
    a schedule, the candidates are all (request, split, row block) triples. SLICES programs then share each candidate:
    program i begins with candidate i // SLICES and advances by the number of programs divided by SLICES.
    """
    candidate = gl.program_id(0) // SLICES
    first_tile, split = candidate * 0, candidate * 0
    if SCHEDULED:
        row = plan.tile_ranges + candidate // sizes.row_blocks * 5
        candidate = gl.maximum(gl.load(row), 0)
        first_tile = gl.maximum(gl.load(row + 2), 0)
        split = gl.maximum(gl.load(row + 4), 0)
    return WorkPosition(candidate, first_tile, split, candidate <= _last_candidate(plan, sizes, SCHEDULED))


@gluon.jit
@no_type_check
def _last_candidate(plan, sizes, SCHEDULED: gl.constexpr):
    """Return the index of the last candidate of this program (with a schedule) or of the grid (without a schedule).

    The index is computed anew for every work item, because keeping it would cost a register.
    """
    if SCHEDULED:
        row = plan.tile_ranges + gl.program_id(0) // sizes.row_blocks * 5
        last_candidate = gl.minimum(gl.load(row + 1), sizes.num_requests - 1)
    else:
        last_candidate = sizes.num_requests * plan.num_splits * sizes.row_blocks - 1
    return last_candidate


@gluon.jit
@no_type_check
def _planned_end(candidate, length, plan, sizes):
    """Return the end (exclusive) of the tiles of a request that the schedule assigns to this program."""
    # load the end even if it is not needed, so that this load overlaps with the load of the last candidate
    planned_end = gl.load(plan.tile_ranges + gl.program_id(0) // sizes.row_blocks * 5 + 3)
    tiles = planned_tiles(length)
    return gl.where(candidate == _last_candidate(plan, sizes, True), gl.minimum(planned_end, tiles), tiles)


@gluon.jit
@no_type_check
def lens_of(request, inputs, sizes):
    """Return the `RequestLens` of a request; invalid offsets and lengths are clamped to valid numbers."""
    query_start = gl.minimum(gl.maximum(gl.load(inputs.query_start_loc + request), 0), sizes.num_tokens)
    query_end = gl.minimum(gl.load(inputs.query_start_loc + request + 1), sizes.num_tokens)
    length = gl.maximum(gl.load(inputs.seq_lens + request), 0)
    return RequestLens(query_start, query_end, length, gl.minimum(length, sizes.max_keys))


@gluon.jit
@no_type_check
def item_at(position, plan, inputs, sizes, EVEN_TILES: gl.constexpr, BY_LENGTH: gl.constexpr, SCHEDULED: gl.constexpr):
    """Return the `CandidateItem` at a position; `seek_item` checks whether the candidate has a query token.

    Without a schedule a work item may have no tile: its request has no keys, or has fewer tiles than splits. The
    program then writes zeros for this work item.

    Args:
        position: `WorkPosition`.
        plan: `SplitPlan`.
        inputs: `Inputs`, for the lengths of requests.
        sizes: `Sizes`.
        EVEN_TILES: splits begin at multiples of this number of tiles; unused if BY_LENGTH is true.
        BY_LENGTH: True if the decode is batch-invariant: the splits of a request depend on its length alone.
        SCHEDULED: True if a schedule assigns tiles to programs.
    """
    split = position.split
    if SCHEDULED:
        request, row_block = position.candidate, gl.program_id(0) % sizes.row_blocks
    else:
        request, row_block = (
            position.candidate // sizes.row_blocks // plan.num_splits,
            position.candidate % sizes.row_blocks,
        )
        split = position.candidate // sizes.row_blocks % plan.num_splits
    if not BY_LENGTH:  # before `lens_of`, so that the loads of both functions overlap
        partial = _partial_index(request, split, plan, SCHEDULED)
    lens = lens_of(request, inputs, sizes)
    exists = request >= 0
    split_tiles = request * 0
    if BY_LENGTH:
        split_tiles, splits = own_splits(lens, plan)
        if SCHEDULED:
            begin = position.first_tile
            end = gl.minimum(_planned_end(position.candidate, lens.length, plan, sizes), splits * split_tiles)
            exists = begin < end
        else:
            item_tiles = ceil_div(splits, plan.num_splits) * split_tiles
            begin, end = split * item_tiles, gl.minimum((split + 1) * item_tiles, splits * split_tiles)
            exists = begin < end
        partial = record_progress(request, row_block, begin, end, exists, split_tiles, splits, plan, sizes.num_requests)
    elif SCHEDULED:
        begin = position.first_tile
        end = _planned_end(position.candidate, lens.length, plan, sizes)
        exists = begin < end
        # Round `begin` and `end` down to multiples of EVEN_TILES. The program that ends at a tile and the program that
        # begins at this tile thus compute the same boundary.
        begin = begin // EVEN_TILES * EVEN_TILES
        end = gl.where(end < planned_tiles(lens.length), end // EVEN_TILES * EVEN_TILES, end)
    else:
        tiles = ceil_div(lens.readable, TILE)
        split_tiles = EVEN_TILES * ceil_div(tiles, EVEN_TILES * plan.num_splits)
        begin = gl.minimum(split * split_tiles, tiles)
        end = gl.minimum(begin + split_tiles, tiles)
    return CandidateItem(
        WorkItem(request, row_block, lens.query_start, lens.query_end, lens.readable, begin, end, partial, split_tiles),
        exists,
    )


@gluon.jit
@no_type_check
def _partial_index(request, split, plan, SCHEDULED: gl.constexpr):
    """Return the partial index of a work item; -1 if the request has one split and the program writes the output."""
    if SCHEDULED:
        first_split = gl.load(plan.split_offsets + request)
        partial = first_split + split
        splits = gl.load(plan.split_offsets + request + 1) - first_split
        # clamp the index, because an invalid schedule may contain any numbers
        partial = gl.where(splits <= 1, -1, gl.minimum(gl.maximum(partial, 0), plan.num_partials - 1))
    else:
        partial = gl.where(plan.num_splits <= 1, -1, split)
    return partial


@gluon.jit
@no_type_check
def next_position(position, plan, sizes, SCHEDULED: gl.constexpr, SLICES: gl.constexpr):
    """Return the `WorkPosition` of the next candidate."""
    candidate, first_tile, split = position.candidate, position.first_tile, position.split
    if SCHEDULED:
        first_tile, split = first_tile * 0, split * 0
        candidate += 1
    else:
        candidate += gl.num_programs(0) // SLICES
    return WorkPosition(candidate, first_tile, split, candidate <= _last_candidate(plan, sizes, SCHEDULED))


@gluon.jit
@no_type_check
def seek_item(
    position, plan, inputs, sizes, EVEN_TILES: gl.constexpr, ROWS: gl.constexpr, HEADS: gl.constexpr,
    BY_LENGTH: gl.constexpr, SCHEDULED: gl.constexpr, SLICES: gl.constexpr,
):  # fmt: skip
    """Find the first work item at or after a position; return `(position of the work item, work item)`.

    A candidate is a work item if `exists` of its `CandidateItem` is true and its row block has a query token. If no
    work item is left, the returned item has request -1 and zeros, and `more` of the returned position is false.

    Args:
        position: `WorkPosition` at which the search begins.
        plan: `SplitPlan`.
        inputs: `Inputs`.
        sizes: `Sizes`.
        EVEN_TILES: see `item_at`.
        ROWS: rows of a row block.
        HEADS: N.
        BY_LENGTH: see `item_at`.
        SCHEDULED: see `item_at`.
        SLICES: number of programs that share each work item.
    """
    item = _no_item()
    searching = position.more
    while searching:
        candidate_item = item_at(position, plan, inputs, sizes, EVEN_TILES, BY_LENGTH, SCHEDULED)
        if _is_item(candidate_item, ROWS, HEADS):
            item = _readable_item(candidate_item.item)
            searching = item.request < 0
        else:
            position = next_position(position, plan, sizes, SCHEDULED, SLICES)
            searching = position.more
    return position, item


@gluon.jit
@no_type_check
def first_item(
    plan, inputs, sizes, EVEN_TILES: gl.constexpr, ROWS: gl.constexpr, HEADS: gl.constexpr, BY_LENGTH: gl.constexpr,
    SCHEDULED: gl.constexpr, SLICES: gl.constexpr,
):  # fmt: skip
    """Find the first work item of a program; `seek_item` describes the arguments and the results.

    A schedule tells which request is the first, so `seek_item` loads the lengths of this request after the schedule.
    If the batch has only one request, this function loads schedule and lengths at the same time.
    """
    position = first_position(plan, sizes, SCHEDULED, SLICES)
    if SCHEDULED and not BY_LENGTH:
        item = _no_item()
        if sizes.num_requests == 1:
            only = WorkPosition(gl.program_id(0) * 0, position.first_tile, position.split, position.more)
            candidate_item = item_at(only, plan, inputs, sizes, EVEN_TILES, BY_LENGTH, SCHEDULED)
            more = position.more & _is_item(candidate_item, ROWS, HEADS)
            position = WorkPosition(position.candidate, position.first_tile, position.split, more)
            if more:
                item = _readable_item(candidate_item.item)
        else:
            position, item = seek_item(
                position, plan, inputs, sizes, EVEN_TILES, ROWS, HEADS, BY_LENGTH, SCHEDULED, SLICES
            )
    else:
        position, item = seek_item(position, plan, inputs, sizes, EVEN_TILES, ROWS, HEADS, BY_LENGTH, SCHEDULED, SLICES)
    return position, item


@gluon.jit
@no_type_check
def _no_item():
    """Return the `WorkItem` with request -1 and zeros; without query tokens and tiles it causes no loads."""
    none = gl.program_id(0) * 0
    return WorkItem(none - 1, none, none, none, none, none, none, none, none)


@gluon.jit
@no_type_check
def _is_item(candidate_item, ROWS: gl.constexpr, HEADS: gl.constexpr):
    """Return whether a `CandidateItem` is a work item: it exists, and its row block has a query token."""
    item = candidate_item.item
    return candidate_item.exists & (item.query_start + item.row_block * ROWS // HEADS < item.query_end)


@gluon.jit
@no_type_check
def _readable_item(item):
    """Return a `WorkItem` without the tiles beyond `max_keys`, which a schedule may contain."""
    stop = gl.minimum(item.stop, ceil_div(item.length, TILE))
    return WorkItem(
        item.request, item.row_block, item.query_start, item.query_end, item.length, item.begin, stop, item.partial,
        item.split_tiles,
    )  # fmt: skip


@gluon.jit
@no_type_check
def write_item(items, number, item, item_written):
    """In the producer, write work item `number` to shared memory and arrive at the barrier `item_written`."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    for i in gl.static_range(ITEM_FIELDS):
        items.index(number % ITEMS_HELD * ITEM_FIELDS + i).store(gl.full([1], item[i], gl.int32, layout))
    arrive(item_written)


@gluon.jit
@no_type_check
def read_item(items, number):
    """In a consumer that has waited for the barrier `item_written`, read work item `number` from shared memory."""
    return WorkItem(
        _field(items, number, 0), _field(items, number, 1), _field(items, number, 2), _field(items, number, 3),
        _field(items, number, 4), _field(items, number, 5), _field(items, number, 6), _field(items, number, 7),
        _field(items, number, 8),
    )  # fmt: skip


@gluon.jit
@no_type_check
def _field(items, number, FIELD: gl.constexpr):
    """Return one field of work item `number` as a scalar."""
    index = number % ITEMS_HELD * ITEM_FIELDS + FIELD
    return gl.max(items.index(index).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
@no_type_check
def row_block_of(item, sizes, HEADS: gl.constexpr):
    """Return the `RowBlock` of a work item; `rows_at` computes the rows from it."""
    num_heads = gl.to_tensor(HEADS)
    return RowBlock(item.query_start, item.query_end, item.row_block, sizes.request_rows, sizes.num_tokens, num_heads)
