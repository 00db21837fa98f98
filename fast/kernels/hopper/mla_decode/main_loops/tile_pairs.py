"""Main loop of the kernel for row blocks of 64 rows: two consumers process tiles of 64 keys in pairs.

A consumer is four warps that multiply. A row is one (query token, head) pair.

| | first consumer (CONSUMER = 0) | second consumer (CONSUMER = 1) |
|---|---|---|
| scores and softmax | tile 0 of the pair, all 64 rows | tile 1 of the pair, all 64 rows |
| weighted sum of the values of both tiles | quarters 0 and 1 of the latent columns | quarters 2 and 3 |

Each consumer needs the probabilities of both tiles. It therefore writes the probabilities of its own tile to shared
memory for the other consumer. While one consumer computes its softmax, the products of the other consumer run on the
matrix unit; FlashMLA calls this order "seesaw". In the docstrings below, P0 and P1 are the probabilities of tiles 0 and
1, and V0 and V1 are the latents of these tiles. P0 V0 is the product of P0 and V0.

The reference score of a row is the number that is subtracted from the row's scores before exp2. The reference score may
grow from tile to tile (`tile_scores.reference_of`). The probabilities here are not normalised: they are exp2(score -
reference score).

SCORES is the layout of the scores of a tile, and VALUES is the layout of a quarter of the output. If two programs share
the work (SLICES = 2, see `row_blocks_64`), VALUES has only the columns of one slice of the quarter.
"""

from __future__ import annotations

from typing import Any, NamedTuple, no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...common.arrivals import arrive
from ...common.epilogue import LEAST, shift_of
from ...common.gluon_versions import partition_barrier
from ...common.loads import zero_from
from ...common.own_length import TILE
from ...common.records import HalfState
from .tile_scores import ROWS, masked, quarter_of, reference_of, score_quarter


class Shared(NamedTuple):
    """Shared memory of a program.

    Attributes:
        queries: `Queries`.
        latents: latents of two tiles, in quarters.
        rope_tiles: for each of the two tiles, first the rope part of its keys, later its probabilities.
        row_values: [4, ROWS]. Index 0 and 1: reference scores after tile 0 and after tile 1 of the pair. Index 2 and 3:
            sums of probabilities of consumer 0 and of consumer 1.
        kept: [4, ROWS]: for each consumer, the reference scores and sums of probabilities that it keeps between splits.
        items: the current and the next work item.
    """

    queries: Any
    latents: Any
    rope_tiles: Any
    row_values: Any
    kept: Any
    items: Any


class Bars(NamedTuple):
    """Barriers of a program; the README of `mla_decode` says who arrives and who waits."""

    full: Any
    empty: Any
    probabilities_ready: Any
    item_begun: Any
    sums_ready: Any
    item_written: Any


class PairCounters(NamedTuple):
    """Counters from which a consumer computes the phases of its barriers.

    Attributes:
        pairs: number of pairs of tiles processed so far.
        sums: number of calls of `attend_pairs` so far; in each call, the consumers exchange sums of probabilities.
    """

    pairs: Any
    sums: Any


@gluon.jit
@no_type_check
def slice_of_program(SLICES: gl.constexpr):
    """Return which slice of every quarter this program multiplies."""
    return gl.program_id(0) % SLICES


@gluon.jit
@no_type_check
def _multiplied(
    latents, TILE_INDEX: gl.constexpr, QUARTER: gl.constexpr, zero, WIDTH: gl.constexpr, VALUES: gl.constexpr
):
    """Return the shared memory of a quarter, or of the slice of this quarter that this program multiplies."""
    SPAN: gl.constexpr = VALUES.instr_shape[1]
    SLICES: gl.constexpr = WIDTH // SPAN
    if SLICES == 1:
        shared = quarter_of(latents, TILE_INDEX, QUARTER, zero, WIDTH)
    else:  # a slice has as many columns as are contiguous in shared memory
        layout: gl.constexpr = gl.NVMMASharedLayout(128, 16)
        slices = latents._reinterpret(latents.dtype, [8 * SLICES, TILE, SPAN], layout)
        shared = slices.index((4 * TILE_INDEX + QUARTER) * SLICES + slice_of_program(SLICES) + zero)
    return shared


