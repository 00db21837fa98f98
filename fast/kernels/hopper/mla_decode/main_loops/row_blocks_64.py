"""Decode kernel for row blocks of 64 rows: two consumers process tiles of 64 keys in pairs (`tile_pairs`).

A row is one (query token, head) pair, and a row block is the rows of one request that a program processes together. The
two consumers (four warps each) process the same 64 rows. Each consumer accumulates one half of the latent columns of
the output. A producer (one warp) loads the tiles with TMA, the GPU's bulk copy engine.

Shared memory has room for only two tiles. A tile is therefore loaded in four quarters of its latent columns, and each
quarter has its own barriers. When the consumers have finished with one quarter of a tile, the producer can already load
the same quarter of a later tile. The README of `mla_decode` shows the timeline and the barriers.

If multiprocessors would be idle otherwise, two programs compute the scores of the same tiles (SLICES = 2). Each program
then multiplies the probabilities by only one slice of every quarter: one half of the columns of the quarter. The words
"half" and "quarter" of the output then mean only the columns that the program computes.
"""

from __future__ import annotations

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ...common.dependent_launch import follow_kernel
from ...common.l2_prefetch import prefetch_first_item
from ...common.loads import block_table_row_of, cache_block_of
from ...common.own_length import TILE
from ...common.records import (
    Context,
    Inputs,
    Outputs,
    PagedCache,
    Queries,
    Sizes,
    SplitPlan,
    SplitRule,
    Strides,
    of_consumer,
)
from ...common.work_items import ITEM_FIELDS, ITEMS_HELD, first_item, next_position, seek_item, write_item
from ...common.work_loop import as_loaded, run_work_items
from ..arguments import ANY_ALIGNMENT, ANY_VALUE
from .epilogue_64 import keep, prefetch_next, to_base_two, with_kept, write_partial, write_whole
from .tile_pairs import Bars, PairCounters, Shared, attend_pairs
from .tile_scores import ROWS, load_quarter

LONG = gl.constexpr(8)  # a first work item of at least this many tiles is long: see `produce`


