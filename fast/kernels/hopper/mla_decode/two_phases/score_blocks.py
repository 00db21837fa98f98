"""The first phase of a decode in two: pairs of tiles are scored apart, for 64 rows, and their probabilities are left.

A unit is a pair of tiles and a block of rows. What its probabilities are relative to goes from tile to tile of a split
(`tile_pairs`), so the program tells the others its tiles' largest scores, and waits for those of the pairs before.
"""

from __future__ import annotations

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma_wait

from ...common.arrivals import arrive
from ...common.gluon_versions import partition_barrier
from ...common.loads import LEAST, pages_held, seen_at, shift_of
from ...common.work_items import TILE, ceil_div, lens_of, own_cut, tiles_of
from ..main_loops.tile_pairs import ROWS, fetch_quarter, masked, reference_of, score_quarter

QUARTERS = gl.constexpr(4)  # of a tile's latent columns, scored one by one
BEFORE = gl.constexpr(8)  # pairs whose largest scores are asked for at a time
UNTOLD = gl.constexpr(-1)  # what words hold before they are told: the bits of no largest score, of no flag
CANONICAL_NAN = gl.constexpr(0x7FFFFFFF)
TOPS = gl.constexpr(2 * ROWS.value)  # words of a unit: largest scores of its rows; behind all, a flag of each unit
ROW_VALUES = gl.constexpr(4 * ROWS.value)  # of a unit: references after both tiles, sums of both


@gluon.jit
@no_type_check
def _num_units(sizes, pairs):
    """Of all requests, as if each filled the block table."""
    return sizes[2] * pairs * sizes[4]


@gluon.jit
@no_type_check
def flags_behind(words, sizes, pairs):
    """Of each unit one, that its probabilities are left."""
    return words + _num_units(sizes, pairs) * TOPS


@gluon.jit
@no_type_check
def unit_of_program(cut, lens, sizes, pairs, HEADS: gl.constexpr):
    """A note of the unit that has the program's number (`pieces`), and whether there is one."""
    unit = gl.program_id(0)
    num_tokens, _, num_requests, max_keys, row_blocks, _, _ = sizes
    request = gl.minimum(unit // row_blocks // pairs, num_requests - 1)
    row_block, begin = unit % row_blocks, unit // row_blocks % pairs * 2
    query_start, query_end, length, readable = lens_of(request, lens, num_tokens, max_keys)
    split_tiles, _ = own_cut(length, readable, cut)
    stop = gl.minimum(begin + 2, ceil_div(readable, TILE))
    there = (unit < _num_units(sizes, pairs)) & (begin < stop)
    there = there & (query_start + row_block * ROWS // HEADS < query_end)
    note = (request, row_block, query_start, query_end, readable, begin, stop, begin * 0, split_tiles)
    return note, there


@gluon.jit
@no_type_check
def _pages_at(block_table, sizes, strides, pairs, BLOCK_SIZE: gl.constexpr):
    """The first pages of the tiles of the program's unit, before it is known whether it has keys there."""
    unit = gl.program_id(0)
    _, _, num_requests, max_keys, row_blocks, _, _ = sizes
    request, key = unit // row_blocks // pairs, unit // row_blocks % pairs * (2 * TILE)
    table_row = block_table + gl.minimum(request, num_requests - 1).to(gl.int64) * strides[4]
    first, second = key // BLOCK_SIZE, (key + TILE) // BLOCK_SIZE
    first_page = gl.load(table_row + first.to(gl.int64) * strides[5], mask=key < max_keys, other=-1)
    return first_page, gl.load(table_row + second.to(gl.int64) * strides[5], mask=key + TILE < max_keys, other=-1)


@gluon.jit
@no_type_check
def fetch_unit(
    cut, lens, block_table, latent_pages, rope_pages, sizes, strides, buffers, full, pairs,
    HEADS: gl.constexpr, LATENT: gl.constexpr, ROPE: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """Fetch the tiles of the program's unit, if it has one."""
    pages = _pages_at(block_table, sizes, strides, pairs, BLOCK_SIZE)
    note, there = unit_of_program(cut, lens, sizes, pairs, HEADS)
    if there:
        request, length, begin, stop = tiles_of(note)
        table_row, table_stride = block_table + request.to(gl.int64) * strides[4], strides[5]
        end_key = gl.minimum(stop * TILE, length)
        first_pages = (pages[0], gl.where((begin + 1) * TILE < end_key, pages[1], -1))
        for place in gl.static_range(2):
            for number in gl.static_range(QUARTERS):
                fetch_quarter(
                    begin + place, end_key, first_pages[place], table_row, table_stride, latent_pages, rope_pages,
                    buffers, full, place, number, LATENT, ROPE, BLOCK_SIZE,
                )  # fmt: skip


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
def fence_async_global():
    """What this thread has written or seen in memory comes before what copy engines read there."""
    gl.inline_asm_elementwise("fence.proxy.async.global; // dummy $0", "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
@no_type_check
def _leave_tile(scores, reference, findings, unit, scale_log2, PLACE: gl.constexpr, SCORES: gl.constexpr):
    """Leave a tile's probabilities, their rows' sums, and the references that they are relative to."""
    row_values, probabilities = findings
    # each of the four threads that have a row takes eight keys that lie together, twice: few stores of whole sectors
    LINES: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32]], [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [],
        [64, 64],
    )  # fmt: skip
    weights = gl.exp2(scores * scale_log2 - shift_of(reference, scale_log2)[:, None])
    row, key = gl.arange(0, ROWS, gl.SliceLayout(1, LINES)), gl.arange(0, TILE, gl.SliceLayout(0, LINES))
    place = probabilities + (2 * unit + PLACE).to(gl.int64) * (ROWS * TILE) + (row * TILE)[:, None] + key[None, :]
    gl.store(place, gl.convert_layout(weights.to(probabilities.dtype.element_ty), LINES))
    place = row_values + unit.to(gl.int64) * ROW_VALUES + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
    gl.store(place + PLACE * ROWS, reference)
    gl.store(place + (2 + PLACE) * ROWS, gl.sum(weights, 1))


@gluon.jit
@no_type_check
def score_unit(
    note, inputs, words, findings, sizes, strides, shared, full, scored, pairs,
    HEADS: gl.constexpr, LATENT: gl.constexpr, ROPE: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """Score the program's unit, whose queries are asked for, and leave what its rows' values are multiplied by.

    `scored` says that the memory of tiles and queries is free.
    """
    _, _, block_table, _, _, visible_lens = inputs
    _, num_blocks, _, _, row_blocks, _, scale_log2 = sizes
    q_latent, q_rope, latents, tails, _, _, _ = shared
    table_row_stride, table_stride = strides[4], strides[5]
    unit, flags = gl.program_id(0), flags_behind(words, sizes, pairs)
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
    partition_barrier()  # every warp has multiplied, before one of them says so
    arrive(scored)
    second_top = gl.max(second, 1)
    _tell_tops(words, unit, 1, second_top)

    before = _reference_before(words, unit, begin % note[8] // 2, row_blocks, scale_log2, ALL)
    middle = reference_of(gl.convert_layout(before, ROW), first_top, scale_log2)
    top = reference_of(middle, second_top, scale_log2)
    _leave_tile(first, middle, findings, unit, scale_log2, 0, SCORES)
    _leave_tile(second, top, findings, unit, scale_log2, 1, SCORES)
    fence_async_global()
    partition_barrier()  # what every thread has written, before one of them tells
    gl.atomic_xchg(flags + unit, 0, sem="release", scope="gpu")
