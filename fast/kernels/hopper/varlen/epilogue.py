"""Epilogue of the prefill kernel: store the outputs and LSEs of a consumer, or its partial outputs and partial LSEs."""

from __future__ import annotations

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...combine.states import RowState
from ..common.epilogue import LN_2, divisor_of, in_base_two, lse_in_base_two
from .records import ROWS


@gluon.constexpr_function
def _lines(columns):
    """Return a layout of [64, columns] in which a thread has 8 adjacent columns, and 4 threads have 32.

    A warp has the same 16 rows as in the result of a matrix product. The conversion from that layout moves values
    between the threads of a warp only, and needs no shared memory.
    """
    wide = []
    column = 32
    while column < columns:
        wide.append([0, column])
        column *= 2
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], *wide, [8, 0]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, columns],
    )


@gluon.jit
@no_type_check
def write_rows(largest, total, weighted, item, ctx, c):
    """Store output and LSE of the rows of this consumer that belong to the request of the work item.

    A row that saw no key gets the output 0 and the LSE -inf. A row with NaN scores gets NaN.
    """
    outputs, sizes = ctx.outputs, ctx.sizes
    dtype: gl.constexpr = outputs.out.dtype.element_ty
    first_row = c.CONSUMER * ROWS
    state = RowState(largest, total, weighted)
    divisor = divisor_of(state)
    if outputs.lse is not None:
        log = lse_in_base_two(state, divisor, sizes.scale_log2)
        log = gl.where(total == 0, float("-inf"), log * LN_2)
        row = first_row + gl.arange(0, ROWS, log.type.layout)
        pointers = outputs.lse + item.head.to(gl.int64) * sizes.num_tokens + (item.token + row)
        gl.store(pointers, log, mask=row < item.rows)
    factor = gl.convert_layout(1.0 / divisor, gl.SliceLayout(1, weighted.type.layout))
    rounded = (weighted * factor[:, None]).to(dtype)
    if dtype.primitive_bitwidth == 16:
        rounded = gl.convert_layout(rounded, _lines(c.VALUE))
    LAYOUT: gl.constexpr = rounded.type.layout
    row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, weighted.shape[1], gl.SliceLayout(0, LAYOUT))
    base = outputs.out + item.head.to(gl.int64) * outputs.strides.head
    tokens = (item.token + row).to(gl.int64) * outputs.strides.token
    pointers = base + tokens[:, None] + (column.to(gl.int64) * outputs.strides.column)[None, :]
    if c.WIDE_STORES:  # the compiler loses what it knows of the strides, in one of the two consumers
        WIDE: gl.constexpr = 128 // dtype.primitive_bitwidth
        pointers = gl.multiple_of(gl.max_contiguous(pointers, [1, WIDE]), [1, 16])
    gl.store(pointers, rounded, mask=(row < item.rows)[:, None])


@gluon.jit
@no_type_check
def write_partial_rows(largest, total, weighted, item, ctx, c):
    """Store partial output and partial LSE of the rows of this consumer that belong to the request of the work item.

    A row that sees no key of the split gets the reference score -inf and zeros, also if the split has no key tile.
    """
    ROW: gl.constexpr = largest.type.layout
    LAYOUT: gl.constexpr = weighted.type.layout
    outputs, sizes = ctx.outputs, ctx.sizes
    first_row = c.CONSUMER * ROWS
    split_rows = sizes.num_tokens.to(gl.int64) * sizes.num_heads  # rows of a split
    row = first_row + gl.arange(0, ROWS, ROW)
    real = row < item.rows
    base = item.split.to(gl.int64) * split_rows + item.head
    partial_lse = outputs.lse + (base + (item.token + row).to(gl.int64) * sizes.num_heads)
    gl.store(partial_lse, in_base_two(RowState(largest, total, weighted), sizes.scale_log2), mask=real)
    gl.store(partial_lse + sizes.num_splits.to(gl.int64) * split_rows, total, mask=real)
    row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    partial_row = base + (item.token + row).to(gl.int64) * sizes.num_heads
    column = gl.arange(0, weighted.shape[1], gl.SliceLayout(0, LAYOUT))
    pointers = outputs.out + (partial_row * weighted.shape[1])[:, None] + column[None, :]
    pointers = gl.multiple_of(gl.max_contiguous(pointers, [1, 2]), [1, 8])
    gl.store(pointers, weighted, mask=(row < item.rows)[:, None])
