"""The work loop of consumers: work item after work item, split after split, whatever the main loop is.

A main loop is six functions, which a consumer passes by name:

| function | does |
|---|---|
| `prefetch_next(item, wanted, ctx, c)` | issues the loads of an item's queries, if they are wanted |
| `attend(begin, stop, end, visibility, ctx, counters, c)` | attends tiles; returns the state and the counters |
| `with_kept(state, kept_values, ctx, counters, c)` | adds the state that was kept; returns the same two |
| `keep(state, kept_values, ctx, c)` | keeps a state for the next split of the item |
| `to_base_two(state, scale_log2)` | returns the state with its largest scores in base 2 |
| `write_partial(state, block, partial, scale_log2, ctx, c, OF_REQUEST)` | writes a partial output |
| `write_whole(state, block, scale_log2, following, wanted, ctx, c)` | writes outputs; prefetches the next queries |

`ctx` is a `Context` whose `shared` has `items` and `queries`, and whose `bars` have `item_written` and `item_begun`;
`c` are `Constants`. `counters` count what the barriers of the main loop count.
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
def run_work_items(
    prefetch_next, attend, with_kept, keep, write_partial, write_whole, to_base_two, counters, ctx, c,
    ROW: gl.constexpr, SEVERAL: gl.constexpr,
):  # fmt: skip
    """Attend every work item of a program in one consumer.

    Args:
        prefetch_next: see above.
        attend: see above.
        with_kept: see above.
        keep: see above.
        write_partial: see above.
        write_whole: see above.
        to_base_two: returns a state with its largest scores in base 2.
        counters: of the main loop, at its beginning.
        ctx: arguments, shared memory and barriers.
        c: what the kernel is compiled for.
        ROW: layout of a value for each row.
        SEVERAL: several consumers share the queries; each then waits until all have loaded their columns.
    """
    sizes, items, bars = ctx.sizes, ctx.shared.items, ctx.bars
    number = 0
    mbarrier.wait(bars.item_written, 0)
    item = read_item(items, 0)
    prefetch_next(item, item.request >= 0, ctx, c)
    visible, pages = visible_keys(item, ctx.inputs, sizes, ctx.strides, c.ROWS, c.HEADS, c.BLOCK_SIZE, ROW)
    while item.request >= 0:
        begin, stop = item.begin, item.stop
        table_row = ctx.inputs.block_table + item.request.to(gl.int64) * ctx.strides.table_row
        visible = gl.minimum(visible, item.length)
        visibility = visibility_of(item, visible, pages, table_row, sizes, ctx.strides, c.BLOCK_SIZE, SEVERAL)
        async_copy.wait_group(0)
        fence_async_shared()
        partition_barrier()  # the fence of every thread, before one of them arrives
        arrive(bars.item_begun)
        if SEVERAL:
            mbarrier.wait(bars.item_begun, number & 1)

        if c.BY_LENGTH:
            # split by split: each state waits for the next one's, or is a partial output by itself (`work_items`)
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
                # reloaded: registers that are held through a split are dear
                current = read_item(items, number)
                # the next item is not there before the last split, and nothing is prefetched before
                following = read_item(items, number + gl.where(running, 0, 1))
                wanted = (split_stop >= stop) & (following.request >= 0)
                block, partial = row_block_of(current, sizes, c.HEADS), current.partial
                if running & (begin == 0):
                    keep(state, kept_values, ctx, c)
                elif running | (partial >= 0):
                    if not SEVERAL:
                        prefetch_next(following, wanted, ctx, c)
                    # the first index of the request where splits are combined, else each split's own
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
            visible, pages = visible_keys(item, ctx.inputs, sizes, ctx.strides, c.ROWS, c.HEADS, c.BLOCK_SIZE, ROW)
        else:
            state, counters = attend(begin, stop, stop, visibility, ctx, counters, c)
            mbarrier.wait(bars.item_written, (number + 1) & 1)
            item = read_item(items, number + 1)
            wanted = item.request >= 0
            visible, pages = visible_keys(item, ctx.inputs, sizes, ctx.strides, c.ROWS, c.HEADS, c.BLOCK_SIZE, ROW)
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
