"""Epilogue of `row_blocks_16_32`: functions that write outputs or partial outputs, or keep the state between splits.

A split is consecutive tiles (64 keys each) of one request. A program of a batch-invariant decode may attend several
splits one after another. It keeps the softmax state of the earlier splits, the *kept state*, in shared memory. A state
has a reference score (the number that is subtracted from the scores of a row before exp2), a sum of probabilities, and
weighted sums (the output before the division by the sum of probabilities). If there are more than SHARED_VALUES
weighted sums, those of the second half of the latent columns are kept in global memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple, no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ...common.arrivals import arrive
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
from ...common.records import RowState

STAGES = gl.constexpr(2)  # stages (buffers) of the ring through which tiles are loaded; a stage holds one tile
SHARED_VALUES = gl.constexpr(8192)  # float32 values that a program can keep in shared memory between splits


class Kept(NamedTuple):
    """Shared memory for the kept state.

    Attributes:
        row_values: [2, ROWS]: reference scores and sums of probabilities.
        weighted: weighted sums of all latent columns. If the sums of the second half of the columns are in global
            memory, only the sums of the first half.
        stored: barrier at which the consumer arrives when it has written sums to global memory.
    """

    row_values: Any
    weighted: Any
    stored: Any


class Shared(NamedTuple):
    """Shared memory of a program.

    Attributes:
        queries: `Queries`.
        k_latent: ring of STAGES tiles, latent columns.
        k_rope: ring of STAGES tiles, rope columns.
        weights: probabilities of a tile, exp2(score - reference score), [1, keys, rows].
        kept: `Kept`.
        items: the current and the next work item.
    """

    queries: Any
    k_latent: Any
    k_rope: Any
    weights: Any
    kept: Any
    items: Any


class Bars(NamedTuple):
    """Barriers of a program; the README of `mla_decode` says who arrives and who waits."""

    full: Any
    empty: Any
    item_begun: Any
    item_written: Any


@gluon.jit
@no_type_check
def prefetch_next(item, wanted, ctx, c):
    """If `wanted`, issue the loads of a work item's queries."""
    if wanted:
        prefetch_queries(item, ctx.shared.queries, ctx.sizes, c.ROWS, c.HEADS, 0, c.LATENT, c.ROPE, 0)


@gluon.jit
@no_type_check
def write_whole(state, block, scale_log2, following, wanted, ctx, c):
    """Write the output and LSE of rows whose state is final; if `wanted`, prefetch the queries of item `following`."""
    TRANSPOSED: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.ROWS, 16])
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    out, q_latent = ctx.outputs.out, ctx.shared.queries.q_latent
    rows = rows_at(block, c.ROWS, gl.SliceLayout(0, TRANSPOSED))
    divisor = divisor_of(state)
    weighted = state.weighted * (1.0 / divisor)[None, :]
    log = lse_in_base_two(state, divisor, scale_log2)
    write_lse(log, state, rows, rows.real, block, ctx.outputs)
    if out.dtype.element_ty == q_latent.dtype:
        # Transpose through the shared memory of the queries, which are no longer needed. Stores to global memory then
        # fill whole cache lines.
        staged = q_latent.index(0)
        staged.permute([1, 0]).store(weighted.to(q_latent.dtype))
        rows = rows_at(block, c.ROWS, gl.SliceLayout(1, WIDE))
        lines = staged.load(WIDE)
        partition_barrier()
        prefetch_next(following, wanted, ctx, c)
        stored = out_columns(lines, 0, rows, block, ctx.outputs, c.LATENT, ROW_AXIS=0)
        store_columns(lines, stored, 0, NORMAL)
    else:
        prefetch_next(following, wanted, ctx, c)
        stored = out_columns(weighted, 0, rows, block, ctx.outputs, c.LATENT, ROW_AXIS=1)
        store_columns(weighted, stored, 0, NORMAL)


@gluon.jit
@no_type_check
def write_partial(state, block, partial, scale_log2, ctx, c, OF_REQUEST: gl.constexpr):
    """Write the partial output and partial LSE of rows."""
    TRANSPOSED: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.ROWS, 16])
    rows = partial_rows(partial, block, c.ROWS, gl.SliceLayout(0, TRANSPOSED), OF_REQUEST)
    write_partial_largest(state, scale_log2, rows, rows.real, ctx.outputs)
    write_partial_total(state, rows, rows.real, ctx.plan, ctx.outputs)
    stored = partial_out_columns(state.weighted, 0, rows, ctx.outputs, c.LATENT, ROW_AXIS=1)
    store_columns(state.weighted, stored, 0, STAYS)


@gluon.jit
@no_type_check
def to_base_two(state, scale_log2):
    """Return a state whose reference scores are converted to base 2 (`in_base_two`)."""
    return RowState(in_base_two(state, scale_log2), state.total, state.weighted)


