"""The second phase of a decode in two: a split's probabilities multiply its values, pair after pair, in order.

A share is a split, 64 rows and an eighth of the latent columns: few enough that many programs work at one split.
"""

from __future__ import annotations

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...common.arrivals import arrive
from ...common.gluon_versions import partition_barrier
from ...common.loads import LEAST, LN_2, STAYS, load_columns, page_of, partial_rows_of, rows_at, zero_from
from ...common.work_items import TILE, ceil_div, leave_word, lens_of, own_cut, rows_of, tiles_of
from ..main_loops.tile_pairs import ROWS
from .score_blocks import ROW_VALUES, UNTOLD, fence_async_global

SHARES = gl.constexpr(8)  # of a split's latent columns
STAGES = gl.constexpr(8)  # for a share's columns of a pair of tiles, on their way or there
PLACES = gl.constexpr(4)  # for the probabilities of a pair, likewise
LANES = gl.constexpr(32)  # pairs that are looked at at a time


@gluon.jit
@no_type_check
def seek_share(share, cut, lens, sizes, splits_bound, HEADS: gl.constexpr):
    """The program's first share from one on: its number, and a note of its split (`pieces`).

    With the request's splits instead of a slot.
    """
    num_tokens, _, num_requests, max_keys, row_blocks, _, _ = sizes
    none = share * 0
    request, row_block, query_start, query_end, readable = none, none, none, none, none
    begin, stop, split_tiles, splits = none, none, none + 2, none
    shares = num_requests * splits_bound * row_blocks * SHARES
    searching = share < shares
    while searching:
        request, split = share // SHARES // row_blocks // splits_bound, share // SHARES // row_blocks % splits_bound
        row_block = share // SHARES % row_blocks
        query_start, query_end, length, readable = lens_of(request, lens, num_tokens, max_keys)
        split_tiles, splits = own_cut(length, readable, cut)
        begin = split * split_tiles
        stop = gl.minimum(begin + split_tiles, ceil_div(readable, TILE))
        if (split < splits) & (query_start + row_block * ROWS // HEADS < query_end):
            searching = request < 0
        else:
            share += gl.num_programs(0)
            searching = share < shares
    return share, (request, row_block, query_start, query_end, readable, begin, stop, splits, split_tiles)


@gluon.jit
@no_type_check
def first_share():
    """Programs without a unit have the first shares."""
    return gl.num_programs(0) - 1 - gl.program_id(0)


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
        pages = pages + (_pages_of_pair(what, pair, block_table, strides, BLOCK_SIZE),)  # noqa: RUF005  as in `units`
    return pages


@gluon.jit
@no_type_check
def _await_stage(released, step):
    """Wait until the pair STAGES before number `step` is multiplied."""
    mbarrier.wait(released.index(step % STAGES), ((step // STAGES) & 1) ^ 1)


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
def _pairs_found(flags, first_unit, pair, count, row_blocks):
    """Look in one warp at LANES flags, from a pair's on: the pair up to which probabilities are left."""
    lane = gl.arange(0, LANES, gl.BlockedLayout([1], [32], [1], [0]))
    place = (flags + first_unit + gl.minimum(pair + lane, count - 1) * row_blocks).to(gl.int64)
    found = gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [place], gl.int32, is_pure=False, pack=1
    )
    seen = gl.min(gl.where(found == UNTOLD, lane, LANES), 0)
    partition_barrier()  # what one lane has acquired, all have
    fence_async_global()
    return gl.minimum(pair + seen, count)


@gluon.jit
@no_type_check
def _ask_findings(unit, findings, probability_places, row_places, found_bars, place):
    """Ask in one warp for a unit's row values, where they lie, and probabilities, as the copy engine takes them."""
    row_values, probability_pairs = findings
    number = gl.arange(0, ROW_VALUES, gl.BlockedLayout([4], [32], [1], [0]))
    values = row_values + unit.to(gl.int64) * ROW_VALUES + number
    async_copy.async_copy_global_to_shared(row_places.index(place), values)
    found = found_bars.index(place)
    async_copy.mbarrier_arrive(found)  # later, so each thread adds itself to who is waited for: all before one arrives
    partition_barrier()
    mbarrier.expect(found, 2 * ROWS * TILE * 2)
    tma.async_copy_global_to_shared(probability_pairs, [unit * (2 * ROWS), 0], found, probability_places.index(place))


@gluon.jit
@no_type_check
def fetch_shares(
    cut, lens, block_table, value_pages, findings, sizes, strides, shared, bars, flags, pairs, splits_bound,
    HEADS: gl.constexpr, LATENT: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """Fetch what the program's shares multiply, once its unit is scored, for there is no other memory.

    Values come ahead of probabilities, which other programs may still be about to leave.
    """
    num_requests, row_blocks = sizes[2], sizes[4]
    row_places, probability_places, tiles = shared[4], shared[5], shared[6]
    _, scored, arrived, released, found_bars = bars
    shares = num_requests * splits_bound * row_blocks * SHARES
    share, what = seek_share(first_share(), cut, lens, sizes, splits_bound, HEADS)
    first = _pages_of_share(what, block_table, strides, BLOCK_SIZE)
    mbarrier.wait(scored, 0)
    step = share * 0  # pairs of all shares
    while share < shares:
        first_column = share % SHARES * (LATENT // SHARES)
        request, begin, stop = what[0], what[5], what[6]
        count = ceil_div(stop - begin, 2)
        first_unit = (request * pairs + begin // 2) * row_blocks + what[1]
        # all places are free at first; then half of them, so that a share's first probabilities are asked for early
        ahead = gl.where(step == 0, STAGES, STAGES - PLACES)
        for i in gl.static_range(STAGES):
            if (i < ahead) & (i < count):
                _await_stage(released, step + i)
                _fetch_pair(
                    what, i, first[i], block_table, strides, value_pages, tiles, arrived, first_column, step + i,
                    BLOCK_SIZE,
                )  # fmt: skip
        pair, found_pairs = begin * 0, begin * 0
        while pair < count:
            while found_pairs <= pair:
                found_pairs = _pairs_found(flags, first_unit, pair, count, row_blocks)
            later = pair + STAGES - PLACES  # in the stage of the pair whose place these probabilities take
            _await_stage(released, step + later)
            _ask_findings(
                first_unit + pair * row_blocks, findings, probability_places, row_places, found_bars,
                (step + pair) % PLACES,
            )  # fmt: skip
            if (later >= ahead) & (later < count):
                pages = _pages_of_pair(what, later, block_table, strides, BLOCK_SIZE)
                _fetch_pair(
                    what, later, pages, block_table, strides, value_pages, tiles, arrived, first_column, step + later,
                    BLOCK_SIZE,
                )  # fmt: skip
            pair += 1
        step += count
        share, what = seek_share(share + gl.num_programs(0), cut, lens, sizes, splits_bound, HEADS)
        first = _pages_of_share(what, block_table, strides, BLOCK_SIZE)


@gluon.jit
@no_type_check
def _row_values(row_places, place, WHICH: gl.constexpr, LAYOUT: gl.constexpr):
    """Of a pair in shared memory: references after its first tile and after its second, sums of both."""
    each = row_places._reinterpret(gl.float32, [4 * PLACES, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return each.index(4 * place + WHICH).load(LAYOUT)


@gluon.jit
@no_type_check
def _zero_unowned(values, first_row, WIDTH: gl.constexpr):
    """Zeros from a row of a tile's columns on (`zero_from`)."""
    if first_row < TILE:
        for column in gl.static_range(0, WIDTH, 64):
            zero_from(values.slice(column, 64, dim=1), first_row)
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
def _write_partial(state, where, results, slot, num_partials, first_column, LATENT: gl.constexpr, VALUES: gl.constexpr):
    """A part of rows for the merge: a share's columns, and one of largest and total."""
    largest, total, values = state
    _, _, partial_out, partial_lse = results
    WIDTH: gl.constexpr = LATENT // SHARES
    row, partial_rows, real = partial_rows_of(slot, where, ROWS, gl.SliceLayout(1, VALUES), True)
    gl.store(partial_lse + row, largest, mask=real & (first_column == 0))
    gl.store(partial_lse + num_partials.to(gl.int64) * partial_rows + row, total, mask=real & (first_column == 0))
    columns = first_column + gl.arange(0, WIDTH, gl.SliceLayout(0, VALUES))
    place = partial_out + (row * LATENT)[:, None] + columns[None, :]
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
def multiply_shares(
    share, what, inputs, cut, results, sizes, shared, bars, splits_bound, HEADS: gl.constexpr,
    LATENT: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """The second phase, from a share on."""
    _, _, _, seq_lens, query_start_loc, _ = inputs
    _, _, num_requests, _, row_blocks, _, scale_log2 = sizes
    row_places, probability_places, tiles = shared[4], shared[5], shared[6]
    _, _, arrived, released, found_bars = bars
    num_partials, lens = cut[3], (seq_lens, query_start_loc)
    WIDTH: gl.constexpr = LATENT // SHARES
    BUFFERS: gl.constexpr = tiles.shape[0] // (2 * STAGES)
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, VALUES)
    ALL: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    shares = num_requests * splits_bound * row_blocks * SHARES
    step = 0  # pairs of all shares
    while share < shares:
        first_column = share % SHARES * WIDTH
        request, length, begin, stop = tiles_of(what)
        count = ceil_div(stop - begin, 2)
        largest = gl.full([ROWS], LEAST, gl.float32, ROW)
        known = gl.full([ROWS], LEAST, gl.float32, ALL)
        first_total = gl.zeros([ROWS], gl.float32, ROW)
        second_total = gl.zeros([ROWS], gl.float32, ROW)
        values = gl.zeros([ROWS, WIDTH], gl.float32, VALUES)
        for pair in range(0, count):
            place, stage = step % PLACES, step % STAGES
            mbarrier.wait(found_bars.index(place), (step // PLACES) & 1)
            middle, top = _row_values(row_places, place, 0, ROW), _row_values(row_places, place, 1, ROW)
            between, end = _row_values(row_places, place, 0, ALL), _row_values(row_places, place, 1, ALL)
            moved = gl.max(((known != between) | (between != end)).to(gl.int32), 0) > 0
            known = end
            first = tiles.index(2 * stage * BUFFERS)._reinterpret(tiles.dtype, [TILE, WIDTH], SHARED)
            second = tiles.index((2 * stage + 1) * BUFFERS)._reinterpret(tiles.dtype, [TILE, WIDTH], SHARED)
            probabilities = probability_places.index(place)
            owned = length - (begin + 2 * pair) * TILE
            mbarrier.wait(arrived.index(stage), (step // STAGES) & 1)
            _zero_unowned(first, owned, WIDTH)
            values = _rescaled(values, moved, largest, middle, scale_log2)
            values = warpgroup_mma(probabilities.slice(0, ROWS), first, values, is_async=True)
            first_decay, second_decay = gl.exp2((largest - middle) * scale_log2), gl.exp2((largest - top) * scale_log2)
            first_total = first_total * first_decay + _row_values(row_places, place, 2, ROW)
            second_total = second_total * second_decay + _row_values(row_places, place, 3, ROW)
            first_total = first_total * gl.exp2((middle - top) * scale_log2)
            values = warpgroup_mma_wait(0, deps=[values])
            _zero_unowned(second, owned - TILE, WIDTH)
            values = _rescaled(values, moved, middle, top, scale_log2)
            largest = top
            values = warpgroup_mma(probabilities.slice(ROWS, ROWS), second, values, is_async=True)
            values = warpgroup_mma_wait(0, deps=[values])
            partition_barrier()  # every warp has read and multiplied, before one of them releases
            arrive(released.index(stage))
            step += 1

        slot = leave_word(
            request, what[1], begin, begin + what[8], first_column == 0, what[8], what[7], cut, num_requests
        )
        total = first_total + second_total
        state = (gl.where(total == 0, float("-inf"), largest * scale_log2), total, values)
        where = rows_of(what, sizes, HEADS)
        if slot >= 0:
            _write_partial(state, where, results, slot, num_partials, first_column, LATENT, VALUES)
        else:
            _write_whole(state, where, results, first_column, HEADS, LATENT, VALUES)
        share, what = seek_share(share + gl.num_programs(0), cut, lens, sizes, splits_bound, HEADS)
