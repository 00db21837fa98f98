"""Decode kernel for row blocks of 16 and 32 rows, with transposed products.

A row is one (query token, head) pair, and a row block is the rows of one request that a program processes together. The
left operand of a product on Hopper's matrix unit has at least 64 rows. If 16 or 32 query rows were the left operand, at
least half of the operand would be empty, and the product would take as long as with 64 query rows. The products are
therefore transposed: scores are [keys, rows], and outputs are [columns of the latent, rows]. The left operand then has
64 keys, or 64 columns of the latent.

A producer (one warp) loads tiles of 64 keys with TMA, the GPU's bulk copy engine, into a ring of two stages (buffers in
shared memory). One consumer (four warps) multiplies. The memory bandwidth limits the speed. The README of `mla_decode`
shows how a tile passes from the producer to the consumer.
"""

from __future__ import annotations

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from ...common.arrivals import arrive
from ...common.dependent_launch import follow_kernel
from ...common.epilogue import LEAST, kept_in_memory, shift_of
from ...common.gluon_versions import partition_barrier
from ...common.loads import block_table_row_of, cache_block_of, load_columns, zero_from
from ...common.own_length import TILE
from ...common.records import (
    Context,
    Inputs,
    Outputs,
    Queries,
    RowState,
    Sizes,
    SplitPlan,
    SplitRule,
    Strides,
)
from ...common.work_items import ITEM_FIELDS, ITEMS_HELD, first_item, next_position, seek_item, write_item
from ...common.work_loop import as_loaded, run_work_items
from ..arguments import ANY_ALIGNMENT, ANY_VALUE
from .epilogue_16_32 import (
    SHARED_VALUES,
    STAGES,
    Bars,
    Kept,
    Shared,
    keep,
    prefetch_kept,
    prefetch_next,
    to_base_two,
    with_kept,
    write_partial,
    write_whole,
)
from .transposed_scores import masked_keys

LONG = gl.constexpr(16)  # a first work item of at least this many tiles is long: see `produce`