@gluon.jit
@no_type_check
def scaled(left, right, factor, VALUES: gl.constexpr):
    """Return both quarters of the weighted sums, with each row multiplied by its factor."""
    factor = gl.convert_layout(factor, gl.SliceLayout(1, VALUES))[:, None]
    return left * factor, right * factor


@gluon.jit
@no_type_check
def _all_rows(row_values, TILE_INDEX: gl.constexpr):
    """Load the reference scores of all rows, as they are after tile TILE_INDEX of a pair, into every warp.

    All warps then take the same branch in `_rescaled`, without a barrier.
    """
    return row_values.index(TILE_INDEX).load(gl.BlockedLayout([2], [32], [4], [0]))


@gluon.jit
@no_type_check
def _rescaled(left, right, old_references, new_references, before, after, scale_log2, VALUES: gl.constexpr):
    """Rescale the weighted sums from old to new reference scores, if at least one reference score has changed.

    Args:
        left: the consumer's first quarter of the weighted sums.
        right: the consumer's second quarter of the weighted sums.
        old_references: old reference scores, with a copy of all rows in every warp (`_all_rows`).
        new_references: new reference scores, with a copy of all rows in every warp.
        before: old reference scores, in the layout of the rows of SCORES.
        after: new reference scores, in the layout of the rows of SCORES.
        scale_log2: softmax scale divided by ln 2.
        VALUES: layout of a quarter of the output.
    """
    if gl.max((old_references != new_references).to(gl.int32), 0) > 0:
        left, right = scaled(left, right, gl.exp2((before - after) * scale_log2), VALUES)
    return left, right