@gluon.jit
@no_type_check
def consume(ctx, c):
    """Run a consumer: compute scores of tile c.CONSUMER of each pair, and accumulate half c.CONSUMER of the columns."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    counters = PairCounters(0, 0)
    run_work_items(
        prefetch_next, as_loaded, attend_pairs, with_kept, keep, write_partial, write_whole, to_base_two, counters, ctx,
        c, gl.SliceLayout(1, SCORES), True,
    )  # fmt: skip


@gluon.jit
@no_type_check
def _load_quarter(
    tile, cache_block, blocks, latent_tma, rope_tma, ctx, phase, TILE_INDEX: gl.constexpr, NUMBER: gl.constexpr, c
):
    """Wait until the buffer of quarter NUMBER of a tile is free, then issue the loads of this quarter."""
    shared, bars = ctx.shared, ctx.bars
    mbarrier.wait(bars.empty.index(4 * TILE_INDEX + (2 * TILE_INDEX + NUMBER) % 4), phase)
    load_quarter(
        tile, cache_block, blocks, latent_tma, rope_tma, (shared.latents, shared.rope_tiles), bars.full, TILE_INDEX,
        NUMBER, c.LATENT, c.ROPE, c.BLOCK_SIZE,
    )  # fmt: skip


@gluon.jit
@no_type_check
def produce(ctx, latent_tma, rope_tma, c):
    """Run the producer (one warp): find the work items, write them for the consumers, and load pairs of tiles."""
    sizes, items, bars = ctx.sizes, ctx.shared.items, ctx.bars
    position, item = first_item(ctx.plan, ctx.inputs, sizes, 2, ROWS, c.HEADS, c.BY_LENGTH, c.SCHEDULED, c.SLICES)
    write_item(items, 0, item, bars.item_written)
    pair = 0
    number = 0
    while position.more:
        begin, stop = item.begin, item.stop
        blocks = block_table_row_of(item, ctx.inputs.block_table, ctx.strides)
        next_blocks = (
            cache_block_of(begin * TILE, blocks, c.BLOCK_SIZE),
            cache_block_of((begin + 1) * TILE, blocks, c.BLOCK_SIZE),
        )
        # All programs load their first tiles at the same time, which delays the loads of the queries in the consumers.
        # If the first work item is long, the producer therefore waits until the queries have arrived: before the second
        # tile, and with several row blocks per request already before the first tile. With SLICES = 2 there are so few
        # programs that the queries are not delayed.
        queries_first = (c.SLICES == 1) & (number == 0) & (stop - begin >= LONG)
        if queries_first & (sizes.row_blocks > 1):
            mbarrier.wait(bars.item_begun, 0)
        for first in range(begin, stop, 2):
            phase = (pair & 1) ^ 1
            tile_blocks = next_blocks
            next_blocks = (
                cache_block_of((first + 2) * TILE, blocks, c.BLOCK_SIZE),
                cache_block_of((first + 3) * TILE, blocks, c.BLOCK_SIZE),
            )
            for tile_index in gl.static_range(2):
                if (tile_index == 1) & queries_first & (first == begin):
                    mbarrier.wait(bars.item_begun, 0)
                for quarter in gl.static_range(4):
                    _load_quarter(
                        first + tile_index,
                        tile_blocks[tile_index],
                        blocks,
                        latent_tma,
                        rope_tma,
                        ctx,
                        phase,
                        tile_index,
                        quarter,
                        c,
                    )
            pair += 1
        position = next_position(position, ctx.plan, sizes, c.SCHEDULED, c.SLICES)
        position, item = seek_item(
            position, ctx.plan, ctx.inputs, sizes, 2, ROWS, c.HEADS, c.BY_LENGTH, c.SCHEDULED, c.SLICES
        )
        mbarrier.wait(bars.item_begun, number & 1)  # the consumers no longer read the item that is overwritten
        number += 1
        write_item(items, number, item, bars.item_written)


@gluon.jit
@no_type_check
def shared_memory(inputs, strides, latent_tma, c):
    """Allocate the shared memory of a program and initialise its barriers; return `Shared` and `Bars`.

    Args:
        inputs: `Inputs`.
        strides: `Strides`.
        latent_tma: descriptor of the latent columns of the cache.
        c: `Constants`.
    """
    dtype: gl.constexpr = latent_tma.dtype
    BOX_KEYS: gl.constexpr = latent_tma.block_shape[1]
    BOX_COLUMNS: gl.constexpr = latent_tma.block_shape[2]
    TILE_SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    ROPE_SHARED: gl.constexpr = gl.NVMMASharedLayout(2 * c.ROPE if c.ROPE > 0 else 128, 16)
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    boxes: gl.constexpr = 2 * (TILE // BOX_KEYS) * (c.LATENT // BOX_COLUMNS)
    latents = gl.allocate_shared_memory(dtype, [boxes, 1, BOX_KEYS, BOX_COLUMNS], latent_tma.layout)
    q_latent = gl.allocate_shared_memory(dtype, [1, ROWS, c.LATENT], TILE_SHARED)
    # for each tile: first the rope part of its keys, later its probabilities
    rope_tiles = gl.allocate_shared_memory(dtype, [2, TILE, 64], TILE_SHARED)
    q_rope = q_latent
    if c.ROPE > 0:
        q_rope = gl.allocate_shared_memory(dtype, [1, ROWS, c.ROPE], ROPE_SHARED)
    row_values = gl.allocate_shared_memory(gl.float32, [4, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    kept = row_values
    if c.BY_LENGTH:
        kept = gl.allocate_shared_memory(gl.float32, [4, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [8, 1], BAR)  # one for each quarter of both tiles
    empty = gl.allocate_shared_memory(gl.int64, [8, 1], BAR)
    probabilities_ready = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)  # one for each tile
    sums_ready = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    items = gl.allocate_shared_memory(gl.int32, [ITEMS_HELD * ITEM_FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    item_begun = gl.allocate_shared_memory(gl.int64, [1], BAR)
    item_written = gl.allocate_shared_memory(gl.int64, [1], BAR)
    for i in gl.static_range(8):
        mbarrier.init(full.index(i), 1)
        mbarrier.init(empty.index(i), 1)
    for i in gl.static_range(2):
        mbarrier.init(probabilities_ready.index(i), 1)
        mbarrier.init(sums_ready.index(i), 1)
    mbarrier.init(item_begun, 2)
    mbarrier.init(item_written, 1)
    fence_async_shared()

    queries = Queries(inputs.ql_nope, inputs.q_pe, q_latent, q_rope, strides)
    shared = Shared(queries, latents, rope_tiles, row_values, kept, items)
    bars = Bars(full, empty, probabilities_ready, item_begun, sums_ready, item_written)
    return shared, bars


@gluon.jit(do_not_specialize=[*ANY_VALUE, "block_stride", "key_stride"], do_not_specialize_on_alignment=ANY_ALIGNMENT)
@no_type_check
def _row_blocks_64_kernel(
    ql_nope, q_pe, latent_tma, rope_tma, block_table, seq_lens, query_start_loc, visible_lens,
    tile_ranges, split_offsets, written,
    num_tokens, num_blocks, num_requests, max_keys, num_splits, row_blocks, request_rows, num_partials,
    small_tiles, small_splits, large_tiles, max_splits, scale_log2,
    query_strides, table_row_stride, table_stride,
    out_rows, kv_cache, block_stride, key_stride, c: gl.constexpr,
):  # fmt: skip
    """Attend all work items, in row blocks of 64 rows, and write their outputs or partial outputs.

    `fast.kernels.combine` adds the partial outputs afterwards. `mla_decode/arguments.py` describes the arguments. If
    `out_rows` is a TMA descriptor, TMA writes the outputs; if `out_rows` is None, plain stores write the outputs.
    """
    inputs = Inputs(ql_nope, q_pe, block_table, seq_lens, query_start_loc, visible_lens)
    strides = Strides(
        query_strides.latent_token, query_strides.latent_head, query_strides.rope_token, query_strides.rope_head,
        table_row_stride, table_stride,
    )  # fmt: skip
    shared, bars = shared_memory(inputs, strides, latent_tma, c)
    progress = written.partial_lse + 2 * num_partials.to(gl.int64) * request_rows
    progress = progress.to(gl.pointer_type(gl.int32), bitcast=True)
    rule = SplitRule(small_tiles, small_splits, large_tiles, max_splits)
    plan = SplitPlan(tile_ranges, split_offsets, num_splits, num_partials, progress, rule)
    outputs = Outputs(written.out, written.lse, written.partial_out, written.partial_lse, out_rows)
    sizes = Sizes(num_tokens, num_blocks, num_requests, max_keys, row_blocks, request_rows, scale_log2)
    cache = PagedCache(kv_cache, block_stride, key_stride)
    if c.HEADS <= ROWS and not (c.BY_LENGTH or c.SCHEDULED or c.SPLIT):
        prefetch_first_item(inputs, cache, sizes, strides, ROWS, c.HEADS, c.LATENT, c.ROPE, c.BLOCK_SIZE)
    follow_kernel()
    ctx = Context(inputs, plan, outputs, sizes, strides, shared, bars)
    gl.warp_specialize(
        [
            (consume, (ctx, c)),
            (consume, (ctx, of_consumer(c, 1))),
            (produce, (ctx, latent_tma, rope_tma, c)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