@gluon.jit
@no_type_check
def attend_tiles(begin, stop, end, visibility, ctx, step, c):
    """Attend the tiles [begin, stop) of a work item: compute scores, softmax and the weighted sum of the values.

    Args:
        begin: first tile.
        stop: end of the tiles, exclusive.
        end: end of the work item's tiles, exclusive; keys behind these tiles are masked.
        visibility: `Visibility`.
        ctx: `Context`.
        step: number of times that a stage of the ring has been filled so far; it determines the next stage and the
            phases of the barriers of that stage.
        c: `Constants`.

    Returns:
        The `RowState` over the keys of these tiles, and the new `step`.
    """
    shared, bars, scale_log2 = ctx.shared, ctx.bars, ctx.sizes.scale_log2
    q_latent, q_rope = shared.queries.q_latent, shared.queries.q_rope
    k_latent, k_rope, full, empty = shared.k_latent, shared.k_rope, bars.full, bars.empty
    ROWS: gl.constexpr = c.ROWS
    LATENT: gl.constexpr = c.LATENT
    ROPE: gl.constexpr = c.ROPE
    dtype: gl.constexpr = k_latent.dtype
    TRANSPOSED: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    TILE_SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    ROPE_SHARED: gl.constexpr = gl.NVMMASharedLayout(2 * ROPE if ROPE > 0 else 128, 16)
    BUFFERS: gl.constexpr = k_latent.shape[0] // STAGES
    ROPE_BUFFERS: gl.constexpr = k_rope.shape[0] // STAGES
    ROW: gl.constexpr = gl.SliceLayout(0, TRANSPOSED)
    largest = gl.full([ROWS], LEAST, gl.float32, ROW)
    totals = gl.zeros([TILE, ROWS], gl.float32, TRANSPOSED)
    values = warpgroup_mma_init(gl.zeros([LATENT, ROWS], gl.float32, TRANSPOSED))
    for tile in range(begin, stop):
        stage = step % STAGES
        phase = (step // STAGES) & 1
        zero = step >> 30  # always 0; with a literal 0, addresses of the queries would occupy registers
        k_tile = k_latent.index(stage * BUFFERS)._reinterpret(dtype, [TILE, LATENT], TILE_SHARED)
        values = warpgroup_mma_wait(0, deps=[values])
        arrive(empty.index((step + STAGES - 1) % STAGES), pred=tile > begin)
        mbarrier.wait(full.index(stage), phase)
        scores = gl.zeros([TILE, ROWS], gl.float32, TRANSPOSED)
        scores = warpgroup_mma(k_tile, q_latent.index(zero).permute([1, 0]), scores, use_acc=False, is_async=True)
        if ROPE > 0:
            rope_tile = k_rope.index(stage * ROPE_BUFFERS)._reinterpret(dtype, [TILE, ROPE], ROPE_SHARED)
            scores = warpgroup_mma(rope_tile, q_rope.index(zero).permute([1, 0]), scores, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
        if tile >= visibility.first_masked:
            scores = masked_keys(scores, tile, end, visibility, c.BLOCK_SIZE)
            if (tile + 1) * TILE > visibility.length:
                for column in gl.static_range(0, LATENT, 64):
                    zero_from(k_tile.slice(column, 64, dim=1), visibility.length - tile * TILE)
        new_largest = gl.maximum(largest, gl.max(scores, 0))
        weights = gl.exp2(scores * scale_log2 - shift_of(new_largest, scale_log2)[None, :])
        decay = gl.exp2((largest - new_largest) * scale_log2)
        largest = new_largest
        totals = totals * decay[None, :] + weights
        shared.weights.index(zero).store(weights.to(dtype))
        fence_async_shared()
        partition_barrier()
        values = values * decay[None, :]
        values = warpgroup_mma(k_tile.permute([1, 0]), shared.weights.index(zero), values, is_async=True)
        step += 1
    values = warpgroup_mma_wait(0, deps=[values])
    arrive(empty.index((step + STAGES - 1) % STAGES), pred=begin < stop)
    return RowState(largest, gl.sum(totals, 0), values), step


@gluon.jit
@no_type_check
def consume(ctx, c):
    """Run the consumer: attend all work items of the program."""
    TRANSPOSED: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.ROWS, 16])
    step = 0  # number of times that a stage of the ring has been filled so far
    run_work_items(
        prefetch_next, as_loaded, attend_tiles, with_kept, keep, write_partial, write_whole, to_base_two, step, ctx, c,
        gl.SliceLayout(0, TRANSPOSED), False,
    )  # fmt: skip


