"""Attend tiles of keys that a cache stores in e4m3 (8 bits), for both decode kernels of the backend "triton".

`decode_tiles` explains rows, tiles and the online softmax. A program reads the e4m3 numbers of a tile as bytes and
converts them to a dtype that holds every e4m3 number exactly: the dtype of the queries, or float16. A conversion to
bfloat16 needs four times as many instructions as a conversion to float16. In row blocks of up to 32 rows, queries in
bfloat16 are therefore converted to float16 too: first, each row is divided by a power of two
(`decode_tiles._in_float16`).

A column block is a group of columns of the latents. If a cache entry has scales, all columns of a block have the same
scale. No key and no value is multiplied by its scale, because the product would have to be rounded. The scales multiply
other numbers:

| scale | in the scores | in the output |
|---|---|---|
| one scale of the layer | multiplies the score in float32 | multiplies the sum of weighted latents in float32 |
| scale of a key's column block | multiplies the block's part of the score in float32 | multiplies the probability |

The product of probability and scale is computed in float32 and then rounded, like a probability without a scale. The
product is another number for each column block, so a row has one sum of weighted latents for each column block. With a
scale of the layer, a latent has four column blocks if the row block has 16 rows, with PREFETCH, or if products are
computed in e4m3, and otherwise one column block (`decode_shapes.stored_constants` has the exact condition). With four
column blocks, the four products of a score do not wait for each other.

Queries in e4m3 (`fp8_query` and `fp8_product`, see `reference.mla_decode`) have a scale too, which multiplies the score
in float32. Products of e4m3 numbers are computed in e4m3 if the GPU has instructions for the rows of a row block
(E4M3_DOTS, `decode_shapes.multiplies_e4m3`). Otherwise both operands are converted to float16. Both ways multiply the
same numbers, and differ in the rounding of sums alone. For `fp8_query`, the values are converted to float16. For
`fp8_product`, each probability is multiplied by a factor and then rounded to e4m3. The sum of the exponentials is not
rounded.

| scale | factor of a probability before the rounding |
|---|---|
| one scale of the layer | 2^8, as in the backend "cpu" |
| scale of a key's column block | the scale, divided by a power of two for the tile and column block (`_unit_in_e4m3`) |

The product of a probability and a scale is rounded even if the probability is 1. With scales in the entries,
`fp8_product` therefore has a rounding error also in rows that attend only one key.

Tensor Cores that multiply e4m3 numbers give all summands the exponent of the largest summand, keep about 13 binary
digits behind the point, and cut off the other digits. A sum over all keys would lose one more digit whenever the number
of keys doubles. Every e4m3 product therefore begins with the sum 0, and adds at most 128 columns or the keys of one
tile. The result is then added to the earlier sums in float32. `max_num_imprecise_acc`, the number of terms that may be
added with few digits, is set to the length of the product. Its default on GPUs other than Hopper is 0; the compiler
would then make the addition in float32 a part of the product.

With PREFETCH (`decode_shapes.prefetch_shape` has the condition), a program loads the e4m3 numbers of the next tile into
registers, in words of four numbers, before it attends the present tile. Latents, rope parts and queries then have the
column order of `fp8.even_groups_first`. Without PREFETCH, the compiler's pipeline copies tiles through shared memory,
and a program has small tiles and one more copy of each tile.
"""

from __future__ import annotations

from typing import Any, NamedTuple, no_type_check

import triton
import triton.language as tl

from ..combine.states import RowState
from .decode_tiles import RowQueries, SoftmaxStep, attend_tiles, keys_of_tile, products, softmax_step
from .fp8 import e4m3_to, even_groups_first, float16_of_words, float32_to_e4m3, in_order, pinned

# In float16, the product of a probability and a scale could overflow or be rounded to 0. The product is therefore
# divided by a unit, a power of two, so that the largest scale becomes a number from 2^14 to 2^15. float16 ends at 2^16.
HEADROOM = tl.constexpr(14)
BIAS = tl.constexpr(127)  # exponent bias of float32
PROBABILITY_UNITS = tl.constexpr(2.0**13)  # factor of probabilities in float16, so that small ones do not become 0
WEIGHT_UNITS = tl.constexpr(2.0**8)  # factor of e4m3 probabilities; e4m3 ends at 448
LAST_EXPONENT = tl.constexpr(253)  # largest biased exponent of a power of two whose inverse is a normal number


