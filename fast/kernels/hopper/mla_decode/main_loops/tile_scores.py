"""Scores of one tile of 64 keys for 64 rows: loads, products, mask and reference scores.

A row is one (query token, head) pair. The reference score of a row is the number that is subtracted from the scores of
the row before exp2. A probability is exp2(score - reference score). It is not normalised, so it can be larger than 1.

Tiles are processed in pairs: the two tiles of a pair have TILE_INDEX 0 and 1. A tile is loaded and multiplied in four
quarters of its latent columns, in the order 0, 1, 2, 3 for tile 0, and 2, 3, 0, 1 for tile 1. NUMBER is the position of
a quarter in this order. The rope part of the tile is loaded and multiplied together with NUMBER 3.
"""

from __future__ import annotations

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma

from ...common.loads import load_columns
from ...common.own_length import TILE

ROWS = gl.constexpr(64)
MOST_GROWTH = gl.constexpr(8.0)  # a reference score grows if a probability would exceed 2^8: see `reference_of`


@gluon.jit
@no_type_check
def load_quarter(
    tile, cache_block, blocks, latent_tma, rope_tma, buffers, full,
    TILE_INDEX: gl.constexpr, NUMBER: gl.constexpr, LATENT: gl.constexpr, ROPE: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """Set the number of bytes that the barrier of quarter NUMBER expects, and issue the TMA loads of this quarter."""
    latents, rope_tiles = buffers
    WIDTH: gl.constexpr = LATENT // 4
    BUFFERS: gl.constexpr = latents.shape[0] // 8
    QUARTER: gl.constexpr = (2 * TILE_INDEX + NUMBER) % 4
    # In `tile_pairs`, one consumer computes the probabilities of this tile and writes them to the buffer of the rope
    # part, and the other consumer multiplies them by values. The other consumer releases quarter NUMBER 3 after this
    # product, so the buffer is free when NUMBER 3 is loaded again.
    ROPE_COLUMNS: gl.constexpr = ROPE if NUMBER == 3 else 0
    BYTES: gl.constexpr = TILE * (WIDTH + ROPE_COLUMNS) * (latents.dtype.primitive_bitwidth // 8)
    bar = full.index(4 * TILE_INDEX + QUARTER)
    mbarrier.expect(bar, BYTES)
    load_columns(
        tile, cache_block, blocks, latent_tma, latents, (4 * TILE_INDEX + QUARTER) * BUFFERS, bar, BLOCK_SIZE,
        QUARTER * WIDTH, WIDTH,
    )  # fmt: skip
    if ROPE_COLUMNS > 0:
        boxes = rope_tiles.index(TILE_INDEX)._reinterpret(
            rope_tiles.dtype,
            [TILE // rope_tma.block_shape[1], 1, rope_tma.block_shape[1], rope_tma.block_shape[2]],
            rope_tma.layout,
        )
        load_columns(tile, cache_block, blocks, rope_tma, boxes, 0, bar, BLOCK_SIZE, LATENT, ROPE)


@gluon.jit
@no_type_check
def score_quarter(
    scores, buffers, q_latent, q_rope, full, zero, phase, expected, TILE_INDEX: gl.constexpr, NUMBER: gl.constexpr,
    LATENT: gl.constexpr, ROPE: gl.constexpr,
):  # fmt: skip
    """Add the products of quarter NUMBER of a tile to the scores; NUMBER 3 also adds the products of the rope part.

    If `expected` is false, the quarter is not loaded, and this function does not wait. It multiplies whatever the
    buffer holds, and the caller discards the product.
    """
    latents, rope_tiles = buffers
    WIDTH: gl.constexpr = LATENT // 4
    QUARTER: gl.constexpr = (2 * TILE_INDEX + NUMBER) % 4
    mbarrier.wait(full.index(4 * TILE_INDEX + QUARTER), phase, pred=expected)
    queries = q_latent.index(zero).slice(QUARTER * WIDTH, WIDTH, dim=1)
    keys = quarter_of(latents, TILE_INDEX, QUARTER, zero, WIDTH)
    scores = warpgroup_mma(queries, keys.permute([1, 0]), scores, use_acc=NUMBER > 0, is_async=True)
    if NUMBER == 3 and ROPE > 0:
        layout: gl.constexpr = gl.NVMMASharedLayout(2 * ROPE, 16)
        keys = rope_tiles.index(TILE_INDEX + zero)._reinterpret(rope_tiles.dtype, [TILE, ROPE], layout)
        scores = warpgroup_mma(q_rope.index(zero), keys.permute([1, 0]), scores, is_async=True)
    return scores


@gluon.jit
@no_type_check
def quarter_of(latents, TILE_INDEX: gl.constexpr, QUARTER: gl.constexpr, zero, WIDTH: gl.constexpr):
    """Return the shared memory [TILE, WIDTH] of quarter QUARTER of the latents of a tile."""
    BUFFERS: gl.constexpr = latents.shape[0] // 8
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    return latents.index((4 * TILE_INDEX + QUARTER) * BUFFERS + zero)._reinterpret(latents.dtype, [TILE, WIDTH], layout)


@gluon.jit
@no_type_check
def masked(scores, tile, end, visibility, LAYOUT: gl.constexpr, BLOCK_SIZE: gl.constexpr):
    """Replace scores by -inf for keys that a row must not see, and for keys whose block number is invalid."""
    table_row, table_stride, checked_keys = visibility.table_row, visibility.table_stride, visibility.checked_keys
    key = tile * TILE + gl.arange(0, TILE, gl.SliceLayout(0, LAYOUT))
    if BLOCK_SIZE % TILE == 0:  # all keys of the tile are in one cache block
        entry = (tile * TILE // BLOCK_SIZE).to(gl.int64)
        cache_block = gl.load(table_row + entry * table_stride, mask=tile * TILE < checked_keys, other=0)
    else:
        cache_block = gl.load(
            table_row + (key // BLOCK_SIZE).to(gl.int64) * table_stride, mask=key < checked_keys, other=0
        )
    readable = (cache_block >= 0) & (cache_block < visibility.num_blocks) & (key < end * TILE)
    return gl.where(readable[None, :] & (key[None, :] < visibility.visible[:, None]), scores, float("-inf"))


@gluon.jit
@no_type_check
def reference_of(before, largest, scale_log2):
    """Return the reference score of each row after a tile.

    `before` has the reference scores before the tile, and `largest` has the largest scores of the tile. A row keeps its
    reference score, unless the probability of the largest score would exceed 2^8. In this case the largest score
    becomes the reference score, and all sums of the row must be rescaled. With this rule, most tiles need no rescaling.
    Probabilities up to 2^8 cost no accuracy in the float32 sums.
    """
    return gl.where((largest - before) * scale_log2 > MOST_GROWTH, largest, before)
