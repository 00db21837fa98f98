"""Shared epilogue of all main loops and of phase 2: write the LSE, the output, or a partial output of rows."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...combine.kernels import REFERENCE_GROWTH
from .loads import rows_at
from .records import CombineWeights, PartialRows

LN_2 = gl.constexpr(math.log(2))
NORMAL = gl.constexpr("")  # eviction policy of outputs
STAYS = gl.constexpr("evict_last")  # stays in the L2 while the cache streams by, for it is read again soon
LEAST = gl.constexpr(-3.4028234663852886e38)  # before any score: finite, so that no infinity is subtracted from another


class StoredColumns(NamedTuple):
    """Where some columns of rows lie in memory: base pointer, offsets of rows and of columns, and which rows are real.

    `rows`, `columns` and `real` broadcast to the shape of the values.
    """

    base: Any
    rows: Any
    columns: Any
    real: Any


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
def divisor_of(state):
    """Return the divisor of each row's weighted sum; 1 for a row that saw no key, whose output is then 0."""
    return gl.where(state.total == 0, 1.0, state.total)


@gluon.jit
@no_type_check
def lse_in_base_two(state, divisor, scale_log2):
    """Return the LSE of rows in base 2; `write_lse` replaces the LSE of a row that saw no key by -inf."""
    return state.largest * scale_log2 + gl.log2(divisor)


@gluon.jit
@no_type_check
def write_lse(log, state, rows, written, block, results):
    """Write the natural LSE of the `written` rows, given as `log` in base 2; -inf for a row that saw no key."""
    log = gl.where(state.total == 0, float("-inf"), log)
    gl.store(results.lse + rows.head.to(gl.int64) * block.num_tokens + rows.token, log * LN_2, mask=written)


@gluon.jit
@no_type_check
def out_columns(values, first_column, rows, block, results, LATENT: gl.constexpr, ROW_AXIS: gl.constexpr):
    """Return where the output of rows has the columns of `values`, along whose axis ROW_AXIS the rows lie."""
    columns = _columns_of(values, first_column, ROW_AXIS)
    offsets = gl.expand_dims((rows.token.to(gl.int64) * block.num_heads + rows.head) * LATENT, 1 - ROW_AXIS)
    return StoredColumns(results.out, offsets, columns, gl.expand_dims(rows.real, 1 - ROW_AXIS))


@gluon.jit
@no_type_check
def partial_out_columns(values, first_column, rows, results, LATENT: gl.constexpr, ROW_AXIS: gl.constexpr):
    """Return where the partial output of rows (`partial_rows`) has the columns of `values`, as `out_columns` does."""
    columns = _columns_of(values, first_column, ROW_AXIS)
    offsets = gl.expand_dims(rows.place * LATENT, 1 - ROW_AXIS)
    return StoredColumns(results.partial_out, offsets, columns, gl.expand_dims(rows.real, 1 - ROW_AXIS))


@gluon.jit
@no_type_check
def _columns_of(values, first_column, ROW_AXIS: gl.constexpr):
    """Return the columns that `values` have, from `first_column` on."""
    LAYOUT: gl.constexpr = gl.SliceLayout(ROW_AXIS, values.type.layout)
    return gl.expand_dims(first_column + gl.arange(0, values.shape[1 - ROW_AXIS], LAYOUT), ROW_AXIS)


@gluon.jit
@no_type_check
def store_columns(values, stored, SHIFT: gl.constexpr, EVICTION_POLICY: gl.constexpr):
    """Store the values of the real rows, SHIFT columns behind the columns that `stored` names."""
    place = stored.base + stored.rows + stored.columns + SHIFT
    gl.store(place, values.to(stored.base.dtype.element_ty), mask=stored.real, eviction_policy=EVICTION_POLICY)


@gluon.jit
@no_type_check
def write_partial_largest(state, scale_log2, rows, written, results):
    """Write the largest scores, in base 2, of the `written` rows of a partial output."""
    gl.store(results.partial_lse + rows.place, in_base_two(state, scale_log2), mask=written)


@gluon.jit
@no_type_check
def write_partial_total(state, rows, written, plan, results):
    """Write the sums of weights of the `written` rows of a partial output; they lie behind all largest scores."""
    totals = results.partial_lse + plan.num_partials.to(gl.int64) * rows.index_rows
    gl.store(totals + rows.place, state.total, mask=written)


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