class BlockState(NamedTuple):
    """State of the online softmax of ROWS rows.

    Attributes:
        largest: [ROWS], largest score so far, in base 2.
        total: [ROWS], sum of exp2(score - largest).
        exponent: biased exponent of the unit of `weighted`, a power of two; not used if the unit is 1.
        weighted: tuple with the sum of weighted latents of each column block, [ROWS, columns of the block].
    """

    largest: Any
    total: Any
    exponent: Any
    weighted: Any


class Words(NamedTuple):
    """Keys of a tile as the cache stores them, in words (int32) of four e4m3 codes; other keys are 0.

    Attributes:
        held: [TILE], whether the cache holds a key.
        latents: tuple with the words of each column block, [TILE, columns of the block / 4].
        rope: [TILE, ROPE_PAD / 4]; not used if R is 0.
    """

    held: Any
    latents: Any
    rope: Any


class StoredTile(NamedTuple):
    """Keys of a tile, loaded from the cache; with PREFETCH in the column order of `fp8.even_groups_first`.

    Attributes:
        keys: tuple with the e4m3 numbers of each column block, [TILE, columns of the block], in the dtype in which
            they are multiplied by the queries.
        latents: the same numbers, in the dtype in which they are multiplied by the probabilities.
        scales: tuple with the scales of each column block, [TILE]; empty if the layer has one scale.
        rope: [TILE, ROPE_PAD]; not used if R is 0.
    """

    keys: Any
    latents: Any
    scales: Any
    rope: Any


@triton.jit
@no_type_check  # the tests' type checker skips this kernel, because Triton's interpreter must read its source
def attend(queries, row_keys, first_tile, last_tile, cache, scale_log2, c):
    """Attend tiles of a cache of any format; arguments and result are those of `attend_tiles`."""
    if c.E4M3:
        state = _attend_e4m3_tiles(queries, row_keys, first_tile, last_tile, cache, scale_log2, c)
    else:
        state = attend_tiles(queries, row_keys, first_tile, last_tile, cache, scale_log2, c)
    return state


@triton.jit
@no_type_check
def _attend_e4m3_tiles(queries, row_keys, first_tile, last_tile, cache, scale_log2, c):
    BLOCKS: tl.constexpr = c.BLOCKS
    IN_HALVES: tl.constexpr = c.Q_E4M3 or queries.latent[0].dtype == tl.float16
    ROWS: tl.constexpr = queries.latent[0].shape[0]
    COLUMNS: tl.constexpr = queries.latent[0].shape[1]
    layer_scale = 1.0
    if c.SCALE_TILE == 0:
        layer_scale = tl.load(cache.scale)
    weighted = ()
    for _ in tl.static_range(BLOCKS):
        weighted = weighted + (tl.zeros([ROWS, COLUMNS], tl.float32),)  # noqa: RUF005 (Triton compiles no unpacking)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    state = BlockState(largest, tl.zeros([ROWS], tl.float32), tl.full([], 1, tl.int32), weighted)
    if c.PREFETCH:
        latent = ()
        for number in tl.static_range(BLOCKS):
            latent = latent + (even_groups_first(queries.latent[number]),)  # noqa: RUF005
        rope = queries.rope
        if c.ROPE > 0:
            rope = even_groups_first(rope)
        queries = RowQueries(latent, rope, queries.unit)
        # The address of a tile depends on the tile's block. The block is therefore loaded one tile before the words.
        words = _load_words(
            row_keys, first_tile, last_tile, _block_of_tile(row_keys, first_tile, last_tile, c), cache, c
        )
        block = _block_of_tile(row_keys, first_tile + 1, last_tile, c)
        for tile in tl.range(first_tile, last_tile, num_stages=1):
            stored, held = _converted(words, c), words.held
            words = _load_words(row_keys, tile + 1, last_tile, block, cache, c)
            block = _block_of_tile(row_keys, tile + 2, last_tile, c)
            keys = tile * c.TILE + tl.arange(0, c.TILE)
            state = _attend_stored(state, queries, row_keys, tile, keys, stored, held, scale_log2, layer_scale, c, True)
    else:
        for tile in tl.range(first_tile, tl.minimum(row_keys.full_tiles, last_tile)):
            state = _attend_tile(state, queries, row_keys, tile, cache, scale_log2, layer_scale, c, False)
        for tile in tl.range(tl.maximum(row_keys.full_tiles, first_tile), last_tile, num_stages=1):
            state = _attend_tile(state, queries, row_keys, tile, cache, scale_log2, layer_scale, c, True)
    weighted = ()
    for number in tl.static_range(BLOCKS):
        block = state.weighted[number]
        if c.PREFETCH:
            block = in_order(block)
        weighted = weighted + (block,)  # noqa: RUF005
    if BLOCKS == 4:
        left = _side_by_side(weighted[0], weighted[1])
        weighted = _side_by_side(left, _side_by_side(weighted[2], weighted[3]))
    else:
        weighted = weighted[0]
    if c.P_E4M3:
        if c.SCALE_TILE == 0:
            weighted = weighted * (layer_scale / WEIGHT_UNITS)
    elif c.SCALE_TILE > 0:
        if IN_HALVES:
            weighted = weighted * _power_of_two(state.exponent)
    elif IN_HALVES:
        weighted = weighted * (layer_scale / PROBABILITY_UNITS)
    else:
        weighted = weighted * layer_scale
    return RowState(state.largest, state.total, weighted)


