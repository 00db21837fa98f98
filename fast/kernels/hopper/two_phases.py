"""Decode of many rows where programs would be idle: all of them score first, then they multiply by what they found.

First a program takes a unit: a pair of tiles, and 64 rows. References go from tile to tile of a split (`tile_pairs`),
so it tells the others its tiles' largest scores, waits for those of the pairs before, and leaves probabilities, row
sums and references in memory. Then it takes shares: a split, 64 rows and an eighth of the latent columns, pair after
pair.

All of it is computed as in `tile_pairs`, step for step: the bits do not tell which kernel it was. Programs wait for
each other in either direction, so all of them must run at once: the launch is a cooperative one.
"""

from __future__ import annotations

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .gluon_versions import partition_barrier
from .pieces import TILE, ceil_div, follow_kernel, leave_word, lens_of, own_cut, rows_of, tiles_of
from .rows_and_pages import (
    LEAST,
    LN_2,
    STAYS,
    ask_queries,
    load_columns,
    page_of,
    pages_held,
    part_rows,
    rows_at,
    seen_at,
    shift_of,
)
from .tile_pairs import ROWS, fetch_quarter, masked, reference_of, score_quarter

QUARTERS = gl.constexpr(4)  # of a tile's latent columns, scored one by one
SHARES = gl.constexpr(8)  # of a split's latent columns
STAGES = gl.constexpr(8)  # pairs of tiles of a slice, on their way or there
FIRST = gl.constexpr(2)  # of them that are asked for before probabilities are
PAIRS = gl.constexpr(4)  # of tiles of probabilities, likewise
AHEAD = gl.constexpr(3)  # pairs of tiles whose probabilities are asked for before they multiply
BEFORE = gl.constexpr(8)  # pairs whose largest scores are asked for at a time
LANES = gl.constexpr(32)  # pairs that are looked at at a time
UNTOLD = gl.constexpr(-1)  # what words hold before they are told: the bits of no largest score, of no flag
CANONICAL_NAN = gl.constexpr(0x7FFFFFFF)
TOPS = gl.constexpr(2 * ROWS.value)  # words of a unit: largest scores of its rows; behind all, a flag of each unit
ROW_VALUES = gl.constexpr(4 * ROWS.value)  # of a unit: references after both tiles, sums of both
CLEARED = gl.constexpr(1024)  # words of a program


@gluon.jit(do_not_specialize=["num_words"])
@no_type_check
def _clear_kernel(words, num_words):
    """Fill words with UNTOLD."""
    follow_kernel()
    word = gl.program_id(0) * CLEARED + gl.arange(0, CLEARED, gl.BlockedLayout([4], [32], [4], [0]))
    gl.store(words + word, gl.full([CLEARED], UNTOLD, gl.int32, word.type.layout), mask=word < num_words)


