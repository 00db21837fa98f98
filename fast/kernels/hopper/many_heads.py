"""Decode of many rows a request: two warp groups share 64 rows and take pairs of tiles (FlashMLA's seesaw).

Each group scores its own tile of a pair with all rows, and holds one half of the latent columns of the output. The
probabilities of both tiles multiply both halves, so each group hands its own to the other through shared memory: one
group's products run while the other is at its softmax. A third partition, one warp, fetches tiles, a quarter of their
columns at a time: each quarter is released, fetched again and multiplied by itself, as no third tile fits.
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
from .pieces import (
    NOTED,
    NOTES,
    TILE,
    first_piece,
    follow_kernel,
    next_piece,
    read_note,
    rows_of,
    seek,
    slot_of,
    split_tiles_of,
    tiles_of,
    write_note,
)
from .rows_and_pages import (
    LEAST,
    LN_2,
    ask_queries,
    fold_shares,
    load_columns,
    page_of,
    pages_held,
    part_rows,
    rows_at,
    seen_at,
    shift_of,
)

ROWS = gl.constexpr(64)
MOST_GROWTH = gl.constexpr(8.0)  # binary orders of magnitude
LONG = gl.constexpr(8)  # tiles of a program's first piece, from which on its queries go first


@gluon.jit
@no_type_check
def _ask(note, asked, queries, sizes, OWN: gl.constexpr, HEADS: gl.constexpr, ROPE: gl.constexpr):
    """Ask for a piece's queries, those of half OWN of the columns, unless they are not wanted."""
    HALF: gl.constexpr = queries[2].shape[2] // 2
    if asked:
        ask_queries(note, queries, sizes, ROWS, HEADS, OWN * HALF, HALF, ROPE if OWN == 1 else 0)


@gluon.jit
@no_type_check
def _write_whole(
    state, where, results, scale_log2, following, asked, queries, sizes, OWN: gl.constexpr, HEADS: gl.constexpr,
    LATENT: gl.constexpr, ROPE: gl.constexpr, SCORES: gl.constexpr, VALUES: gl.constexpr,
):  # fmt: skip
    """Outputs of rows that one program saw whole: half OWN of the columns. The following queries are asked for."""
    largest, total, left, right = state
    out, lse, _, _ = results
    q_latent = queries[2]
    num_tokens, num_heads = where[4], where[5]
    HALF: gl.constexpr = LATENT // 2
    WIDTH: gl.constexpr = LATENT // 4
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HALF, HALF // 8], [4, 1], [1, 0])
    divisor = gl.where(total == 0, 1.0, total)  # a row that saw nothing: values 0
    left, right = _scaled(left, right, 1.0 / divisor, VALUES)
    if OWN == 0:
        _, token, head, real = rows_at(where, ROWS, gl.SliceLayout(1, SCORES))
        log = gl.where(total == 0, float("-inf"), largest * scale_log2 + gl.log2(divisor))
        gl.store(lse + head.to(gl.int64) * num_tokens + token, log * LN_2, mask=real)
    if out.dtype.element_ty == q_latent.dtype:
        # by way of the queries' memory, which nobody multiplies by any more, so that whole lines are written
        _, token, head, real = rows_at(where, ROWS, gl.SliceLayout(1, WIDE))
        staged = q_latent.index(0).slice(OWN * HALF, HALF, dim=1)
        staged.slice(0, WIDTH, dim=1).store(left.to(q_latent.dtype))
        staged.slice(WIDTH, WIDTH, dim=1).store(right.to(q_latent.dtype))
        lines = staged.load(WIDE)
        partition_barrier()
        _ask(following, asked, queries, sizes, OWN, HEADS, ROPE)
        columns = OWN * HALF + gl.arange(0, HALF, gl.SliceLayout(0, WIDE))
        offsets = (token.to(gl.int64) * num_heads + head) * LATENT
        gl.store(out + offsets[:, None] + columns[None, :], lines, mask=real[:, None])
    else:
        _ask(following, asked, queries, sizes, OWN, HEADS, ROPE)
        _, token, head, real = rows_at(where, ROWS, gl.SliceLayout(1, VALUES))
        columns = OWN * HALF + gl.arange(0, WIDTH, gl.SliceLayout(0, VALUES))
        offsets = (token.to(gl.int64) * num_heads + head) * LATENT
        place = out + offsets[:, None] + columns[None, :]
        gl.store(place, left.to(out.dtype.element_ty), mask=real[:, None])
        gl.store(place + WIDTH, right.to(out.dtype.element_ty), mask=real[:, None])


@gluon.jit
@no_type_check
def _write_part(
    state, where, results, scale_log2, slot, num_slots, OWN: gl.constexpr, LATENT: gl.constexpr,
    SCORES: gl.constexpr, VALUES: gl.constexpr, OF_REQUEST: gl.constexpr,
):  # fmt: skip
    """Parts of rows for the merge: half OWN of the columns, and one of largest and total."""
    largest, total, left, right = state
    _, _, part_out, part_lse = results
    HALF: gl.constexpr = LATENT // 2
    WIDTH: gl.constexpr = LATENT // 4
    row, slot_rows, real = part_rows(slot, where, ROWS, gl.SliceLayout(1, SCORES), OF_REQUEST)
    if OWN == 0:
        gl.store(part_lse + row, gl.where(total == 0, float("-inf"), largest * scale_log2), mask=real)
    else:
        gl.store(part_lse + num_slots.to(gl.int64) * slot_rows + row, total, mask=real)
    row, _, real = part_rows(slot, where, ROWS, gl.SliceLayout(1, VALUES), OF_REQUEST)
    columns = OWN * HALF + gl.arange(0, WIDTH, gl.SliceLayout(0, VALUES))
    place = part_out + (row * LATENT)[:, None] + columns[None, :]
    gl.store(place, left, mask=real[:, None])
    gl.store(place + WIDTH, right, mask=real[:, None])


