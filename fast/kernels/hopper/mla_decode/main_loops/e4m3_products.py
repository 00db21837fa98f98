"""Main loop of the kernel over e4m3 caches for row blocks of 64 rows: two consumers score tiles in turn.

A row is one (query token, head) pair. A tile is 64 keys. A consumer is four warps. The queries and the cache are in
e4m3, so the scores are products of e4m3 numbers. Tile i of a split is scored by consumer i % 2: this consumer computes
the scores [rows, keys], their softmax and the probabilities. Both consumers multiply the probabilities of every tile,
each by its half of the latent columns. The sums [columns, rows] are transposed, because the values are then the left
operand of the product, which the matrix unit takes from registers. A consumer loads words of two columns into
registers, transposed, and sorts their bytes (`_values_in_e4m3`), or converts them to float16 (`halves_of_keys`).

| step of consumer i % 2 with tile i | |
|---|---|
| 1 | compute the scores of tile i, and publish reference scores, decays and probabilities of tile i |
| 2 | add the product of the probabilities and the values of tile i - 1, which the other consumer has scored |
| 3 | add the product of the probabilities and the values of tile i |

The consumers are half a step apart, so neither waits long for the other. The reference score of a row is the number
that is subtracted from the row's scores before exp2. The decay of a row is the factor of the earlier sums:
exp2(reference score before the tile - reference score after the tile).

In `fp8_query`, the reference score is the largest score of all tiles up to this tile. In `fp8_product`, it is the
largest score of this tile alone: the largest probability of each tile is then a power of two, which e4m3 holds exactly,
so the output has a smaller error. The sums are multiplied by a decay for each tile anyway, so this costs almost no
time. The decay is larger than 1 where a tile has smaller scores than the tile before. A reference score is therefore at
most `DROP` below the largest score so far: the sums stay below 2^(DROP + 8) times the number of keys times the largest
value, far below the largest float32.

The matrix unit keeps only about 13 binary digits of a sum of e4m3 products; a sum over all keys would lose the others.
In `fp8_product`, every product with values therefore begins with the sum 0, and is added to the earlier sums in
float32. The matrix unit adds products of float16 in float32. In `fp8_query`, it therefore adds every product to the
earlier sums itself, which also frees the registers of a second copy of the sums: the main loop then spills none.

| probabilities | multiplied by | order of the keys in shared memory | product with values begins with |
|---|---|---|---|
| in e4m3 (`fp8_product`) | 2^8 | permuted within 16 keys: the order in which a thread has keys and values | 0 |
| in float16 (`fp8_query`) | 2^13 | unchanged | the earlier sums times their decay |
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
from ...common.e4m3_words import halves_of_keys, sorted_keys
from ...common.epilogue import LEAST
from ...common.gluon_versions import partition_barrier
from ...common.loads import zero_from
from ...common.own_length import TILE
from ...common.records import RowState
from .e4m3_tiles import meet
from .tile_scores import ROWS, masked

CHUNK = gl.constexpr(64)  # words of a key that are multiplied at a time: 128 columns
# Replaces a factor of the scores that underflows to 0: masked scores are -inf, and -inf * 0 would be NaN. The factor is
# the product of the softmax scale and of the scales of the queries and of the cache.
LEAST_FACTOR = gl.constexpr(1e-37)
DROP = gl.constexpr(16.0)  # how far a reference score of `fp8_product` may be below the largest score so far, in base 2


class Shared(NamedTuple):
    """Shared memory of a program, and the scale of the cache.

    Attributes:
        queries: `Queries`, in words of two e4m3 numbers.
        k_latent: ring of tiles, latent columns in words.
        sides: for each stage of the ring, first the rope columns of the tile, later its probabilities.
        references: for each stage, the reference scores after the tile.
        largest: for each stage, the largest scores of all tiles up to the tile; None in `fp8_query`, where these are
            the reference scores.
        decays: for each stage, the factors of the sums of the earlier tiles.
        totals: [4, rows]: sums of probabilities of both consumers, for an even and for an odd number of meetings.
        q_scales: for each consumer, the scales of the queries.
        kept: [4, rows]: for each consumer, reference scores and sums of probabilities of the kept state.
        items: the current and the next work item.
        kv_scale: scale of the cache.
        q_scale: pointer to the scales of the queries.
        q_scale_stride: elements between the scales of two heads; 0 if all heads have the same scale.
    """

    queries: Any
    k_latent: Any
    sides: Any
    references: Any
    largest: Any
    decays: Any
    totals: Any
    q_scales: Any
    kept: Any
    items: Any
    kv_scale: Any
    q_scale: Any
    q_scale_stride: Any


class Bars(NamedTuple):
    """Barriers of a program; the README of `mla_decode` says who arrives and who waits."""

    full: Any
    empty: Any
    probabilities_ready: Any
    exchange: Any
    item_begun: Any
    item_written: Any


class ProductCounters(NamedTuple):
    """Counters from which a consumer computes the phases of its barriers.

    Attributes:
        tiles: number of tiles that both consumers have attended in earlier splits.
        meetings: number of times that both consumers have met (`meet`).
    """

    tiles: Any
    meetings: Any


@gluon.jit
@no_type_check
def _scores(stage, shared, zero, c):
    """Return the products [rows, keys] of the queries and the tile in `stage`, before the factors."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 32])
    FP8: gl.constexpr = gl.float8e4nv
    BUFFERS: gl.constexpr = shared.k_latent.shape[0] // shared.sides.shape[0]
    WIDE: gl.constexpr = gl.NVMMASharedLayout(128, 8)
    queries = shared.queries.q_latent.index(zero)._reinterpret(FP8, [ROWS, c.LATENT], WIDE)
    keys = shared.k_latent.index(stage * BUFFERS)._reinterpret(FP8, [TILE, c.LATENT], WIDE)
    scores = gl.zeros([ROWS, TILE], gl.float32, SCORES)
    scores = warpgroup_mma(queries, keys.permute([1, 0]), scores, use_acc=False, is_async=True)
    if c.ROPE > 0:
        NARROW: gl.constexpr = gl.NVMMASharedLayout(c.ROPE, 8)
        queries = shared.queries.q_rope.index(zero)._reinterpret(FP8, [ROWS, c.ROPE], NARROW)
        keys = shared.sides.index(stage)._reinterpret(FP8, [TILE, c.ROPE], NARROW)
        scores = warpgroup_mma(queries, keys.permute([1, 0]), scores, is_async=True)
    return warpgroup_mma_wait(0, deps=[scores])


