"""Decode kernel over e4m3 caches for row blocks of 64 rows, with queries in e4m3: the modes `fp8_query`, `fp8_product`.

A row is one (query token, head) pair, and a row block is the rows of one request that a program processes together. A
producer (one warp) loads tiles of 64 keys with TMA, the GPU's bulk copy engine, into a ring of stages. Two consumers
(four warps each) score the tiles in turn, and each accumulates one half of the latent columns of the output
(`e4m3_products`).
"""

from __future__ import annotations

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ...common.dependent_launch import follow_kernel
from ...common.loads import block_table_row_of, cache_block_of, load_columns
from ...common.own_length import TILE
from ...common.records import Context, Inputs, Outputs, Queries, Sizes, SplitPlan, SplitRule, Strides, of_consumer
from ...common.work_items import ITEM_FIELDS, ITEMS_HELD, first_position, next_position, seek_item, write_item
from ...common.work_loop import as_loaded, run_work_items
from ..arguments import ANY_ALIGNMENT, ANY_VALUE
from .e4m3_products import Bars, ProductCounters, Shared, attend_tiles
from .epilogue_16_32_e4m3 import keep, to_base_two, with_kept, write_partial
from .epilogue_64_e4m3 import prefetch_next, write_whole
from .tile_scores import ROWS

LONG = gl.constexpr(16)  # a first work item of at least this many tiles is long: see `row_blocks_16_32`


@gluon.jit
@no_type_check
def _consume(ctx, c):
    """Run a consumer: score every second tile of all work items, and accumulate half c.CONSUMER of the columns."""
    TRANSPOSED: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 32])
    counters = ProductCounters(0, 0)
    run_work_items(
        prefetch_next, as_loaded, attend_tiles, with_kept, keep, write_partial, write_whole, to_base_two,
        counters, ctx, c, gl.SliceLayout(1, TRANSPOSED), True,
    )  # fmt: skip