@gluon.jit
@no_type_check
def _based_on_two(state, scale_log2):
    """A state with its largest scores in base 2, -inf where nothing was seen."""
    largest, total, left, right = state
    return gl.where(total == 0, float("-inf"), largest * scale_log2), total, left, right


@gluon.jit
@no_type_check
def _kept_at(kept_values, OWN: gl.constexpr, LATENT: gl.constexpr, VALUES: gl.constexpr):
    """Where a group keeps the first quarter of its values; the second lies LATENT // 4 * ROWS elements further.

    In squares of 8 by 8, as the matrix unit deals them to the threads, so that a warp's accesses fill whole lines.
    """
    row = gl.arange(0, ROWS, gl.SliceLayout(1, VALUES))
    column = gl.arange(0, LATENT // 4, gl.SliceLayout(0, VALUES))
    place = kept_values + gl.program_id(0).to(gl.int64) * (ROWS * LATENT) + OWN * (LATENT // 2) * ROWS
    return place + (row * 8)[:, None] + (column // 8 * (8 * ROWS) + column % 8)[None, :]


@gluon.jit
@no_type_check
def _folded(
    state, kept, kept_values, OWN: gl.constexpr, LATENT: gl.constexpr, SCORES: gl.constexpr, VALUES: gl.constexpr
):
    """What the group kept of the splits before, and a state, as one: half OWN of the columns."""
    largest, total, left, right = state
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    largest, old, new = fold_shares(kept.index(2 * OWN).load(ROW), largest)
    total = gl.fma(kept.index(2 * OWN + 1).load(ROW), old, total * new)
    place = _kept_at(kept_values, OWN, LATENT, VALUES)
    old = gl.convert_layout(old, gl.SliceLayout(1, VALUES))[:, None]
    left, right = _scaled(left, right, new, VALUES)
    left = gl.fma(gl.load(place), old, left)
    right = gl.fma(gl.load(place + LATENT // 4 * ROWS), old, right)
    return largest, total, left, right


@gluon.jit
@no_type_check
def _keep(state, kept, kept_values, OWN: gl.constexpr, LATENT: gl.constexpr, VALUES: gl.constexpr):
    """Keep a state for the next split of the run: half OWN of the columns."""
    largest, total, left, right = state
    kept.index(2 * OWN).store(largest)
    kept.index(2 * OWN + 1).store(total)
    place = _kept_at(kept_values, OWN, LATENT, VALUES)
    gl.store(place, left)
    gl.store(place + LATENT // 4 * ROWS, right)


@gluon.jit
@no_type_check
def _score(
    scores, buffers, q_latent, q_rope, full, zero, phase, PLACE: gl.constexpr, NUMBER: gl.constexpr,
    LATENT: gl.constexpr, ROPE: gl.constexpr,
):  # fmt: skip
    """Multiply the quarter of a tile that comes as number NUMBER; with the last one also the rope part."""
    latents, tails = buffers
    WIDTH: gl.constexpr = LATENT // 4
    QUARTER: gl.constexpr = (2 * PLACE + NUMBER) % 4
    mbarrier.wait(full.index(4 * PLACE + QUARTER), phase)
    queries = q_latent.index(zero).slice(QUARTER * WIDTH, WIDTH, dim=1)
    keys = _quarter(latents, PLACE, QUARTER, zero, WIDTH)
    scores = warpgroup_mma(queries, keys.permute([1, 0]), scores, use_acc=NUMBER > 0, is_async=True)
    if NUMBER == 3 and ROPE > 0:
        layout: gl.constexpr = gl.NVMMASharedLayout(2 * ROPE, 16)
        keys = tails.index(PLACE + zero)._reinterpret(tails.dtype, [TILE, ROPE], layout)
        scores = warpgroup_mma(q_rope.index(zero), keys.permute([1, 0]), scores, is_async=True)
    return scores


@gluon.jit
@no_type_check
def _quarter(latents, PLACE: gl.constexpr, QUARTER: gl.constexpr, zero, WIDTH: gl.constexpr):
    """A quarter of the latents of a tile in shared memory, [TILE, WIDTH]."""
    BUFFERS: gl.constexpr = latents.shape[0] // 8
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    return latents.index((4 * PLACE + QUARTER) * BUFFERS + zero)._reinterpret(latents.dtype, [TILE, WIDTH], layout)


@gluon.jit
@no_type_check
def _scaled(left, right, factor, VALUES: gl.constexpr):
    """Both quarters of the values, each row times its factor."""
    factor = gl.convert_layout(factor, gl.SliceLayout(1, VALUES))[:, None]
    return left * factor, right * factor


@gluon.jit
@no_type_check
def _mask(scores, tile, end, seen, LAYOUT: gl.constexpr, BLOCK_SIZE: gl.constexpr):
    """-inf for keys that a row must not see, or that lie in no page."""
    visible, length, table_row, table_stride, num_blocks = seen
    key = tile * TILE + gl.arange(0, TILE, gl.SliceLayout(0, LAYOUT))
    page = gl.load(table_row + (key // BLOCK_SIZE).to(gl.int64) * table_stride, mask=key < length, other=-1)
    held = (page >= 0) & (page < num_blocks) & (key < end * TILE)
    return gl.where(held[None, :] & (key[None, :] < visible[:, None]), scores, float("-inf"))


@gluon.jit
@no_type_check
def _reference(before, largest, scale_log2):
    """What a row's scores are taken relative to: as before, unless the largest would pass it by a factor over 2^8.

    Weights up to 2^8 lose nothing in the sums, and most tiles then rescale no row.
    """
    return gl.where((largest - before) * scale_log2 > MOST_GROWTH, largest, before)


@gluon.jit
@no_type_check
def _all_rows(row_values, PLACE: gl.constexpr):
    """The references that were left in a place, of all rows in every warp: warps then agree without a barrier."""
    return row_values.index(PLACE).load(gl.BlockedLayout([2], [32], [4], [0]))


@gluon.jit
@no_type_check
def _rescaled(left, right, known, found, before, after, scale_log2, VALUES: gl.constexpr):
    """The values relative to other references, unless none has moved.

    Args:
        left: the first quarter that the group holds of them.
        right: the second one.
        known: all rows' references until now.
        found: all rows' references from now on.
        before: references until now of the rows that a thread has.
        after: references from now on of the rows that a thread has.
        scale_log2: of scores.
        VALUES: layout of a quarter.
    """
    if gl.max((known != found).to(gl.int32), 0) > 0:
        left, right = _scaled(left, right, gl.exp2((before - after) * scale_log2), VALUES)
    return left, right


@gluon.jit
@no_type_check
def _zero_unowned(left, right, first_row, WIDTH: gl.constexpr):
    """Zeros from a row of two quarters on: nobody owns those bytes, and 0 * NaN is NaN."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    if first_row < TILE:
        row = gl.arange(0, TILE, gl.SliceLayout(1, layout))
        for column in gl.static_range(0, WIDTH, 64):
            part = left.slice(column, 64, dim=1)
            part.store(gl.where((row < first_row)[:, None], part.load(layout), 0.0))
            part = right.slice(column, 64, dim=1)
            part.store(gl.where((row < first_row)[:, None], part.load(layout), 0.0))
        fence_async_shared()
        partition_barrier()


@gluon.jit
@no_type_check
def _first_group(
    scores, state, first, end, plain, seen, buffers, row_values, bars, zero, phase, scale_log2,
    WIDTH: gl.constexpr, BLOCK_SIZE: gl.constexpr, SCORES: gl.constexpr, VALUES: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """A pair of tiles in the group that scores the first: P0 V0 from registers, then P1 V1 from shared memory.

    Returns with the second product in flight.
    """
    largest, total, left, right = state
    latents, tails = buffers
    full, free, handed, _, _, _ = bars
    length = seen[1]
    own_left, own_right = _quarter(latents, 0, 0, zero, WIDTH), _quarter(latents, 0, 1, zero, WIDTH)
    cross_left, cross_right = _quarter(latents, 1, 0, zero, WIDTH), _quarter(latents, 1, 1, zero, WIDTH)
    if MASKED and first >= plain:
        scores = _mask(scores, first, end, seen, SCORES, BLOCK_SIZE)
    if MASKED:
        _zero_unowned(own_left, own_right, length - first * TILE, WIDTH)
    middle = _reference(largest, gl.max(scores, 1), scale_log2)
    weights = gl.exp2(scores * scale_log2 - shift_of(middle, scale_log2)[:, None])
    rounded = weights.to(latents.dtype)
    tails.index(zero).store(rounded)
    row_values.index(0).store(middle)
    fence_async_shared()
    known = _all_rows(row_values, 1)  # of the pair before; before the first one the values are zeros
    mbarrier.arrive(handed.index(0))
    decay = gl.exp2((largest - middle) * scale_log2)
    found = _all_rows(row_values, 0)
    left, right = _rescaled(left, right, known, found, largest, middle, scale_log2, VALUES)
    probabilities = gl.convert_layout(rounded, gl.DotOperandLayout(0, VALUES, 2))
    left = warpgroup_mma(probabilities, own_left, left, is_async=True)
    right = warpgroup_mma(probabilities, own_right, right, is_async=True)
    total = total * decay + gl.sum(weights, 1)
    left = warpgroup_mma_wait(1, deps=[left])
    mbarrier.arrive(free.index(0))
    right, probabilities = warpgroup_mma_wait(0, deps=[right, probabilities])
    mbarrier.arrive(free.index(1))
    mbarrier.wait(handed.index(1), phase)
    largest = row_values.index(1).load(gl.SliceLayout(1, SCORES))
    decay = gl.exp2((middle - largest) * scale_log2)
    left, right = _rescaled(left, right, found, _all_rows(row_values, 1), middle, largest, scale_log2, VALUES)
    if MASKED:
        mbarrier.wait(full.index(4), phase)
        mbarrier.wait(full.index(5), phase)
        _zero_unowned(cross_left, cross_right, length - (first + 1) * TILE, WIDTH)
    left = warpgroup_mma(tails.index(1 + zero), cross_left, left, is_async=True)
    right = warpgroup_mma(tails.index(1 + zero), cross_right, right, is_async=True)
    total = total * decay
    return largest, total, left, right


@gluon.jit
@no_type_check
def _second_group(
    state, first, end, plain, seen, buffers, row_values, q_latent, q_rope, bars, zero, phase, scale_log2,
    LATENT: gl.constexpr, ROPE: gl.constexpr, BLOCK_SIZE: gl.constexpr, SCORES: gl.constexpr, VALUES: gl.constexpr,
    MASKED: gl.constexpr,
):  # fmt: skip
    """A pair of tiles in the group that scores the second: P0 V0 before its own scores, then P1 V1 from registers."""
    WIDTH: gl.constexpr = LATENT // 4
    largest, total, left, right = state
    latents, tails = buffers
    full, free, handed, _, _, _ = bars
    length = seen[1]
    own_left, own_right = _quarter(latents, 1, 2, zero, WIDTH), _quarter(latents, 1, 3, zero, WIDTH)
    cross_left, cross_right = _quarter(latents, 0, 2, zero, WIDTH), _quarter(latents, 0, 3, zero, WIDTH)
    scores = gl.zeros([ROWS, TILE], gl.float32, SCORES)
    for number in gl.static_range(4):
        scores = _score(scores, buffers, q_latent, q_rope, full, zero, phase, 1, number, LATENT, ROPE)
    mbarrier.wait(handed.index(0), phase)
    middle = row_values.index(0).load(gl.SliceLayout(1, SCORES))
    known, found = _all_rows(row_values, 1), _all_rows(row_values, 0)
    left, right = _rescaled(left, right, known, found, largest, middle, scale_log2, VALUES)
    if MASKED:
        mbarrier.wait(full.index(2), phase)
        mbarrier.wait(full.index(3), phase)
        _zero_unowned(cross_left, cross_right, length - first * TILE, WIDTH)
    left = warpgroup_mma(tails.index(zero), cross_left, left, is_async=True)
    right = warpgroup_mma(tails.index(zero), cross_right, right, is_async=True)
    scores = warpgroup_mma_wait(2, deps=[scores])
    if MASKED and first + 1 >= plain:
        scores = _mask(scores, first + 1, end, seen, SCORES, BLOCK_SIZE)
    top = _reference(middle, gl.max(scores, 1), scale_log2)
    weights = gl.exp2(scores * scale_log2 - shift_of(top, scale_log2)[:, None])
    rounded = weights.to(latents.dtype)
    tails.index(1 + zero).store(rounded)
    row_values.index(1).store(top)
    fence_async_shared()
    mbarrier.arrive(handed.index(1))
    left = warpgroup_mma_wait(1, deps=[left])
    mbarrier.arrive(free.index(2))
    right = warpgroup_mma_wait(0, deps=[right])
    mbarrier.arrive(free.index(3))
    left, right = _rescaled(left, right, found, _all_rows(row_values, 1), middle, top, scale_log2, VALUES)
    if MASKED:
        _zero_unowned(own_left, own_right, length - (first + 1) * TILE, WIDTH)
    probabilities = gl.convert_layout(rounded, gl.DotOperandLayout(0, VALUES, 2))
    left = warpgroup_mma(probabilities, own_left, left, is_async=True)
    right = warpgroup_mma(probabilities, own_right, right, is_async=True)
    total = total * gl.exp2((largest - top) * scale_log2) + gl.sum(weights, 1)
    left = warpgroup_mma_wait(1, deps=[left])
    mbarrier.arrive(free.index(6))
    right, probabilities = warpgroup_mma_wait(0, deps=[right, probabilities])
    mbarrier.arrive(free.index(7))
    return top, total, left, right


@gluon.jit
@no_type_check
def _first_pairs(
    begin, plain_end, stop, plain, seen, buffers, row_values, q_latent, q_rope, bars, pair, scale_log2,
    LATENT: gl.constexpr, ROPE: gl.constexpr, BLOCK_SIZE: gl.constexpr, SCORES: gl.constexpr, VALUES: gl.constexpr,
):  # fmt: skip
    """The pairs [begin, stop) in the group that scores the first tile of each; the state, and the pairs counted on."""
    WIDTH: gl.constexpr = LATENT // 4
    full, free, _, _, _, _ = bars
    largest, total, left, right = _nothing_seen(WIDTH, SCORES, VALUES)
    if begin < stop:
        zero = pair >> 30  # the compiler must not see that this is 0: it would share the addresses of all
        # buffers among all products, and spill them
        scores = gl.zeros([ROWS, TILE], gl.float32, SCORES)
        for number in gl.static_range(4):
            scores = _score(scores, buffers, q_latent, q_rope, full, zero, pair & 1, 0, number, LATENT, ROPE)
        for first in range(begin, plain_end, 2):
            zero = pair >> 30
            scores = warpgroup_mma_wait(0, deps=[scores])
            largest, total, left, right = _first_group(
                scores, (largest, total, left, right), first, stop, plain, seen, buffers, row_values, bars,
                zero, pair & 1, scale_log2, WIDTH, BLOCK_SIZE, SCORES, VALUES, False,
            )  # fmt: skip
            left = warpgroup_mma_wait(1, deps=[left])
            mbarrier.arrive(free.index(4))
            pair += 1
            scores = gl.zeros([ROWS, TILE], gl.float32, SCORES)
            scores = _score(scores, buffers, q_latent, q_rope, full, zero, pair & 1, 0, 0, LATENT, ROPE)
            right = warpgroup_mma_wait(1, deps=[right])
            mbarrier.arrive(free.index(5))
            for number in gl.static_range(1, 4):
                scores = _score(scores, buffers, q_latent, q_rope, full, zero, pair & 1, 0, number, LATENT, ROPE)
        scores = warpgroup_mma_wait(0, deps=[scores])
        for first in range(plain_end, stop, 2):
            zero = pair >> 30
            largest, total, left, right = _first_group(
                scores, (largest, total, left, right), first, stop, plain, seen, buffers, row_values, bars,
                zero, pair & 1, scale_log2, WIDTH, BLOCK_SIZE, SCORES, VALUES, True,
            )  # fmt: skip
            left, right = warpgroup_mma_wait(0, deps=[left, right])
            mbarrier.arrive(free.index(4))
            mbarrier.arrive(free.index(5))
            pair += 1
            if first + 2 < stop:
                scores = gl.zeros([ROWS, TILE], gl.float32, SCORES)
                for number in gl.static_range(4):
                    scores = _score(scores, buffers, q_latent, q_rope, full, zero, pair & 1, 0, number, LATENT, ROPE)
                scores = warpgroup_mma_wait(0, deps=[scores])
    return (largest, total, left, right), pair


@gluon.jit
@no_type_check
def _second_pairs(
    begin, plain_end, stop, plain, seen, buffers, row_values, q_latent, q_rope, bars, pair, scale_log2,
    LATENT: gl.constexpr, ROPE: gl.constexpr, BLOCK_SIZE: gl.constexpr, SCORES: gl.constexpr, VALUES: gl.constexpr,
):  # fmt: skip
    """The pairs [begin, stop) in the group that scores the second tile of each; the state, and the pairs counted on."""
    largest, total, left, right = _nothing_seen(LATENT // 4, SCORES, VALUES)
    for first in range(begin, plain_end, 2):
        largest, total, left, right = _second_group(
            (largest, total, left, right), first, stop, plain, seen, buffers, row_values, q_latent, q_rope,
            bars, pair >> 30, pair & 1, scale_log2, LATENT, ROPE, BLOCK_SIZE, SCORES, VALUES, False,
        )  # fmt: skip
        pair += 1
    for first in range(plain_end, stop, 2):
        largest, total, left, right = _second_group(
            (largest, total, left, right), first, stop, plain, seen, buffers, row_values, q_latent, q_rope,
            bars, pair >> 30, pair & 1, scale_log2, LATENT, ROPE, BLOCK_SIZE, SCORES, VALUES, True,
        )  # fmt: skip
        pair += 1
    return (largest, total, left, right), pair


@gluon.jit
@no_type_check
def _nothing_seen(WIDTH: gl.constexpr, SCORES: gl.constexpr, VALUES: gl.constexpr):
    """A state before any tile."""
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    largest, total = gl.full([ROWS], LEAST, gl.float32, ROW), gl.full([ROWS], 0.0, gl.float32, ROW)
    return largest, total, gl.zeros([ROWS, WIDTH], gl.float32, VALUES), gl.zeros([ROWS, WIDTH], gl.float32, VALUES)


@gluon.jit
@no_type_check
def _pairs(
    begin, stop, plain, seen, buffers, row_values, q_latent, q_rope, bars, pair, sums, scale_log2, OWN: gl.constexpr,
    LATENT: gl.constexpr, ROPE: gl.constexpr, BLOCK_SIZE: gl.constexpr, SCORES: gl.constexpr, VALUES: gl.constexpr,
):  # fmt: skip
    """The pairs of tiles [begin, stop) in either group: the state, its sum that of both, pairs and sums counted on.

    Args:
        begin: tile.
        stop: tile.
        plain: up to this tile all rows see all keys.
        seen: keys that the rows see, readable keys, the request's row of the table and its stride, blocks of the cache.
        buffers: latents, and tails.
        row_values: what the groups tell each other of the rows.
        q_latent: queries.
        q_rope: queries.
        bars: barriers.
        pair: pairs of all pieces before: its parity is that of the barriers.
        sums: exchanged before, likewise.
        scale_log2: of scores.
        OWN: which group.
        LATENT: Lkv.
        ROPE: R.
        BLOCK_SIZE: keys a page.
        SCORES: layout.
        VALUES: layout of a quarter.
    """
    # the end of the pairs of such tiles; the last pair is not among them, as its successor has no scores
    plain_end = begin + gl.maximum(gl.minimum(plain - begin, stop - 1 - begin), 0) // 2 * 2
    if OWN == 0:
        state, pair = _first_pairs(
            begin, plain_end, stop, plain, seen, buffers, row_values, q_latent, q_rope, bars, pair, scale_log2, LATENT,
            ROPE, BLOCK_SIZE, SCORES, VALUES,
        )  # fmt: skip
    else:
        state, pair = _second_pairs(
            begin, plain_end, stop, plain, seen, buffers, row_values, q_latent, q_rope, bars, pair, scale_log2, LATENT,
            ROPE, BLOCK_SIZE, SCORES, VALUES,
        )  # fmt: skip
    largest, total, left, right = state
    row_values.index(2 + OWN).store(total)
    mbarrier.arrive(bars[4].index(OWN))
    mbarrier.wait(bars[4].index(1 - OWN), sums & 1)
    total += row_values.index(3 - OWN).load(gl.SliceLayout(1, SCORES))
    return (largest, total, left, right), pair, sums + 1


@gluon.jit
@no_type_check
def _consume(
    inputs, cut, results, sizes, strides, shared, bars,
    OWN: gl.constexpr, HEADS: gl.constexpr, LATENT: gl.constexpr, ROPE: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    BY_LENGTH: gl.constexpr, SCHEDULED: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """One warp group: scores tile OWN of each pair, and holds half OWN of the output's columns."""
    ql_nope, q_pe, block_table, _, _, visible_lens = inputs
    num_slots = cut[3]
    num_blocks, scale_log2 = sizes[1], sizes[6]
    latent_token_stride, latent_head_stride, rope_token_stride, rope_head_stride, table_row_stride, table_stride = (
        strides
    )
    q_latent, q_rope, latents, tails, row_values, kept, notes = shared
    buffers = (latents, tails)
    _, _, _, query_bar, _, noted = bars
    queries = (
        ql_nope, q_pe, q_latent, q_rope, latent_token_stride, latent_head_stride, rope_token_stride, rope_head_stride
    )  # fmt: skip
    WIDTH: gl.constexpr = LATENT // 4
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)

    pair = 0  # of all pieces: its parity is that of the barriers
    sums = 0
    piece = 0
    mbarrier.wait(noted, 0)
    note = read_note(notes, 0)
    _ask(note, note[0] >= 0, queries, sizes, OWN, HEADS, ROPE)
    visible, pages = seen_at(note, block_table, visible_lens, sizes, strides, ROWS, HEADS, BLOCK_SIZE, ROW)
    while note[0] >= 0:
        request, length, begin, stop = tiles_of(note)
        table_row = block_table + request.to(gl.int64) * table_row_stride
        visible = gl.minimum(visible, length)
        seen = (visible, length, table_row, table_stride, num_blocks)
        plain = gl.maximum(gl.min(visible, 0), 0) // TILE  # tiles that all rows see whole
        end_key = gl.minimum(stop * TILE, length)
        held = pages_held(pages, begin, end_key, table_row, table_stride, num_blocks, BLOCK_SIZE, 4)
        plain = gl.where(held, gl.minimum(plain, stop), begin)
        async_copy.wait_group(0)
        fence_async_shared()
        partition_barrier()  # the fence of every thread, before one of them arrives
        mbarrier.arrive(query_bar)
        mbarrier.wait(query_bar, piece & 1)

        if BY_LENGTH:
            # split by split; the outcome of each waits for the next one's, or is a part by itself (`pieces`)
            split_begin, split_stop = begin, gl.minimum(begin + split_tiles_of(note), stop)
            running = split_begin >= 0
            while running:
                running = split_stop < stop
                state, pair, sums = _pairs(
                    split_begin, split_stop, plain, seen, buffers, row_values, q_latent, q_rope, bars, pair, sums,
                    scale_log2, OWN, LATENT, ROPE, BLOCK_SIZE, SCORES, VALUES,
                )  # fmt: skip
                state = _based_on_two(state, scale_log2)
                kept_values = results[2] + num_slots.to(gl.int64) * sizes[5] * LATENT  # behind all parts
                if (begin == 0) & (split_begin > 0):
                    state = _folded(state, kept, kept_values, OWN, LATENT, SCORES, VALUES)
                if not running:
                    mbarrier.wait(noted, (piece + 1) & 1)
                # asked anew: registers that are held through a split are dear
                written, following = read_note(notes, piece), read_note(notes, piece + 1)
                asked = (split_stop >= stop) & (following[0] >= 0)
                where, slot = rows_of(written, sizes, HEADS), slot_of(written)
                if running & (begin == 0):
                    _keep(state, kept, kept_values, OWN, LATENT, VALUES)
                elif running | (slot >= 0):
                    _ask(following, asked, queries, sizes, OWN, HEADS, ROPE)
                    # of a run that folds the first slot, else each split's own
                    slot += gl.where(begin == 0, 0, (split_begin - begin) // split_tiles_of(written))
                    _write_part(state, where, results, 1.0, slot, num_slots, OWN, LATENT, SCORES, VALUES, True)
                else:
                    _write_whole(
                        state, where, results, 1.0, following, asked, queries, sizes, OWN, HEADS, LATENT, ROPE, SCORES,
                        VALUES,
                    )  # fmt: skip
                split_begin = split_stop
                split_stop = gl.minimum(split_stop + split_tiles_of(written), stop)
            note = read_note(notes, piece + 1)
            visible, pages = seen_at(note, block_table, visible_lens, sizes, strides, ROWS, HEADS, BLOCK_SIZE, ROW)
        else:
            state, pair, sums = _pairs(
                begin, stop, plain, seen, buffers, row_values, q_latent, q_rope, bars, pair, sums, scale_log2, OWN,
                LATENT, ROPE, BLOCK_SIZE, SCORES, VALUES,
            )  # fmt: skip
            mbarrier.wait(noted, (piece + 1) & 1)
            note = read_note(notes, piece + 1)
            asked = note[0] >= 0
            visible, pages = seen_at(note, block_table, visible_lens, sizes, strides, ROWS, HEADS, BLOCK_SIZE, ROW)
            written = read_note(notes, piece)
            where, slot = rows_of(written, sizes, HEADS), slot_of(written)
            if SCHEDULED:
                if slot < 0:
                    _write_whole(
                        state, where, results, scale_log2, note, asked, queries, sizes, OWN, HEADS, LATENT, ROPE,
                        SCORES, VALUES,
                    )  # fmt: skip
                else:
                    _ask(note, asked, queries, sizes, OWN, HEADS, ROPE)
                    _write_part(state, where, results, scale_log2, slot, num_slots, OWN, LATENT, SCORES, VALUES, True)
            elif SPLIT:
                _ask(note, asked, queries, sizes, OWN, HEADS, ROPE)
                _write_part(state, where, results, scale_log2, slot, num_slots, OWN, LATENT, SCORES, VALUES, False)
            else:
                _write_whole(
                    state, where, results, scale_log2, note, asked, queries, sizes, OWN, HEADS, LATENT, ROPE, SCORES,
                    VALUES,
                )  # fmt: skip
        piece += 1


@gluon.jit
@no_type_check
def _fetch(
    tile, end_key, page, table_row, table_stride, latent_pages, rope_pages, buffers, full, free, phase,
    PLACE: gl.constexpr, NUMBER: gl.constexpr, LATENT: gl.constexpr, ROPE: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """The quarter of a tile that is released and multiplied as number NUMBER."""
    latents, tails = buffers
    WIDTH: gl.constexpr = LATENT // 4
    BUFFERS: gl.constexpr = latents.shape[0] // 8
    QUARTER: gl.constexpr = (2 * PLACE + NUMBER) % 4
    # the rope part goes with the quarter that the other group releases last: it then holds what that group multiplies
    TAIL: gl.constexpr = ROPE if NUMBER == 3 else 0
    bar = full.index(4 * PLACE + QUARTER)
    mbarrier.wait(free.index(4 * PLACE + QUARTER), phase)
    mbarrier.expect(bar, TILE * (WIDTH + TAIL) * 2)
    load_columns(
        tile, end_key, page, table_row, table_stride, latent_pages, latents, (4 * PLACE + QUARTER) * BUFFERS, bar,
        BLOCK_SIZE, QUARTER * WIDTH, WIDTH,
    )  # fmt: skip
    if TAIL > 0:
        boxes = tails.index(PLACE)._reinterpret(
            tails.dtype,
            [TILE // rope_pages.block_shape[1], 1, rope_pages.block_shape[1], rope_pages.block_shape[2]],
            rope_pages.layout,
        )
        load_columns(tile, end_key, page, table_row, table_stride, rope_pages, boxes, 0, bar, BLOCK_SIZE, LATENT, ROPE)


@gluon.jit
@no_type_check
def _produce(
    inputs, cut, sizes, strides, latent_pages, rope_pages, shared, bars,
    HEADS: gl.constexpr, LATENT: gl.constexpr, ROPE: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    BY_LENGTH: gl.constexpr, SCHEDULED: gl.constexpr,
):  # fmt: skip
    """One warp fetches pairs of tiles, and notes the pieces for the groups that compute."""
    _, _, block_table, seq_lens, query_start_loc, _ = inputs
    num_tokens, _, num_requests, table_width, row_blocks, _, _ = sizes
    _, _, _, _, table_row_stride, table_stride = strides
    _, _, latents, tails, _, _, notes = shared
    full, free, _, query_bar, _, noted = bars
    lens, piece_sizes = (seq_lens, query_start_loc), (num_tokens, num_requests, table_width, row_blocks)
    walk = first_piece(cut, num_requests, row_blocks, SCHEDULED)
    walk, note = seek(walk, cut, lens, piece_sizes, BLOCK_SIZE, 2, ROWS, HEADS, BY_LENGTH, SCHEDULED)
    write_note(notes, 0, note, noted)
    pair = 0
    piece = 0
    while walk[3]:
        request, length, begin, stop = tiles_of(note)
        table_row = block_table + request.to(gl.int64) * table_row_stride
        end_key = gl.minimum(stop * TILE, length)
        next_pages = (
            page_of(begin * TILE, end_key, table_row, table_stride, BLOCK_SIZE),
            page_of((begin + 1) * TILE, end_key, table_row, table_stride, BLOCK_SIZE),
        )
        if (piece == 0) & (row_blocks > 1) & (stop - begin >= LONG):
            mbarrier.wait(query_bar, 0)  # the first tiles of all programs at once would keep the queries waiting
        for first in range(begin, stop, 2):
            phase = (pair & 1) ^ 1
            pages = next_pages
            next_pages = (
                page_of((first + 2) * TILE, end_key, table_row, table_stride, BLOCK_SIZE),
                page_of((first + 3) * TILE, end_key, table_row, table_stride, BLOCK_SIZE),
            )
            for place in gl.static_range(2):
                for number in gl.static_range(4):
                    _fetch(
                        first + place, end_key, pages[place], table_row, table_stride, latent_pages, rope_pages,
                        (latents, tails), full, free, phase, place, number, LATENT, ROPE, BLOCK_SIZE,
                    )  # fmt: skip
            pair += 1
        walk = next_piece(walk, cut, piece_sizes, SCHEDULED)
        walk, note = seek(walk, cut, lens, piece_sizes, BLOCK_SIZE, 2, ROWS, HEADS, BY_LENGTH, SCHEDULED)
        mbarrier.wait(query_bar, piece & 1)  # this piece has begun, and nobody reads the note of the one before it
        piece += 1
        write_note(notes, piece, note, noted)


@gluon.jit(
    do_not_specialize=[
        "num_tokens", "num_blocks", "num_requests", "table_width", "num_splits", "row_blocks", "request_rows",
        "num_slots", "least_tiles", "even_splits", "most_tiles", "max_splits", "table_row_stride",
    ],
    do_not_specialize_on_alignment=[
        "block_table", "seq_lens", "query_start_loc", "visible_lens", "tile_ranges", "split_offsets"
    ],
)  # fmt: skip
@no_type_check
def _many_heads_kernel(
    ql_nope, q_pe, latent_pages, rope_pages, block_table, seq_lens, query_start_loc, visible_lens,
    tile_ranges, split_offsets, out, lse, part_out, part_lse,
    num_tokens, num_blocks, num_requests, table_width, num_splits, row_blocks, request_rows, num_slots,
    least_tiles, even_splits, most_tiles, max_splits, scale_log2,
    latent_token_stride, latent_head_stride, rope_token_stride, rope_head_stride, table_row_stride, table_stride,
    HEADS: gl.constexpr, LATENT: gl.constexpr, ROPE: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    BY_LENGTH: gl.constexpr, SCHEDULED: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """A program's pieces for 64 of each request's rows; parts as `fast.kernels.triton.decode_merge` has them."""
    dtype: gl.constexpr = latent_pages.dtype
    BOX_KEYS: gl.constexpr = latent_pages.block_shape[1]
    BOX_COLUMNS: gl.constexpr = latent_pages.block_shape[2]
    TILE_SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    ROPE_SHARED: gl.constexpr = gl.NVMMASharedLayout(2 * ROPE if ROPE > 0 else 128, 16)
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    boxes: gl.constexpr = 2 * (TILE // BOX_KEYS) * (LATENT // BOX_COLUMNS)
    latents = gl.allocate_shared_memory(dtype, [boxes, 1, BOX_KEYS, BOX_COLUMNS], latent_pages.layout)
    q_latent = gl.allocate_shared_memory(dtype, [1, ROWS, LATENT], TILE_SHARED)
    # rope parts of the keys, then the probabilities of their tile
    tails = gl.allocate_shared_memory(dtype, [2, TILE, 64], TILE_SHARED)
    q_rope = q_latent
    if ROPE > 0:
        q_rope = gl.allocate_shared_memory(dtype, [1, ROWS, ROPE], ROPE_SHARED)
    row_values = gl.allocate_shared_memory(gl.float32, [4, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    kept = row_values
    if BY_LENGTH:
        kept = gl.allocate_shared_memory(gl.float32, [4, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [8, 1], BAR)  # quarters of both tiles
    free = gl.allocate_shared_memory(gl.int64, [8, 1], BAR)
    handed = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)  # probabilities and references of both tiles
    sum_bar = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    notes = gl.allocate_shared_memory(gl.int32, [NOTES * NOTED, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    query_bar = gl.allocate_shared_memory(gl.int64, [1], BAR)
    noted = gl.allocate_shared_memory(gl.int64, [1], BAR)
    for i in gl.static_range(8):
        mbarrier.init(full.index(i), 1)
        mbarrier.init(free.index(i), 1)
    for i in gl.static_range(2):
        mbarrier.init(handed.index(i), 1)
        mbarrier.init(sum_bar.index(i), 1)
    mbarrier.init(query_bar, 2)
    mbarrier.init(noted, 1)
    fence_async_shared()
    follow_kernel()

    inputs = (ql_nope, q_pe, block_table, seq_lens, query_start_loc, visible_lens)
    progress = (part_lse + 2 * num_slots.to(gl.int64) * request_rows).to(gl.pointer_type(gl.int32), bitcast=True)
    own = (least_tiles, even_splits, most_tiles, max_splits)
    cut = (tile_ranges, split_offsets, num_splits, num_slots, progress, own)
    results = (out, lse, part_out, part_lse)
    sizes = (num_tokens, num_blocks, num_requests, table_width, row_blocks, request_rows, scale_log2)
    strides = (
        latent_token_stride, latent_head_stride, rope_token_stride, rope_head_stride, table_row_stride, table_stride
    )  # fmt: skip
    shared = (q_latent, q_rope, latents, tails, row_values, kept, notes)
    bars = (full, free, handed, query_bar, sum_bar, noted)
    gl.warp_specialize(
        [
            (_consume, (inputs, cut, results, sizes, strides, shared, bars, 0, HEADS, LATENT, ROPE, BLOCK_SIZE,
                        BY_LENGTH, SCHEDULED, SPLIT)),
            (_consume, (inputs, cut, results, sizes, strides, shared, bars, 1, HEADS, LATENT, ROPE, BLOCK_SIZE,
                        BY_LENGTH, SCHEDULED, SPLIT)),
            (_produce, (inputs, cut, sizes, strides, latent_pages, rope_pages, shared, bars, HEADS, LATENT, ROPE,
                        BLOCK_SIZE, BY_LENGTH, SCHEDULED)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
