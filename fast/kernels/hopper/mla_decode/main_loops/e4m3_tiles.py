"""Main loop of the kernel over e4m3 caches, for row blocks of 16 and 32 rows: two consumers take tiles in turn.

A row is one (query token, head) pair. A tile is 64 keys. Tile i of a work item belongs to consumer i % 2 (a consumer is
four warps). Each consumer has its own softmax state, with sums over all latent columns. At the end of a split, both
consumers exchange sums, and each has the complete sums of one half of the columns (`_merged`).

A tile stays in shared memory as the cache stores it: in e4m3, two codes in a word of 16 bits. It is the left operand of
both products, which are transposed as in `row_blocks_16_32`. The matrix unit takes left operands from registers, so a
consumer loads words into registers and converts them there to float16 (`common/e4m3_words.py`). This conversion is
exact, but changes the order of columns:

| product | order of the converted words |
|---|---|
| scores [keys, rows] | columns 4i and 4i + 1, and columns 4i + 2 and 4i + 3; the queries have the same order |
| sums [columns, rows] | even columns, and odd columns; each has sums of its own, and the epilogue sorts them |

Registers hold only CHUNK words of each key at a time. No number is multiplied by the scale of the cache, because the
product would be rounded. The scale multiplies scores and sums in float32 instead. Queries and probabilities are
multiplied by powers of two, so that they fit into float16:

| number | power of two |
|---|---|
| queries of a row | the one that makes the largest size at least 2^14 and below 2^15 |
| probabilities | `PROBABILITY_UNITS`; they are at most 1, and without this factor small ones would become 0 |
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
from ...common.e4m3_words import halves_of_columns, halves_of_keys
from ...common.epilogue import LEAST
from ...common.gluon_versions import partition_barrier
from ...common.loads import zero_from
from ...common.own_length import TILE
from ...common.records import RowState
from .transposed_scores import masked_keys

STAGES = gl.constexpr(2)  # stages (buffers) of each consumer's ring; a stage holds one tile
CHUNK = gl.constexpr(64)  # words of a key that are multiplied at a time: 128 columns
PROBABILITY_UNITS = gl.constexpr(2.0**13)  # factor of probabilities in float16
UNIT = gl.constexpr(4)  # index in `Shared.row_values` of the factors that undo the factors of the queries


class Shared(NamedTuple):
    """Shared memory of a program, and the scale of the cache.

    Attributes:
        queries: `Queries`; first as loaded, then in float16 and in the order of the table above.
        rope_halves: rope part of the queries in float16, [2, rows, R / 2].
        k_latent: rings of both consumers, latent columns in words.
        k_rope: rings of both consumers, rope columns in words.
        weights: for each consumer, the probabilities of a tile, [keys, rows].
        row_values: [5, rows]: reference scores of both consumers, sums of probabilities of both consumers, and UNIT.
        exchanged: sums that the consumers exchange; half of this memory is written by each consumer.
        kept: [4, rows]: for each consumer, reference scores and sums of probabilities of the kept state.
        items: the current and the next work item.
        kv_scale: scale of the cache.
    """

    queries: Any
    rope_halves: Any
    k_latent: Any
    k_rope: Any
    weights: Any
    row_values: Any
    exchanged: Any
    kept: Any
    items: Any
    kv_scale: Any


class Bars(NamedTuple):
    """Barriers of a program; the README of `mla_decode` says who arrives and who waits."""

    full: Any
    empty: Any
    exchange: Any
    item_begun: Any
    item_written: Any


class TileCounters(NamedTuple):
    """Counters from which a consumer computes the phases of its barriers.

    Attributes:
        tiles: number of tiles that this consumer has attended.
        meetings: number of times that both consumers have met (`meet`).
    """

    tiles: Any
    meetings: Any


@gluon.jit
@no_type_check
def meet(exchange, meetings):
    """Wait until the other consumer has come here too; its accesses to shared memory before are then visible."""
    arrive(exchange)
    mbarrier.wait(exchange, meetings & 1)
    return meetings + 1


@gluon.jit
@no_type_check
def _scores(tile_words, rope_words, shared, zero, c):
    """Return the products [keys, rows] of a tile and the queries, before the factors."""
    ROWS: gl.constexpr = c.ROWS
    TRANSPOSED: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, TRANSPOSED, 2)
    CHUNKS: gl.constexpr = c.LATENT // 2 // CHUNK
    queries = shared.queries.q_latent.index(zero)._reinterpret(
        gl.float16, [2 * CHUNKS, ROWS, CHUNK], gl.NVMMASharedLayout(128, 16)
    )
    scores = gl.zeros([TILE, ROWS], gl.float32, TRANSPOSED)
    AHEAD: gl.constexpr = 1 if ROWS == 16 else 0
    flying = ()
    for chunk in gl.static_range(CHUNKS):
        first, second = halves_of_columns(tile_words.slice(chunk * CHUNK, CHUNK, dim=1).load(LEFT))
        scores = warpgroup_mma(
            first, queries.index(chunk + zero).permute([1, 0]), scores, use_acc=chunk > 0, is_async=True
        )
        scores = warpgroup_mma(second, queries.index(CHUNKS + chunk + zero).permute([1, 0]), scores, is_async=True)
        if AHEAD == 0:
            scores, first, second = warpgroup_mma_wait(0, deps=[scores, first, second])
        elif chunk > 0:
            warpgroup_mma_wait(2, deps=flying)
        flying = (first, second)
    if c.ROPE > 0:
        first, second = halves_of_columns(rope_words.load(LEFT))
        halves = shared.rope_halves
        scores = warpgroup_mma(first, halves.index(zero).permute([1, 0]), scores, is_async=True)
        scores = warpgroup_mma(second, halves.index(1 + zero).permute([1, 0]), scores, is_async=True)
        if AHEAD > 0:
            warpgroup_mma_wait(2, deps=flying)
        flying = (first, second)
    scores, first, second = warpgroup_mma_wait(0, deps=[scores, flying[0], flying[1]])
    return scores


@gluon.jit
@no_type_check
def _sums(even, odd, tile_words, weights, c):
    """Return the sums of even and of odd columns after the addition of a tile; `even` and `odd` are already decayed."""
    ROWS: gl.constexpr = c.ROWS
    TRANSPOSED: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, TRANSPOSED, 2)
    CHUNKS: gl.constexpr = c.LATENT // 2 // CHUNK
    new_even, new_odd = (), ()
    AHEAD: gl.constexpr = 1 if ROWS == 16 else 0
    flying = ()
    for chunk in gl.static_range(CHUNKS):
        words = tile_words.slice(chunk * CHUNK, CHUNK, dim=1).permute([1, 0]).load(LEFT)
        left, right = halves_of_keys(words)
        sums = warpgroup_mma(left, weights, even[chunk], is_async=True)
        other_sums = warpgroup_mma(right, weights, odd[chunk], is_async=True)
        if chunk >= AHEAD:
            if AHEAD == 0:
                flying = (sums, other_sums, left, right)
            sums_before, other_before, _, _ = warpgroup_mma_wait(2 * AHEAD, deps=flying)
            new_even = new_even + (sums_before,)  # noqa: RUF005 (Triton compiles no unpacking)
            new_odd = new_odd + (other_before,)  # noqa: RUF005
        flying = (sums, other_sums, left, right)
    if AHEAD > 0:
        sums_before, other_before, _, _ = warpgroup_mma_wait(0, deps=flying)
        new_even = new_even + (sums_before,)  # noqa: RUF005
        new_odd = new_odd + (other_before,)  # noqa: RUF005
    return new_even, new_odd


@gluon.jit
@no_type_check
def _added_pairs(weights):
    """Return [keys / 2, rows]: the sums of the pairs of probabilities [keys, rows] that the same thread has."""
    ROWS: gl.constexpr = weights.shape[1]
    pairs = gl.sum(gl.reshape(weights, [TILE // 16, 2, 8, ROWS]), 1)
    return gl.reshape(pairs, [TILE // 2, ROWS])


@gluon.jit
@no_type_check
def _scaled(sums, factor):
    """Return a tuple of sums [columns, rows], multiplied by a factor for each row."""
    scaled = ()
    for chunk in gl.static_range(len(sums)):
        scaled = scaled + (sums[chunk] * factor[None, :],)  # noqa: RUF005
    return scaled


@gluon.jit
@no_type_check
def attend_tiles(begin, stop, end, visibility, ctx, counters, c):
    """Attend the tiles [begin, stop) of a work item, every second of them in this consumer, and merge the states.

    Args:
        begin: first tile.
        stop: end of the tiles, exclusive.
        end: end of the work item's tiles, exclusive; keys behind these tiles are masked.
        visibility: `Visibility`.
        ctx: `Context`; `scale_log2` of its sizes contains the scale of the cache.
        counters: `TileCounters`.
        c: `Constants`.

    Returns:
        The `RowState` over all keys of these tiles, in base 2, and the new `TileCounters`. The weighted sums are those
        of half c.CONSUMER of the latent columns.
    """
    ROWS: gl.constexpr = c.ROWS
    shared, bars = ctx.shared, ctx.bars
    k_latent, k_rope, full, empty = shared.k_latent, shared.k_rope, bars.full, bars.empty
    WORDS: gl.constexpr = c.LATENT // 2
    TRANSPOSED: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    ROW: gl.constexpr = gl.SliceLayout(0, TRANSPOSED)
    BUFFERS: gl.constexpr = k_latent.shape[0] // (2 * STAGES)
    ROPE_BUFFERS: gl.constexpr = k_rope.shape[0] // (2 * STAGES)
    largest = gl.full([ROWS], LEAST, gl.float32, ROW)
    totals = _added_pairs(gl.zeros([TILE, ROWS], gl.float32, TRANSPOSED))
    even, odd = (), ()
    for _ in gl.static_range(WORDS // CHUNK):
        even = even + (gl.zeros([CHUNK, ROWS], gl.float32, TRANSPOSED),)  # noqa: RUF005
        odd = odd + (gl.zeros([CHUNK, ROWS], gl.float32, TRANSPOSED),)  # noqa: RUF005
    tiles = counters.tiles
    for tile in range(begin + c.CONSUMER, stop, 2):
        stage = c.CONSUMER * STAGES + tiles % STAGES
        zero = tiles >> 30  # always 0; with a literal 0, addresses of the queries would occupy registers
        tile_words = k_latent.index(stage * BUFFERS)._reinterpret(
            gl.int16, [TILE, WORDS], gl.NVMMASharedLayout(128, 16)
        )
        rope_words = tile_words
        if c.ROPE > 0:
            rope_words = k_rope.index(stage * ROPE_BUFFERS)._reinterpret(
                gl.int16, [TILE, c.ROPE // 2], gl.NVMMASharedLayout(c.ROPE, 16)
            )
        mbarrier.wait(full.index(stage), (tiles // STAGES) & 1)
        scores = _scores(tile_words, rope_words, shared, zero, c)
        # keeping this factor from tile to tile would cost registers
        factor = shared.row_values.index(UNIT + zero).load(ROW) * ctx.sizes.scale_log2
        scores = scores * factor[None, :]
        if tile >= visibility.first_masked:
            scores = masked_keys(scores, tile, end, visibility, c.BLOCK_SIZE)
            if (tile + 1) * TILE > visibility.length:
                chunks = k_latent.index(stage * BUFFERS)._reinterpret(
                    gl.int16, [WORDS // CHUNK, TILE, CHUNK], gl.NVMMASharedLayout(128, 16)
                )
                for chunk in range(WORDS // CHUNK + zero):  # `+ zero` (0) prevents unrolling
                    zero_from(chunks.index(chunk), visibility.length - tile * TILE)
                partition_barrier()
        new_largest = gl.maximum(largest, gl.max(scores, 0))
        weights = gl.exp2(scores - gl.where(new_largest == LEAST, 0.0, new_largest)[None, :])
        decay = gl.exp2(largest - new_largest)
        largest = new_largest
        pairs = _added_pairs(weights)
        totals = totals * gl.convert_layout(decay, gl.SliceLayout(0, pairs.type.layout))[None, :] + pairs
        rounded = shared.weights.index(c.CONSUMER + zero)
        rounded.store((weights * PROBABILITY_UNITS).to(gl.float16))
        fence_async_shared()
        partition_barrier()
        even, odd = _sums(_scaled(even, decay), _scaled(odd, decay), tile_words, rounded, c)
        fence_async_shared()  # TMA (the GPU's bulk copy engine) will write another tile into this stage
        partition_barrier()  # every thread executes the fence before one thread arrives
        arrive(empty.index(stage))
        tiles += 1
    state, meetings = _merged(largest, gl.sum(totals, 0), even, odd, ctx, counters.meetings, c)
    return state, TileCounters(tiles, meetings)


@gluon.jit
@no_type_check
def _merged(largest, total, even, odd, ctx, meetings, c):
    """Add the states of both consumers; return this consumer's `RowState`, with half of the columns, and `meetings`.

    Each consumer writes its sums of the other consumer's half to shared memory, in one or several rounds.
    """
    ROWS: gl.constexpr = c.ROWS
    shared, exchange = ctx.shared, ctx.bars.exchange
    row_values, exchanged = shared.row_values, shared.exchanged
    ROW: gl.constexpr = gl.SliceLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16]))
    OWN: gl.constexpr = c.CONSUMER
    HALF: gl.constexpr = c.LATENT // 4 // CHUNK  # chunks of one half
    AT_ONCE: gl.constexpr = exchanged.shape[0] // 4  # chunks that a consumer can write in one round
    row_values.index(OWN).store(largest)
    row_values.index(2 + OWN).store(total)
    meetings = meet(exchange, meetings)
    before, after = row_values.index(0).load(ROW), row_values.index(1).load(ROW)
    reference = gl.maximum(before, after)
    first_weight, second_weight = gl.exp2(before - reference), gl.exp2(after - reference)
    total = row_values.index(2).load(ROW) * first_weight + row_values.index(3).load(ROW) * second_weight
    weight = (first_weight if OWN == 0 else second_weight) * (shared.kv_scale / PROBABILITY_UNITS)
    even, odd = _scaled(even, weight), _scaled(odd, weight)
    columns = even[0]
    for chunk in gl.static_range(HALF):
        if chunk > 0 and chunk % AT_ONCE == 0:
            meetings = meet(exchange, meetings)  # the other consumer has read what this consumer wrote before
        place = exchanged.index(2 * (OWN * AT_ONCE + chunk % AT_ONCE))
        place.store(even[(1 - OWN) * HALF + chunk])
        place = exchanged.index(2 * (OWN * AT_ONCE + chunk % AT_ONCE) + 1)
        place.store(odd[(1 - OWN) * HALF + chunk])
        if chunk % AT_ONCE == AT_ONCE - 1 or chunk == HALF - 1:
            meetings = meet(exchange, meetings)
            for number in gl.static_range(chunk // AT_ONCE * AT_ONCE, chunk + 1):
                own_even, own_odd = even[OWN * HALF + number], odd[OWN * HALF + number]
                place = exchanged.index(2 * ((1 - OWN) * AT_ONCE + number % AT_ONCE))
                own_even += place.load(own_even.type.layout)
                place = exchanged.index(2 * ((1 - OWN) * AT_ONCE + number % AT_ONCE) + 1)
                own_odd += place.load(own_odd.type.layout)
                pairs = gl.permute(gl.join(own_even, own_odd), [0, 2, 1])  # [words, 2, rows]
                pairs = gl.reshape(pairs, [2 * CHUNK, ROWS])
                if number == 0:
                    columns = pairs
                else:
                    columns = gl.permute(gl.join(columns, pairs), [2, 0, 1])
                    columns = gl.reshape(columns, [4 * CHUNK, ROWS])
    reference = gl.where(total == 0, float("-inf"), reference)
    return RowState(reference, total, columns), meetings