@gluon.jit
@no_type_check
def _sorted_probabilities(weights):
    """Return probabilities [rows, keys] in e4m3, with the keys of each 16 in the order of `sorted_keys`."""
    codes = weights.to(gl.float8e4nv)
    codes = gl.permute(gl.reshape(codes, [ROWS, TILE // 16, 2, 4, 2]), [0, 1, 3, 2, 4])
    return gl.reshape(codes, [ROWS, TILE])


@gluon.jit
@no_type_check
def _added(weights):
    """Return [rows, 4]: the sums of the probabilities [rows, keys] that the same thread has."""
    parts = gl.sum(gl.reshape(weights, [ROWS, TILE // 8, 4, 2]), 3)
    return gl.sum(parts, 1)


@gluon.jit
@no_type_check
def _score_tile(tile, begin, end, number, own_reference, totals, visibility, ctx, c):
    """Score a tile and publish its probabilities; return the new reference scores and sums of probabilities.

    `own_reference` has the reference scores of `totals`: those after the last tile that this consumer has scored.
    """
    shared, bars = ctx.shared, ctx.bars
    STAGES: gl.constexpr = shared.sides.shape[0]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 32])
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    WORDS: gl.constexpr = c.LATENT // 2
    UNITS: gl.constexpr = 8.0 if c.WEIGHTS_E4M3 else 13.0
    BUFFERS: gl.constexpr = shared.k_latent.shape[0] // STAGES
    zero = number >> 30  # always 0; with a literal 0, addresses of the queries would occupy registers
    stage = number % STAGES
    mbarrier.wait(bars.full.index(stage), (number // STAGES) & 1)
    scores = _scores(stage, shared, zero, c)
    factor = shared.q_scales.index(c.CONSUMER + zero).load(ROW) * ctx.sizes.scale_log2
    factor = gl.where(factor == 0, LEAST_FACTOR, factor)  # NaN stays NaN
    if tile >= visibility.first_masked:
        scores = masked(scores, tile, end, visibility, SCORES, c.BLOCK_SIZE)
        if (tile + 1) * TILE > visibility.length:
            chunks = shared.k_latent.index(stage * BUFFERS)._reinterpret(
                gl.int16, [WORDS // CHUNK, TILE, CHUNK], gl.NVMMASharedLayout(128, 16)
            )
            for chunk in range(WORDS // CHUNK + zero):  # `+ zero` (0) prevents unrolling
                zero_from(chunks.index(chunk), visibility.length - tile * TILE)
    tile_largest = gl.max(scores, 1) * factor
    before = number + STAGES - 1
    mbarrier.wait(bars.probabilities_ready.index(before % STAGES), (before // STAGES - 1) & 1, pred=tile > begin)
    reference = shared.references.index(before % STAGES).load(ROW)
    reference = gl.where(tile > begin, reference, LEAST)
    if c.WEIGHTS_E4M3:
        largest = shared.largest.index(before % STAGES).load(ROW)
        largest = gl.maximum(gl.where(tile > begin, largest, LEAST), tile_largest)
        shared.largest.index(stage).store(largest)
        new_reference = gl.maximum(largest - DROP, tile_largest)
    else:
        new_reference = gl.maximum(reference, tile_largest)
    weights = gl.exp2(scores * factor[:, None] - (new_reference - UNITS)[:, None])
    shared.references.index(stage).store(new_reference)
    shared.decays.index(stage).store(gl.exp2(reference - new_reference))
    if c.WEIGHTS_E4M3:
        codes = _sorted_probabilities(weights)
        shared.sides.index(stage)._reinterpret(gl.float8e4nv, [ROWS, TILE], gl.NVMMASharedLayout(TILE.value, 8)).store(
            codes
        )
    else:
        shared.sides.index(stage)._reinterpret(gl.float16, [ROWS, TILE], gl.NVMMASharedLayout(128, 16)).store(
            weights.to(gl.float16)
        )
    fence_async_shared()
    partition_barrier()  # every thread executes the fence before one thread arrives
    arrive(bars.probabilities_ready.index(stage))
    added = _added(weights)
    decay = gl.convert_layout(gl.exp2(own_reference - new_reference), gl.SliceLayout(1, added.type.layout))
    return new_reference, totals * decay[:, None] + added


@gluon.jit
@no_type_check
def _left_operands(words, c):
    """Return the values of even and of odd columns [words of a key, keys] as left operands of a product."""
    if c.WEIGHTS_E4M3:
        TRANSPOSED: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32])
        LEFT: gl.constexpr = gl.DotOperandLayout(0, TRANSPOSED, 4)
        even, odd = sorted_keys(words)
        even = gl.convert_layout(even, LEFT, assert_trivial=True)
        odd = gl.convert_layout(odd, LEFT, assert_trivial=True)
    else:
        even, odd = halves_of_keys(words)
    return even, odd


@gluon.jit
@no_type_check
def _add_tile(even, odd, number, ctx, c):
    """Return the sums of even and odd columns after the addition of a tile, and release its stage."""
    shared, bars = ctx.shared, ctx.bars
    STAGES: gl.constexpr = shared.sides.shape[0]
    TRANSPOSED: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32 if c.WEIGHTS_E4M3 else 16])
    WORDS: gl.constexpr = c.LATENT // 2
    BUFFERS: gl.constexpr = shared.k_latent.shape[0] // STAGES
    CHUNKS: gl.constexpr = WORDS // 2 // CHUNK
    WORD_LAYOUT: gl.constexpr = (
        gl.DistributedLinearLayout(
            [[0, 1], [0, 8], [8, 0], [0, 16], [0, 32]],
            [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
            [[16, 0], [32, 0]],
            [],
            [64, 64],
        )
        if c.WEIGHTS_E4M3
        else gl.DotOperandLayout(0, TRANSPOSED, 2)
    )
    stage = number % STAGES
    mbarrier.wait(bars.probabilities_ready.index(stage), (number // STAGES) & 1)
    tile_words = shared.k_latent.index(stage * BUFFERS)._reinterpret(
        gl.int16, [TILE, WORDS], gl.NVMMASharedLayout(128, 16)
    )
    if c.WEIGHTS_E4M3:
        weights = shared.sides.index(stage)._reinterpret(
            gl.float8e4nv, [ROWS, TILE], gl.NVMMASharedLayout(TILE.value, 8)
        )
    else:
        weights = shared.sides.index(stage)._reinterpret(gl.float16, [ROWS, TILE], gl.NVMMASharedLayout(128, 16))
    decay = shared.decays.index(stage).load(gl.SliceLayout(0, TRANSPOSED))[None, :]
    new_even, new_odd = (), ()
    FIRST: gl.constexpr = c.CONSUMER * (WORDS // 2)
    none = gl.zeros([CHUNK, ROWS], gl.float32, TRANSPOSED)
    by_row = weights.permute([1, 0])
    for chunk in gl.static_range(CHUNKS):
        words = tile_words.slice(FIRST + chunk * CHUNK, CHUNK, dim=1).permute([1, 0]).load(WORD_LAYOUT)
        left, right = _left_operands(words, c)
        if c.WEIGHTS_E4M3:
            sums = warpgroup_mma(left, by_row, none, use_acc=False, is_async=True)
            other = warpgroup_mma(right, by_row, none, use_acc=False, is_async=True)
            sums, other = warpgroup_mma_wait(0, deps=[sums, other])
            sums, other = even[chunk] * decay + sums, odd[chunk] * decay + other
        else:
            sums = warpgroup_mma(left, by_row, even[chunk] * decay, is_async=True)
            other = warpgroup_mma(right, by_row, odd[chunk] * decay, is_async=True)
            sums, other = warpgroup_mma_wait(0, deps=[sums, other])
        new_even = new_even + (sums,)  # noqa: RUF005 (Triton compiles no unpacking)
        new_odd = new_odd + (other,)  # noqa: RUF005
    fence_async_shared()  # TMA (the GPU's bulk copy engine) will write another tile into this stage
    partition_barrier()  # every thread executes the fence before one thread arrives
    arrive(bars.empty.index(stage))
    return new_even, new_odd


@gluon.jit
@no_type_check
def attend_tiles(begin, stop, end, visibility, ctx, counters, c):
    """Attend the tiles [begin, stop) of a work item; every second tile is scored in this consumer.

    Args:
        begin: first tile.
        stop: end of the tiles, exclusive.
        end: end of the work item's tiles, exclusive; keys behind these tiles are masked.
        visibility: `Visibility`.
        ctx: `Context`; `scale_log2` of its sizes contains the scale of the cache.
        counters: `ProductCounters`.
        c: `Constants`.

    Returns:
        The `RowState` over all keys of these tiles, in base 2, and the new `ProductCounters`. The weighted sums are
        those of half c.CONSUMER of the latent columns.
    """
    shared = ctx.shared
    stop = gl.maximum(stop, begin)  # an invalid schedule may contain a begin behind the end of the keys
    STAGES: gl.constexpr = shared.sides.shape[0]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 32])
    TRANSPOSED: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32 if c.WEIGHTS_E4M3 else 16])
    SORTED: gl.constexpr = gl.SliceLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16]))
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    UNITS: gl.constexpr = 2.0**8 if c.WEIGHTS_E4M3 else 2.0**13
    CHUNKS: gl.constexpr = c.LATENT // 4 // CHUNK
    own_reference = gl.full([ROWS], LEAST, gl.float32, ROW)
    totals = _added(gl.zeros([ROWS, TILE], gl.float32, SCORES))
    even, odd = (), ()
    for _ in gl.static_range(CHUNKS):
        even = even + (gl.zeros([CHUNK, ROWS], gl.float32, TRANSPOSED),)  # noqa: RUF005
        odd = odd + (gl.zeros([CHUNK, ROWS], gl.float32, TRANSPOSED),)  # noqa: RUF005
    number = counters.tiles - begin  # of a tile: `number + tile` counts tiles over all splits
    scored = begin + c.CONSUMER
    added = begin
    while added < stop:
        if scored < stop:
            own_reference, totals = _score_tile(
                scored, begin, end, number + scored, own_reference, totals, visibility, ctx, c
            )
        until = gl.minimum(scored + 1, stop)
        for tile in range(added, until):
            even, odd = _add_tile(even, odd, number + tile, ctx, c)
        added = until
        scored += 2
    last = number + stop - 1 + STAGES
    reference = shared.references.index(last % STAGES).load(ROW)
    reference = gl.where(stop > begin, reference, LEAST)
    total = gl.convert_layout(gl.sum(totals, 1), ROW) * gl.exp2(own_reference - reference)
    place = 2 * (counters.meetings & 1)
    shared.totals.index(place + c.CONSUMER).store(total)
    meetings = meet(ctx.bars.exchange, counters.meetings)
    total = (shared.totals.index(place).load(SORTED) + shared.totals.index(place + 1).load(SORTED)) / UNITS
    reference = gl.convert_layout(reference, SORTED)
    reference = gl.where(total == 0, float("-inf"), reference)
    unit = shared.kv_scale / UNITS
    columns = even[0]
    for chunk in gl.static_range(CHUNKS):
        pairs = gl.permute(gl.join(even[chunk] * unit, odd[chunk] * unit), [0, 2, 1])  # [words, 2, rows]
        pairs = gl.reshape(pairs, [2 * CHUNK, ROWS])
        if chunk == 0:
            columns = pairs
        else:
            columns = gl.permute(gl.join(columns, pairs), [2, 0, 1])
            columns = gl.reshape(columns, [4 * CHUNK, ROWS])
    return RowState(reference, total, columns), ProductCounters(counters.tiles + stop - begin, meetings)
