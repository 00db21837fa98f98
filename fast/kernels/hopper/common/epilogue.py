"""Epilogue functions of all Hopper decode kernels: they write outputs and LSEs, or partial outputs and partial LSEs.

A row is one (query token, head) pair. Its state is a `RowState`: the reference score `largest`, the sum of
probabilities `total`, and the weighted sum of the values. The reference score is about the largest score of the row; it
is subtracted from the scores of the row before exp2. A probability is exp2(score - reference score), not normalised. In
a state "in base 2", the reference scores have already been multiplied by the softmax scale and divided by ln 2.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...combine.states import REFERENCE_GROWTH
from .loads import rows_at
from .records import CombineWeights, PartialRows

LN_2 = gl.constexpr(math.log(2))
NORMAL = gl.constexpr("")  # eviction policy of outputs: the default
STAYS = gl.constexpr("evict_last")  # eviction policy of partial outputs: kept in the L2, because they are read soon
LEAST = gl.constexpr(-3.4028234663852886e38)  # initial reference score; finite, because inf - inf would be NaN


class StoredColumns(NamedTuple):
    """Place in global memory of a block of values, with some rows and some columns.

    Attributes:
        base: pointer to the first element of the whole tensor.
        rows: offset of each row, in elements; broadcasts to the shape of the values.
        columns: offset of each column, in elements; broadcasts to the shape of the values.
        real: False for rows behind the last row of the request, which are not stored; broadcasts to the shape of the
            values.
    """

    base: Any
    rows: Any
    columns: Any
    real: Any


@gluon.jit
@no_type_check
def shift_of(largest, scale_log2):
    """Return the number to subtract from the scaled scores of each row: the scaled reference score.

    For a row that saw no key the function returns 0, because `LEAST * scale_log2` may be infinite.
    """
    return gl.where(largest == LEAST, 0.0, largest * scale_log2)


@gluon.jit
@no_type_check
def in_base_two(state, scale_log2):
    """Return the reference scores of a state, converted to base 2; -inf for a row that saw no key."""
    return gl.where(state.total == 0, float("-inf"), state.largest * scale_log2)


@gluon.jit
@no_type_check
def divisor_of(state):
    """Return the divisor of the weighted sum of each row; 1 for a row that saw no key, so that its output is 0."""
    return gl.where(state.total == 0, 1.0, state.total)


@gluon.jit
@no_type_check
def lse_in_base_two(state, divisor, scale_log2):
    """Return the LSE of each row in base 2; for a row that saw no key, `write_lse` writes -inf instead."""
    return state.largest * scale_log2 + gl.log2(divisor)


@gluon.jit
@no_type_check
def write_lse(log, state, rows, written, block, outputs):
    """Write the LSE of rows as a natural logarithm, and -inf for a row that saw no key.

    Args:
        log: LSE in base 2 (`lse_in_base_two`).
        state: state of the rows.
        rows: `Rows`.
        written: mask of the rows to write.
        block: `RowBlock`.
        outputs: `Outputs`.
    """
    log = gl.where(state.total == 0, float("-inf"), log)
    gl.store(outputs.lse + rows.head.to(gl.int64) * block.num_tokens + rows.token, log * LN_2, mask=written)


@gluon.jit
@no_type_check
def out_columns(values, first_column, rows, block, outputs, LATENT: gl.constexpr, ROW_AXIS: gl.constexpr):
    """Return the `StoredColumns` at which `values` are stored in the output.

    Args:
        values: tensor to store; only its shape and layout are used.
        first_column: index, among the latent columns, of the first column of `values`.
        rows: `Rows`, in the layout of `values` without the column axis.
        block: `RowBlock`.
        outputs: `Outputs`.
        LATENT: Lkv.
        ROW_AXIS: axis of `values` that counts rows: 0 or 1.
    """
    columns = _columns_of(values, first_column, ROW_AXIS)
    offsets = gl.expand_dims((rows.token.to(gl.int64) * block.num_heads + rows.head) * LATENT, 1 - ROW_AXIS)
    return StoredColumns(outputs.out, offsets, columns, gl.expand_dims(rows.real, 1 - ROW_AXIS))


@gluon.jit
@no_type_check
def partial_out_columns(values, first_column, rows, outputs, LATENT: gl.constexpr, ROW_AXIS: gl.constexpr):
    """Return the `StoredColumns` at which `values` are stored in a partial output.

    `rows` are `PartialRows`; `out_columns` describes the other arguments.
    """
    columns = _columns_of(values, first_column, ROW_AXIS)
    offsets = gl.expand_dims(rows.partial_row * LATENT, 1 - ROW_AXIS)
    return StoredColumns(outputs.partial_out, offsets, columns, gl.expand_dims(rows.real, 1 - ROW_AXIS))


@gluon.jit
@no_type_check
def _columns_of(values, first_column, ROW_AXIS: gl.constexpr):
    """Return the index of the latent column of each column of `values`; axis ROW_AXIS of the result has length 1."""
    LAYOUT: gl.constexpr = gl.SliceLayout(ROW_AXIS, values.type.layout)
    return gl.expand_dims(first_column + gl.arange(0, values.shape[1 - ROW_AXIS], LAYOUT), ROW_AXIS)


@gluon.jit
@no_type_check
def store_columns(values, stored, SHIFT: gl.constexpr, EVICTION_POLICY: gl.constexpr):
    """Store the values of the real rows, SHIFT columns to the right of the columns of `stored`."""
    pointers = stored.base + stored.rows + stored.columns + SHIFT
    gl.store(pointers, values.to(stored.base.dtype.element_ty), mask=stored.real, eviction_policy=EVICTION_POLICY)


@gluon.jit
@no_type_check
def write_partial_largest(state, scale_log2, rows, written, outputs):
    """Write the reference scores (in base 2) of the rows with `written` true into the tensor of partial LSEs."""
    gl.store(outputs.partial_lse + rows.partial_row, in_base_two(state, scale_log2), mask=written)


@gluon.jit
@no_type_check
def write_partial_total(state, rows, written, plan, outputs):
    """Write the sums of probabilities of the rows with `written` true into the tensor of partial LSEs.

    The sums are stored behind the reference scores of all partial indices.
    """
    totals = outputs.partial_lse + plan.num_partials.to(gl.int64) * rows.index_rows
    gl.store(totals + rows.partial_row, state.total, mask=written)


@gluon.jit
@no_type_check
def kept_in_memory(ctx, LATENT: gl.constexpr):
    """Return the pointer to the global memory in which programs keep their weighted sums from one split to the next.

    This memory lies behind all partial outputs.
    """
    return ctx.outputs.partial_out + ctx.plan.num_partials.to(gl.int64) * ctx.sizes.request_rows * LATENT


@gluon.jit
@no_type_check
def partial_rows(partial, block, ROWS: gl.constexpr, LAYOUT: gl.constexpr, OF_REQUEST: gl.constexpr):
    """Return the `PartialRows` of a row block at a partial index.

    Args:
        partial: partial index.
        block: `RowBlock`.
        ROWS: rows of a row block.
        LAYOUT: layout of the rows.
        OF_REQUEST: True if a partial index belongs to one request. False if all requests have the same number of
            splits; a partial index then belongs to all requests.
    """
    rows = rows_at(block, ROWS, LAYOUT)
    if OF_REQUEST:
        row, index_rows = rows.number, block.request_rows
    else:
        row, index_rows = rows.token * block.num_heads + rows.head, block.num_tokens * block.num_heads
    return PartialRows(partial.to(gl.int64) * index_rows + row, index_rows, rows.real)


@gluon.jit
@no_type_check
def combine_weights(before, largest):
    """Return the `CombineWeights` of two states: the state of the earlier splits, and the state of the next split.

    The operations are those of `add_partial` in `fast.kernels.combine.states`, so a decode kernel and the combine
    kernel compute the same bits.

    Args:
        before: reference scores of the state of the earlier splits, in base 2.
        largest: reference scores of the state of the next split, in base 2.
    """
    grown = largest > before + REFERENCE_GROWTH
    reference = gl.where(grown, largest, before)
    old = gl.where(grown, gl.exp2(before - gl.where(grown, largest, 0.0)), 1.0)
    new = gl.where(grown, 1.0, gl.exp2(largest - gl.where(before == float("-inf"), 0.0, before)))
    return CombineWeights(reference, old, new)