@gluon.jit
@no_type_check
def _pointers_of_half(kept_values, half):
    """Return pointers to the half of the kept weighted sums that is in global memory.

    In memory, the values have the shape [ROWS // 8, latent columns, 8]. A warp then stores 64 consecutive values at a
    time.
    """
    LATENTS: gl.constexpr = half.shape[0]
    ROWS: gl.constexpr = half.shape[1]
    LAYOUT: gl.constexpr = half.type.layout
    row = gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT))
    column = gl.arange(0, LATENTS, gl.SliceLayout(1, LAYOUT))
    pointers = kept_values + gl.program_id(0).to(gl.int64) * (ROWS * LATENTS)
    return pointers + (column * 8)[:, None] + (row // 8 * (8 * LATENTS) + row % 8)[None, :]


@gluon.jit
@no_type_check
def _halves(weighted):
    """Return the weighted sums of each half of the latent columns; no value moves between threads."""
    LATENT: gl.constexpr = weighted.shape[0]
    ROWS: gl.constexpr = weighted.shape[1]
    return gl.split(gl.permute(gl.reshape(weighted, [2, LATENT // 2, ROWS]), [1, 2, 0]))


@gluon.jit
@no_type_check
def prefetch_kept(kept_values, shared, bars, step, number, ROWS: gl.constexpr, LATENT: gl.constexpr):
    """Issue the loads of the kept sums that are in global memory, into the next stage of the ring.

    These sums occupy one stage, like a tile. The producer calls this function ahead of time, so that the sums are in
    shared memory when the consumer needs them.
    """
    CHUNK: gl.constexpr = 1024  # elements of one copy
    NUMBER: gl.constexpr = ROWS * LATENT // 2 // CHUNK
    BUFFERS: gl.constexpr = shared.k_latent.shape[0] // STAGES
    stage = step % STAGES
    mbarrier.wait(bars.empty.index(stage), ((step // STAGES) & 1) ^ 1)
    mbarrier.wait(shared.kept.stored, number & 1)
    tile = shared.k_latent.index(stage * BUFFERS)._reinterpret(
        gl.float32, [NUMBER, CHUNK], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    element = gl.arange(0, CHUNK, gl.BlockedLayout([4], [32], [1], [0]))
    pointers = kept_values + gl.program_id(0).to(gl.int64) * (NUMBER * CHUNK)
    for chunk in range(NUMBER):
        async_copy.async_copy_global_to_shared(tile.index(chunk), pointers + chunk * CHUNK + element)
    # `async_copy.mbarrier_arrive`: each thread adds one expected arrival, and arrives after its copies.
    # `mbarrier.arrive`: the one arrival that the barrier has expected since `mbarrier.init`.
    async_copy.mbarrier_arrive(bars.full.index(stage))
    mbarrier.arrive(bars.full.index(stage))


@gluon.jit
@no_type_check
def _take_kept(half, shared, bars, step):
    """Return the values that `prefetch_kept` loaded, in the layout of `half`, and release their stage."""
    LATENTS: gl.constexpr = half.shape[0]
    ROWS: gl.constexpr = half.shape[1]
    HALF: gl.constexpr = half.type.layout
    BUFFERS: gl.constexpr = shared.k_latent.shape[0] // STAGES
    squares = gl.permute(gl.reshape(half, [LATENTS, ROWS // 8, 8]), [1, 0, 2])
    SQUARES: gl.constexpr = squares.type.layout
    stage = step % STAGES
    tile = shared.k_latent.index(stage * BUFFERS)._reinterpret(
        gl.float32, [ROWS // 8, LATENTS, 8], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    )
    mbarrier.wait(bars.full.index(stage), (step // STAGES) & 1)
    before = gl.reshape(gl.permute(tile.load(SQUARES), [1, 0, 2]), [LATENTS, ROWS])
    fence_async_shared()  # TMA (the GPU's bulk copy engine) will write the next tile into this stage
    partition_barrier()  # every thread executes the fence before one thread arrives
    arrive(bars.empty.index(stage))
    return gl.convert_layout(before, HALF)


@gluon.jit
@no_type_check
def with_kept(state, kept_values, ctx, counters, c):
    """Combine the kept state with `state`; return the combined state and the new counter.

    The counter says how many times a stage of the ring has been used so far. It grows by one if kept sums from global
    memory passed through a stage.
    """
    TRANSPOSED: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.ROWS, 16])
    kept, step = ctx.shared.kept, counters
    ROW: gl.constexpr = gl.SliceLayout(0, TRANSPOSED)
    weights = combine_weights(kept.row_values.index(0).load(ROW), state.largest)
    old, new = weights.old, weights.new
    total = gl.fma(kept.row_values.index(1).load(ROW), old, state.total * new)
    if c.ROWS * c.LATENT <= SHARED_VALUES:
        weighted = gl.fma(kept.weighted.load(TRANSPOSED), old[None, :], state.weighted * new[None, :])
    else:
        near, far = _halves(state.weighted)
        HALF: gl.constexpr = near.type.layout
        old = gl.convert_layout(old, gl.SliceLayout(0, HALF))[None, :]
        new = gl.convert_layout(new, gl.SliceLayout(0, HALF))[None, :]
        near = gl.fma(kept.weighted.load(HALF), old, near * new)
        far = gl.fma(_take_kept(far, ctx.shared, ctx.bars, step), old, far * new)
        both = gl.reshape(gl.permute(gl.join(near, far), [2, 0, 1]), [c.LATENT, c.ROWS])
        weighted = gl.convert_layout(both, TRANSPOSED)
        step += 1
    return RowState(weights.reference, total, weighted), step


@gluon.jit
@no_type_check
def keep(state, kept_values, ctx, c):
    """Store a state as the kept state, until the next split of the work item is attended."""
    kept = ctx.shared.kept
    kept.row_values.index(0).store(state.largest)
    kept.row_values.index(1).store(state.total)
    if c.ROWS * c.LATENT <= SHARED_VALUES:
        kept.weighted.store(state.weighted)
    else:
        near, far = _halves(state.weighted)
        kept.weighted.store(near)
        gl.store(_pointers_of_half(kept_values, far), far, eviction_policy=STAYS)
        arrive(kept.stored)
