"""Epilogue of `row_blocks_16_32_e4m3`: functions that load queries, write outputs, or keep the state between splits.

Two consumers (four warps each) run these functions at the same time. Each consumer loads and converts one half of the
rows of queries, and has one half of the latent columns of the output. The reference scores of its states are in base 2.
A split is consecutive tiles (64 keys each) of one request. A program of a batch-invariant decode may attend several
splits one after another. It keeps the state of the earlier splits: row values in shared memory, and weighted sums in
global memory.
"""

from __future__ import annotations

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...common.e4m3_words import halves_of_queries
from ...common.epilogue import (
    NORMAL,
    STAYS,
    combine_weights,
    divisor_of,
    lse_in_base_two,
    out_columns,
    partial_out_columns,
    partial_rows,
    store_columns,
    write_lse,
    write_partial_largest,
    write_partial_total,
)
from ...common.gluon_versions import partition_barrier
from ...common.loads import prefetch_queries, rows_at
from ...common.records import RowState, WorkItem
from .e4m3_tiles import UNIT

LARGEST_QUERY = gl.constexpr(14)  # the largest number of a row of float16 queries is from 2^14 to 2^15
BIAS = gl.constexpr(127)  # exponent bias of float32
LAST_EXPONENT = gl.constexpr(253)  # largest biased exponent of a power of two whose inverse is a normal number


@gluon.jit
@no_type_check
def prefetch_next(item, wanted, ctx, c):
    """If `wanted`, issue the loads of a work item's queries; each consumer loads half of the rows."""
    HALF: gl.constexpr = c.ROWS // 2
    if wanted:
        item = WorkItem(
            item.request, 2 * item.row_block + c.CONSUMER, item.query_start, item.query_end, item.length, item.begin,
            item.stop, item.partial, item.split_tiles,
        )  # fmt: skip
        prefetch_queries(item, ctx.shared.queries, ctx.sizes, HALF, c.HEADS, 0, c.LATENT, c.ROPE, c.CONSUMER * HALF)


