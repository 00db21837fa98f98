"""What every decode kernel does with its rows: load their queries, and take tiles of keys into a running softmax.

A program holds the query rows of one request, or 64 of them (a row is one head of one query token). One loaded tile
serves as key and, without its rope part, as value.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, no_type_check

import triton
import triton.language as tl

from ..combine.kernels import RowState

LN_2 = tl.constexpr(math.log(2))


class Constants(NamedTuple):
    """What a kernel is compiled for; kernels take the record as one `constexpr`.

    The fields of the other records here are values of a kernel, which no type of Python describes.

    Attributes:
        LATENT: Lkv.
        ROPE: R.
        BLOCK_SIZE: tokens a page.
        TILE: keys of a tile.
        LATENT_PAD: power of two, at least Lkv.
        ROPE_PAD: power of two, at least R.
        PIECE_COLUMNS: columns of each partial sum of a float32 product (`_products`); 0 for other products.
        PAGED_COPY: the copy engine loads tiles.
    """

    LATENT: Any
    ROPE: Any
    BLOCK_SIZE: Any
    TILE: Any
    LATENT_PAD: Any
    ROPE_PAD: Any
    PIECE_COLUMNS: Any
    PAGED_COPY: Any


class Queries(NamedTuple):
    """Both parts of the queries in memory, and their strides in elements."""

    ql_nope: Any
    q_pe: Any
    latent_token_stride: Any
    latent_head_stride: Any
    latent_element_stride: Any
    rope_token_stride: Any
    rope_head_stride: Any
    rope_element_stride: Any


class RowQueries(NamedTuple):
    """Queries of ROWS rows: latent part and rope part. Without a rope part, `rope` is the latent part again."""

    latent: Any
    rope: Any


class Cache(NamedTuple):
    """The paged cache.

    Attributes:
        entries: pointer to all entries.
        latent_pages: descriptor by which the copy engine loads latent parts, or None.
        rope_pages: descriptor by which the copy engine loads rope parts, or None.
        num_blocks: number of pages.
        block_stride: elements from one page to the next.
        entry_stride: elements from one entry of a page to the next.
        element_stride: elements from one element of an entry to the next.
    """

    entries: Any
    latent_pages: Any
    rope_pages: Any
    num_blocks: Any
    block_stride: Any
    entry_stride: Any
    element_stride: Any


class RowKeys(NamedTuple):
    """Keys of a request that ROWS rows see.

    Attributes:
        visible: number of keys that each row sees.
        end: index behind the last key that any row sees.
        full_tiles: number of tiles that every row sees whole.
        table_row: pointer to the request's row of the block table.
        table_stride: elements from one entry of that row to the next.
    """

    visible: Any
    end: Any
    full_tiles: Any
    table_row: Any
    table_stride: Any


class SoftmaxStep(NamedTuple):
    """The running softmax after a tile: largest score, factor of older values, sum, and the tile's probabilities."""

    largest: Any
    decay: Any
    total: Any
    probabilities: Any


@triton.jit
@no_type_check  # the interpreter needs the source and globals of the kernels themselves
def _softmax_step(scores, seen, state, dtype: tl.constexpr):
    """Return the running softmax after a tile, with the probabilities [ROWS, TILE] in a dtype."""
    scores = tl.where(seen, scores, float("-inf"))
    largest = tl.maximum(state.largest, tl.max(scores, 1))
    shift = tl.where(largest == float("-inf"), 0.0, largest)  # nothing seen yet: exp2(-inf - 0) = 0
    weights = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(state.largest - shift)
    return SoftmaxStep(largest, decay, state.total * decay + tl.sum(weights, 1), weights.to(dtype))


@triton.jit
@no_type_check
def _products(q, k, PIECE_COLUMNS: tl.constexpr):
    """Scores [ROWS, TILE] of q [ROWS, D] and k [TILE, D]; with PIECE_COLUMNS as a sum of sums over so many columns.

    One sum over all columns rounds by their number, as no float32 library does it.
    """
    if PIECE_COLUMNS == 0:
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    else:
        PIECES: tl.constexpr = q.shape[1] // PIECE_COLUMNS
        q_pieces = tl.permute(q.reshape(q.shape[0], PIECES, PIECE_COLUMNS), (1, 0, 2))
        k_pieces = tl.permute(k.reshape(k.shape[0], PIECES, PIECE_COLUMNS), (1, 2, 0))
        scores = tl.sum(tl.dot(q_pieces, k_pieces, input_precision="ieee"), 0)
    return scores