@triton.jit
@no_type_check
def _attend_tile(state, queries, row_keys, tile, cache, scale_log2, layer_scale, c, PARTIAL: tl.constexpr):
    """Return the `BlockState` after one more tile; PARTIAL is False if every row sees every key of the tile."""
    KEY_DTYPE: tl.constexpr = queries.latent[0].dtype
    DTYPE: tl.constexpr = tl.float16 if c.Q_E4M3 and not (c.P_E4M3 and c.E4M3_DOTS) else KEY_DTYPE
    at = keys_of_tile(row_keys, tile, cache, c)
    stored = _load_tile(at.keys, at.block, at.held, cache, KEY_DTYPE, DTYPE, queries.rope.dtype, c)
    return _attend_stored(state, queries, row_keys, tile, at.keys, stored, at.held, scale_log2, layer_scale, c, PARTIAL)


@triton.jit
@no_type_check
def _attend_stored(
    state, queries, row_keys, tile, keys, stored, held, scale_log2, layer_scale, c, PARTIAL: tl.constexpr
):
    """Return the `BlockState` after the tile `stored` (`StoredTile`) of `keys` [TILE]; see `_attend_tile`."""
    BLOCKS: tl.constexpr = c.BLOCKS
    DTYPE: tl.constexpr = stored.latents[0].dtype
    IN_HALVES: tl.constexpr = stored.latents[0].dtype == tl.float16
    IN_UNITS: tl.constexpr = c.SCALE_TILE > 0 and IN_HALVES and not c.P_E4M3
    # 1. scores
    scores = _key_products(queries.latent[0], stored.keys[0], c)
    if c.SCALE_TILE > 0:
        scores = scores * stored.scales[0][None, :]
    for number in tl.static_range(1, BLOCKS):
        product = _key_products(queries.latent[number], stored.keys[number], c)
        if c.SCALE_TILE > 0:
            product = product * stored.scales[number][None, :]
        scores += product
    factor = scale_log2 * layer_scale
    if c.HALF or c.Q_E4M3:
        factor = (queries.unit * factor)[:, None]
    scores = scores * factor
    if c.ROPE > 0:
        rope_product = _key_products(queries.rope, stored.rope, c)
        if c.ROPE_E4M3:
            scores += rope_product * factor
        elif c.Q_E4M3:
            scores += rope_product * (queries.unit * scale_log2)[:, None]
        else:
            scores += rope_product * scale_log2
    # 2. probabilities
    seen = held[None, :]
    if PARTIAL:
        seen = seen & (keys[None, :] < row_keys.visible[:, None])
    WEIGHTS: tl.constexpr = tl.float32
    if scores.shape[0] == 64:  # hides a dependence from the compiler, as `decode_tiles._attend_tile` explains
        step = SoftmaxStep(state.largest, state.largest, state.total, tl.zeros(scores.shape, WEIGHTS))
        if tile >= 0:
            step = softmax_step(scores, seen, state, WEIGHTS)
    else:
        step = softmax_step(scores, seen, state, WEIGHTS)
    # 3. sums of weighted latents
    decay, exponent, inverse = step.decay, state.exponent, 1.0
    if IN_UNITS:
        exponent = _exponent_of_unit(exponent, stored.scales)
        inverse = _power_of_two(-exponent + 2 * BIAS)
        decay = decay * (_power_of_two(state.exponent) * inverse)
    weighted = ()
    if c.P_E4M3:
        weighted = _sums_in_e4m3(state, step, stored, c)
    else:
        for number in tl.static_range(BLOCKS):
            weights = step.probabilities
            if c.SCALE_TILE > 0:
                weights = weights * (stored.scales[number] * inverse)[None, :]
            elif IN_HALVES:
                weights = weights * PROBABILITY_UNITS
            weights = weights.to(DTYPE)
            sums = state.weighted[number] * decay[:, None]
            sums = tl.dot(weights, stored.latents[number], acc=sums, input_precision="ieee")
            weighted = weighted + (sums,)  # noqa: RUF005
    return BlockState(step.largest, step.total, exponent, weighted)


