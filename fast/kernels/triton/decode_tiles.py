"""Functions that both decode kernels of the backend "triton" use: load queries, then attend tiles of keys.

A row is one head of one query token, and a program processes ROWS rows of one request. A tile is TILE consecutive
cache entries of the request. An entry is the key of a token, and the latent part of the entry is also the token's
value. A program therefore loads each tile once. The softmax is an online softmax (arXiv 1805.02867).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, no_type_check

import triton
import triton.language as tl

from ..combine.states import RowState
from .fp8 import e4m3_to, pinned

LN_2 = tl.constexpr(math.log(2))


class Constants(NamedTuple):
    """Compile-time constants of a kernel; the kernel takes this named tuple as one `constexpr` argument.

    All fields in this module have the annotation `Any`, because no Python type describes values inside a kernel.

    Attributes:
        LATENT: Lkv, columns of the latent part of a cache entry.
        ROPE: R, columns of the rope part of a cache entry.
        BLOCK_SIZE: tokens of a cache block.
        TILE: keys of a tile.
        LATENT_PAD: Lkv, padded to a power of two.
        ROPE_PAD: R, padded to a power of two.
        SUM_COLUMNS: columns of each partial sum of a float32 dot product (`products`); 0 for other dtypes.
        PAGED_COPY: True if TMA (the GPU's bulk copy engine) loads the tiles.
        E4M3: True if the latents of the cache are e4m3 numbers (`decode_fp8_tiles`); the cache is then read as bytes.
            The constants below are for such a cache alone.
        NATIVE: True if the GPU has instructions for e4m3.
        PINNED: True if converted numbers stay in the layout of their load (`fp8.pinned`): on a GPU, unless the queries
            are float32.
        HALF: True if bfloat16 queries are converted to float16 before they are multiplied by e4m3 numbers (not for row
            blocks of 64 rows, whose products the compiler would then serialise).
        BLOCKS: number of column blocks of a latent, which are loaded and multiplied one after another.
        SCALE_TILE: columns of a latent that have one scale in the entry; 0 if the layer has one scale.
        SCALE_COLUMN: column at which the scales of an entry begin.
        ROPE_COLUMN: column at which the rope part of an entry begins.
        ROPE_E4M3: True if the rope part is e4m3 too, and False if it is bfloat16.
        Q_E4M3: True if the queries are e4m3 numbers, which are read as bytes.
        P_E4M3: True if the probabilities are rounded to e4m3.
        E4M3_DOTS: True if products are computed in e4m3, and False if e4m3 numbers are converted first.
        PREFETCH: True if the next tile is loaded into registers, in words of four e4m3 numbers, before the present tile
            is attended.
    """

    LATENT: Any
    ROPE: Any
    BLOCK_SIZE: Any
    TILE: Any
    LATENT_PAD: Any
    ROPE_PAD: Any
    SUM_COLUMNS: Any
    PAGED_COPY: Any
    E4M3: Any = False
    NATIVE: Any = False
    PINNED: Any = False
    HALF: Any = False
    BLOCKS: Any = 1
    SCALE_TILE: Any = 0
    SCALE_COLUMN: Any = 0
    ROPE_COLUMN: Any = 0
    ROPE_E4M3: Any = False
    Q_E4M3: Any = False
    P_E4M3: Any = False
    E4M3_DOTS: Any = False
    PREFETCH: Any = False


class Queries(NamedTuple):
    """Pointers to the latent and the rope part of all queries, and the strides of both parts in elements.

    `scale` is a pointer to the scale of queries in e4m3, or None. `scale_stride` is the stride from the scale of a head
    to the scale of the next head: 0 if all heads have one scale.
    """

    ql_nope: Any
    q_pe: Any
    latent_token_stride: Any
    latent_head_stride: Any
    latent_element_stride: Any
    rope_token_stride: Any
    rope_head_stride: Any
    rope_element_stride: Any
    scale: Any
    scale_stride: Any


class RowStrides(NamedTuple):
    """Strides of queries [T, N, columns]: distances in elements between tokens, between heads and between columns."""

    token: Any
    head: Any
    element: Any


class RowQueries(NamedTuple):
    """Queries of ROWS rows.

    Attributes:
        latent: [ROWS, LATENT_PAD]; for a cache with e4m3 numbers, a tuple with one tensor for each column block.
        rope: [ROWS, ROPE_PAD]; not used if R is 0.
        unit: [ROWS], factor by which the products with `latent` are multiplied. With `HALF`, it is the unit of
            `_in_float16`; with `Q_E4M3`, it is the scale of the queries; otherwise it is not used.
    """

    latent: Any
    rope: Any
    unit: Any


class Cache(NamedTuple):
    """The paged cache.

    Attributes:
        entries: pointer to all entries.
        latent_pages: TMA descriptor of the latent parts, or None.
        rope_pages: TMA descriptor of the rope parts, or None.
        num_blocks: number of blocks.
        block_stride: elements from one block to the next.
        entry_stride: elements from one token of a block to the next.
        element_stride: elements from one column to the next.
        scale: pointer to the scale of the layer, or None.
    """

    entries: Any
    latent_pages: Any
    rope_pages: Any
    num_blocks: Any
    block_stride: Any
    entry_stride: Any
    element_stride: Any
    scale: Any


class RowKeys(NamedTuple):
    """Keys of a request that ROWS rows see.

    Attributes:
        visible: [ROWS], number of keys that each row sees.
        end: largest number of keys that a row sees.
        full_tiles: number of tiles at the start of the request in which every row sees every key; these tiles need no
            mask.
        table_row: pointer to the request's row of the block table.
        table_stride: elements from one entry of the request's row to the next entry.
    """

    visible: Any
    end: Any
    full_tiles: Any
    table_row: Any
    table_stride: Any


class TileKeys(NamedTuple):
    """Keys of a tile, and where they are stored.

    Attributes:
        keys: [TILE], index of each key in its request.
        block: number of the cache block: a scalar if one block holds the whole tile, otherwise [TILE].
        held: [TILE], whether the cache holds the key.
    """

    keys: Any
    block: Any
    held: Any


class SoftmaxStep(NamedTuple):
    """Result of the online softmax for one tile, before the probabilities are multiplied by the values.

    Attributes:
        largest: [ROWS], largest score so far. Scores are divided by ln 2, so that exp2 can replace exp.
        decay: [ROWS], factor that rescales earlier sums to the new `largest`.
        total: [ROWS], sum of exp2(score - largest) over all keys so far.
        probabilities: [ROWS, TILE], exp2(score - largest) of this tile.
    """

    largest: Any
    decay: Any
    total: Any
    probabilities: Any


@triton.jit
@no_type_check  # the tests' type checker skips this kernel, because Triton's interpreter must read its source
def softmax_step(scores, seen, state, dtype: tl.constexpr):
    """Return the `SoftmaxStep` of a tile with scores [ROWS, TILE] and mask `seen`; `probabilities` are in `dtype`."""
    scores = tl.where(seen, scores, float("-inf"))
    largest = tl.maximum(state.largest, tl.max(scores, 1))
    shift = tl.where(largest == float("-inf"), 0.0, largest)  # no key so far: -inf - (-inf) would be NaN
    weights = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(state.largest - shift)
    return SoftmaxStep(largest, decay, state.total * decay + tl.sum(weights, 1), weights.to(dtype))


@triton.jit
@no_type_check
def products(q, k, SUM_COLUMNS: tl.constexpr):
    """Return the scores [ROWS, TILE] of `q` [ROWS, columns] and `k` [TILE, columns].

    If SUM_COLUMNS is not 0, compute one sum for every SUM_COLUMNS columns, and then add these sums. Short sums have a
    smaller rounding error, because the error of a float32 sum grows with the number of its terms.
    """
    if SUM_COLUMNS == 0:
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    else:
        SUMS: tl.constexpr = q.shape[1] // SUM_COLUMNS
        q_groups = tl.permute(q.reshape(q.shape[0], SUMS, SUM_COLUMNS), (1, 0, 2))
        k_groups = tl.permute(k.reshape(k.shape[0], SUMS, SUM_COLUMNS), (1, 2, 0))
        scores = tl.sum(tl.dot(q_groups, k_groups, input_precision="ieee"), 0)
    return scores


@triton.jit
@no_type_check
def keys_of_tile(row_keys, tile, cache, c):
    """Return the `TileKeys` of a tile."""
    keys = tile * c.TILE + tl.arange(0, c.TILE)
    if c.BLOCK_SIZE % c.TILE == 0:  # one cache block holds the whole tile, so one entry of the block table suffices
        block = tl.load(row_keys.table_row + (tile * c.TILE // c.BLOCK_SIZE) * row_keys.table_stride)
    else:
        block = tl.load(
            row_keys.table_row + (keys // c.BLOCK_SIZE) * row_keys.table_stride, mask=keys < row_keys.end, other=-1
        )
    held = (keys < row_keys.end) & (block >= 0) & (block < cache.num_blocks)  # keys that exist in the cache
    return TileKeys(keys, block, held)


@triton.jit
@no_type_check
def _attend_tile(state, queries, row_keys, tile, cache, scale_log2, c, PARTIAL: tl.constexpr):
    """Return the state of the rows (`RowState`) after one more tile.

    PARTIAL is False if every row sees every key of the tile; the tile then needs no mask.
    """
    ONE_WARPGROUP_ROWS: tl.constexpr = queries.latent.shape[0] == 64
    at = keys_of_tile(row_keys, tile, cache, c)
    keys, block, held = at.keys, at.block, at.held
    if c.PAGED_COPY:  # TMA returns zeros for a block number outside the cache
        first = (tile * c.TILE) % c.BLOCK_SIZE
        latent = cache.latent_pages.load([block, first, 0]).reshape(c.TILE, c.LATENT)
        if PARTIAL:  # cache entries past the last key may hold NaN, and probability 0 * NaN is NaN
            latent = tl.where(held[:, None], latent, 0.0)
    else:
        # 64-bit offsets [TILE]
        entries = block.to(tl.int64) * cache.block_stride + (keys % c.BLOCK_SIZE).to(tl.int64) * cache.entry_stride
        columns = tl.arange(0, c.LATENT_PAD)
        pointers = cache.entries + entries[:, None] + columns[None, :].to(tl.int64) * cache.element_stride
        if c.LATENT == c.LATENT_PAD:
            latent = tl.load(pointers, mask=held[:, None], other=0.0)
        else:
            latent = tl.load(pointers, mask=held[:, None] & (columns < c.LATENT)[None, :], other=0.0)

    scores = products(queries.latent, latent, c.SUM_COLUMNS)
    if c.ROPE > 0:
        if c.PAGED_COPY:  # NaN past the last key does no harm here, because the scores of these keys are masked
            rope = cache.rope_pages.load([block, first, c.LATENT]).reshape(c.TILE, c.ROPE)
        else:
            columns = tl.arange(0, c.ROPE_PAD)
            rows = cache.entries + entries[:, None]
            pointers = rows + (c.LATENT + columns)[None, :].to(tl.int64) * cache.element_stride
            if c.ROPE == c.ROPE_PAD:
                rope = tl.load(pointers, mask=held[:, None], other=0.0)
            else:
                rope = tl.load(pointers, mask=held[:, None] & (columns < c.ROPE)[None, :], other=0.0)
        if ONE_WARPGROUP_ROWS:
            scores = scores * scale_log2 + products(queries.rope, rope, c.SUM_COLUMNS) * scale_log2
        elif c.SUM_COLUMNS > 0:
            scores = (scores + products(queries.rope, rope, c.SUM_COLUMNS)) * scale_log2
        else:
            scores = tl.dot(queries.rope, tl.trans(rope), acc=scores, input_precision="ieee") * scale_log2
    else:
        scores *= scale_log2

    seen = held[None, :]
    if PARTIAL:
        seen = seen & (keys[None, :] < row_keys.visible[:, None])
    if ONE_WARPGROUP_ROWS:
        # The first product gives the scores. The second product multiplies the probabilities of these scores by the
        # latents. If the compiler sees this dependence, it divides the rows among the warps, but not the columns. One
        # warp group (4 warps) covers 64 rows, so the second warp group would compute the same scores again. The branch
        # below hides the dependence from the compiler. Its condition is always true.
        step = SoftmaxStep(state.largest, state.largest, state.total, tl.zeros(scores.shape, latent.dtype))
        if tile >= 0:
            step = softmax_step(scores, seen, state, latent.dtype)
    else:
        step = softmax_step(scores, seen, state, latent.dtype)
    weighted = state.weighted * step.decay[:, None]
    weighted = tl.dot(step.probabilities, latent, acc=weighted, input_precision="ieee")
    return RowState(step.largest, step.total, weighted)


@triton.jit
@no_type_check
def load_queries(queries, token, head, real, c):
    """Load the queries of ROWS rows; a row with `real` false gets zeros.

    For a cache with e4m3 numbers, `latent` of the result is a tuple: for every column block, the queries
    [ROWS, columns of the block].
    """
    latent_strides = RowStrides(
        queries.latent_token_stride, queries.latent_head_stride, queries.latent_element_stride
    )  # fmt: skip
    if c.E4M3:
        BLOCKS: tl.constexpr = c.BLOCKS
        latent = ()
        for number in tl.static_range(BLOCKS):
            columns = tl.arange(0, c.LATENT_PAD // BLOCKS) + number * (c.LATENT_PAD // BLOCKS)
            block = _load_columns(queries.ql_nope, columns, token, head, real, latent_strides, c.LATENT)
            latent = latent + (block,)  # noqa: RUF005
        rope = latent[0]
    else:
        columns = tl.arange(0, c.LATENT_PAD)
        latent = _load_columns(queries.ql_nope, columns, token, head, real, latent_strides, c.LATENT)
        rope = latent
    if c.ROPE > 0:
        columns = tl.arange(0, c.ROPE_PAD)
        rope_strides = RowStrides(queries.rope_token_stride, queries.rope_head_stride, queries.rope_element_stride)
        rope = _load_columns(queries.q_pe, columns, token, head, real, rope_strides, c.ROPE)
    row_queries = RowQueries(latent, rope, rope)
    if c.HALF:
        row_queries = _in_float16(latent, rope, c)
    if c.Q_E4M3:
        row_queries = _from_codes(latent, rope, tl.load(queries.scale + head * queries.scale_stride), c)
    return row_queries


@triton.jit
@no_type_check
def _from_codes(latent, rope, scale, c):
    """Return queries that were loaded as e4m3 codes, in the dtype of their products; `scale` [ROWS] is their unit.

    Every e4m3 number is exact in the dtypes of the products. If the rope keys are bfloat16, the rope queries become
    bfloat16 too. In Triton's interpreter (PINNED is False), the rope queries become float32 instead, because the
    interpreter computes wrong products in bfloat16.
    """
    BLOCKS: tl.constexpr = c.BLOCKS
    DTYPE: tl.constexpr = tl.float8e4nv if c.E4M3_DOTS else tl.float16
    WIDE: tl.constexpr = tl.bfloat16 if c.PINNED else tl.float32
    converted = ()
    for number in tl.static_range(BLOCKS):
        block = e4m3_to(latent[number], DTYPE, c.NATIVE)
        if c.PINNED and not c.E4M3_DOTS:
            block = pinned(block)
        converted = converted + (block,)  # noqa: RUF005
    converted_rope = converted[0]
    if c.ROPE > 0:
        converted_rope = e4m3_to(rope, DTYPE if c.ROPE_E4M3 else WIDE, c.NATIVE)
        if c.PINNED and not (c.E4M3_DOTS and c.ROPE_E4M3):
            converted_rope = pinned(converted_rope)
    return RowQueries(converted, converted_rope, scale)


@triton.jit
@no_type_check
def _in_float16(latent, rope, c):
    """Convert bfloat16 queries to float16; divide each row by its unit first, a power of two that is returned too.

    The largest quotient of a row is a number from 2^14 to 2^15, so queries of any size fit into float16. The quotients
    are exact, except that numbers below 2^-28 times the largest number of the row lose bits. Rope queries are converted
    only if the rope keys are e4m3.
    """
    BLOCKS: tl.constexpr = c.BLOCKS
    largest = tl.max(tl.abs(latent[0].to(tl.float32)), 1)
    for number in tl.static_range(1, BLOCKS):
        largest = tl.maximum(largest, tl.max(tl.abs(latent[number].to(tl.float32)), 1))
    if c.ROPE > 0 and c.ROPE_E4M3:
        largest = tl.maximum(largest, tl.max(tl.abs(rope.to(tl.float32)), 1))
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 0xFF  # biased; 255 for infinity and NaN
    inverse_exponent = tl.minimum(2 * 127 + 14 - exponent, 253)  # exponent of 1 / unit
    inverse = (inverse_exponent << 23).to(tl.float32, bitcast=True)[:, None]
    halves = ()
    for number in tl.static_range(BLOCKS):
        halves = halves + ((latent[number].to(tl.float32) * inverse).to(tl.float16),)  # noqa: RUF005
    if c.ROPE > 0 and c.ROPE_E4M3:
        rope = (rope.to(tl.float32) * inverse).to(tl.float16)
    return RowQueries(halves, rope, ((2 * 127 - inverse_exponent) << 23).to(tl.float32, bitcast=True))


@triton.jit
@no_type_check
def _load_columns(base, columns, token, head, real, strides, WIDTH: tl.constexpr):
    """Load columns of ROWS rows from [T, N, WIDTH]; rows with `real` false and columns from WIDTH on get zeros."""
    offsets = token.to(tl.int64) * strides.token + head.to(tl.int64) * strides.head
    return tl.load(
        base + offsets[:, None] + (columns.to(tl.int64) * strides.element)[None, :],
        mask=real[:, None] & (columns < WIDTH)[None, :],
        other=0.0,
    )


@triton.jit
@no_type_check
def attend_tiles(queries, row_keys, first_tile, last_tile, cache, scale_log2, c):
    """Attend the tiles [first_tile, last_tile) and return the softmax state (`RowState`) of ROWS rows.

    Args:
        queries: queries of the rows (`load_queries`).
        row_keys: keys that the rows see.
        first_tile: first tile to attend.
        last_tile: index behind the last tile to attend.
        cache: the paged cache.
        scale_log2: softmax scale divided by ln 2; the kernel computes exp2 in place of exp.
        c: compile-time constants of the kernel.
    """
    ROWS: tl.constexpr = queries.latent.shape[0]
    LATENT_PAD: tl.constexpr = c.LATENT_PAD  # `tl.zeros` accepts no field of a named tuple in its shape
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    state = RowState(largest, total, tl.zeros([ROWS, LATENT_PAD], tl.float32))
    for tile in tl.range(first_tile, tl.minimum(row_keys.full_tiles, last_tile)):
        state = _attend_tile(state, queries, row_keys, tile, cache, scale_log2, c, False)
    for tile in tl.range(tl.maximum(row_keys.full_tiles, first_tile), last_tile, num_stages=1):
        state = _attend_tile(state, queries, row_keys, tile, cache, scale_log2, c, True)
    return state
