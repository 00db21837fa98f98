"""The work loop of a consumer (the warps that multiply): it processes one work item after another.

A work item is consecutive tiles (64 keys each) of one request, for one row block. The producer (the warp that loads)
writes work items to shared memory. Four kernels with different main loops use this work loop. Each kernel passes eight
functions of its own to `run_work_items` (their arguments are explained below the table):

| function | what it does |
|---|---|
| `prefetch_next(item, wanted, ctx, c)` | If `wanted`, issue the loads of the item's queries. |
| `prepare_queries(ctx, c)` | Convert the queries in shared memory, where the matrix unit needs another form. |
| `attend(begin, stop, end, visibility, ctx, counters, c)` | Attend tiles [begin, stop); return state, counters. |
| `keep(state, kept_values, ctx, c)` | Store `state`, the *kept state*, until the next split of the item is attended. |
| `with_kept(state, kept_values, ctx, counters, c)` | Combine the kept state with `state`; return state, counters. |
| `to_base_two(state, scale_log2)` | Multiply reference scores (see below) by softmax scale / ln 2; return the state. |
| `write_partial(state, block, partial, scale_log2, ctx, c, OF_REQUEST)` | Write a partial output. |
| `write_whole(state, block, scale_log2, following, wanted, ctx, c)` | Write outputs; prefetch the next queries. |

A split is consecutive tiles of one request that give one partial output. A work item has one split, or several splits
if the decode is batch-invariant. The arguments of the eight functions are:

- `begin`, `stop`: first tile of the split, and end (exclusive) of its tiles. `end`: end of the work item's tiles.
- `state`: `RowState` or `HalfState`. A state has the *reference score* of each row: the number that is subtracted from
  the scores of the row before exp2.
- `kept_values`: pointer to global memory in which `keep` can store values.
- `following`: the next work item. `item`: the work item whose queries `prefetch_next` loads.
- `wanted`: whether the queries of `following`, or of `item`, must be loaded now.
- `block`: the `RowBlock` of the work item. `partial`: a partial index. `OF_REQUEST`: see `epilogue.partial_rows`.
- `ctx`: `Context`. `ctx.shared` has `items` and `queries`, and `ctx.bars` has `item_written` and `item_begun`.
- `c`: `Constants`.
- `counters`: counts of the main loop, such as the number of tiles processed so far. The kernel computes the phases of
  the main loop's barriers from these counts.
"""

from __future__ import annotations

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from .arrivals import arrive
from .epilogue import kept_in_memory
from .gluon_versions import partition_barrier
from .loads import visibility_of, visible_keys
from .work_items import read_item, row_block_of


@gluon.jit
@no_type_check
def as_loaded(ctx, c):
    """Leave the queries in shared memory as they are; `prepare_queries` of a kernel that multiplies them so."""