@triton.jit
@no_type_check
def _sums_in_e4m3(state, step, stored, c):
    """Return the sums of weighted latents after one more tile; the probabilities are rounded to e4m3."""
    BLOCKS: tl.constexpr = c.BLOCKS
    TILE: tl.constexpr = c.TILE
    weighted = ()
    for number in tl.static_range(BLOCKS):
        if c.SCALE_TILE > 0:
            exponent = _unit_in_e4m3(stored.scales[number])
            weights = step.probabilities * (stored.scales[number] * _power_of_two(-exponent + 2 * BIAS))[None, :]
        else:
            weights = step.probabilities * WEIGHT_UNITS
        codes = float32_to_e4m3(weights, c.NATIVE)
        if c.E4M3_DOTS:
            codes = e4m3_to(codes, tl.float8e4nv, c.NATIVE)
            product = tl.dot(codes, stored.latents[number], max_num_imprecise_acc=TILE)
        else:
            product = tl.dot(e4m3_to(codes, tl.float16, c.NATIVE), stored.latents[number])
        if c.SCALE_TILE > 0:
            product = product * _power_of_two(exponent)
        weighted = weighted + (state.weighted[number] * step.decay[:, None] + product,)  # noqa: RUF005
    return weighted


@triton.jit
@no_type_check
def _key_products(q, k, c):
    """Return the products [ROWS, TILE] of `q` [ROWS, columns] and `k` [TILE, columns], which have the same dtype."""
    COLUMNS: tl.constexpr = q.shape[1]
    if q.dtype == tl.float8e4nv:
        scores = tl.dot(q, tl.trans(k), max_num_imprecise_acc=COLUMNS)
    else:
        scores = products(q, k, c.SUM_COLUMNS)
    return scores


@triton.jit
@no_type_check
def _load_tile(keys, block, held, cache, key_dtype: tl.constexpr, dtype: tl.constexpr, rope_dtype: tl.constexpr, c):
    """Load the keys of a tile (`StoredTile`); a key that the cache does not hold becomes 0, with scales of 0.

    `StoredTile.keys` get `key_dtype`, `StoredTile.latents` get `dtype`, and the rope parts get `rope_dtype`.
    """
    SAME: tl.constexpr = key_dtype == dtype
    BLOCKS: tl.constexpr = c.BLOCKS
    COLUMNS: tl.constexpr = c.LATENT_PAD // BLOCKS
    offsets = block.to(tl.int64) * cache.block_stride + (keys % c.BLOCK_SIZE).to(tl.int64) * cache.entry_stride
    entries = cache.entries + offsets
    columns = tl.arange(0, COLUMNS)
    key_parts = ()
    latents = ()
    for number in tl.static_range(BLOCKS):
        mask = held[:, None]
        if c.LATENT < c.LATENT_PAD:
            mask = mask & (columns + number * COLUMNS < c.LATENT)[None, :]
        offsets = (columns + number * COLUMNS).to(tl.int64) * cache.element_stride
        codes = tl.load(entries[:, None] + offsets[None, :], mask=mask, other=0)
        latent = e4m3_to(codes, dtype, c.NATIVE)
        if c.PINNED and dtype != tl.float8e4nv:
            latent = pinned(latent)
        key_part = latent
        if not SAME:
            key_part = e4m3_to(codes, key_dtype, c.NATIVE)
        key_parts = key_parts + (key_part,)  # noqa: RUF005
        latents = latents + (latent,)  # noqa: RUF005
    scales = ()
    if c.SCALE_TILE > 0:
        pointers = (entries + c.SCALE_COLUMN).to(tl.pointer_type(tl.float32))
        for number in tl.static_range(BLOCKS):
            scales = scales + (tl.load(pointers + number, mask=held, other=0.0),)  # noqa: RUF005
    rope = key_parts[0]
    if c.ROPE > 0:
        columns = tl.arange(0, c.ROPE_PAD)
        mask = held[:, None]
        if c.ROPE < c.ROPE_PAD:
            mask = mask & (columns < c.ROPE)[None, :]
        if c.ROPE_E4M3:
            offsets = (columns + c.ROPE_COLUMN).to(tl.int64) * cache.element_stride
            rope = e4m3_to(tl.load(entries[:, None] + offsets[None, :], mask=mask, other=0), rope_dtype, c.NATIVE)
        else:  # the rope part is bfloat16, and its columns are contiguous
            pointers = (entries + c.ROPE_COLUMN).to(tl.pointer_type(tl.bfloat16))
            rope = tl.load(pointers[:, None] + columns[None, :], mask=mask, other=0.0).to(rope_dtype)
    return StoredTile(key_parts, latents, scales, rope)


