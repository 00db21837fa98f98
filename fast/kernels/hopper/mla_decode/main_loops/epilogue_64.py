"""Epilogue of `row_blocks_64`: functions that write outputs or partial outputs, or keep a state between splits.

Two consumers (four warps each) run these functions at the same time. Each consumer has one half of the latent columns
of the output: two quarters, called `left` and `right`. A split is consecutive tiles (64 keys each) of one request. A
program of a batch-invariant decode may attend several splits one after another. Between two splits it keeps the state
of the earlier splits: sums, and the reference score of each row, which is subtracted from the row's scores before exp2.

If SLICES is 2, two programs divide the work: each program computes only one slice (half) of the columns of every
quarter. The variable `number` is the slice of the program, 0 or 1. The program of slice 0 also writes the values that
belong to a whole row, such as the LSE.
"""

from __future__ import annotations

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from ...common.epilogue import (
    NORMAL,
    STAYS,
    combine_weights,
    divisor_of,
    in_base_two,
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
from ...common.records import HalfState
from .tile_pairs import scaled, slice_of_program
from .tile_scores import ROWS


@gluon.jit
@no_type_check
def prefetch_next(item, wanted, ctx, c):
    """If `wanted`, issue the loads of a work item's queries; each consumer loads half of the latent columns."""
    HALF: gl.constexpr = c.LATENT // 2
    if wanted:
        prefetch_queries(
            item,
            ctx.shared.queries,
            ctx.sizes,
            ROWS,
            c.HEADS,
            c.CONSUMER * HALF,
            HALF,
            c.ROPE if c.CONSUMER == 1 else 0,
            0,
        )


@gluon.jit
@no_type_check
def _send_rows(left, right, block, out_rows, q_latent, CONSUMER: gl.constexpr):
    """Write this consumer's half of the output columns with TMA, the GPU's bulk copy engine.

    TMA copies the values from the shared memory of the queries, which are no longer needed. Each consumer uses the half
    of this memory that it filled with queries. TMA can write all 64 rows: they belong to one query token, and no row
    lies behind the last row of the request.
    """
    first_row = block.query_start * block.num_heads + block.number * ROWS
    WIDTH: gl.constexpr = left.shape[1]
    quarters = q_latent._reinterpret(q_latent.dtype, [4, ROWS, WIDTH], out_rows.layout)
    quarters.index(2 * CONSUMER).store(left.to(q_latent.dtype))
    quarters.index(2 * CONSUMER + 1).store(right.to(q_latent.dtype))
    fence_async_shared()
    partition_barrier()
    for quarter in gl.static_range(2 * CONSUMER, 2 * CONSUMER + 2):
        tma.async_copy_shared_to_global(out_rows, [first_row, quarter * WIDTH], quarters.index(quarter))
    tma.store_wait(0)
    partition_barrier()


@gluon.jit
@no_type_check
def _lines_of(left, right, q_latent, CONSUMER: gl.constexpr, WIDE: gl.constexpr):
    """Return both quarters of this consumer in the layout WIDE, in which stores fill whole cache lines.

    The values change their layout through the shared memory of the queries, which are no longer needed.
    """
    WIDTH: gl.constexpr = left.shape[1]
    staged = q_latent.index(0).slice(2 * CONSUMER * WIDTH, 2 * WIDTH, dim=1)
    staged.slice(0, WIDTH, dim=1).store(left.to(q_latent.dtype))
    staged.slice(WIDTH, WIDTH, dim=1).store(right.to(q_latent.dtype))
    lines = staged.load(WIDE)
    partition_barrier()
    return lines


@gluon.jit
@no_type_check
def write_whole(state, block, scale_log2, following, wanted, ctx, c):
    """Write this consumer's half of the output of a row block; consumer 0 also writes the LSE.

    If `wanted`, the function also issues the loads of the queries of the work item `following`, as soon as the shared
    memory of the queries is free.
    """
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.LATENT // 4 // c.SLICES, 16])
    CONSUMER: gl.constexpr = c.CONSUMER
    HALF: gl.constexpr = c.LATENT // 2
    WIDTH: gl.constexpr = c.LATENT // 4
    SPAN: gl.constexpr = state.left.shape[1]
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HALF, HALF // 8], [4, 1], [1, 0])
    out, q_latent = ctx.outputs.out, ctx.shared.queries.q_latent
    number = slice_of_program(WIDTH // SPAN)
    divisor = divisor_of(state)
    left, right = scaled(state.left, state.right, 1.0 / divisor, VALUES)
    if CONSUMER == 0:
        rows = rows_at(block, ROWS, gl.SliceLayout(1, SCORES))
        log = lse_in_base_two(state, divisor, scale_log2)
        write_lse(log, state, rows, rows.real & (number == 0), block, ctx.outputs)
    if ctx.outputs.out_rows is not None:
        _send_rows(left, right, block, ctx.outputs.out_rows, q_latent, CONSUMER)
        prefetch_next(following, wanted, ctx, c)
    elif out.dtype.element_ty == q_latent.dtype and SPAN == WIDTH:
        rows = rows_at(block, ROWS, gl.SliceLayout(1, WIDE))
        lines = _lines_of(left, right, q_latent, CONSUMER, WIDE)
        prefetch_next(following, wanted, ctx, c)
        stored = out_columns(lines, CONSUMER * HALF, rows, block, ctx.outputs, c.LATENT, ROW_AXIS=0)
        store_columns(lines, stored, 0, NORMAL)
    else:
        prefetch_next(following, wanted, ctx, c)
        rows = rows_at(block, ROWS, gl.SliceLayout(1, VALUES))
        first_column = CONSUMER * HALF + number * SPAN
        stored = out_columns(left, first_column, rows, block, ctx.outputs, c.LATENT, ROW_AXIS=0)
        store_columns(left, stored, 0, NORMAL)
        store_columns(right, stored, WIDTH, NORMAL)


@gluon.jit
@no_type_check
def write_partial(state, block, partial, scale_log2, ctx, c, OF_REQUEST: gl.constexpr):
    """Write this consumer's half of a partial output.

    Consumer 0 also writes the reference scores, and consumer 1 also writes the sums of probabilities.
    """
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.LATENT // 4 // c.SLICES, 16])
    HALF: gl.constexpr = c.LATENT // 2
    WIDTH: gl.constexpr = c.LATENT // 4
    SPAN: gl.constexpr = state.left.shape[1]
    number = slice_of_program(WIDTH // SPAN)
    rows = partial_rows(partial, block, ROWS, gl.SliceLayout(1, SCORES), OF_REQUEST)
    written = rows.real & (number == 0)
    if c.CONSUMER == 0:
        write_partial_largest(state, scale_log2, rows, written, ctx.outputs)
    else:
        write_partial_total(state, rows, written, ctx.plan, ctx.outputs)
    rows = partial_rows(partial, block, ROWS, gl.SliceLayout(1, VALUES), OF_REQUEST)
    first_column = c.CONSUMER * HALF + number * SPAN
    stored = partial_out_columns(state.left, first_column, rows, ctx.outputs, c.LATENT, ROW_AXIS=0)
    store_columns(state.left, stored, 0, STAYS)
    store_columns(state.right, stored, WIDTH, STAYS)


@gluon.jit
@no_type_check
def to_base_two(state, scale_log2):
    """Return the state with reference scores times `scale_log2` (in base 2), or -inf for a row that saw no key."""
    return HalfState(in_base_two(state, scale_log2), state.total, state.left, state.right)


@gluon.jit
@no_type_check
def _kept_pointers(kept_values, CONSUMER: gl.constexpr, LATENT: gl.constexpr, VALUES: gl.constexpr):
    """Return pointers to the memory in which a consumer keeps the weighted sums of its quarter `left` between splits.

    The quarter `right` begins LATENT // 4 * ROWS elements further. In memory, a quarter has the shape [columns // 8,
    ROWS, 8]. Each access of a warp then fills whole cache lines.
    """
    row = gl.arange(0, ROWS, gl.SliceLayout(1, VALUES))
    column = gl.arange(0, VALUES.instr_shape[1], gl.SliceLayout(0, VALUES))
    pointers = kept_values + gl.program_id(0).to(gl.int64) * (ROWS * LATENT) + CONSUMER * (LATENT // 2) * ROWS
    return pointers + (row * 8)[:, None] + (column // 8 * (8 * ROWS) + column % 8)[None, :]


@gluon.jit
@no_type_check
def with_kept(state, kept_values, ctx, counters, c):
    """Combine the state that this consumer has kept with `state`; return the new state and the unchanged counters."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.LATENT // 4 // c.SLICES, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    kept = ctx.shared.kept
    weights = combine_weights(kept.index(2 * c.CONSUMER).load(ROW), state.largest)
    total = gl.fma(kept.index(2 * c.CONSUMER + 1).load(ROW), weights.old, state.total * weights.new)
    pointers = _kept_pointers(kept_values, c.CONSUMER, c.LATENT, VALUES)
    old = gl.convert_layout(weights.old, gl.SliceLayout(1, VALUES))[:, None]
    left, right = scaled(state.left, state.right, weights.new, VALUES)
    left = gl.fma(gl.load(pointers), old, left)
    right = gl.fma(gl.load(pointers + c.LATENT // 4 * ROWS), old, right)
    return HalfState(weights.reference, total, left, right), counters


@gluon.jit
@no_type_check
def keep(state, kept_values, ctx, c):
    """Store this consumer's half of a state until the next split is attended.

    Reference scores and sums of probabilities go to shared memory, and the weighted sums go to global memory.
    """
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.LATENT // 4 // c.SLICES, 16])
    kept = ctx.shared.kept
    kept.index(2 * c.CONSUMER).store(state.largest)
    kept.index(2 * c.CONSUMER + 1).store(state.total)
    pointers = _kept_pointers(kept_values, c.CONSUMER, c.LATENT, VALUES)
    gl.store(pointers, state.left, eviction_policy=STAYS)
    gl.store(pointers + c.LATENT // 4 * ROWS, state.right, eviction_policy=STAYS)
