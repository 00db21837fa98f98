"""Functions of the attention kernels of grouped-query attention: load queries, then attend tiles of keys.

`records` explains rows, row blocks, groups and tiles. The softmax is an online softmax (arXiv 1805.02867). Scores are
divided by ln 2, so that exp2 can replace exp.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from ...combine.states import LN_2, RowState
from ..decode_tiles import SoftmaxStep, products, softmax_step
from ..fp8 import e4m3_to, even_groups_first, float32_to_e4m3, in_order, pinned
from .records import Queries, RowKeys, TileKeys

NO_KEY = tl.constexpr(2**31 - 1)  # larger than the index of any key
ENTRIES = tl.constexpr(128)  # entries of the block table that a program checks at a time
SMALL_TANH = tl.constexpr(0.2)  # below this absolute value, `_tanh` uses a polynomial


@triton.jit
@no_type_check  # the tests' type checker must not wrap a kernel: Triton's interpreter reads its source
def load_queries(q, rows, scores, strides, c):
    """Load the queries of a row block (`Queries`); rows that are not real get zeros."""
    columns = tl.arange(0, c.COLUMNS)
    offsets = rows.token.to(tl.int64) * strides.q_token + rows.head.to(tl.int64) * strides.q_head
    numbers = tl.load(
        q + offsets[:, None] + (columns.to(tl.int64) * strides.q_column)[None, :],
        mask=rows.real[:, None] & (columns < c.DIM)[None, :],
        other=0.0,
    )
    factor = scores.factors.factor
    if c.E4M3:
        factor = factor * tl.load(scores.k_scale)
    if c.Q_E4M3:
        q_scale = tl.load(scores.q_scale)
        codes = float32_to_e4m3(tl.div_rn(numbers.to(tl.float32), q_scale), c.NATIVE)
        numbers = e4m3_to(codes, tl.float16 if c.HALF else q.dtype.element_ty, c.NATIVE)
        factor = factor * q_scale
    elif c.HALF:
        # Divide each row by a power of two, so that queries of any size fit into float16. The largest quotient of a
        # row is a number from 2^14 to 2^15. The quotients are exact, except that numbers below 2^-28 times the largest
        # number of the row lose bits.
        largest = tl.max(tl.abs(numbers.to(tl.float32)), 1)
        exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 0xFF  # biased; 255 for infinity and NaN
        inverse_exponent = tl.minimum(2 * 127 + 14 - exponent, 253)  # exponent of 1 / unit
        inverse = (inverse_exponent << 23).to(tl.float32, bitcast=True)
        numbers = (numbers.to(tl.float32) * inverse[:, None]).to(tl.float16)
        factor = (((2 * 127 - inverse_exponent) << 23).to(tl.float32, bitcast=True) * factor)[:, None]
    slopes = factor
    if scores.slopes is not None:
        slopes = tl.load(scores.slopes + rows.head, mask=rows.real, other=0.0)[:, None] / LN_2
    return Queries(numbers, factor, slopes)


@triton.jit
@no_type_check
def keys_of_rows(first, end, position, real, c):
    """Return the `RowKeys` of a row block from the numbers [ROWS] of each row; a row attends the keys [first, end)."""
    first, end = tl.maximum(first, 0), tl.where(real, end, 0)
    attends = first < end
    low = tl.min(tl.where(attends, first, NO_KEY), 0)
    high = tl.max(tl.where(attends, end, 0), 0)
    # rows that are not real may attend every key, because their results are not stored
    whole_first = tl.cdiv(tl.max(tl.where(real, first, 0), 0), c.TILE)
    whole_end = tl.min(tl.where(real, end, NO_KEY), 0) // c.TILE
    return RowKeys(
        first[:, None], end[:, None], position[:, None], low, high, whole_first, tl.maximum(whole_end, whole_first)
    )


@triton.jit
@no_type_check
def _tile_keys(source, rows, tile, c, MASKED: tl.constexpr):
    """Return the `TileKeys` of a tile. Without MASKED, the program reads all keys, and their blocks are valid."""
    keys = tile * c.TILE + tl.arange(0, c.TILE)
    first_place = tile * c.TILE
    held = (keys >= rows.low) & (keys < rows.high)
    if c.BLOCK_SIZE == 0:
        block = tl.zeros([], tl.int64)
        first_place = source.first_token + tile * c.TILE
        place = source.first_token + keys
    elif c.BLOCK_SIZE % c.TILE == 0:  # one block holds the whole tile, so one entry of the block table suffices
        block = tl.load(source.table_row + (tile * c.TILE // c.BLOCK_SIZE) * source.table_stride)
        held = held & (block >= 0) & (block < source.num_blocks)
        first_place = tile * c.TILE % c.BLOCK_SIZE
        place = keys % c.BLOCK_SIZE
    else:
        pointers = source.table_row + (keys // c.BLOCK_SIZE) * source.table_stride
        block = tl.load(pointers, mask=held, other=-1) if MASKED else tl.load(pointers)
        held = held & (block >= 0) & (block < source.num_blocks)
        place = keys % c.BLOCK_SIZE
    return TileKeys(keys, held, block.to(tl.int64), place.to(tl.int64), first_place)


@triton.jit
@no_type_check
def _copied_tile(boxes, source, tile_keys, c):
    """Load keys or values [TILE, COLUMNS] of a tile with TMA, also of keys that the program should not read."""
    if c.BLOCK_SIZE == 0:
        box = boxes.load([tile_keys.first_place, source.kv_head, 0])
    else:  # TMA returns zeros for a block outside the cache
        box = boxes.load([tile_keys.block.to(tl.int32), tile_keys.first_place, source.kv_head, 0])
    return box.reshape(c.TILE, c.COLUMNS)


@triton.jit
@no_type_check
def _load_tile(base, boxes, source, tile_keys, block_stride, token_stride, column_stride, dtype: tl.constexpr, c,
               MASKED: tl.constexpr, VALUES: tl.constexpr):  # fmt: skip
    """Load keys or values [TILE, COLUMNS] of a tile in `dtype`; keys that are not read, and padded columns, become 0.

    Memory without a token may hold NaN, and a probability of 0 times NaN is NaN. Keys that TMA loads are not replaced,
    because their scores are masked. Values that were e4m3 have the column order of `fp8.even_groups_first`.
    """
    if c.BULK_COPY:
        numbers = _copied_tile(boxes, source, tile_keys, c)
        if MASKED and VALUES:
            numbers = tl.where(tile_keys.held[:, None], numbers, 0.0)
    else:
        numbers = _gathered_tile(base, tile_keys, block_stride, token_stride, column_stride, c, MASKED)
    if c.E4M3:
        numbers = e4m3_to(numbers, dtype, c.NATIVE)
        if VALUES:
            numbers = even_groups_first(numbers)
        if c.PINNED_VALUES if VALUES else c.PINNED_KEYS:
            numbers = pinned(numbers)
    return numbers


@triton.jit
@no_type_check
def _gathered_tile(base, tile_keys, block_stride, token_stride, column_stride, c, MASKED: tl.constexpr):
    """Load keys or values [TILE, COLUMNS] of a tile; keys that are not read, and padded columns, become 0."""
    columns = tl.arange(0, c.COLUMNS)
    rows = tile_keys.block * block_stride + tile_keys.place * token_stride
    pointers = base + rows[:, None] + (columns.to(tl.int64) * column_stride)[None, :]
    if MASKED:
        mask = tile_keys.held[:, None]
        if c.DIM != c.COLUMNS:
            mask = mask & (columns < c.DIM)[None, :]
        numbers = tl.load(pointers, mask=mask, other=0)
    elif c.DIM != c.COLUMNS:
        numbers = tl.load(pointers, mask=(columns < c.DIM)[None, :], other=0)
    else:
        numbers = tl.load(pointers)
    return numbers


@triton.jit
@no_type_check
def _tanh(x):
    """Return tanh(x), with an error of a few float32 roundings.

    For small |x| the quotient below would lose the leading digits of its numerator, so a polynomial replaces it. The
    first neglected term of the polynomial is 62/2835 * x^9.
    """
    size = tl.abs(x)
    square = x * x
    small = x + x * square * (-1 / 3 + square * (2 / 15 - square * (17 / 315)))
    decay = tl.exp(-2 * size)
    large = (1 - decay) / (1 + decay)
    return tl.where(size < SMALL_TANH, small, tl.where(x < 0, -large, large))


@triton.jit
@no_type_check
def _finish_scores(dots, queries, rows, tile_keys, scores, c):
    """Return the scores [ROWS, TILE] of dot products, divided by ln 2."""
    finished = dots * queries.factor
    if c.SOFT_CAP:
        finished = _tanh(finished) * scores.factors.cap
    if scores.slopes is not None:
        finished -= tl.abs(rows.position - tile_keys.keys[None, :]).to(tl.float32) * queries.slopes
    return finished


@triton.jit
@no_type_check
def _attend_tile(state, queries, rows, source, boxes, tile, scores, strides, c, MASKED: tl.constexpr):
    """Return the state of the rows (`RowState`) after one more tile.

    Without MASKED, every row attends every key of the tile, and the tile needs no mask.
    """
    dtype = queries.numbers.dtype
    tile_keys = _tile_keys(source, rows, tile, c, MASKED)
    keys = _load_tile(
        source.k, boxes.k, source, tile_keys, strides.k_block, strides.k_token, strides.k_column, dtype, c,
        MASKED, False,
    )  # fmt: skip
    dots = products(queries.numbers, keys, c.SUM_COLUMNS)
    if not (MASKED or c.SOFT_CAP or c.HALF) and scores.slopes is None:
        # one fused multiply-add for each score, instead of a product and a difference; factors are positive
        largest = tl.maximum(state.largest, tl.max(dots, 1) * queries.factor)
        weights = tl.exp2(dots * queries.factor - largest[:, None])
        decay = tl.exp2(state.largest - largest)
        step = SoftmaxStep(largest, decay, state.total * decay + tl.sum(weights, 1), weights.to(dtype))
    else:
        finished = _finish_scores(dots, queries, rows, tile_keys, scores, c)
        seen = tile_keys.held[None, :]
        if MASKED:
            seen = seen & (tile_keys.keys[None, :] < rows.end)
            if c.WINDOW:
                seen = seen & (tile_keys.keys[None, :] >= rows.first)
        step = softmax_step(finished, seen, state, dtype)
    values = _load_tile(
        source.v, boxes.v, source, tile_keys, strides.v_block, strides.v_token, strides.v_column, dtype, c,
        MASKED, True,
    )  # fmt: skip
    weighted = tl.dot(step.probabilities, values, acc=state.weighted * step.decay[:, None], input_precision="ieee")
    return RowState(step.largest, step.total, weighted)


@triton.jit
@no_type_check
def _blocks_are_valid(source, first, end):
    """Return whether the entries [first, end) of a row of the block table are blocks of the cache."""
    lowest, highest = tl.zeros([], tl.int32), tl.full([], -1, tl.int32)
    for start in tl.range(first, end, ENTRIES):
        entry = start + tl.arange(0, ENTRIES)
        block = tl.load(source.table_row + entry * source.table_stride, mask=entry < end, other=0)
        lowest, highest = tl.minimum(lowest, tl.min(block, 0)), tl.maximum(highest, tl.max(block, 0))
    return (lowest >= 0) & (highest < source.num_blocks)


@triton.jit
@no_type_check
def attend_tiles(queries, rows, source, boxes, first_tile, last_tile, scores, strides, c):
    """Attend the tiles [first_tile, last_tile) of a request; return the softmax state (`RowState`) of a row block.

    The tiles outside [low, high) of the rows are not read.
    """
    ROWS: tl.constexpr = c.ROWS  # `tl.zeros` accepts no field of a named tuple in its shape
    COLUMNS: tl.constexpr = c.COLUMNS
    state = RowState(
        tl.full([ROWS], float("-inf"), tl.float32),
        tl.zeros([ROWS], tl.float32),
        tl.zeros([ROWS, COLUMNS], tl.float32),
    )
    first_tile = tl.maximum(first_tile, tl.minimum(rows.low, rows.high) // c.TILE)
    last_tile = tl.minimum(last_tile, tl.cdiv(rows.high, c.TILE))
    if c.WHOLE_TILES:
        whole_end = rows.whole_end
        if c.BLOCK_SIZE > 0:  # tiles of invalid blocks need a mask
            valid = _blocks_are_valid(source, first_tile * c.TILE // c.BLOCK_SIZE, tl.cdiv(rows.high, c.BLOCK_SIZE))
            whole_end = tl.where(valid, whole_end, rows.whole_first)
        if c.WINDOW:
            for tile in tl.range(first_tile, tl.minimum(rows.whole_first, last_tile)):
                state = _attend_tile(state, queries, rows, source, boxes, tile, scores, strides, c, True)
            first_tile = tl.maximum(first_tile, rows.whole_first)
        for tile in tl.range(first_tile, tl.minimum(whole_end, last_tile)):
            state = _attend_tile(state, queries, rows, source, boxes, tile, scores, strides, c, False)
        first_tile = tl.maximum(first_tile, whole_end)
    for tile in tl.range(first_tile, last_tile):
        state = _attend_tile(state, queries, rows, source, boxes, tile, scores, strides, c, True)
    weighted = state.weighted
    if c.E4M3:
        weighted = in_order(weighted)
    return RowState(state.largest, state.total, weighted)
