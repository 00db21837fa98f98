"""What every decode kernel does with its rows: load their queries, and take tiles of keys into a running softmax.

A program holds the query rows of one request, or 64 of them (a row is one head of one query token). One loaded tile
serves as key and, without its rope part, as value.
"""

from __future__ import annotations

import math
from typing import no_type_check

import triton
import triton.language as tl

LN_2 = tl.constexpr(math.log(2))


@triton.jit
@no_type_check  # the interpreter needs the source and globals of the kernels themselves
def _softmax_step(scores, seen, largest, total, dtype: tl.constexpr):
    """Running maximum, what older values shrink by, running sum, and the probabilities [ROWS, TILE] in a dtype."""
    scores = tl.where(seen, scores, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(scores, 1))
    shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)  # nothing seen yet: exp2(-inf - 0) = 0
    weights = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(largest - shift)
    return new_largest, decay, total * decay + tl.sum(weights, 1), weights.to(dtype)


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
def _attend_tile(
    largest, total, values, q_latent, q_rope, visible, key_end, tile, table_row, table_stride, num_blocks,
    kv_cache, latent_pages, rope_pages, block_stride, entry_stride, element_stride, scale_log2,
    LATENT: tl.constexpr, ROPE: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    LATENT_PAD: tl.constexpr, ROPE_PAD: tl.constexpr, PIECE_COLUMNS: tl.constexpr, PAGED_COPY: tl.constexpr,
    PARTIAL: tl.constexpr,
):  # fmt: skip
    """Take one tile of keys into the running softmax; a PARTIAL tile has keys that some row, or all, must not see."""
    ONE_WARPGROUP_ROWS: tl.constexpr = q_latent.shape[0] == 64
    keys = tile * TILE + tl.arange(0, TILE)
    if BLOCK_SIZE % TILE == 0:  # one page holds the tile, and its first key is there
        page = tl.load(table_row + (tile * TILE // BLOCK_SIZE) * table_stride)
    else:
        page = tl.load(table_row + (keys // BLOCK_SIZE) * table_stride, mask=keys < key_end, other=-1)
    held = (keys < key_end) & (page >= 0) & (page < num_blocks)
    if PAGED_COPY:  # the copy engine fills what lies outside the cache with 0
        first = (tile * TILE) % BLOCK_SIZE
        latent = latent_pages.load([page, first, 0]).reshape(TILE, LATENT)
        if PARTIAL:  # unowned bytes may be NaN, and 0 * NaN is NaN
            latent = tl.where(held[:, None], latent, 0.0)
    else:
        # [TILE] 64-bit offsets; unowned bytes are never loaded
        entries = page.to(tl.int64) * block_stride + (keys % BLOCK_SIZE).to(tl.int64) * entry_stride
        columns = tl.arange(0, LATENT_PAD)
        where = kv_cache + entries[:, None] + columns[None, :].to(tl.int64) * element_stride
        if LATENT == LATENT_PAD:
            latent = tl.load(where, mask=held[:, None], other=0.0)
        else:
            latent = tl.load(where, mask=held[:, None] & (columns < LATENT)[None, :], other=0.0)

    scores = _products(q_latent, latent, PIECE_COLUMNS)
    if ROPE > 0:
        if PAGED_COPY:  # among keys NaN does no harm: their scores are masked
            rope = rope_pages.load([page, first, LATENT]).reshape(TILE, ROPE)
        else:
            rope_columns = tl.arange(0, ROPE_PAD)
            where = kv_cache + entries[:, None] + (LATENT + rope_columns)[None, :].to(tl.int64) * element_stride
            if ROPE == ROPE_PAD:
                rope = tl.load(where, mask=held[:, None], other=0.0)
            else:
                rope = tl.load(where, mask=held[:, None] & (rope_columns < ROPE)[None, :], other=0.0)
        if ONE_WARPGROUP_ROWS:
            scores = scores * scale_log2 + _products(q_rope, rope, PIECE_COLUMNS) * scale_log2
        elif PIECE_COLUMNS > 0:
            scores = (scores + _products(q_rope, rope, PIECE_COLUMNS)) * scale_log2
        else:
            scores = tl.dot(q_rope, tl.trans(rope), acc=scores, input_precision="ieee") * scale_log2
    else:
        scores *= scale_log2

    seen = held[None, :]
    if PARTIAL:
        seen = seen & (keys[None, :] < visible[:, None])
    if ONE_WARPGROUP_ROWS:
        # Where one product feeds another, the compiler gives all warps to rows; two warpgroups on 64 rows then compute
        # the same scores twice. It does not see one feed the other through a branch. This one is always taken.
        new_largest, decay, new_total = largest, largest, total
        probabilities = tl.zeros(scores.shape, latent.dtype)
        if tile >= 0:
            new_largest, decay, new_total, probabilities = _softmax_step(scores, seen, largest, total, latent.dtype)
    else:
        new_largest, decay, new_total, probabilities = _softmax_step(scores, seen, largest, total, latent.dtype)
    values = values * decay[:, None]
    values = tl.dot(probabilities, latent, acc=values, input_precision="ieee")
    return new_largest, new_total, values


@triton.jit
@no_type_check
def load_queries(
    ql_nope, q_pe, token, head, real, latent_token_stride, latent_head_stride, latent_element_stride,
    rope_token_stride, rope_head_stride, rope_element_stride,
    LATENT: tl.constexpr, ROPE: tl.constexpr, LATENT_PAD: tl.constexpr, ROPE_PAD: tl.constexpr,
):  # fmt: skip
    """Both parts of the queries of ROWS rows; the second is the first again where there is no rope part."""
    columns = tl.arange(0, LATENT_PAD)
    offsets = token.to(tl.int64) * latent_token_stride + head.to(tl.int64) * latent_head_stride
    q_latent = tl.load(
        ql_nope + offsets[:, None] + (columns.to(tl.int64) * latent_element_stride)[None, :],
        mask=real[:, None] & (columns < LATENT)[None, :],
        other=0.0,
    )
    q_rope = q_latent
    if ROPE > 0:
        rope_columns = tl.arange(0, ROPE_PAD)
        offsets = token.to(tl.int64) * rope_token_stride + head.to(tl.int64) * rope_head_stride
        q_rope = tl.load(
            q_pe + offsets[:, None] + (rope_columns.to(tl.int64) * rope_element_stride)[None, :],
            mask=real[:, None] & (rope_columns < ROPE)[None, :],
            other=0.0,
        )
    return q_latent, q_rope


@triton.jit
@no_type_check
def attend_tiles(
    q_latent, q_rope, visible, key_end, full_tiles, first_tile, last_tile, table_row, table_stride, num_blocks,
    kv_cache, latent_pages, rope_pages, block_stride, entry_stride, element_stride, scale_log2,
    LATENT: tl.constexpr, ROPE: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    LATENT_PAD: tl.constexpr, ROPE_PAD: tl.constexpr, PIECE_COLUMNS: tl.constexpr, PAGED_COPY: tl.constexpr,
):  # fmt: skip
    """The softmax of ROWS rows over the tiles [first_tile, last_tile): maximum in base 2, sum, and sum of values."""
    ROWS: tl.constexpr = q_latent.shape[0]
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    values = tl.zeros([ROWS, LATENT_PAD], tl.float32)
    for tile in tl.range(first_tile, tl.minimum(full_tiles, last_tile)):
        largest, total, values = _attend_tile(
            largest, total, values, q_latent, q_rope, visible, key_end, tile, table_row, table_stride, num_blocks,
            kv_cache, latent_pages, rope_pages, block_stride, entry_stride, element_stride, scale_log2,
            LATENT, ROPE, BLOCK_SIZE, TILE, LATENT_PAD, ROPE_PAD, PIECE_COLUMNS, PAGED_COPY, False,
        )  # fmt: skip
    for tile in tl.range(tl.maximum(full_tiles, first_tile), last_tile, num_stages=1):
        largest, total, values = _attend_tile(
            largest, total, values, q_latent, q_rope, visible, key_end, tile, table_row, table_stride, num_blocks,
            kv_cache, latent_pages, rope_pages, block_stride, entry_stride, element_stride, scale_log2,
            LATENT, ROPE, BLOCK_SIZE, TILE, LATENT_PAD, ROPE_PAD, PIECE_COLUMNS, PAGED_COPY, True,
        )  # fmt: skip
    return largest, total, values
