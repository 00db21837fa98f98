"""Which tiles of which request a program takes.

The fetching warp walks the pieces, and notes each for the warp groups that compute, before they need it.

Of a request that is cut by its own length a piece is a run of splits. One that begins with the request's first split
folds each split into those before. Of any other run each split is a part by itself, for none but the program with the
splits before may fold it in: the order of the sums must not tell how many programs there were.
"""

from __future__ import annotations

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .arrivals import arrive

TILE = gl.constexpr(64)  # keys
NOTES = gl.constexpr(2)  # this piece and the next
NOTED = gl.constexpr(9)  # numbers of a note
LAUNCH = {"num_warps": 4, "launch_pdl": True}  # to begin while the kernel before ends: `follow_kernel`


@gluon.jit
@no_type_check
def ceil_div(a, b):
    """The quotient, rounded up."""
    return (a + b - 1) // b


@gluon.jit
@no_type_check
def launch_next():
    """Let the next kernel be launched already."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // dummy $0", "=r", [], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
@no_type_check
def await_before():
    """Wait for the kernel before, whose launch let this one begin."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // dummy $0", "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
@no_type_check
def follow_kernel():
    """Both: what comes after may read what the kernel before has written."""
    launch_next()
    await_before()


@gluon.jit
@no_type_check
def first_piece(cut, num_requests, row_blocks, SCHEDULED: gl.constexpr, SLICES: gl.constexpr):
    """Where a program begins: place, first tile, split, and whether there is anything at all.

    A place is a request where a schedule says what each program takes. Else every request is shared among equally many
    programs, a place is one share of one block of rows, and programs take them in turn, SLICES of them each.
    """
    tile_ranges = cut[0]
    place = gl.program_id(0) // SLICES
    first_tile, split = place * 0, place * 0
    if SCHEDULED:
        row = tile_ranges + place // row_blocks * 5
        place = gl.maximum(gl.load(row), 0)
        first_tile = gl.maximum(gl.load(row + 2), 0)
        split = gl.maximum(gl.load(row + 4), 0)
    return place, first_tile, split, place <= _last_place(cut, num_requests, row_blocks, SCHEDULED)


@gluon.jit
@no_type_check
def _last_place(cut, num_requests, row_blocks, SCHEDULED: gl.constexpr):
    """Of the program, or of all; asked anew for each piece, as a register that is held through one is dear."""
    tile_ranges, num_splits = cut[0], cut[2]
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
def lens_of(request, lens, num_tokens, max_keys):
    """A request's query tokens [start, end), its length, and how many of its keys are readable."""
    seq_lens, query_start_loc = lens
    query_start = gl.minimum(gl.maximum(gl.load(query_start_loc + request), 0), num_tokens)
    query_end = gl.minimum(gl.load(query_start_loc + request + 1), num_tokens)
    length = gl.maximum(gl.load(seq_lens + request), 0)
    return query_start, query_end, length, gl.minimum(length, max_keys)