@triton.jit
@no_type_check
def _attend_tile(state, queries, row_keys, tile, cache, scale_log2, c, PARTIAL: tl.constexpr):
    """Return the state of rows after one more tile; a PARTIAL tile has keys that some row, or all, must not see."""
    ONE_WARPGROUP_ROWS: tl.constexpr = queries.latent.shape[0] == 64
    keys = tile * c.TILE + tl.arange(0, c.TILE)
    if c.BLOCK_SIZE % c.TILE == 0:  # one page holds the tile, and its first key is there
        page = tl.load(row_keys.table_row + (tile * c.TILE // c.BLOCK_SIZE) * row_keys.table_stride)
    else:
        page = tl.load(
            row_keys.table_row + (keys // c.BLOCK_SIZE) * row_keys.table_stride, mask=keys < row_keys.end, other=-1
        )
    held = (keys < row_keys.end) & (page >= 0) & (page < cache.num_blocks)
    if c.PAGED_COPY:  # the copy engine fills what lies outside the cache with 0
        first = (tile * c.TILE) % c.BLOCK_SIZE
        latent = cache.latent_pages.load([page, first, 0]).reshape(c.TILE, c.LATENT)
        if PARTIAL:  # unowned bytes may be NaN, and 0 * NaN is NaN
            latent = tl.where(held[:, None], latent, 0.0)
    else:
        # [TILE] 64-bit offsets; unowned bytes are never loaded
        entries = page.to(tl.int64) * cache.block_stride + (keys % c.BLOCK_SIZE).to(tl.int64) * cache.entry_stride
        columns = tl.arange(0, c.LATENT_PAD)
        place = cache.entries + entries[:, None] + columns[None, :].to(tl.int64) * cache.element_stride
        if c.LATENT == c.LATENT_PAD:
            latent = tl.load(place, mask=held[:, None], other=0.0)
        else:
            latent = tl.load(place, mask=held[:, None] & (columns < c.LATENT)[None, :], other=0.0)

    scores = _products(queries.latent, latent, c.PIECE_COLUMNS)
    if c.ROPE > 0:
        if c.PAGED_COPY:  # among keys NaN does no harm: their scores are masked
            rope = cache.rope_pages.load([page, first, c.LATENT]).reshape(c.TILE, c.ROPE)
        else:
            columns = tl.arange(0, c.ROPE_PAD)
            rows = cache.entries + entries[:, None]
            place = rows + (c.LATENT + columns)[None, :].to(tl.int64) * cache.element_stride
            if c.ROPE == c.ROPE_PAD:
                rope = tl.load(place, mask=held[:, None], other=0.0)
            else:
                rope = tl.load(place, mask=held[:, None] & (columns < c.ROPE)[None, :], other=0.0)
        if ONE_WARPGROUP_ROWS:
            scores = scores * scale_log2 + _products(queries.rope, rope, c.PIECE_COLUMNS) * scale_log2
        elif c.PIECE_COLUMNS > 0:
            scores = (scores + _products(queries.rope, rope, c.PIECE_COLUMNS)) * scale_log2
        else:
            scores = tl.dot(queries.rope, tl.trans(rope), acc=scores, input_precision="ieee") * scale_log2
    else:
        scores *= scale_log2

    seen = held[None, :]
    if PARTIAL:
        seen = seen & (keys[None, :] < row_keys.visible[:, None])
    if ONE_WARPGROUP_ROWS:
        # Where one product feeds another, the compiler gives all warps to rows; two warpgroups on 64 rows then compute
        # the same scores twice. It does not see one feed the other through a branch. This one is always taken.
        step = SoftmaxStep(state.largest, state.largest, state.total, tl.zeros(scores.shape, latent.dtype))
        if tile >= 0:
            step = _softmax_step(scores, seen, state, latent.dtype)
    else:
        step = _softmax_step(scores, seen, state, latent.dtype)
    weighted = state.weighted * step.decay[:, None]
    weighted = tl.dot(step.probabilities, latent, acc=weighted, input_precision="ieee")
    return RowState(step.largest, step.total, weighted)


@triton.jit
@no_type_check
def load_queries(
    queries, token, head, real,
    LATENT: tl.constexpr, ROPE: tl.constexpr, LATENT_PAD: tl.constexpr, ROPE_PAD: tl.constexpr,
):  # fmt: skip
    """Load the queries of ROWS rows, zeros for padding rows."""
    columns = tl.arange(0, LATENT_PAD)
    offsets = token.to(tl.int64) * queries.latent_token_stride + head.to(tl.int64) * queries.latent_head_stride
    latent = tl.load(
        queries.ql_nope + offsets[:, None] + (columns.to(tl.int64) * queries.latent_element_stride)[None, :],
        mask=real[:, None] & (columns < LATENT)[None, :],
        other=0.0,
    )
    rope = latent
    if ROPE > 0:
        columns = tl.arange(0, ROPE_PAD)
        offsets = token.to(tl.int64) * queries.rope_token_stride + head.to(tl.int64) * queries.rope_head_stride
        rope = tl.load(
            queries.q_pe + offsets[:, None] + (columns.to(tl.int64) * queries.rope_element_stride)[None, :],
            mask=real[:, None] & (columns < ROPE)[None, :],
            other=0.0,
        )
    return RowQueries(latent, rope)


@triton.jit
@no_type_check
def attend_tiles(queries, row_keys, first_tile, last_tile, cache, scale_log2, c):
    """Return the state (`RowState`) of ROWS rows over the tiles [first_tile, last_tile).

    Args:
        queries: queries of the rows (`load_queries`).
        row_keys: keys that the rows see.
        first_tile: first tile to attend.
        last_tile: index behind the last tile to attend.
        cache: the paged cache.
        scale_log2: multiplies the scores, in base 2.
        c: what the kernel is compiled for.
    """
    ROWS: tl.constexpr = queries.latent.shape[0]
    LATENT_PAD: tl.constexpr = c.LATENT_PAD  # `tl.zeros` takes no field of a record in its shape
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    state = RowState(largest, total, tl.zeros([ROWS, LATENT_PAD], tl.float32))
    for tile in tl.range(first_tile, tl.minimum(row_keys.full_tiles, last_tile)):
        state = _attend_tile(state, queries, row_keys, tile, cache, scale_log2, c, False)
    for tile in tl.range(tl.maximum(row_keys.full_tiles, first_tile), last_tile, num_stages=1):
        state = _attend_tile(state, queries, row_keys, tile, cache, scale_log2, c, True)
    return state
