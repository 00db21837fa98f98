"""Decode kernel over e4m3 caches for row blocks of 16 and 32 rows: two consumers, with transposed products.

A row is one (query token, head) pair, and a row block is the rows of one request that a program processes together. The
products are transposed for the reason that `row_blocks_16_32` gives. A producer (one warp) loads tiles of 64 keys with
TMA, the GPU's bulk copy engine, into two rings of STAGES stages, one ring for each consumer. The consumers (four warps
each) take the tiles of a work item in turn (`e4m3_tiles`). One consumer alone would wait for the results of
instructions during a third of its time.
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
from ...common.work_loop import run_work_items
from ..arguments import ANY_ALIGNMENT, ANY_VALUE
from .e4m3_tiles import CHUNK, STAGES, Bars, Shared, TileCounters, attend_tiles
from .epilogue_16_32_e4m3 import (
    keep,
    prefetch_next,
    prepare_queries,
    to_base_two,
    with_kept,
    write_partial,
    write_whole,
)

LONG = gl.constexpr(16)  # a first work item of at least this many tiles is long: see `row_blocks_16_32`
EXCHANGED_VALUES = gl.constexpr(8192)  # float32 values that both consumers can write before they meet


@gluon.jit
@no_type_check
def _consume(ctx, c):
    """Run a consumer: attend every second tile of all work items of the program."""
    ROWS: gl.constexpr = c.ROWS
    TRANSPOSED: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    counters = TileCounters(0, 0)
    run_work_items(
        prefetch_next, prepare_queries, attend_tiles, with_kept, keep, write_partial, write_whole, to_base_two,
        counters, ctx, c, gl.SliceLayout(0, TRANSPOSED), True,
    )  # fmt: skip


@gluon.jit
@no_type_check
def _produce(ctx, latent_tma, rope_tma, c):
    """Run the producer (one warp): find the work items, write them for the consumers, and load their tiles."""
    sizes, shared, bars = ctx.sizes, ctx.shared, ctx.bars
    BUFFERS: gl.constexpr = shared.k_latent.shape[0] // (2 * STAGES)
    ROPE_BUFFERS: gl.constexpr = shared.k_rope.shape[0] // (2 * STAGES)
    WORDS: gl.constexpr = (c.LATENT + c.ROPE) // 2  # of two elements, for each key
    BYTES: gl.constexpr = TILE * WORDS * (shared.k_latent.dtype.primitive_bitwidth // 8)
    position = first_position(ctx.plan, sizes, c.SCHEDULED, 1)
    position, item = seek_item(position, ctx.plan, ctx.inputs, sizes, 1, c.ROWS, c.HEADS, c.BY_LENGTH, c.SCHEDULED, 1)
    write_item(shared.items, 0, item, bars.item_written)
    first_tiles = 0  # tiles that were loaded for consumer 0
    second_tiles = 0  # tiles that were loaded for consumer 1
    number = 0
    while position.more:
        begin, stop = item.begin, item.stop
        blocks = block_table_row_of(item, ctx.inputs.block_table, ctx.strides)
        cache_block = cache_block_of(begin * TILE, blocks, c.BLOCK_SIZE)
        next_block = cache_block_of((begin + 1) * TILE, blocks, c.BLOCK_SIZE)
        queries_first = (number == 0) & (stop - begin >= LONG)
        for tile in range(begin, stop):
            consumer = (tile - begin) & 1
            tiles = gl.where(consumer == 0, first_tiles, second_tiles)
            stage = consumer * STAGES + tiles % STAGES
            bar = bars.full.index(stage)
            if queries_first & (tile == begin + 1):
                mbarrier.wait(bars.item_begun, 0)
            mbarrier.wait(bars.empty.index(stage), ((tiles // STAGES) & 1) ^ 1)
            mbarrier.expect(bar, BYTES)
            load_columns(
                tile, cache_block, blocks, latent_tma, shared.k_latent, stage * BUFFERS, bar, c.BLOCK_SIZE, 0,
                c.LATENT // 2,
            )  # fmt: skip
            if c.ROPE > 0:
                load_columns(
                    tile, cache_block, blocks, rope_tma, shared.k_rope, stage * ROPE_BUFFERS, bar, c.BLOCK_SIZE,
                    c.LATENT // 2, c.ROPE // 2,
                )  # fmt: skip
            cache_block = next_block
            next_block = cache_block_of((tile + 2) * TILE, blocks, c.BLOCK_SIZE)
            first_tiles += 1 - consumer
            second_tiles += consumer
        position = next_position(position, ctx.plan, sizes, c.SCHEDULED, 1)
        position, item = seek_item(
            position, ctx.plan, ctx.inputs, sizes, 1, c.ROWS, c.HEADS, c.BY_LENGTH, c.SCHEDULED, 1
        )
        mbarrier.wait(bars.item_begun, number & 1)  # the consumers no longer read the item that is overwritten
        number += 1
        write_item(shared.items, number, item, bars.item_written)


@gluon.jit(do_not_specialize=ANY_VALUE, do_not_specialize_on_alignment=[*ANY_ALIGNMENT, "kv_scale"])
@no_type_check
def _row_blocks_16_32_e4m3_kernel(
    ql_nope, q_pe, latent_tma, rope_tma, block_table, seq_lens, query_start_loc, visible_lens,
    tile_ranges, split_offsets, written,
    num_tokens, num_blocks, num_requests, max_keys, num_splits, row_blocks, request_rows, num_partials,
    small_tiles, small_splits, large_tiles, max_splits, scale_log2,
    query_strides, table_row_stride, table_stride, kv_scale, c: gl.constexpr,
):  # fmt: skip
    """Attend all work items, in row blocks of `c.ROWS` rows, and write their outputs or partial outputs.

    `fast.kernels.combine` adds the partial outputs afterwards. `arguments.py` describes the arguments; `kv_scale` is
    the pointer to the scale of the cache.
    """
    LATENT: gl.constexpr = c.LATENT
    ROWS: gl.constexpr = c.ROWS
    BOX_KEYS: gl.constexpr = latent_tma.block_shape[1]
    BOX_WORDS: gl.constexpr = latent_tma.block_shape[2]
    BOXES: gl.constexpr = 2 * STAGES * (TILE // BOX_KEYS)
    dtype: gl.constexpr = ql_nope.dtype.element_ty
    ROUND: gl.constexpr = min(EXCHANGED_VALUES, ROWS * LATENT) // (CHUNK * ROWS)
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    k_latent = gl.allocate_shared_memory(
        gl.int16, [BOXES * (LATENT // 2 // BOX_WORDS), 1, BOX_KEYS, BOX_WORDS], latent_tma.layout
    )
    q_latent = gl.allocate_shared_memory(dtype, [1, ROWS, LATENT], gl.NVMMASharedLayout(128, 16))
    k_rope, q_rope, rope_halves = k_latent, q_latent, q_latent
    if c.ROPE > 0:
        k_rope = gl.allocate_shared_memory(gl.int16, [BOXES, 1, BOX_KEYS, c.ROPE // 2], rope_tma.layout)
        q_rope = gl.allocate_shared_memory(dtype, [1, ROWS, c.ROPE], gl.NVMMASharedLayout(2 * c.ROPE, 16))
        rope_halves = gl.allocate_shared_memory(gl.float16, [2, ROWS, c.ROPE // 2], gl.NVMMASharedLayout(c.ROPE, 16))
    weights = gl.allocate_shared_memory(gl.float16, [2, TILE, ROWS], gl.NVMMASharedLayout(2 * ROWS, 16))
    row_values = gl.allocate_shared_memory(gl.float32, [5, ROWS], PLAIN)
    # A warp accesses 8 columns by 8 rows at once; the layout spreads these 64 numbers evenly over the 32 banks.
    exchanged = gl.allocate_shared_memory(
        gl.float32, [ROUND, CHUNK, ROWS], gl.SwizzledSharedLayout(8, 32 // ROWS, ROWS // 8, [1, 0])
    )
    kept = row_values
    if c.BY_LENGTH:
        kept = gl.allocate_shared_memory(gl.float32, [4, ROWS], PLAIN)
    full = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], BAR)
    empty = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], BAR)
    items = gl.allocate_shared_memory(gl.int32, [ITEMS_HELD * ITEM_FIELDS, 1], PLAIN)
    exchange = gl.allocate_shared_memory(gl.int64, [1], BAR)
    item_begun = gl.allocate_shared_memory(gl.int64, [1], BAR)
    item_written = gl.allocate_shared_memory(gl.int64, [1], BAR)
    for i in gl.static_range(2 * STAGES):
        mbarrier.init(full.index(i), 1)
        mbarrier.init(empty.index(i), 1)
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
    shared = Shared(queries, rope_halves, k_latent, k_rope, weights, row_values, exchanged, kept, items, scale)
    bars = Bars(full, empty, exchange, item_begun, item_written)
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
