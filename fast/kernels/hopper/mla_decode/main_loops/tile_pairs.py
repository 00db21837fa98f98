"""Pairs of tiles in two warp groups: scores, softmax and products of 64 rows, and what the groups hand each other.

Each group scores its own tile of a pair with all rows, and holds one half of the latent columns of the output. The
probabilities of both tiles multiply both halves, so each group hands its own to the other through shared memory: one
group's products run while the other is at its softmax (FlashMLA's seesaw). VALUES, the layout of a quarter of the
output, says how much of one a program multiplies: all of it, or a slice (`many_heads`).
"""

from __future__ import annotations

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...common.arrivals import arrive
from ...common.gluon_versions import partition_barrier
from ...common.loads import LEAST, load_columns, shift_of, zero_from
from ...common.work_items import TILE

ROWS = gl.constexpr(64)
MOST_GROWTH = gl.constexpr(8.0)  # binary orders of magnitude


@gluon.jit
@no_type_check
def fetch_quarter(
    tile, end_key, page, table_row, table_stride, latent_pages, rope_pages, buffers, full,
    PLACE: gl.constexpr, NUMBER: gl.constexpr, LATENT: gl.constexpr, ROPE: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """Fetch the quarter of a tile that is multiplied as number NUMBER."""
    latents, tails = buffers
    WIDTH: gl.constexpr = LATENT // 4
    BUFFERS: gl.constexpr = latents.shape[0] // 8
    QUARTER: gl.constexpr = (2 * PLACE + NUMBER) % 4
    # the rope part goes with the quarter that the other group releases last: it then holds what that group multiplies
    TAIL: gl.constexpr = ROPE if NUMBER == 3 else 0
    bar = full.index(4 * PLACE + QUARTER)
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
def score_quarter(
    scores, buffers, q_latent, q_rope, full, zero, phase, there, PLACE: gl.constexpr, NUMBER: gl.constexpr,
    LATENT: gl.constexpr, ROPE: gl.constexpr,
):  # fmt: skip
    """Multiply the quarter of a tile that comes as number NUMBER; with the last one also the rope part.

    Unless it is `there` to come, what lies there is multiplied, and nobody looks at the outcome.
    """
    latents, tails = buffers
    WIDTH: gl.constexpr = LATENT // 4
    QUARTER: gl.constexpr = (2 * PLACE + NUMBER) % 4
    mbarrier.wait(full.index(4 * PLACE + QUARTER), phase, pred=there)
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
def slice_of_program(SLICES: gl.constexpr):
    """Which slice of each quarter of the latents a program multiplies by its probabilities."""
    return gl.program_id(0) % SLICES


@gluon.jit
@no_type_check
def _multiplied(latents, PLACE: gl.constexpr, QUARTER: gl.constexpr, zero, WIDTH: gl.constexpr, VALUES: gl.constexpr):
    """What the program multiplies of a quarter of the latents of a tile: all of it, or one of two slices."""
    SPAN: gl.constexpr = VALUES.instr_shape[1]
    SLICES: gl.constexpr = WIDTH // SPAN
    if SLICES == 1:
        shared = _quarter(latents, PLACE, QUARTER, zero, WIDTH)
    else:  # of as many columns as lie together
        layout: gl.constexpr = gl.NVMMASharedLayout(128, 16)
        slices = latents._reinterpret(latents.dtype, [8 * SLICES, TILE, SPAN], layout)
        shared = slices.index((4 * PLACE + QUARTER) * SLICES + slice_of_program(SLICES) + zero)
    return shared


@gluon.jit
@no_type_check
def scaled(left, right, factor, VALUES: gl.constexpr):
    """Both quarters of the values, each row times its factor."""
    factor = gl.convert_layout(factor, gl.SliceLayout(1, VALUES))[:, None]
    return left * factor, right * factor


@gluon.jit
@no_type_check
def masked(scores, tile, end, seen, LAYOUT: gl.constexpr, BLOCK_SIZE: gl.constexpr):
    """-inf for keys that a row must not see, or that lie in no page."""
    visible, _, table_row, table_stride, num_blocks, unsure = seen
    key = tile * TILE + gl.arange(0, TILE, gl.SliceLayout(0, LAYOUT))
    if BLOCK_SIZE % TILE == 0:  # all in one page
        block = (tile * TILE // BLOCK_SIZE).to(gl.int64)
        page = gl.load(table_row + block * table_stride, mask=tile * TILE < unsure, other=0)
    else:
        page = gl.load(table_row + (key // BLOCK_SIZE).to(gl.int64) * table_stride, mask=key < unsure, other=0)
    held = (page >= 0) & (page < num_blocks) & (key < end * TILE)
    return gl.where(held[None, :] & (key[None, :] < visible[:, None]), scores, float("-inf"))


@gluon.jit
@no_type_check
def reference_of(before, largest, scale_log2):
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
        VALUES: layout of a quarter, or of a slice of one.
    """
    if gl.max((known != found).to(gl.int32), 0) > 0:
        left, right = scaled(left, right, gl.exp2((before - after) * scale_log2), VALUES)
    return left, right


@gluon.jit
@no_type_check
def _zero_unowned(latents, zero, first_row, PLACE: gl.constexpr, QUARTER: gl.constexpr, WIDTH: gl.constexpr):
    """Zeros from a row of two quarters of a tile on (`zero_from`)."""
    COLUMNS: gl.constexpr = 64  # that lie together
    FIRST: gl.constexpr = (4 * PLACE + QUARTER) * WIDTH // COLUMNS
    parts = latents._reinterpret(latents.dtype, [8 * WIDTH // COLUMNS, TILE, COLUMNS], gl.NVMMASharedLayout(128, 16))
    if first_row < TILE:
        for number in range(FIRST, FIRST + 2 * WIDTH // COLUMNS + zero):  # the compiler must not unroll it
            zero_from(parts.index(number), first_row)
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
    own_left = _multiplied(latents, 0, 0, zero, WIDTH, VALUES)
    own_right = _multiplied(latents, 0, 1, zero, WIDTH, VALUES)
    cross_left = _multiplied(latents, 1, 0, zero, WIDTH, VALUES)
    cross_right = _multiplied(latents, 1, 1, zero, WIDTH, VALUES)
    if MASKED and first >= plain:
        scores = masked(scores, first, end, seen, SCORES, BLOCK_SIZE)
    if MASKED:
        _zero_unowned(latents, zero, length - first * TILE, 0, 0, WIDTH)
    middle = reference_of(largest, gl.max(scores, 1), scale_log2)
    weights = gl.exp2(scores * scale_log2 - shift_of(middle, scale_log2)[:, None])
    rounded = weights.to(latents.dtype)
    tails.index(zero).store(rounded)
    row_values.index(0).store(middle)
    fence_async_shared()
    known = _all_rows(row_values, 1)  # of the pair before; before the first one the values are zeros
    arrive(handed.index(0))
    decay = gl.exp2((largest - middle) * scale_log2)
    found = _all_rows(row_values, 0)
    left, right = _rescaled(left, right, known, found, largest, middle, scale_log2, VALUES)
    probabilities = gl.convert_layout(rounded, gl.DotOperandLayout(0, VALUES, 2))
    left = warpgroup_mma(probabilities, own_left, left, is_async=True)
    right = warpgroup_mma(probabilities, own_right, right, is_async=True)
    total = total * decay + gl.sum(weights, 1)
    left = warpgroup_mma_wait(1, deps=[left])
    arrive(free.index(0))
    right, probabilities = warpgroup_mma_wait(0, deps=[right, probabilities])
    arrive(free.index(1))
    mbarrier.wait(handed.index(1), phase)
    largest = row_values.index(1).load(gl.SliceLayout(1, SCORES))
    decay = gl.exp2((middle - largest) * scale_log2)
    left, right = _rescaled(left, right, found, _all_rows(row_values, 1), middle, largest, scale_log2, VALUES)
    if MASKED:
        mbarrier.wait(full.index(4), phase)
        mbarrier.wait(full.index(5), phase)
        _zero_unowned(latents, zero, length - (first + 1) * TILE, 1, 0, WIDTH)
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
    own_left = _multiplied(latents, 1, 2, zero, WIDTH, VALUES)
    own_right = _multiplied(latents, 1, 3, zero, WIDTH, VALUES)
    cross_left = _multiplied(latents, 0, 2, zero, WIDTH, VALUES)
    cross_right = _multiplied(latents, 0, 3, zero, WIDTH, VALUES)
    scores = gl.zeros([ROWS, TILE], gl.float32, SCORES)
    for number in gl.static_range(4):
        scores = score_quarter(scores, buffers, q_latent, q_rope, full, zero, phase, True, 1, number, LATENT, ROPE)
    mbarrier.wait(handed.index(0), phase)
    middle = row_values.index(0).load(gl.SliceLayout(1, SCORES))
    known, found = _all_rows(row_values, 1), _all_rows(row_values, 0)
    left, right = _rescaled(left, right, known, found, largest, middle, scale_log2, VALUES)
    if MASKED:
        mbarrier.wait(full.index(2), phase)
        mbarrier.wait(full.index(3), phase)
        _zero_unowned(latents, zero, length - first * TILE, 0, 2, WIDTH)
    left = warpgroup_mma(tails.index(zero), cross_left, left, is_async=True)
    right = warpgroup_mma(tails.index(zero), cross_right, right, is_async=True)
    scores = warpgroup_mma_wait(2, deps=[scores])
    if MASKED and first + 1 >= plain:
        scores = masked(scores, first + 1, end, seen, SCORES, BLOCK_SIZE)
    top = reference_of(middle, gl.max(scores, 1), scale_log2)
    weights = gl.exp2(scores * scale_log2 - shift_of(top, scale_log2)[:, None])
    rounded = weights.to(latents.dtype)
    tails.index(1 + zero).store(rounded)
    row_values.index(1).store(top)
    fence_async_shared()
    arrive(handed.index(1))
    left = warpgroup_mma_wait(1, deps=[left])
    arrive(free.index(2))
    right = warpgroup_mma_wait(0, deps=[right])
    arrive(free.index(3))
    left, right = _rescaled(left, right, found, _all_rows(row_values, 1), middle, top, scale_log2, VALUES)
    if MASKED:
        _zero_unowned(latents, zero, length - (first + 1) * TILE, 1, 2, WIDTH)
    probabilities = gl.convert_layout(rounded, gl.DotOperandLayout(0, VALUES, 2))
    left = warpgroup_mma(probabilities, own_left, left, is_async=True)
    right = warpgroup_mma(probabilities, own_right, right, is_async=True)
    total = total * gl.exp2((largest - top) * scale_log2) + gl.sum(weights, 1)
    left = warpgroup_mma_wait(1, deps=[left])
    arrive(free.index(6))
    right, probabilities = warpgroup_mma_wait(0, deps=[right, probabilities])
    arrive(free.index(7))
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
    largest, total, left, right = _nothing_seen(SCORES, VALUES)
    if begin < stop:
        zero = pair >> 30  # the compiler must not see that this is 0: it would share the addresses of all
        # buffers among all products, and spill them
        scores = gl.zeros([ROWS, TILE], gl.float32, SCORES)
        for number in gl.static_range(4):
            scores = score_quarter(
                scores, buffers, q_latent, q_rope, full, zero, pair & 1, True, 0, number, LATENT, ROPE
            )
        for first in range(begin, plain_end, 2):
            zero = pair >> 30
            scores = warpgroup_mma_wait(0, deps=[scores])
            largest, total, left, right = _first_group(
                scores, (largest, total, left, right), first, stop, plain, seen, buffers, row_values, bars,
                zero, pair & 1, scale_log2, WIDTH, BLOCK_SIZE, SCORES, VALUES, False,
            )  # fmt: skip
            left = warpgroup_mma_wait(1, deps=[left])
            arrive(free.index(4))
            pair += 1
            more = first + 2 < stop  # after the last pair products of what lies there, which nobody looks at
            scores = gl.zeros([ROWS, TILE], gl.float32, SCORES)
            scores = score_quarter(scores, buffers, q_latent, q_rope, full, zero, pair & 1, more, 0, 0, LATENT, ROPE)
            right = warpgroup_mma_wait(1, deps=[right])
            arrive(free.index(5))
            for number in gl.static_range(1, 4):
                scores = score_quarter(
                    scores, buffers, q_latent, q_rope, full, zero, pair & 1, more, 0, number, LATENT, ROPE
                )
        scores = warpgroup_mma_wait(0, deps=[scores])
        for first in range(plain_end, stop, 2):
            zero = pair >> 30
            largest, total, left, right = _first_group(
                scores, (largest, total, left, right), first, stop, plain, seen, buffers, row_values, bars,
                zero, pair & 1, scale_log2, WIDTH, BLOCK_SIZE, SCORES, VALUES, True,
            )  # fmt: skip
            left, right = warpgroup_mma_wait(0, deps=[left, right])
            arrive(free.index(4))
            arrive(free.index(5))
            pair += 1
            if first + 2 < stop:
                scores = gl.zeros([ROWS, TILE], gl.float32, SCORES)
                for number in gl.static_range(4):
                    scores = score_quarter(
                        scores, buffers, q_latent, q_rope, full, zero, pair & 1, True, 0, number, LATENT, ROPE
                    )
                scores = warpgroup_mma_wait(0, deps=[scores])
    return (largest, total, left, right), pair


@gluon.jit
@no_type_check
def _second_pairs(
    begin, plain_end, stop, plain, seen, buffers, row_values, q_latent, q_rope, bars, pair, scale_log2,
    LATENT: gl.constexpr, ROPE: gl.constexpr, BLOCK_SIZE: gl.constexpr, SCORES: gl.constexpr, VALUES: gl.constexpr,
):  # fmt: skip
    """The pairs [begin, stop) in the group that scores the second tile of each; the state, and the pairs counted on."""
    largest, total, left, right = _nothing_seen(SCORES, VALUES)
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
def _nothing_seen(SCORES: gl.constexpr, VALUES: gl.constexpr):
    """A state before any tile."""
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    SPAN: gl.constexpr = VALUES.instr_shape[1]
    largest, total = gl.full([ROWS], LEAST, gl.float32, ROW), gl.full([ROWS], 0.0, gl.float32, ROW)
    return largest, total, gl.zeros([ROWS, SPAN], gl.float32, VALUES), gl.zeros([ROWS, SPAN], gl.float32, VALUES)


@gluon.jit
@no_type_check
def attend_pairs(
    begin, stop, plain, seen, buffers, row_values, q_latent, q_rope, bars, pair, sums, scale_log2, OWN: gl.constexpr,
    LATENT: gl.constexpr, ROPE: gl.constexpr, BLOCK_SIZE: gl.constexpr, SCORES: gl.constexpr, VALUES: gl.constexpr,
):  # fmt: skip
    """The pairs of tiles [begin, stop) in either group: the state, its sum that of both, pairs and sums counted on.

    Args:
        begin: tile.
        stop: tile.
        plain: up to this tile all rows see all keys.
        seen: keys that the rows see, readable keys, the request's row of the table and its stride, blocks of the cache,
            keys up to which pages may lie outside it.
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
        VALUES: layout of a quarter, or of a slice of one.
    """
    plain_end = begin + gl.maximum(gl.minimum(plain, stop) - begin, 0) // 2 * 2  # the end of the pairs of such tiles
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
    arrive(bars[4].index(OWN))
    mbarrier.wait(bars[4].index(1 - OWN), sums & 1)
    total += row_values.index(3 - OWN).load(gl.SliceLayout(1, SCORES))
    return (largest, total, left, right), pair, sums + 1
