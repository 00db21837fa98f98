"""Scores of one tile for 64 rows, quarter by quarter of its latent columns: loads, products, mask and reference."""

from __future__ import annotations

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma

from ...common.loads import load_columns
from ...common.own_length import TILE

ROWS = gl.constexpr(64)
MOST_GROWTH = gl.constexpr(8.0)  # binary orders of magnitude


@gluon.jit
@no_type_check
def fetch_quarter(
    tile, page, pages, latent_pages, rope_pages, buffers, full,
    PLACE: gl.constexpr, NUMBER: gl.constexpr, LATENT: gl.constexpr, ROPE: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """Load the quarter of a tile that is multiplied as number NUMBER."""
    latents, tails = buffers
    WIDTH: gl.constexpr = LATENT // 4
    BUFFERS: gl.constexpr = latents.shape[0] // 8
    QUARTER: gl.constexpr = (2 * PLACE + NUMBER) % 4
    # the rope part goes with the quarter that the other consumer releases last: it then holds what that one multiplies
    TAIL: gl.constexpr = ROPE if NUMBER == 3 else 0
    BYTES: gl.constexpr = TILE * (WIDTH + TAIL) * (latents.dtype.primitive_bitwidth // 8)
    bar = full.index(4 * PLACE + QUARTER)
    mbarrier.expect(bar, BYTES)
    load_columns(
        tile, page, pages, latent_pages, latents, (4 * PLACE + QUARTER) * BUFFERS, bar, BLOCK_SIZE, QUARTER * WIDTH,
        WIDTH,
    )  # fmt: skip
    if TAIL > 0:
        boxes = tails.index(PLACE)._reinterpret(
            tails.dtype,
            [TILE // rope_pages.block_shape[1], 1, rope_pages.block_shape[1], rope_pages.block_shape[2]],
            rope_pages.layout,
        )
        load_columns(tile, page, pages, rope_pages, boxes, 0, bar, BLOCK_SIZE, LATENT, ROPE)


@gluon.jit
@no_type_check
def score_quarter(
    scores, buffers, q_latent, q_rope, full, zero, phase, there, PLACE: gl.constexpr, NUMBER: gl.constexpr,
    LATENT: gl.constexpr, ROPE: gl.constexpr,
):  # fmt: skip
    """Multiply the quarter of a tile that comes as number NUMBER; with the last one also the rope part.

    If `there` is false, do not wait: multiply whatever the buffer holds; the product is discarded.
    """
    latents, tails = buffers
    WIDTH: gl.constexpr = LATENT // 4
    QUARTER: gl.constexpr = (2 * PLACE + NUMBER) % 4
    mbarrier.wait(full.index(4 * PLACE + QUARTER), phase, pred=there)
    queries = q_latent.index(zero).slice(QUARTER * WIDTH, WIDTH, dim=1)
    keys = quarter_of(latents, PLACE, QUARTER, zero, WIDTH)
    scores = warpgroup_mma(queries, keys.permute([1, 0]), scores, use_acc=NUMBER > 0, is_async=True)
    if NUMBER == 3 and ROPE > 0:
        layout: gl.constexpr = gl.NVMMASharedLayout(2 * ROPE, 16)
        keys = tails.index(PLACE + zero)._reinterpret(tails.dtype, [TILE, ROPE], layout)
        scores = warpgroup_mma(q_rope.index(zero), keys.permute([1, 0]), scores, is_async=True)
    return scores


@gluon.jit
@no_type_check
def quarter_of(latents, PLACE: gl.constexpr, QUARTER: gl.constexpr, zero, WIDTH: gl.constexpr):
    """A quarter of the latents of a tile in shared memory, [TILE, WIDTH]."""
    BUFFERS: gl.constexpr = latents.shape[0] // 8
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    return latents.index((4 * PLACE + QUARTER) * BUFFERS + zero)._reinterpret(latents.dtype, [TILE, WIDTH], layout)


@gluon.jit
@no_type_check
def masked(scores, tile, end, visibility, LAYOUT: gl.constexpr, BLOCK_SIZE: gl.constexpr):
    """Return scores with -inf for keys that a row must not see, or that lie in no page."""
    table_row, table_stride, unsure = visibility.table_row, visibility.table_stride, visibility.unsure
    key = tile * TILE + gl.arange(0, TILE, gl.SliceLayout(0, LAYOUT))
    if BLOCK_SIZE % TILE == 0:  # all in one page
        block = (tile * TILE // BLOCK_SIZE).to(gl.int64)
        page = gl.load(table_row + block * table_stride, mask=tile * TILE < unsure, other=0)
    else:
        page = gl.load(table_row + (key // BLOCK_SIZE).to(gl.int64) * table_stride, mask=key < unsure, other=0)
    readable = (page >= 0) & (page < visibility.num_blocks) & (key < end * TILE)
    return gl.where(readable[None, :] & (key[None, :] < visibility.visible[:, None]), scores, float("-inf"))


@gluon.jit
@no_type_check
def reference_of(before, largest, scale_log2):
    """Return what a row's scores are relative to: as before, unless the largest would pass it by a factor over 2^8.

    Weights up to 2^8 lose nothing in the sums, and most tiles then rescale no row.
    """
    return gl.where((largest - before) * scale_log2 > MOST_GROWTH, largest, before)