@gluon.jit
@no_type_check
def run_work_items(
    prefetch_next, prepare_queries, attend, with_kept, keep, write_partial, write_whole, to_base_two, counters, ctx, c,
    ROW: gl.constexpr, SEVERAL: gl.constexpr,
):  # fmt: skip
    """Process all work items of a program in one consumer: attend their tiles and write their outputs.

    Args:
        prefetch_next: see the module's table.
        prepare_queries: see the module's table.
        attend: see the module's table.
        with_kept: see the module's table.
        keep: see the module's table.
        write_partial: see the module's table.
        write_whole: see the module's table.
        to_base_two: see the module's table.
        counters: counters of the main loop before its first tile.
        ctx: `Context`.
        c: `Constants`.
        ROW: layout of a tensor with one value per row.
        SEVERAL: True if there are several consumers. Each consumer then loads some columns of the queries, and waits
            until the other consumers have loaded the other columns.
    """
    sizes, items, bars = ctx.sizes, ctx.shared.items, ctx.bars
    number = 0
    mbarrier.wait(bars.item_written, 0)
    item = read_item(items, 0)
    prefetch_next(item, item.request >= 0, ctx, c)
    visible, blocks = visible_keys(item, ctx.inputs, sizes, ctx.strides, c.ROWS, c.HEADS, c.BLOCK_SIZE, ROW)
    while item.request >= 0:
        begin, stop = item.begin, item.stop
        table_row = ctx.inputs.block_table + item.request.to(gl.int64) * ctx.strides.table_row
        visible = gl.minimum(visible, item.length)
        visibility = visibility_of(item, visible, blocks, table_row, sizes, ctx.strides, c.BLOCK_SIZE, SEVERAL)
        async_copy.wait_group(0)
        prepare_queries(ctx, c)
        fence_async_shared()
        partition_barrier()  # every thread executes the fence before one thread arrives
        arrive(bars.item_begun)
        if SEVERAL:
            mbarrier.wait(bars.item_begun, number & 1)

        if c.BY_LENGTH:
            # Attend one split after another. If the work item has the first split of the request (begin == 0), the
            # state is kept and combined with the next split. Otherwise each split gives a partial output.
            split_begin, split_stop = begin, gl.minimum(begin + item.split_tiles, stop)
            running = split_begin >= 0
            while running:
                running = split_stop < stop
                state, counters = attend(split_begin, split_stop, stop, visibility, ctx, counters, c)
                state = to_base_two(state, sizes.scale_log2)
                kept_values = kept_in_memory(ctx, c.LATENT)
                if (begin == 0) & (split_begin > 0):
                    if SEVERAL:
                        state, _ = with_kept(state, kept_values, ctx, counters, c)
                    else:
                        state, counters = with_kept(state, kept_values, ctx, counters, c)
                if not running:
                    mbarrier.wait(bars.item_written, (number + 1) & 1)
                # read the item again from shared memory: keeping it during `attend` would cost registers
                current = read_item(items, number)
                # While this item has another split, the next item may not be in shared memory yet. In this case
                # `following` is the current item, and `wanted` is false.
                following = read_item(items, number + gl.where(running, 0, 1))
                wanted = (split_stop >= stop) & (following.request >= 0)
                block, partial = row_block_of(current, sizes, c.HEADS), current.partial
                if running & (begin == 0):
                    keep(state, kept_values, ctx, c)
                elif running | (partial >= 0):
                    if not SEVERAL:
                        prefetch_next(following, wanted, ctx, c)
                    # If begin == 0, `state` is the sum of all splits of this item, stored at the first partial index
                    # of the request. Otherwise `state` is one split, stored at the partial index of this split.
                    partial += gl.where(begin == 0, 0, (split_begin - begin) // current.split_tiles)
                    write_partial(state, block, partial, 1.0, ctx, c, True)
                elif SEVERAL:
                    write_whole(state, block, 1.0, following, False, ctx, c)
                else:
                    write_whole(state, block, 1.0, following, wanted, ctx, c)
                if SEVERAL:
                    prefetch_next(following, wanted, ctx, c)
                split_begin = split_stop
                split_stop = gl.minimum(split_stop + current.split_tiles, stop)
            item = read_item(items, number + 1)
            visible, blocks = visible_keys(item, ctx.inputs, sizes, ctx.strides, c.ROWS, c.HEADS, c.BLOCK_SIZE, ROW)
        else:
            state, counters = attend(begin, stop, stop, visibility, ctx, counters, c)
            mbarrier.wait(bars.item_written, (number + 1) & 1)
            item = read_item(items, number + 1)
            wanted = item.request >= 0
            visible, blocks = visible_keys(item, ctx.inputs, sizes, ctx.strides, c.ROWS, c.HEADS, c.BLOCK_SIZE, ROW)
            current = read_item(items, number)
            block, partial = row_block_of(current, sizes, c.HEADS), current.partial
            if c.SCHEDULED:
                if partial < 0:
                    write_whole(state, block, sizes.scale_log2, item, wanted, ctx, c)
                else:
                    prefetch_next(item, wanted, ctx, c)
                    write_partial(state, block, partial, sizes.scale_log2, ctx, c, True)
            elif c.SPLIT:
                prefetch_next(item, wanted, ctx, c)
                write_partial(state, block, partial, sizes.scale_log2, ctx, c, False)
            else:
                write_whole(state, block, sizes.scale_log2, item, wanted, ctx, c)
        number += 1