@gluon.jit
@no_type_check
def _zero_unowned(latents, zero, first_row, TILE_INDEX: gl.constexpr, QUARTER: gl.constexpr, WIDTH: gl.constexpr):
    """Overwrite key `first_row` of a tile and all later keys with zeros (`zero_from`), in two quarters of the columns.

    The quarters are QUARTER and QUARTER + 1.
    """
    COLUMNS: gl.constexpr = 64  # columns that are contiguous in shared memory
    FIRST: gl.constexpr = (4 * TILE_INDEX + QUARTER) * WIDTH // COLUMNS
    columns = latents._reinterpret(latents.dtype, [8 * WIDTH // COLUMNS, TILE, COLUMNS], gl.NVMMASharedLayout(128, 16))
    if first_row < TILE:
        for number in range(FIRST, FIRST + 2 * WIDTH // COLUMNS + zero):  # `+ zero` (0) prevents unrolling
            zero_from(columns.index(number), first_row)
        fence_async_shared()
        partition_barrier()


@gluon.jit
@no_type_check
def _attend_pair_in_first(
    scores, state, first, end, visibility, buffers, row_values, bars, zero, phase, scale_log2,
    WIDTH: gl.constexpr, BLOCK_SIZE: gl.constexpr, SCORES: gl.constexpr, VALUES: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Attend a pair of tiles in the first consumer: compute P0 V0, then P1 V1; return the state.

    This consumer computes P0 itself and reads P1 from shared memory. P1 V1 may still run when the function returns, so
    the caller must wait for this product.
    """
    largest, total, left, right = state.largest, state.total, state.left, state.right
    latents, rope_tiles = buffers
    full, empty, ready, length = bars.full, bars.empty, bars.probabilities_ready, visibility.length
    own_left = _multiplied(latents, 0, 0, zero, WIDTH, VALUES)
    own_right = _multiplied(latents, 0, 1, zero, WIDTH, VALUES)
    cross_left = _multiplied(latents, 1, 0, zero, WIDTH, VALUES)
    cross_right = _multiplied(latents, 1, 1, zero, WIDTH, VALUES)
    if MASKED and first >= visibility.first_masked:
        scores = masked(scores, first, end, visibility, SCORES, BLOCK_SIZE)
    if MASKED:
        _zero_unowned(latents, zero, length - first * TILE, 0, 0, WIDTH)
    first_reference = reference_of(largest, gl.max(scores, 1), scale_log2)
    weights = gl.exp2(scores * scale_log2 - shift_of(first_reference, scale_log2)[:, None])
    rounded = weights.to(latents.dtype)
    rope_tiles.index(zero).store(rounded)
    row_values.index(0).store(first_reference)
    fence_async_shared()
    # reference scores after the previous pair; undefined for the first pair, when all weighted sums are still 0
    old_references = _all_rows(row_values, 1)
    arrive(ready.index(0))
    decay = gl.exp2((largest - first_reference) * scale_log2)
    new_references = _all_rows(row_values, 0)
    left, right = _rescaled(left, right, old_references, new_references, largest, first_reference, scale_log2, VALUES)
    probabilities = gl.convert_layout(rounded, gl.DotOperandLayout(0, VALUES, 2))
    left = warpgroup_mma(probabilities, own_left, left, is_async=True)
    right = warpgroup_mma(probabilities, own_right, right, is_async=True)
    total = total * decay + gl.sum(weights, 1)
    left = warpgroup_mma_wait(1, deps=[left])
    arrive(empty.index(0))
    right, probabilities = warpgroup_mma_wait(0, deps=[right, probabilities])
    arrive(empty.index(1))
    mbarrier.wait(ready.index(1), phase)
    largest = row_values.index(1).load(gl.SliceLayout(1, SCORES))
    decay = gl.exp2((first_reference - largest) * scale_log2)
    left, right = _rescaled(
        left, right, new_references, _all_rows(row_values, 1), first_reference, largest, scale_log2, VALUES
    )
    if MASKED:
        mbarrier.wait(full.index(4), phase)
        mbarrier.wait(full.index(5), phase)
        _zero_unowned(latents, zero, length - (first + 1) * TILE, 1, 0, WIDTH)
    left = warpgroup_mma(rope_tiles.index(1 + zero), cross_left, left, is_async=True)
    right = warpgroup_mma(rope_tiles.index(1 + zero), cross_right, right, is_async=True)
    total = total * decay
    return HalfState(largest, total, left, right)


@gluon.jit
@no_type_check
def _attend_pair_in_second(
    state, first, end, visibility, buffers, row_values, q_latent, q_rope, bars, zero, phase, scale_log2,
    LATENT: gl.constexpr, ROPE: gl.constexpr, BLOCK_SIZE: gl.constexpr, SCORES: gl.constexpr, VALUES: gl.constexpr,
    MASKED: gl.constexpr,
):  # fmt: skip
    """Attend a pair of tiles in the second consumer: compute P0 V0, then P1 V1; return the state.

    This consumer reads P0 from shared memory and computes P1 itself. P0 V0 runs while the consumer computes P1.
    """
    WIDTH: gl.constexpr = LATENT // 4
    largest, total, left, right = state.largest, state.total, state.left, state.right
    latents, rope_tiles = buffers
    full, empty, ready, length = bars.full, bars.empty, bars.probabilities_ready, visibility.length
    own_left = _multiplied(latents, 1, 2, zero, WIDTH, VALUES)
    own_right = _multiplied(latents, 1, 3, zero, WIDTH, VALUES)
    cross_left = _multiplied(latents, 0, 2, zero, WIDTH, VALUES)
    cross_right = _multiplied(latents, 0, 3, zero, WIDTH, VALUES)
    scores = gl.zeros([ROWS, TILE], gl.float32, SCORES)
    for number in gl.static_range(4):
        scores = score_quarter(scores, buffers, q_latent, q_rope, full, zero, phase, True, 1, number, LATENT, ROPE)
    mbarrier.wait(ready.index(0), phase)
    first_reference = row_values.index(0).load(gl.SliceLayout(1, SCORES))
    old_references, new_references = _all_rows(row_values, 1), _all_rows(row_values, 0)
    left, right = _rescaled(left, right, old_references, new_references, largest, first_reference, scale_log2, VALUES)
    if MASKED:
        mbarrier.wait(full.index(2), phase)
        mbarrier.wait(full.index(3), phase)
        _zero_unowned(latents, zero, length - first * TILE, 0, 2, WIDTH)
    left = warpgroup_mma(rope_tiles.index(zero), cross_left, left, is_async=True)
    right = warpgroup_mma(rope_tiles.index(zero), cross_right, right, is_async=True)
    scores = warpgroup_mma_wait(2, deps=[scores])
    if MASKED and first + 1 >= visibility.first_masked:
        scores = masked(scores, first + 1, end, visibility, SCORES, BLOCK_SIZE)
    second_reference = reference_of(first_reference, gl.max(scores, 1), scale_log2)
    weights = gl.exp2(scores * scale_log2 - shift_of(second_reference, scale_log2)[:, None])
    rounded = weights.to(latents.dtype)
    rope_tiles.index(1 + zero).store(rounded)
    row_values.index(1).store(second_reference)
    fence_async_shared()
    arrive(ready.index(1))
    left = warpgroup_mma_wait(1, deps=[left])
    arrive(empty.index(2))
    right = warpgroup_mma_wait(0, deps=[right])
    arrive(empty.index(3))
    left, right = _rescaled(
        left, right, new_references, _all_rows(row_values, 1), first_reference, second_reference, scale_log2, VALUES
    )
    if MASKED:
        _zero_unowned(latents, zero, length - (first + 1) * TILE, 1, 2, WIDTH)
    probabilities = gl.convert_layout(rounded, gl.DotOperandLayout(0, VALUES, 2))
    left = warpgroup_mma(probabilities, own_left, left, is_async=True)
    right = warpgroup_mma(probabilities, own_right, right, is_async=True)
    total = total * gl.exp2((largest - second_reference) * scale_log2) + gl.sum(weights, 1)
    left = warpgroup_mma_wait(1, deps=[left])
    arrive(empty.index(6))
    right, probabilities = warpgroup_mma_wait(0, deps=[right, probabilities])
    arrive(empty.index(7))
    return HalfState(second_reference, total, left, right)


@gluon.jit
@no_type_check
def _attend_pairs_in_first(
    begin, masked_begin, stop, visibility, buffers, row_values, q_latent, q_rope, bars, pair, scale_log2,
    LATENT: gl.constexpr, ROPE: gl.constexpr, BLOCK_SIZE: gl.constexpr, SCORES: gl.constexpr, VALUES: gl.constexpr,
):  # fmt: skip
    """Attend the tiles [begin, stop) in pairs, in the first consumer; return the state and the new number of pairs.

    The tiles from `masked_begin` on need a mask. `pair` is the number of pairs processed so far.
    """
    WIDTH: gl.constexpr = LATENT // 4
    full, empty = bars.full, bars.empty
    state = _nothing_seen(SCORES, VALUES)
    if begin < stop:
        # always 0; with a literal 0, the compiler would keep all buffer addresses in registers, which would spill
        zero = pair >> 30
        scores = gl.zeros([ROWS, TILE], gl.float32, SCORES)
        for number in gl.static_range(4):
            scores = score_quarter(
                scores, buffers, q_latent, q_rope, full, zero, pair & 1, True, 0, number, LATENT, ROPE
            )
        for first in range(begin, masked_begin, 2):
            zero = pair >> 30
            scores = warpgroup_mma_wait(0, deps=[scores])
            state = _attend_pair_in_first(
                scores, state, first, stop, visibility, buffers, row_values, bars,
                zero, pair & 1, scale_log2, WIDTH, BLOCK_SIZE, SCORES, VALUES, False,
            )  # fmt: skip
            left = warpgroup_mma_wait(1, deps=[state.left])
            arrive(empty.index(4))
            pair += 1
            more = first + 2 < stop  # if false, there is no next pair: the scores computed below are discarded
            scores = gl.zeros([ROWS, TILE], gl.float32, SCORES)
            scores = score_quarter(scores, buffers, q_latent, q_rope, full, zero, pair & 1, more, 0, 0, LATENT, ROPE)
            right = warpgroup_mma_wait(1, deps=[state.right])
            arrive(empty.index(5))
            for number in gl.static_range(1, 4):
                scores = score_quarter(
                    scores, buffers, q_latent, q_rope, full, zero, pair & 1, more, 0, number, LATENT, ROPE
                )
            state = HalfState(state.largest, state.total, left, right)
        scores = warpgroup_mma_wait(0, deps=[scores])
        for first in range(masked_begin, stop, 2):
            zero = pair >> 30
            state = _attend_pair_in_first(
                scores, state, first, stop, visibility, buffers, row_values, bars,
                zero, pair & 1, scale_log2, WIDTH, BLOCK_SIZE, SCORES, VALUES, True,
            )  # fmt: skip
            left, right = warpgroup_mma_wait(0, deps=[state.left, state.right])
            state = HalfState(state.largest, state.total, left, right)
            arrive(empty.index(4))
            arrive(empty.index(5))
            pair += 1
            if first + 2 < stop:
                scores = gl.zeros([ROWS, TILE], gl.float32, SCORES)
                for number in gl.static_range(4):
                    scores = score_quarter(
                        scores, buffers, q_latent, q_rope, full, zero, pair & 1, True, 0, number, LATENT, ROPE
                    )
                scores = warpgroup_mma_wait(0, deps=[scores])
    return state, pair


@gluon.jit
@no_type_check
def _attend_pairs_in_second(
    begin, masked_begin, stop, visibility, buffers, row_values, q_latent, q_rope, bars, pair, scale_log2,
    LATENT: gl.constexpr, ROPE: gl.constexpr, BLOCK_SIZE: gl.constexpr, SCORES: gl.constexpr, VALUES: gl.constexpr,
):  # fmt: skip
    """Attend the tiles [begin, stop) in pairs, in the second consumer; return the state and the new number of pairs.

    The tiles from `masked_begin` on need a mask. `pair` is the number of pairs processed so far.
    """
    state = _nothing_seen(SCORES, VALUES)
    for first in range(begin, masked_begin, 2):
        state = _attend_pair_in_second(
            state, first, stop, visibility, buffers, row_values, q_latent, q_rope, bars, pair >> 30, pair & 1,
            scale_log2, LATENT, ROPE, BLOCK_SIZE, SCORES, VALUES, False,
        )  # fmt: skip
        pair += 1
    for first in range(masked_begin, stop, 2):
        state = _attend_pair_in_second(
            state, first, stop, visibility, buffers, row_values, q_latent, q_rope, bars, pair >> 30, pair & 1,
            scale_log2, LATENT, ROPE, BLOCK_SIZE, SCORES, VALUES, True,
        )  # fmt: skip
        pair += 1
    return state, pair


@gluon.jit
@no_type_check
def _nothing_seen(SCORES: gl.constexpr, VALUES: gl.constexpr):
    """Return the state of rows that have seen no key yet."""
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    SPAN: gl.constexpr = VALUES.instr_shape[1]
    largest, total = gl.full([ROWS], LEAST, gl.float32, ROW), gl.full([ROWS], 0.0, gl.float32, ROW)
    left, right = gl.zeros([ROWS, SPAN], gl.float32, VALUES), gl.zeros([ROWS, SPAN], gl.float32, VALUES)
    return HalfState(largest, total, left, right)


@gluon.jit
@no_type_check
def attend_pairs(begin, stop, end, visibility, ctx, counters, c):
    """Attend the tiles [begin, stop) in pairs, in consumer c.CONSUMER.

    Args:
        begin: first tile.
        stop: end of the tiles, exclusive.
        end: unused; `attend_tiles` of `row_blocks_16_32` needs this argument.
        visibility: `Visibility`.
        ctx: `Context`.
        counters: `PairCounters`.
        c: `Constants`.

    Returns:
        Two values: the `HalfState` over all keys of these tiles, and the new `PairCounters`. The `total` of the state
        includes the sums of both consumers.
    """
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.LATENT // 4 // c.SLICES, 16])
    CONSUMER: gl.constexpr = c.CONSUMER
    shared, bars, scale_log2, first_masked = ctx.shared, ctx.bars, ctx.sizes.scale_log2, visibility.first_masked
    q_latent, q_rope, row_values = shared.queries.q_latent, shared.queries.q_rope, shared.row_values
    buffers = (shared.latents, shared.rope_tiles)
    # first tile of the first pair that needs a mask
    masked_begin = begin + gl.maximum(gl.minimum(first_masked, stop) - begin, 0) // 2 * 2
    if CONSUMER == 0:
        state, pair = _attend_pairs_in_first(
            begin, masked_begin, stop, visibility, buffers, row_values, q_latent, q_rope, bars, counters.pairs,
            scale_log2, c.LATENT, c.ROPE, c.BLOCK_SIZE, SCORES, VALUES,
        )  # fmt: skip
    else:
        state, pair = _attend_pairs_in_second(
            begin, masked_begin, stop, visibility, buffers, row_values, q_latent, q_rope, bars, counters.pairs,
            scale_log2, c.LATENT, c.ROPE, c.BLOCK_SIZE, SCORES, VALUES,
        )  # fmt: skip
    total = state.total
    row_values.index(2 + CONSUMER).store(total)
    arrive(bars.sums_ready.index(CONSUMER))
    mbarrier.wait(bars.sums_ready.index(1 - CONSUMER), counters.sums & 1)
    total += row_values.index(3 - CONSUMER).load(gl.SliceLayout(1, SCORES))
    return HalfState(state.largest, total, state.left, state.right), PairCounters(pair, counters.sums + 1)