@gluon.jit
@no_type_check
def piece_at(walk, cut, lens, sizes, EVEN_TILES: gl.constexpr, BY_LENGTH: gl.constexpr, SCHEDULED: gl.constexpr):
    """A run of tiles of one request.

    Args:
        walk: place, first tile, split, and whether there is more.
        cut: tile ranges, split offsets, number of splits (of runs, where requests are cut by their own length), all
            slots, progress of requests, numbers of `InvariantCut`.
        lens: seq_lens and query_start_loc.
        sizes: tokens, requests, keys of a request at most, blocks of rows.
        EVEN_TILES: cuts lie at multiples of so many tiles; not those by a request's own length.
        BY_LENGTH: whether requests are cut by their own length.
        SCHEDULED: whether a schedule cuts.

    Returns:
        Request, block of rows, slot of its part or -1 where its rows are whole, its query tokens [start, end), its
        readable keys, tiles [begin, end), tiles of a split, and whether the piece is one at all: such a one may still
        have no tiles, and writes that it found nothing.
    """
    place, first_tile, split, _ = walk
    num_splits = cut[2]
    num_tokens, num_requests, max_keys, row_blocks = sizes
    if SCHEDULED:
        request, row_block = place, gl.program_id(0) % row_blocks
    else:
        request, row_block = place // row_blocks // num_splits, place % row_blocks
        split = place // row_blocks % num_splits
    if not BY_LENGTH:  # here, so that its loads wait with the others
        slot = _partial_index_of(request, split, cut, SCHEDULED)
    query_start, query_end, length, readable = lens_of(request, lens, num_tokens, max_keys)
    there = request >= 0
    split_tiles = request * 0
    if BY_LENGTH:
        split_tiles, splits = own_cut(length, readable, cut)
        if SCHEDULED:
            begin = first_tile
            end = gl.minimum(_planned_end(place, length, cut, num_requests, row_blocks), splits * split_tiles)
            there = begin < end
        else:
            run_tiles = ceil_div(splits, num_splits) * split_tiles
            begin, end = split * run_tiles, gl.minimum((split + 1) * run_tiles, splits * split_tiles)
            there = begin < end
        slot = leave_word(request, row_block, begin, end, there, split_tiles, splits, cut, num_requests)
    elif SCHEDULED:
        begin = first_tile
        end = _planned_end(place, length, cut, num_requests, row_blocks)
        there = begin < end
        # those on both sides of a cut move it alike
        begin = begin // EVEN_TILES * EVEN_TILES
        end = gl.where(end < _planned_tiles(length), end // EVEN_TILES * EVEN_TILES, end)
    else:
        tiles = ceil_div(readable, TILE)
        split_tiles = EVEN_TILES * ceil_div(tiles, EVEN_TILES * num_splits)
        begin = gl.minimum(split * split_tiles, tiles)
        end = gl.minimum(begin + split_tiles, tiles)
    return request, row_block, slot, query_start, query_end, readable, begin, end, split_tiles, there


@gluon.jit
@no_type_check
def next_piece(walk, cut, sizes, SCHEDULED: gl.constexpr, SLICES: gl.constexpr):
    """The walk after a piece."""
    place, first_tile, split, _ = walk
    _, num_requests, _, row_blocks = sizes
    if SCHEDULED:
        first_tile, split = first_tile * 0, split * 0
        place += 1
    else:
        place += gl.num_programs(0) // SLICES
    return place, first_tile, split, place <= _last_place(cut, num_requests, row_blocks, SCHEDULED)


@gluon.jit
@no_type_check
def seek(
    walk, cut, lens, sizes, EVEN_TILES: gl.constexpr, ROWS: gl.constexpr, HEADS: gl.constexpr,
    BY_LENGTH: gl.constexpr, SCHEDULED: gl.constexpr, SLICES: gl.constexpr,
):  # fmt: skip
    """The first piece from a walk on: the walk there, and what is noted of it.

    A note is request, block of rows, query tokens [start, end), readable keys, tiles [begin, stop), the slot of its
    part, or -1 where its rows are whole, and tiles of a split. Without another piece the request is -1 and all else 0.
    """
    none = walk[0] * 0  # no query tokens and no tiles, so that nothing is read for it
    noted_request, noted_block, noted_start, noted_end, noted_length = none - 1, none, none, none, none
    noted_begin, noted_stop, noted_slot, noted_split = none, none, none, none
    searching = walk[3]
    while searching:
        request, row_block, slot, query_start, query_end, length, begin, end, split_tiles, there = piece_at(
            walk, cut, lens, sizes, EVEN_TILES, BY_LENGTH, SCHEDULED
        )
        if there & (query_start + row_block * ROWS // HEADS < query_end):
            noted_request, noted_block, noted_start, noted_end = request, row_block, query_start, query_end
            noted_length, noted_begin, noted_split = length, begin, split_tiles
            noted_stop = gl.minimum(end, ceil_div(length, TILE))  # a planned length may lie beyond `max_keys`
            noted_slot = slot
            searching = request < 0
        else:
            walk = next_piece(walk, cut, sizes, SCHEDULED, SLICES)
            searching = walk[3]
    note = (
        noted_request, noted_block, noted_start, noted_end, noted_length, noted_begin, noted_stop, noted_slot,
        noted_split,
    )  # fmt: skip
    return walk, note


@gluon.jit
@no_type_check
def write_note(notes, number, note, noted):
    """Hand a note to the warp groups that compute; `number` counts pieces."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    for i in gl.static_range(NOTED):
        notes.index(number % NOTES * NOTED + i).store(gl.full([1], note[i], gl.int32, layout))
    arrive(noted)


@gluon.jit
@no_type_check
def read_note(notes, number):
    """What is noted of piece `number`."""
    return (
        _number_at(notes, number, 0), _number_at(notes, number, 1), _number_at(notes, number, 2),
        _number_at(notes, number, 3), _number_at(notes, number, 4), _number_at(notes, number, 5),
        _number_at(notes, number, 6), _number_at(notes, number, 7), _number_at(notes, number, 8),
    )  # fmt: skip


@gluon.jit
@no_type_check
def _number_at(notes, number, PLACE: gl.constexpr):
    return gl.max(notes.index(number % NOTES * NOTED + PLACE).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
@no_type_check
def tiles_of(note):
    """A piece's request, that one's readable keys, and its tiles [begin, stop)."""
    return note[0], note[4], note[5], note[6]


@gluon.jit
@no_type_check
def rows_of(note, sizes, HEADS: gl.constexpr):
    """What `rows_at` wants to know of a piece."""
    return note[2], note[3], note[1], sizes[5], sizes[0], HEADS


@gluon.jit
@no_type_check
def partial_index_of(note):
    """Where the part of a piece goes; -1: its rows are whole."""
    return note[7]


@gluon.jit
@no_type_check
def split_tiles_of(note):
    """Tiles of a split, in a piece that is a run of splits."""
    return note[8]


@gluon.jit
@no_type_check
def _planned_tiles(length):
    """As `plan_decode` counts them; the longest length does not overflow."""
    return (gl.maximum(length, 1) - 1) // TILE + (length > 0).to(gl.int32)


@gluon.jit
@no_type_check
def own_cut(length, readable, cut):
    """How a request is cut by its own length: tiles of a split, as `invariant_split_tiles` counts them, and splits.

    What lies beyond `max_keys` is none; a request without keys has one split all the same.
    """
    tiles = _planned_tiles(length)
    small_tiles, small_splits, large_tiles, max_splits = cut[5]
    split_tiles = gl.maximum(gl.minimum(ceil_div(tiles, small_splits), large_tiles), small_tiles)
    split_tiles = gl.maximum(split_tiles, ceil_div(tiles, max_splits))
    split_tiles += split_tiles % 2
    return split_tiles, gl.maximum(ceil_div(_planned_tiles(readable), split_tiles), 1)


@gluon.jit
@no_type_check
def leave_word(request, row_block, begin, end, there, split_tiles, splits, cut, num_requests):
    """Tell the merge how many splits the program with the first ones folds, and of how many; the slot of a run.

    That is the request's first slot for those, -1 if there are no others, and else the slot of the first split.
    """
    num_partials, progress = cut[3], cut[4]
    ended = ceil_div(end, split_tiles)
    told = there & (begin == 0) & (row_block == 0)
    gl.store(progress + 2 * request, ended, mask=told)
    gl.store(progress + 2 * request + 1, splits, mask=told)
    slot = request * (num_partials // num_requests) + begin // split_tiles
    return gl.where((begin == 0) & (ended >= splits), -1, slot)


@gluon.jit
@no_type_check
def _partial_index_of(request, split, cut, SCHEDULED: gl.constexpr):
    """Where the part of a piece lies for the merge (`fast.kernels.combine`); -1: its rows are whole."""
    split_offsets, num_splits, num_partials = cut[1], cut[2], cut[3]
    if SCHEDULED:
        first_split = gl.load(split_offsets + request)
        slot = first_split + split
        splits = gl.load(split_offsets + request + 1) - first_split
        # offsets and splits that nobody planned may lie anywhere
        slot = gl.where(splits <= 1, -1, gl.minimum(gl.maximum(slot, 0), num_partials - 1))
    else:
        slot = gl.where(num_splits <= 1, -1, split)
    return slot