@gluon.jit
@no_type_check
def _unit_at(unit, cut, lens, sizes, pairs, HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr):
    """A note of a unit (`pieces`), and whether there is one."""
    num_tokens, _, num_requests, table_width, row_blocks, _, _ = sizes
    request = gl.minimum(unit // row_blocks // pairs, num_requests - 1)
    row_block, begin = unit % row_blocks, unit // row_blocks % pairs * 2
    query_start, query_end, length, readable = lens_of(request, lens, num_tokens, table_width, BLOCK_SIZE)
    split_tiles, _ = own_cut(length, readable, cut)
    stop = gl.minimum(begin + 2, ceil_div(readable, TILE))
    there = (unit < num_requests * pairs * row_blocks) & (begin < stop)
    there = there & (query_start + row_block * ROWS // HEADS < query_end)
    note = (request, row_block, query_start, query_end, readable, begin, stop, begin * 0, split_tiles)
    return note, there


@gluon.jit
@no_type_check
def _fetch_tile(
    note, page, block_table, strides, latent_pages, rope_pages, buffers, full, PLACE: gl.constexpr,
    LATENT: gl.constexpr, ROPE: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """Fetch one of a unit's tiles, whose first key lies in `page`."""
    request, length, begin, stop = tiles_of(note)
    table_row, table_stride = block_table + request.to(gl.int64) * strides[4], strides[5]
    end_key = gl.minimum(stop * TILE, length)
    for number in gl.static_range(QUARTERS):
        fetch_quarter(
            begin + PLACE, end_key, page, table_row, table_stride, latent_pages, rope_pages, buffers, full, PLACE,
            number, LATENT, ROPE, BLOCK_SIZE,
        )  # fmt: skip


@gluon.jit
@no_type_check
def _pages_at(unit, block_table, sizes, strides, pairs, BLOCK_SIZE: gl.constexpr):
    """The first pages of a unit's tiles, before it is known whether it has keys there."""
    _, _, num_requests, table_width, row_blocks, _, _ = sizes
    request, key = unit // row_blocks // pairs, unit // row_blocks % pairs * (2 * TILE)
    table_row = block_table + gl.minimum(request, num_requests - 1).to(gl.int64) * strides[4]
    first, second = key // BLOCK_SIZE, (key + TILE) // BLOCK_SIZE
    first_page = gl.load(table_row + first.to(gl.int64) * strides[5], mask=first < table_width, other=-1)
    return first_page, gl.load(table_row + second.to(gl.int64) * strides[5], mask=second < table_width, other=-1)


@gluon.jit
@no_type_check
def _tell_tops(words, unit, PLACE: gl.constexpr, tops):
    """Tell the other programs a tile's largest scores: each word is told by what it holds."""
    row = gl.arange(0, ROWS, tops.type.layout)
    bits = tops.to(gl.int32, bitcast=True)
    bits = gl.where(bits == UNTOLD, CANONICAL_NAN, bits)
    gl.atomic_xchg(words + unit * TOPS + PLACE * ROWS + row, bits, sem="relaxed", scope="gpu")


@gluon.jit
@no_type_check
def _tops_before(words, unit, back, row_blocks, ALL: gl.constexpr):
    """What is told of the tiles from `back` pairs before a unit on: bits, -inf's where there is no such pair."""
    row = gl.arange(0, ROWS, ALL)
    found = ()
    for i in gl.static_range(BEFORE):
        place = words + (unit - (back - i) * row_blocks) * TOPS + row
        there = (row >= 0) & (back > i)
        for tile in gl.static_range(2):
            bits = gl.load(place + tile * ROWS, mask=there, other=-8388608, volatile=True)
            found = found + (bits,)  # noqa: RUF005  the compiler knows no unpacking here
    return found


@gluon.jit
@no_type_check
def _untold(found):
    """Whether any word is; every warp looks at all of them, and needs no other."""
    untold = found[0] == UNTOLD
    for i in gl.static_range(1, 2 * BEFORE):
        untold = untold | (found[i] == UNTOLD)
    return gl.max(untold.to(gl.int32), 0) > 0


@gluon.jit
@no_type_check
def _reference_before(words, unit, count, row_blocks, scale_log2, ALL: gl.constexpr):
    """The rows' references after the `count` pairs of the split before a unit, once these have told."""
    reference = gl.full([ROWS], LEAST, gl.float32, ALL)
    for first in range(0, count, BEFORE):
        found = _tops_before(words, unit, count - first, row_blocks, ALL)
        while _untold(found):
            found = _tops_before(words, unit, count - first, row_blocks, ALL)
        for i in gl.static_range(2 * BEFORE):
            reference = reference_of(reference, found[i].to(gl.float32, bitcast=True), scale_log2)
    return reference


@gluon.jit
@no_type_check
def _squares(LAYOUT: gl.constexpr):
    """Where a tile's probabilities lie in memory: in squares of 8 by 8, which warps write and read as whole lines."""
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    key = gl.arange(0, TILE, gl.SliceLayout(0, LAYOUT))
    return (row // 8 * (8 * TILE) + row % 8 * 8)[:, None] + (key // 8 * 64 + key % 8)[None, :]


@gluon.jit
@no_type_check
def _leave_tile(
    scores, reference, weighed, unit, scale_log2, PLACE: gl.constexpr, dtype: gl.constexpr, SCORES: gl.constexpr
):
    """Leave a tile's probabilities, their rows' sums, and the references that they are relative to."""
    row_values, probabilities = weighed
    weights = gl.exp2(scores * scale_log2 - shift_of(reference, scale_log2)[:, None])
    gl.store(probabilities + (2 * unit + PLACE).to(gl.int64) * (ROWS * TILE) + _squares(SCORES), weights.to(dtype))
    place = row_values + unit.to(gl.int64) * ROW_VALUES + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
    gl.store(place + PLACE * ROWS, reference)
    gl.store(place + (2 + PLACE) * ROWS, gl.sum(weights, 1))


@gluon.jit
@no_type_check
def _ask_unit(
    note, pages, queries, block_table, sizes, strides, boxes, shared, full,
    HEADS: gl.constexpr, LATENT: gl.constexpr, ROPE: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """Ask for a unit's tiles, whose first pages are `pages`, and its queries."""
    latent_pages, rope_pages = boxes
    _, _, latents, tails, _ = shared
    end_key = gl.minimum(note[6] * TILE, note[4])
    second_page = gl.where((note[5] + 1) * TILE < end_key, pages[1], -1)
    _fetch_tile(
        note, pages[0], block_table, strides, latent_pages, rope_pages, (latents, tails), full, 0, LATENT, ROPE,
        BLOCK_SIZE,
    )  # fmt: skip
    ask_queries(note, queries, sizes, ROWS, HEADS, 0, LATENT, ROPE)
    _fetch_tile(
        note, second_page, block_table, strides, latent_pages, rope_pages, (latents, tails), full, 1, LATENT, ROPE,
        BLOCK_SIZE,
    )  # fmt: skip


@gluon.jit
@no_type_check
def _score_unit(
    unit, note, inputs, words, weighed, sizes, strides, shared, full, flags,
    HEADS: gl.constexpr, LATENT: gl.constexpr, ROPE: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """Score a unit that was asked for, and leave what its rows' values are to be multiplied by."""
    _, _, block_table, _, _, visible_lens = inputs
    _, num_blocks, _, _, row_blocks, _, scale_log2 = sizes
    q_latent, q_rope, latents, tails, _ = shared
    table_row_stride, table_stride = strides[4], strides[5]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    ALL: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    request, length, begin, stop = tiles_of(note)
    visible, entries = seen_at(note, block_table, visible_lens, sizes, strides, ROWS, HEADS, BLOCK_SIZE, ROW)
    visible = gl.minimum(visible, length)
    table_row = block_table + request.to(gl.int64) * table_row_stride
    plain = gl.maximum(gl.min(visible, 0), 0) // TILE  # tiles that all rows see whole
    end_key = gl.minimum(stop * TILE, length)
    held = pages_held(entries, begin, end_key, table_row, table_stride, num_blocks, BLOCK_SIZE, 4)
    plain = gl.where(held, plain, begin)
    seen = (visible, length, table_row, table_stride, num_blocks, gl.where(held, 0, length))
    async_copy.wait_group(0)
    fence_async_shared()
    partition_barrier()

    first = gl.zeros([ROWS, TILE], gl.float32, SCORES)
    for number in gl.static_range(QUARTERS):
        first = score_quarter(first, (latents, tails), q_latent, q_rope, full, 0, 0, True, 0, number, LATENT, ROPE)
    second = gl.zeros([ROWS, TILE], gl.float32, SCORES)
    first = warpgroup_mma_wait(0, deps=[first])
    for number in gl.static_range(QUARTERS):
        second = score_quarter(second, (latents, tails), q_latent, q_rope, full, 0, 0, True, 1, number, LATENT, ROPE)
    if begin >= plain:
        first = masked(first, begin, stop, seen, SCORES, BLOCK_SIZE)
    first_top = gl.max(first, 1)
    _tell_tops(words, unit, 0, first_top)
    second = warpgroup_mma_wait(0, deps=[second])
    if begin + 1 >= plain:
        second = masked(second, begin + 1, stop, seen, SCORES, BLOCK_SIZE)
    second_top = gl.max(second, 1)
    _tell_tops(words, unit, 1, second_top)

    before = _reference_before(words, unit, begin % note[8] // 2, row_blocks, scale_log2, ALL)
    middle = reference_of(gl.convert_layout(before, ROW), first_top, scale_log2)
    top = reference_of(middle, second_top, scale_log2)
    _leave_tile(first, middle, weighed, unit, scale_log2, 0, latents.dtype, SCORES)
    _leave_tile(second, top, weighed, unit, scale_log2, 1, latents.dtype, SCORES)
    partition_barrier()  # what every thread has written and multiplied, before one of them tells
    gl.atomic_xchg(flags + unit, 0, sem="release", scope="gpu")


@gluon.jit
@no_type_check
def _seek_share(share, cut, lens, sizes, splits_bound, HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr):
    """The program's first share from one on: its number, and a note of its split (`pieces`).

    With the request's splits instead of a slot.
    """
    num_tokens, _, num_requests, table_width, row_blocks, _, _ = sizes
    none = share * 0
    request, row_block, query_start, query_end, length = none, none, none, none, none
    begin, stop, split_tiles, splits, split, readable = none, none, none + 2, none, none, none
    shares = num_requests * splits_bound * row_blocks * SHARES
    searching = share < shares
    while searching:
        request, split = share // SHARES // row_blocks // splits_bound, share // SHARES // row_blocks % splits_bound
        row_block = share // SHARES % row_blocks
        query_start, query_end, length, readable = lens_of(request, lens, num_tokens, table_width, BLOCK_SIZE)
        split_tiles, splits = own_cut(length, readable, cut)
        length = readable
        begin = split * split_tiles
        stop = gl.minimum(begin + split_tiles, ceil_div(length, TILE))
        if (split < splits) & (query_start + row_block * ROWS // HEADS < query_end):
            searching = request < 0
        else:
            share += gl.num_programs(0)
            searching = share < shares
    return share, (request, row_block, query_start, query_end, length, begin, stop, splits, split_tiles)


@gluon.jit
@no_type_check
def _pages_of_pair(what, pair, block_table, strides, BLOCK_SIZE: gl.constexpr):
    """The first pages of both tiles of a share's pair."""
    request, length, begin, stop = tiles_of(what)
    table_row, table_stride = block_table + request.to(gl.int64) * strides[4], strides[5]
    end_key, key = gl.minimum(stop * TILE, length), (begin + 2 * pair) * TILE
    first = page_of(key, end_key, table_row, table_stride, BLOCK_SIZE)
    return first, page_of(key + TILE, end_key, table_row, table_stride, BLOCK_SIZE)


@gluon.jit
@no_type_check
def _pages_of_share(what, block_table, strides, BLOCK_SIZE: gl.constexpr):
    """Those of its first STAGES pairs."""
    pages = ()
    for pair in gl.static_range(STAGES):
        pages = pages + (_pages_of_pair(what, pair, block_table, strides, BLOCK_SIZE),)  # noqa: RUF005  see `_tops_before`
    return pages


@gluon.jit
@no_type_check
def _fetch_share(
    what, pages, block_table, strides, value_pages, tiles, arrived, first_column, step,
    BEGIN: gl.constexpr, END: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """Ask for a share's columns of its pairs [BEGIN, END), whose first pages are among `pages`."""
    _, _, begin, stop = tiles_of(what)
    for i in gl.static_range(BEGIN, END):
        if begin + 2 * i < stop:
            _fetch_pair(
                what, i, pages[i], block_table, strides, value_pages, tiles, arrived, first_column, step + i, BLOCK_SIZE
            )  # fmt: skip


@gluon.jit
@no_type_check
def _fetch_pair(
    what, pair, pages, block_table, strides, value_pages, tiles, arrived, first_column, step, BLOCK_SIZE: gl.constexpr
):
    """Ask for a share's columns of a pair of tiles, as the program's number `step`."""
    WIDTH: gl.constexpr = value_pages.block_shape[2]
    BUFFERS: gl.constexpr = TILE // value_pages.block_shape[1]
    request, length, begin, stop = tiles_of(what)
    table_row, table_stride = block_table + request.to(gl.int64) * strides[4], strides[5]
    end_key = gl.minimum(stop * TILE, length)
    stage = step % STAGES
    mbarrier.expect(arrived.index(stage), 2 * TILE * WIDTH * 2)
    for place in gl.static_range(2):
        load_columns(
            begin + 2 * pair + place, end_key, pages[place], table_row, table_stride, value_pages, tiles,
            (2 * stage + place) * BUFFERS, arrived.index(stage), BLOCK_SIZE, first_column, WIDTH,
        )  # fmt: skip


@gluon.jit
@no_type_check
def _await_weighed(flags, first_unit, count, row_blocks):
    """Wait until the probabilities of so many pairs are there."""
    lane = gl.arange(0, LANES, gl.BlockedLayout([1], [32], [4], [0]))
    for first in range(0, count, LANES):
        place = (flags + first_unit + gl.minimum(first + lane, count - 1) * row_blocks).to(gl.int64)
        untold = count > 0
        while untold:  # every warp looks at all of them
            found = gl.inline_asm_elementwise(
                "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [place], gl.int32, is_pure=False, pack=1
            )
            untold = gl.max((found == UNTOLD).to(gl.int32), 0) > 0
    partition_barrier()  # what one thread has acquired, all have


@gluon.jit
@no_type_check
def _ask_pair(weighed, q_latent, values_shared, unit, slot):
    """Ask for a pair's probabilities, in the memory of the queries, and its row values."""
    row_values, probabilities = weighed
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    tiles = q_latent._reinterpret(q_latent.dtype, [2 * PAIRS, ROWS, TILE], gl.NVMMASharedLayout(128, 16))
    place = probabilities + (2 * unit).to(gl.int64) * (ROWS * TILE) + _squares(WIDE)
    async_copy.async_copy_global_to_shared(tiles.index(2 * slot), place)
    async_copy.async_copy_global_to_shared(tiles.index(2 * slot + 1), place + ROWS * TILE)
    number = gl.arange(0, ROW_VALUES, gl.BlockedLayout([2], [32], [4], [0]))
    async_copy.async_copy_global_to_shared(
        values_shared.index(slot), row_values + unit.to(gl.int64) * ROW_VALUES + number
    )


@gluon.jit
@no_type_check
def _row_values(values_shared, slot, WHICH: gl.constexpr, LAYOUT: gl.constexpr):
    """Of a pair in shared memory: references after its first tile and after its second, sums of both."""
    each = values_shared._reinterpret(gl.float32, [4 * PAIRS, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return each.index(4 * slot + WHICH).load(LAYOUT)


@gluon.jit
@no_type_check
def _zero_unowned(values, first_row, WIDTH: gl.constexpr):
    """Zeros from a row of a tile's columns on: nobody owns those bytes, and 0 * NaN is NaN."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, TILE, gl.SliceLayout(1, layout))
    if first_row < TILE:
        for column in gl.static_range(0, WIDTH, 64):
            part = values.slice(column, 64, dim=1)
            part.store(gl.where((row < first_row)[:, None], part.load(layout), 0.0))
        fence_async_shared()
        partition_barrier()


@gluon.jit
@no_type_check
def _rescaled(values, moved, before, after, scale_log2):
    """The values relative to other references, unless none has moved."""
    if moved:
        values = values * gl.exp2((before - after) * scale_log2)[:, None]
    return values


@gluon.jit
@no_type_check
def _write_part(state, where, results, slot, num_slots, first_column, LATENT: gl.constexpr, VALUES: gl.constexpr):
    """A part of rows for the merge: a share's columns, and one of largest and total."""
    largest, total, values = state
    _, _, part_out, part_lse = results
    WIDTH: gl.constexpr = LATENT // SHARES
    row, slot_rows, real = part_rows(slot, where, ROWS, gl.SliceLayout(1, VALUES), True)
    gl.store(part_lse + row, largest, mask=real & (first_column == 0))
    gl.store(part_lse + num_slots.to(gl.int64) * slot_rows + row, total, mask=real & (first_column == 0))
    columns = first_column + gl.arange(0, WIDTH, gl.SliceLayout(0, VALUES))
    place = part_out + (row * LATENT)[:, None] + columns[None, :]
    gl.store(place, values, mask=real[:, None], eviction_policy=STAYS)


@gluon.jit
@no_type_check
def _write_whole(state, where, results, first_column, HEADS: gl.constexpr, LATENT: gl.constexpr, VALUES: gl.constexpr):
    """Outputs of rows that have one split: a share's columns, and one of the lse."""
    largest, total, values = state
    out, lse, _, _ = results
    WIDTH: gl.constexpr = LATENT // SHARES
    _, token, head, real = rows_at(where, ROWS, gl.SliceLayout(1, VALUES))
    divisor = gl.where(total == 0, 1.0, total)  # a row that saw nothing: values 0
    # the compiler must not know of the 1: it would fuse the product that `largest` is into the sum
    one = gl.full([ROWS], gl.where(where[4] > 0, 1.0, 0.0), gl.float32, largest.type.layout)
    log = gl.where(total == 0, float("-inf"), gl.fma(largest, one, gl.log2(divisor)))
    gl.store(lse + head.to(gl.int64) * where[4] + token, log * LN_2, mask=real & (first_column == 0))
    columns = first_column + gl.arange(0, WIDTH, gl.SliceLayout(0, VALUES))
    offsets = (token.to(gl.int64) * HEADS + head) * LATENT
    values = values * (1.0 / divisor)[:, None]
    gl.store(out + offsets[:, None] + columns[None, :], values.to(out.dtype.element_ty), mask=real[:, None])


@gluon.jit
@no_type_check
def _multiply_shares(
    inputs, cut, weighed, results, sizes, strides, value_pages, shared, arrived, flags, share, what, pages,
    pairs, splits_bound, HEADS: gl.constexpr, LATENT: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """The second phase, from a share on, whose first pages are `pages`."""
    _, _, block_table, seq_lens, query_start_loc, _ = inputs
    _, _, num_requests, _, row_blocks, _, scale_log2 = sizes
    q_latent, _, latents, _, values_shared = shared
    num_slots, lens = cut[3], (seq_lens, query_start_loc)
    WIDTH: gl.constexpr = LATENT // SHARES
    BOX_KEYS: gl.constexpr = value_pages.block_shape[1]
    BUFFERS: gl.constexpr = TILE // BOX_KEYS
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, VALUES)
    ALL: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    weights = q_latent._reinterpret(q_latent.dtype, [2 * PAIRS, ROWS, TILE], SHARED)
    tiles = latents._reinterpret(  # of both tiles' memory
        latents.dtype, [2 * STAGES * BUFFERS, 1, BOX_KEYS, WIDTH], value_pages.layout
    )
    shares = num_requests * splits_bound * row_blocks * SHARES
    step = 0  # pairs of all shares
    while share < shares:
        first_column = share % SHARES * WIDTH
        request, length, begin, stop = tiles_of(what)
        row_block, splits, split_tiles = what[1], what[7], what[8]
        count = ceil_div(stop - begin, 2)
        first_unit = (request * pairs + begin // 2) * row_blocks + row_block
        _fetch_share(
            what, pages, block_table, strides, value_pages, tiles, arrived, first_column, step, 0, FIRST, BLOCK_SIZE
        )
        _await_weighed(flags, first_unit, count, row_blocks)
        for pair in gl.static_range(AHEAD):
            if pair < count:
                _ask_pair(weighed, q_latent, values_shared, first_unit + pair * row_blocks, pair)
            async_copy.commit_group()
        _fetch_share(
            what, pages, block_table, strides, value_pages, tiles, arrived, first_column, step, FIRST, STAGES,
            BLOCK_SIZE,
        )  # fmt: skip

        largest = gl.full([ROWS], LEAST, gl.float32, ROW)
        known = gl.full([ROWS], LEAST, gl.float32, ALL)
        first_total = gl.zeros([ROWS], gl.float32, ROW)
        second_total = gl.zeros([ROWS], gl.float32, ROW)
        values = gl.zeros([ROWS, WIDTH], gl.float32, VALUES)
        for pair in range(0, count):
            async_copy.wait_group(AHEAD - 1)
            fence_async_shared()
            partition_barrier()  # the pair is there, and every warp has multiplied the one before
            slot, stage = pair % PAIRS, step % STAGES
            middle, top = _row_values(values_shared, slot, 0, ROW), _row_values(values_shared, slot, 1, ROW)
            between, end = _row_values(values_shared, slot, 0, ALL), _row_values(values_shared, slot, 1, ALL)
            moved = gl.max(((known != between) | (between != end)).to(gl.int32), 0) > 0
            known = end
            first = tiles.index(2 * stage * BUFFERS)._reinterpret(latents.dtype, [TILE, WIDTH], SHARED)
            second = tiles.index((2 * stage + 1) * BUFFERS)._reinterpret(latents.dtype, [TILE, WIDTH], SHARED)
            owned = length - (begin + 2 * pair) * TILE
            mbarrier.wait(arrived.index(stage), (step // STAGES) & 1)
            _zero_unowned(first, owned, WIDTH)
            values = _rescaled(values, moved, largest, middle, scale_log2)
            values = warpgroup_mma(weights.index(2 * slot), first, values, is_async=True)
            later = pair + AHEAD  # in the place of the pair before
            if later < count:
                _ask_pair(weighed, q_latent, values_shared, first_unit + later * row_blocks, later % PAIRS)
            async_copy.commit_group()
            ahead = pair - 1 + STAGES  # likewise
            if (pair > 0) & (ahead < count):
                ahead_pages = _pages_of_pair(what, ahead, block_table, strides, BLOCK_SIZE)
                _fetch_pair(
                    what, ahead, ahead_pages, block_table, strides, value_pages, tiles, arrived, first_column,
                    step - 1 + STAGES, BLOCK_SIZE,
                )  # fmt: skip
            values = warpgroup_mma_wait(0, deps=[values])
            _zero_unowned(second, owned - TILE, WIDTH)
            values = _rescaled(values, moved, middle, top, scale_log2)
            values = warpgroup_mma(weights.index(2 * slot + 1), second, values, is_async=True)
            first_decay, second_decay = gl.exp2((largest - middle) * scale_log2), gl.exp2((largest - top) * scale_log2)
            first_total = first_total * first_decay + _row_values(values_shared, slot, 2, ROW)
            second_total = second_total * second_decay + _row_values(values_shared, slot, 3, ROW)
            first_total = first_total * gl.exp2((middle - top) * scale_log2)
            largest = top
            values = warpgroup_mma_wait(0, deps=[values])
            step += 1

        partition_barrier()  # every warp has multiplied the last pair
        next_share, next_what = _seek_share(
            share + gl.num_programs(0), cut, lens, sizes, splits_bound, HEADS, BLOCK_SIZE
        )
        pages = _pages_of_share(next_what, block_table, strides, BLOCK_SIZE)
        slot = leave_word(
            request, row_block, begin, begin + split_tiles, first_column == 0, split_tiles, splits, cut, num_requests
        )
        total = first_total + second_total
        state = (gl.where(total == 0, float("-inf"), largest * scale_log2), total, values)
        where = rows_of(what, sizes, HEADS)
        if slot >= 0:
            _write_part(state, where, results, slot, num_slots, first_column, LATENT, VALUES)
        else:
            _write_whole(state, where, results, first_column, HEADS, LATENT, VALUES)
        share, what = next_share, next_what


@gluon.jit(
    do_not_specialize=[
        "num_tokens", "num_blocks", "num_requests", "table_width", "row_blocks", "request_rows", "num_slots",
        "small_tiles", "small_splits", "large_tiles", "max_splits", "table_row_stride", "pairs", "splits_bound",
    ],
    do_not_specialize_on_alignment=["block_table", "seq_lens", "query_start_loc", "visible_lens"],
)  # fmt: skip
@no_type_check
def _two_phases_kernel(
    ql_nope, q_pe, latent_pages, rope_pages, block_table, seq_lens, query_start_loc, visible_lens,
    out, lse, part_out, part_lse, value_pages, words, row_values, probabilities,
    num_tokens, num_blocks, num_requests, table_width, row_blocks, request_rows, num_slots, pairs, splits_bound,
    small_tiles, small_splits, large_tiles, max_splits, scale_log2,
    latent_token_stride, latent_head_stride, rope_token_stride, rope_head_stride, table_row_stride, table_stride,
    HEADS: gl.constexpr, LATENT: gl.constexpr, ROPE: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """A unit, then shares, of requests that are cut by their own length; each split of several is a part by itself.

    Parts as `fast.kernels.triton.decode_merge` has them. There are as many programs as units at least, `words` are
    UNTOLD, and `splits_bound` is no less than the splits of any request, as `pairs` of its tiles.
    """
    dtype: gl.constexpr = latent_pages.dtype
    BOX_KEYS: gl.constexpr = latent_pages.block_shape[1]
    BOX_COLUMNS: gl.constexpr = latent_pages.block_shape[2]
    TILE_SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    ROPE_SHARED: gl.constexpr = gl.NVMMASharedLayout(2 * ROPE if ROPE > 0 else 128, 16)
    ONE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    boxes: gl.constexpr = 2 * (TILE // BOX_KEYS) * (LATENT // BOX_COLUMNS)
    # both tiles of a pair, then STAGES slices of tiles
    latents = gl.allocate_shared_memory(dtype, [boxes, 1, BOX_KEYS, BOX_COLUMNS], latent_pages.layout)
    # then PAIRS pairs of probabilities
    q_latent = gl.allocate_shared_memory(dtype, [1, ROWS, LATENT], TILE_SHARED)
    tails = gl.allocate_shared_memory(dtype, [2, TILE, 64], TILE_SHARED)
    q_rope = q_latent
    if ROPE > 0:
        q_rope = gl.allocate_shared_memory(dtype, [1, ROWS, ROPE], ROPE_SHARED)
    values_shared = gl.allocate_shared_memory(gl.float32, [PAIRS, ROW_VALUES], ONE)
    full = gl.allocate_shared_memory(gl.int64, [2 * QUARTERS, 1], mbarrier.MBarrierLayout())
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2 * QUARTERS):
        mbarrier.init(full.index(i), 1)
    for i in gl.static_range(STAGES):
        mbarrier.init(arrived.index(i), 1)
    fence_async_shared()
    partition_barrier()
    follow_kernel()

    inputs = (ql_nope, q_pe, block_table, seq_lens, query_start_loc, visible_lens)
    progress = (part_lse + 2 * num_slots.to(gl.int64) * request_rows).to(gl.pointer_type(gl.int32), bitcast=True)
    own = (small_tiles, small_splits, large_tiles, max_splits)
    cut = (seq_lens, seq_lens, splits_bound, num_slots, progress, own)
    results = (out, lse, part_out, part_lse)
    sizes = (num_tokens, num_blocks, num_requests, table_width, row_blocks, request_rows, scale_log2)
    strides = (
        latent_token_stride, latent_head_stride, rope_token_stride, rope_head_stride, table_row_stride, table_stride
    )  # fmt: skip
    flags = words + num_requests * pairs * row_blocks * TOPS
    weighed = (row_values, probabilities)
    shared = (q_latent, q_rope, latents, tails, values_shared)
    lens, unit = (seq_lens, query_start_loc), gl.program_id(0)
    first_pages = _pages_at(unit, block_table, sizes, strides, pairs, BLOCK_SIZE)
    note, there = _unit_at(unit, cut, lens, sizes, pairs, HEADS, BLOCK_SIZE)
    if there:
        queries = (
            ql_nope, q_pe, q_latent, q_rope, latent_token_stride, latent_head_stride, rope_token_stride,
            rope_head_stride,
        )  # fmt: skip
        _ask_unit(
            note, first_pages, queries, block_table, sizes, strides, (latent_pages, rope_pages), shared, full, HEADS,
            LATENT, ROPE, BLOCK_SIZE,
        )  # fmt: skip
    # what comes then is looked up while that is on its way; programs without a unit have the first shares
    share = gl.num_programs(0) - 1 - unit
    share, what = _seek_share(share, cut, lens, sizes, splits_bound, HEADS, BLOCK_SIZE)
    pages = _pages_of_share(what, block_table, strides, BLOCK_SIZE)
    if there:
        _score_unit(
            unit, note, inputs, words, weighed, sizes, strides, shared, full, flags, HEADS, LATENT, ROPE, BLOCK_SIZE
        )
    _multiply_shares(
        inputs, cut, weighed, results, sizes, strides, value_pages, shared, arrived, flags, share, what, pages, pairs,
        splits_bound, HEADS, LATENT, BLOCK_SIZE,
    )  # fmt: skip