@gluon.jit
@no_type_check
def prepare_queries(ctx, c):
    """Convert this consumer's rows of queries to float16, in the order of columns that `e4m3_tiles` needs.

    The latent part is overwritten; a row keeps its place in shared memory, so no row of the other consumer changes.
    """
    LATENT: gl.constexpr = c.LATENT
    ROWS: gl.constexpr = c.ROWS
    HALF: gl.constexpr = ROWS // 2
    FIRST: gl.constexpr = c.CONSUMER * HALF
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    ROW: gl.constexpr = gl.SliceLayout(1, WIDE)
    shared = ctx.shared
    q_latent = shared.queries.q_latent.index(0)
    partition_barrier()  # the copies of all threads have arrived
    latent = q_latent.slice(FIRST, HALF, dim=0).load(WIDE).to(gl.float32)
    largest = gl.max(gl.abs(latent), 1)
    rope = latent
    if c.ROPE > 0:
        rope = shared.queries.q_rope.index(0).slice(FIRST, HALF, dim=0).load(NARROW).to(gl.float32)
        largest = gl.maximum(largest, gl.convert_layout(gl.max(gl.abs(rope), 1), ROW))
    exponent = (largest.to(gl.int32, bitcast=True) >> 23) & 0xFF  # biased; 255 for infinity and NaN
    inverse_exponent = gl.minimum(2 * BIAS + LARGEST_QUERY - exponent, LAST_EXPONENT)  # exponent of 1 / unit
    inverse = (inverse_exponent << 23).to(gl.float32, bitcast=True)
    unit = ((2 * BIAS - inverse_exponent) << 23).to(gl.float32, bitcast=True)
    first, second = halves_of_queries((latent * inverse[:, None]).to(gl.float16))
    partition_barrier()  # all threads have loaded their queries
    halves = q_latent._reinterpret(gl.float16, [2, ROWS, LATENT // 2], gl.NVMMASharedLayout(128, 16))
    halves.index(0).slice(FIRST, HALF, dim=0).store(first)
    halves.index(1).slice(FIRST, HALF, dim=0).store(second)
    if c.ROPE > 0:
        inverse = gl.convert_layout(inverse, gl.SliceLayout(1, NARROW))
        first, second = halves_of_queries((rope * inverse[:, None]).to(gl.float16))
        shared.rope_halves.index(0).slice(FIRST, HALF, dim=0).store(first)
        shared.rope_halves.index(1).slice(FIRST, HALF, dim=0).store(second)
    shared.row_values.index(UNIT).slice(FIRST, HALF, dim=0).store(unit)


@gluon.jit
@no_type_check
def write_whole(state, block, scale_log2, following, wanted, ctx, c):
    """Write this consumer's columns of the output; consumer 0 also writes the LSE. Prefetch the queries of `following`.

    `scale_log2` is not used, because the reference scores are in base 2.
    """
    ROWS: gl.constexpr = c.ROWS
    ROW: gl.constexpr = gl.SliceLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16]))
    COLUMNS: gl.constexpr = c.LATENT // 2
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])
    FIRST: gl.constexpr = c.CONSUMER * COLUMNS
    out = ctx.outputs.out
    dtype: gl.constexpr = out.dtype.element_ty
    prefetch_next(following, wanted, ctx, c)
    divisor = divisor_of(state)
    weighted = _times(state.weighted, 1.0 / divisor)
    if c.CONSUMER == 0:
        rows = rows_at(block, ROWS, ROW)
        write_lse(lse_in_base_two(state, divisor, 1.0), state, rows, rows.real, block, ctx.outputs)
    if dtype.primitive_bitwidth == 16:
        # Transpose through the memory whose sums this consumer has read. Stores to global memory then fill whole cache
        # lines. The other consumer writes there again only after both have met.
        place: gl.constexpr = (1 - c.CONSUMER) * (ctx.shared.exchanged.shape[0] // 2)
        staged = ctx.shared.exchanged.index(place)._reinterpret(dtype, [ROWS, COLUMNS], gl.NVMMASharedLayout(128, 16))
        staged.permute([1, 0]).store(weighted.to(dtype))
        rows = rows_at(block, ROWS, gl.SliceLayout(1, WIDE))
        lines = staged.load(WIDE)
        stored = out_columns(lines, FIRST, rows, block, ctx.outputs, c.LATENT, ROW_AXIS=0)
        store_columns(lines, stored, 0, NORMAL)
    else:
        rows = rows_at(block, ROWS, gl.SliceLayout(0, weighted.type.layout))
        stored = out_columns(weighted, FIRST, rows, block, ctx.outputs, c.LATENT, ROW_AXIS=1)
        store_columns(weighted, stored, 0, NORMAL)


@gluon.jit
@no_type_check
def write_partial(state, block, partial, scale_log2, ctx, c, OF_REQUEST: gl.constexpr):
    """Write this consumer's columns of a partial output; consumer 0 also writes the partial LSE."""
    ROWS: gl.constexpr = c.ROWS
    ROW: gl.constexpr = gl.SliceLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16]))
    if c.CONSUMER == 0:
        rows = partial_rows(partial, block, ROWS, ROW, OF_REQUEST)
        write_partial_largest(state, 1.0, rows, rows.real, ctx.outputs)
        write_partial_total(state, rows, rows.real, ctx.plan, ctx.outputs)
    weighted = state.weighted
    rows = partial_rows(partial, block, ROWS, gl.SliceLayout(0, weighted.type.layout), OF_REQUEST)
    first_column = c.CONSUMER * (c.LATENT // 2)
    stored = partial_out_columns(weighted, first_column, rows, ctx.outputs, c.LATENT, ROW_AXIS=1)
    store_columns(weighted, stored, 0, STAYS)


@gluon.jit
@no_type_check
def to_base_two(state, scale_log2):
    """Return the state; its reference scores are in base 2 already."""
    return state


@gluon.jit
@no_type_check
def _times(weighted, factor):
    """Return weighted sums [columns, rows], multiplied by a factor for each row."""
    return weighted * gl.convert_layout(factor, gl.SliceLayout(0, weighted.type.layout))[None, :]


@gluon.jit
@no_type_check
def _kept_pointers(kept_values, weighted, c):
    """Return pointers to the global memory in which this consumer keeps its weighted sums between splits.

    In memory, the sums of a consumer have the shape [columns / 2, rows, 2].
    """
    LAYOUT: gl.constexpr = weighted.type.layout
    row = gl.arange(0, c.ROWS, gl.SliceLayout(0, LAYOUT))
    column = gl.arange(0, c.LATENT // 2, gl.SliceLayout(1, LAYOUT))
    pointers = kept_values + gl.program_id(0).to(gl.int64) * (c.ROWS * c.LATENT)
    pointers += c.CONSUMER * (c.LATENT // 2) * c.ROWS
    return pointers + (column // 2 * (2 * c.ROWS) + column % 2)[:, None] + (2 * row)[None, :]


@gluon.jit
@no_type_check
def with_kept(state, kept_values, ctx, counters, c):
    """Combine the state that this consumer has kept with `state`; return the new state and the unchanged counters."""
    ROWS: gl.constexpr = c.ROWS
    ROW: gl.constexpr = gl.SliceLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16]))
    kept = ctx.shared.kept
    weights = combine_weights(kept.index(2 * c.CONSUMER).load(ROW), state.largest)
    total = gl.fma(kept.index(2 * c.CONSUMER + 1).load(ROW), weights.old, state.total * weights.new)
    before = gl.load(_kept_pointers(kept_values, state.weighted, c))
    old = gl.convert_layout(weights.old, gl.SliceLayout(0, state.weighted.type.layout))[None, :]
    weighted = gl.fma(before, old, _times(state.weighted, weights.new))
    return RowState(weights.reference, total, weighted), counters


@gluon.jit
@no_type_check
def keep(state, kept_values, ctx, c):
    """Store this consumer's state until the next split is attended."""
    kept = ctx.shared.kept
    kept.index(2 * c.CONSUMER).store(state.largest)
    kept.index(2 * c.CONSUMER + 1).store(state.total)
    gl.store(_kept_pointers(kept_values, state.weighted, c), state.weighted, eviction_policy=STAYS)
