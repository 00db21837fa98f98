"""The mask of the scores [keys, rows] of one tile of 64 keys, for the kernels with transposed products.

A row is one (query token, head) pair.
"""

from __future__ import annotations

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...common.own_length import TILE


@gluon.jit
@no_type_check
def masked_keys(scores, tile, end, visibility, BLOCK_SIZE: gl.constexpr):
    """Replace scores by -inf for keys that a row must not see, and for keys whose block number is invalid.

    Args:
        scores: [keys, rows].
        tile: index of the tile.
        end: end of the work item's tiles, exclusive; keys behind these tiles are masked.
        visibility: `Visibility`.
        BLOCK_SIZE: tokens of a cache block.
    """
    key = tile * TILE + gl.arange(0, TILE, gl.SliceLayout(1, scores.type.layout))
    cache_block = gl.load(
        visibility.table_row + (key // BLOCK_SIZE).to(gl.int64) * visibility.table_stride,
        mask=key < visibility.checked_keys,
        other=0,
    )
    readable = (cache_block >= 0) & (cache_block < visibility.num_blocks) & (key < end * TILE)
    seen = readable[:, None] & (key[:, None] < visibility.visible[None, :])
    return gl.where(seen, scores, float("-inf"))