@gluon.jit
@no_type_check
def produce(ctx, latent_tma, rope_tma, c):
    """Run the producer (one warp): find the work items, write them for the consumer, and load their tiles."""
    sizes, shared, bars = ctx.sizes, ctx.shared, ctx.bars
    k_latent, k_rope = shared.k_latent, shared.k_rope
    BUFFERS: gl.constexpr = k_latent.shape[0] // STAGES
    ROPE_BUFFERS: gl.constexpr = k_rope.shape[0] // STAGES
    BYTES: gl.constexpr = TILE * (c.LATENT + c.ROPE) * (k_latent.dtype.primitive_bitwidth // 8)
    # KEEPS: the state that the program keeps between two splits does not fit into shared memory, so half of this state
    # goes through global memory (`epilogue_16_32`)
    KEEPS: gl.constexpr = c.BY_LENGTH and c.ROWS * c.LATENT > SHARED_VALUES
    kept_values = kept_in_memory(ctx, c.LATENT)
    position, item = first_item(ctx.plan, ctx.inputs, sizes, 1, c.ROWS, c.HEADS, c.BY_LENGTH, c.SCHEDULED, 1)
    write_item(shared.items, 0, item, bars.item_written)
    step = 0
    combined = 0
    number = 0
    while position.more:
        begin, stop = item.begin, item.stop
        blocks = block_table_row_of(item, ctx.inputs.block_table, ctx.strides)
        cache_block = cache_block_of(begin * TILE, blocks, c.BLOCK_SIZE)
        next_block = cache_block_of((begin + 1) * TILE, blocks, c.BLOCK_SIZE)
        if KEEPS:
            split_tiles = item.split_tiles
            combine_at = gl.where((begin == 0) & (stop > split_tiles), gl.minimum(2 * split_tiles, stop), 0)
        # All programs load their first tiles at the same time, which delays the consumer's loads of the queries. If the
        # first work item is long, the producer loads one tile, then waits until the queries have arrived.
        queries_first = (number == 0) & (stop - begin >= LONG)
        for tile in range(begin, stop):
            stage = step % STAGES
            bar = bars.full.index(stage)
            if queries_first & (tile == begin + 1):
                mbarrier.wait(bars.item_begun, 0)
            mbarrier.wait(bars.empty.index(stage), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(bar, BYTES)
            load_columns(
                tile, cache_block, blocks, latent_tma, k_latent, stage * BUFFERS, bar, c.BLOCK_SIZE, 0, c.LATENT
            )
            if c.ROPE > 0:
                load_columns(
                    tile,
                    cache_block,
                    blocks,
                    rope_tma,
                    k_rope,
                    stage * ROPE_BUFFERS,
                    bar,
                    c.BLOCK_SIZE,
                    c.LATENT,
                    c.ROPE,
                )
            cache_block = next_block
            next_block = cache_block_of((tile + 2) * TILE, blocks, c.BLOCK_SIZE)
            step += 1
            if KEEPS and tile + 1 == combine_at:
                prefetch_kept(kept_values, shared, bars, step, combined, c.ROWS, c.LATENT)
                step += 1
                combined += 1
                combine_at = gl.minimum(combine_at + split_tiles, stop)
        position = next_position(position, ctx.plan, sizes, c.SCHEDULED, 1)
        position, item = seek_item(
            position, ctx.plan, ctx.inputs, sizes, 1, c.ROWS, c.HEADS, c.BY_LENGTH, c.SCHEDULED, 1
        )
        mbarrier.wait(bars.item_begun, number & 1)  # the consumer no longer reads the item that is overwritten
        number += 1
        write_item(shared.items, number, item, bars.item_written)


@gluon.jit
@no_type_check
def shared_memory(inputs, strides, latent_tma, rope_tma, c):
    """Allocate the shared memory of a program and initialise its barriers; return `Shared` and `Bars`.

    `row_blocks_64.shared_memory` explains the arguments; `rope_tma` is the descriptor of the rope columns of the cache.
    """
    dtype: gl.constexpr = latent_tma.dtype
    BOX_KEYS: gl.constexpr = latent_tma.block_shape[1]
    BOX_COLUMNS: gl.constexpr = latent_tma.block_shape[2]
    TILE_SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    ROPE_SHARED: gl.constexpr = gl.NVMMASharedLayout(2 * c.ROPE if c.ROPE > 0 else 128, 16)
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    boxes: gl.constexpr = TILE // BOX_KEYS
    k_latent = gl.allocate_shared_memory(
        dtype, [STAGES * boxes * (c.LATENT // BOX_COLUMNS), 1, BOX_KEYS, BOX_COLUMNS], latent_tma.layout
    )
    q_latent = gl.allocate_shared_memory(dtype, [1, c.ROWS, c.LATENT], TILE_SHARED)
    k_rope, q_rope = k_latent, q_latent
    if c.ROPE > 0:
        k_rope = gl.allocate_shared_memory(dtype, [STAGES * boxes, 1, BOX_KEYS, c.ROPE], rope_tma.layout)
        q_rope = gl.allocate_shared_memory(dtype, [1, c.ROWS, c.ROPE], ROPE_SHARED)
    weights = gl.allocate_shared_memory(dtype, [1, TILE, c.ROWS], gl.NVMMASharedLayout(2 * c.ROWS, 16))
    row_values, weighted, stored = weights, weights, weights
    if c.BY_LENGTH:
        row_values = gl.allocate_shared_memory(gl.float32, [2, c.ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        # A warp accesses 8 columns of the latent by 8 rows at once. The layout spreads these 64 numbers evenly over the
        # 32 banks of shared memory.
        SHARED_LATENTS: gl.constexpr = c.LATENT if c.ROWS * c.LATENT <= SHARED_VALUES else c.LATENT // 2
        weighted = gl.allocate_shared_memory(
            gl.float32, [SHARED_LATENTS, c.ROWS], gl.SwizzledSharedLayout(8, 32 // c.ROWS, c.ROWS // 8, [1, 0])
        )
        # A barrier that nothing uses must not be initialised: the compiler would use its memory again, for sums over
        # warps (`tests/support/barrier_memory.py`).
        if c.ROWS * c.LATENT > SHARED_VALUES:
            stored = gl.allocate_shared_memory(gl.int64, [1], BAR)
            mbarrier.init(stored, 1)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    items = gl.allocate_shared_memory(gl.int32, [ITEMS_HELD * ITEM_FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    item_begun = gl.allocate_shared_memory(gl.int64, [1], BAR)
    item_written = gl.allocate_shared_memory(gl.int64, [1], BAR)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), 1)
        mbarrier.init(empty.index(i), 1)
    mbarrier.init(item_begun, 1)
    mbarrier.init(item_written, 1)
    fence_async_shared()
    queries = Queries(inputs.ql_nope, inputs.q_pe, q_latent, q_rope, strides)
    shared = Shared(queries, k_latent, k_rope, weights, Kept(row_values, weighted, stored), items)
    bars = Bars(full, empty, item_begun, item_written)
    return shared, bars


@gluon.jit(do_not_specialize=ANY_VALUE, do_not_specialize_on_alignment=ANY_ALIGNMENT)
@no_type_check
def _row_blocks_16_32_kernel(
    ql_nope, q_pe, latent_tma, rope_tma, block_table, seq_lens, query_start_loc, visible_lens,
    tile_ranges, split_offsets, written,
    num_tokens, num_blocks, num_requests, max_keys, num_splits, row_blocks, request_rows, num_partials,
    small_tiles, small_splits, large_tiles, max_splits, scale_log2,
    query_strides, table_row_stride, table_stride, c: gl.constexpr,
):  # fmt: skip
    """Attend all work items, in row blocks of `c.ROWS` rows, and write their outputs or partial outputs.

    `fast.kernels.combine` adds the partial outputs afterwards. `arguments.py` describes the arguments.
    """
    inputs = Inputs(ql_nope, q_pe, block_table, seq_lens, query_start_loc, visible_lens)
    strides = Strides(
        query_strides.latent_token, query_strides.latent_head, query_strides.rope_token, query_strides.rope_head,
        table_row_stride, table_stride,
    )  # fmt: skip
    shared, bars = shared_memory(inputs, strides, latent_tma, rope_tma, c)
    progress = written.partial_lse + 2 * num_partials.to(gl.int64) * request_rows
    progress = progress.to(gl.pointer_type(gl.int32), bitcast=True)
    rule = SplitRule(small_tiles, small_splits, large_tiles, max_splits)
    plan = SplitPlan(tile_ranges, split_offsets, num_splits, num_partials, progress, rule)
    outputs = Outputs(written.out, written.lse, written.partial_out, written.partial_lse, None)
    sizes = Sizes(num_tokens, num_blocks, num_requests, max_keys, row_blocks, request_rows, scale_log2)
    follow_kernel()
    ctx = Context(inputs, plan, outputs, sizes, strides, shared, bars)
    gl.warp_specialize(
        [
            (consume, (ctx, c)),
            (produce, (ctx, latent_tma, rope_tma, c)),
        ],
        [1],
        [24],
    )  # fmt: skip
