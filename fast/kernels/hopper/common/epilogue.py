"""What the epilogues of all main loops share: the softmax of rows in base 2, and where partial outputs lie."""

from __future__ import annotations

import math
from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...combine.kernels import REFERENCE_GROWTH
from .loads import rows_at
from .records import CombineWeights, PartialRows

LN_2 = gl.constexpr(math.log(2))
STAYS = gl.constexpr("evict_last")  # stays in the L2 while the cache streams by, for it is read again soon
LEAST = gl.constexpr(-3.4028234663852886e38)  # before any score: finite, so that no infinity is subtracted from another


@gluon.jit
@no_type_check
def shift_of(largest, scale_log2):
    """Return what is subtracted from scaled scores; 0 where no key was seen, for LEAST may scale to an infinity."""
    return gl.where(largest == LEAST, 0.0, largest * scale_log2)


@gluon.jit
@no_type_check
def in_base_two(state, scale_log2):
    """Return the largest scores of a state in base 2, -inf where no key was seen."""
    return gl.where(state.total == 0, float("-inf"), state.largest * scale_log2)


@gluon.jit
@no_type_check
def kept_in_memory(ctx, LATENT: gl.constexpr):
    """Return where programs keep values between splits: behind all partial outputs."""
    return ctx.results.partial_out + ctx.plan.num_partials.to(gl.int64) * ctx.sizes.request_rows * LATENT


@gluon.jit
@no_type_check
def partial_rows(partial, block, ROWS: gl.constexpr, LAYOUT: gl.constexpr, OF_REQUEST: gl.constexpr):
    """Return where the rows of a partial output lie; a partial index has the rows of a request, or all rows."""
    rows = rows_at(block, ROWS, LAYOUT)
    if OF_REQUEST:
        row, index_rows = rows.number, block.request_rows
    else:
        row, index_rows = rows.token * block.num_heads + rows.head, block.num_tokens * block.num_heads
    return PartialRows(partial.to(gl.int64) * index_rows + row, index_rows, rows.real)


@gluon.jit
@no_type_check
def combine_weights(before, largest):
    """Return the new reference of two states, one after the other, and the weight of either.

    Step for step as `add_partial` of `fast.kernels.combine`: the bits are the same whichever of both combines.
    """
    grown = largest > before + REFERENCE_GROWTH
    reference = gl.where(grown, largest, before)
    old = gl.where(grown, gl.exp2(before - gl.where(grown, largest, 0.0)), 1.0)
    new = gl.where(grown, 1.0, gl.exp2(largest - gl.where(before == float("-inf"), 0.0, before)))
    return CombineWeights(reference, old, new)