@triton.jit
@no_type_check
def _block_of_tile(row_keys, tile, last_tile, c):
    """Return the block of a tile (or the block of each key, [TILE]) as `keys_of_tile` does; -1 from `last_tile` on."""
    if c.BLOCK_SIZE % c.TILE == 0:
        pointer = row_keys.table_row + (tile * c.TILE // c.BLOCK_SIZE) * row_keys.table_stride
        block = tl.load(pointer, mask=tile < last_tile, other=-1)
    else:
        keys = tile * c.TILE + tl.arange(0, c.TILE)
        pointers = row_keys.table_row + (keys // c.BLOCK_SIZE) * row_keys.table_stride
        block = tl.load(pointers, mask=(tile < last_tile) & (keys < row_keys.end), other=-1)
    return block


@triton.jit
@no_type_check
def _load_words(row_keys, tile, last_tile, block, cache, c):
    """Load the `Words` of a tile, whose block (or the block of each key) is `block`; no word from `last_tile` on."""
    BLOCKS: tl.constexpr = c.BLOCKS
    WORDS: tl.constexpr = c.LATENT_PAD // BLOCKS // 4
    keys = tile * c.TILE + tl.arange(0, c.TILE)
    held = (tile < last_tile) & (keys < row_keys.end) & (block >= 0) & (block < cache.num_blocks)
    offsets = block.to(tl.int64) * cache.block_stride + (keys % c.BLOCK_SIZE).to(tl.int64) * cache.entry_stride
    entries = (cache.entries + offsets).to(tl.pointer_type(tl.int32))[:, None]
    latents = ()
    for number in tl.static_range(BLOCKS):
        columns = number * WORDS + tl.arange(0, WORDS)
        latents = latents + (tl.load(entries + columns[None, :], mask=held[:, None], other=0),)  # noqa: RUF005
    rope = latents[0]
    if c.ROPE > 0:
        columns = c.ROPE_COLUMN // 4 + tl.arange(0, c.ROPE_PAD // 4)
        rope = tl.load(entries + columns[None, :], mask=held[:, None], other=0)
    return Words(held, latents, rope)


@triton.jit
@no_type_check
def _converted(words, c):
    """Return the `StoredTile` of `words`, in float16."""
    BLOCKS: tl.constexpr = c.BLOCKS
    latents = ()
    for number in tl.static_range(BLOCKS):
        latents = latents + (float16_of_words(words.latents[number], c.NATIVE, c.PINNED),)  # noqa: RUF005
    rope = latents[0]
    if c.ROPE > 0:
        rope = float16_of_words(words.rope, c.NATIVE, c.PINNED)
    return StoredTile(latents, latents, (), rope)


@triton.jit
@no_type_check
def _exponent_of_unit(exponent, scales):
    """Return the biased exponent of the unit for the largest scale, but at least the earlier `exponent`.

    The bits of the scales are compared as integers, so that a NaN counts as the largest scale.
    """
    bits = scales[0].to(tl.int32, bitcast=True) & 0x7FFFFFFF  # the bits of absolute values have the order of the values
    for number in tl.static_range(1, len(scales)):
        bits = tl.maximum(bits, scales[number].to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    return tl.minimum(tl.maximum(exponent, (tl.max(bits, 0) >> 23) - HEADROOM), LAST_EXPONENT)


@triton.jit
@no_type_check
def _unit_in_e4m3(scales):
    """Return the biased exponent of the unit of a tile, a power of two that divides the scales of a column block.

    A probability is at most 1, so no product of a probability and a scale is above the largest scale of the tile.
    Divided by the unit, the largest scale is above 224 and at most 448, the largest e4m3 number. Each tile can have its
    own unit, because the products of a tile are added to the earlier sums in float32.
    """
    bits = tl.max(scales.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
    # 448 is 1.75 * 2^8, so the exponent is rounded up if the significand of the scale is above 1.75
    exponent = (tl.minimum(bits, 0x7F800000) + 0x1FFFFF) >> 23
    return tl.minimum(tl.maximum(exponent - 8, 1), LAST_EXPONENT)


@triton.jit
@no_type_check
def _power_of_two(exponent):
    """Return the power of two with a biased exponent from 1 to 254."""
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
@no_type_check
def _side_by_side(left, right):
    """Return [ROWS, 2 * columns]: first the columns of `left`, then the columns of `right`."""
    return tl.permute(tl.join(left, right), (0, 2, 1)).reshape(left.shape[0], 2 * left.shape[1])