@gluon.jit
@no_type_check
def _produce(ctx, latent_tma, rope_tma, c):
    """Run the producer (one warp): find the work items, write them for the consumers, and load their tiles."""
    sizes, shared, bars = ctx.sizes, ctx.shared, ctx.bars
    STAGES: gl.constexpr = shared.sides.shape[0]
    BUFFERS: gl.constexpr = shared.k_latent.shape[0] // STAGES
    WORDS: gl.constexpr = (c.LATENT + c.ROPE) // 2  # of two elements, for each key
    BYTES: gl.constexpr = TILE * WORDS * (shared.k_latent.dtype.primitive_bitwidth // 8)
    position = first_position(ctx.plan, sizes, c.SCHEDULED, 1)
    position, item = seek_item(position, ctx.plan, ctx.inputs, sizes, 1, ROWS, c.HEADS, c.BY_LENGTH, c.SCHEDULED, 1)
    write_item(shared.items, 0, item, bars.item_written)
    loaded = 0
    number = 0
    while position.more:
        begin, stop = item.begin, item.stop
        blocks = block_table_row_of(item, ctx.inputs.block_table, ctx.strides)
        cache_block = cache_block_of(begin * TILE, blocks, c.BLOCK_SIZE)
        next_block = cache_block_of((begin + 1) * TILE, blocks, c.BLOCK_SIZE)
        queries_first = (number == 0) & (stop - begin >= LONG)
        for tile in range(begin, stop):
            stage = loaded % STAGES
            bar = bars.full.index(stage)
            if queries_first & (tile == begin + 1):
                mbarrier.wait(bars.item_begun, 0)
            mbarrier.wait(bars.empty.index(stage), ((loaded // STAGES) & 1) ^ 1)
            mbarrier.expect(bar, BYTES)
            load_columns(
                tile, cache_block, blocks, latent_tma, shared.k_latent, stage * BUFFERS, bar, c.BLOCK_SIZE, 0,
                c.LATENT // 2,
            )  # fmt: skip
            if c.ROPE > 0:
                boxes = shared.sides.index(stage)._reinterpret(
                    gl.int16, [TILE // rope_tma.block_shape[1], 1, rope_tma.block_shape[1], c.ROPE // 2],
                    rope_tma.layout,
                )  # fmt: skip
                load_columns(
                    tile, cache_block, blocks, rope_tma, boxes, 0, bar, c.BLOCK_SIZE, c.LATENT // 2, c.ROPE // 2
                )
            cache_block = next_block
            next_block = cache_block_of((tile + 2) * TILE, blocks, c.BLOCK_SIZE)
            loaded += 1
        position = next_position(position, ctx.plan, sizes, c.SCHEDULED, 1)
        position, item = seek_item(position, ctx.plan, ctx.inputs, sizes, 1, ROWS, c.HEADS, c.BY_LENGTH, c.SCHEDULED, 1)
        mbarrier.wait(bars.item_begun, number & 1)  # the consumers no longer read the item that is overwritten
        number += 1
        write_item(shared.items, number, item, bars.item_written)


@gluon.jit(
    do_not_specialize=[*ANY_VALUE, "q_scale_stride"],
    do_not_specialize_on_alignment=[*ANY_ALIGNMENT, "kv_scale", "q_scale"],
)
@no_type_check
def _row_blocks_64_e4m3_kernel(
    ql_nope, q_pe, latent_tma, rope_tma, block_table, seq_lens, query_start_loc, visible_lens,
    tile_ranges, split_offsets, written,
    num_tokens, num_blocks, num_requests, max_keys, num_splits, row_blocks, request_rows, num_partials,
    small_tiles, small_splits, large_tiles, max_splits, scale_log2,
    query_strides, table_row_stride, table_stride, kv_scale, q_scale, q_scale_stride, c: gl.constexpr,
):  # fmt: skip
    """Attend all work items, in row blocks of 64 rows, and write their outputs or partial outputs.

    `fast.kernels.combine` adds the partial outputs afterwards. `arguments.py` describes the arguments. The queries are
    words of two e4m3 numbers; `kv_scale` is the pointer to the scale of the cache, and `q_scale` is the pointer to the
    scales of the queries, which are `q_scale_stride` elements apart.
    """
    LATENT: gl.constexpr = c.LATENT
    STAGES: gl.constexpr = 5 if c.WEIGHTS_E4M3 else 4
    SIDE_WORDS: gl.constexpr = TILE // 2 if c.WEIGHTS_E4M3 else TILE  # words of the probabilities of a row
    BOX_KEYS: gl.constexpr = latent_tma.block_shape[1]
    BOX_WORDS: gl.constexpr = latent_tma.block_shape[2]
    BOXES: gl.constexpr = STAGES * (TILE // BOX_KEYS)
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    k_latent = gl.allocate_shared_memory(
        gl.int16, [BOXES * (LATENT // 2 // BOX_WORDS), 1, BOX_KEYS, BOX_WORDS], latent_tma.layout
    )
    q_latent = gl.allocate_shared_memory(gl.int16, [1, ROWS, LATENT // 2], gl.NVMMASharedLayout(128, 16))
    q_rope = q_latent
    if c.ROPE > 0:
        q_rope = gl.allocate_shared_memory(gl.int16, [1, ROWS, c.ROPE // 2], gl.NVMMASharedLayout(c.ROPE, 16))
    sides = gl.allocate_shared_memory(gl.int16, [STAGES, TILE, SIDE_WORDS], gl.NVMMASharedLayout(2 * SIDE_WORDS, 16))
    references = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], PLAIN)
    largest = None
    if c.WEIGHTS_E4M3:
        largest = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], PLAIN)
    decays = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], PLAIN)
    totals = gl.allocate_shared_memory(gl.float32, [4, ROWS], PLAIN)
    q_scales = gl.allocate_shared_memory(gl.float32, [2, ROWS], PLAIN)
    kept = totals
    if c.BY_LENGTH:
        kept = gl.allocate_shared_memory(gl.float32, [4, ROWS], PLAIN)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    probabilities_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    items = gl.allocate_shared_memory(gl.int32, [ITEMS_HELD * ITEM_FIELDS, 1], PLAIN)
    exchange = gl.allocate_shared_memory(gl.int64, [1], BAR)
    item_begun = gl.allocate_shared_memory(gl.int64, [1], BAR)
    item_written = gl.allocate_shared_memory(gl.int64, [1], BAR)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), 1)
        mbarrier.init(empty.index(i), 2)
        mbarrier.init(probabilities_ready.index(i), 1)
    mbarrier.init(exchange, 2)
    mbarrier.init(item_begun, 2)
    mbarrier.init(item_written, 1)
    fence_async_shared()
    follow_kernel()

    scale = gl.load(kv_scale)
    inputs = Inputs(ql_nope, q_pe, block_table, seq_lens, query_start_loc, visible_lens)
    progress = written.partial_lse + 2 * num_partials.to(gl.int64) * request_rows
    progress = progress.to(gl.pointer_type(gl.int32), bitcast=True)
    rule = SplitRule(small_tiles, small_splits, large_tiles, max_splits)
    plan = SplitPlan(tile_ranges, split_offsets, num_splits, num_partials, progress, rule)
    outputs = Outputs(written.out, written.lse, written.partial_out, written.partial_lse, None)
    sizes = Sizes(num_tokens, num_blocks, num_requests, max_keys, row_blocks, request_rows, scale_log2 * scale)
    strides = Strides(
        query_strides.latent_token, query_strides.latent_head, query_strides.rope_token, query_strides.rope_head,
        table_row_stride, table_stride,
    )  # fmt: skip
    queries = Queries(ql_nope, q_pe, q_latent, q_rope, strides)
    shared = Shared(
        queries, k_latent, sides, references, largest, decays, totals, q_scales, kept, items, scale, q_scale,
        q_scale_stride,
    )  # fmt: skip
    bars = Bars(full, empty, probabilities_ready, exchange, item_begun, item_written)
    ctx = Context(inputs, plan, outputs, sizes, strides, shared, bars)
    gl.warp_specialize(
        [
            (_consume, (ctx, c)),
            (_consume, (ctx, of_consumer(c, 1))),
            (_produce, (ctx, latent_tma, rope_tma, c)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
