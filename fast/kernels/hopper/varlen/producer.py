"""The producer (one warp): it finds work items, and loads queries, keys and values with TMA (bulk copy engine).

Packed keys follow each other without padding, so a box of 128 keys may contain keys of the next request:

- Rows of K behind the end of the request give scores that the consumers replace by -inf.
- Rows of V behind the end of the request would be multiplied by the probability 0, and 0 * NaN is NaN. The producer
  overwrites these rows with zeros in shared memory, before the consumers may read the tile.
"""

from __future__ import annotations

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from ..common.arrivals import arrive
from ..common.gluon_versions import partition_barrier
from .records import CONSUMERS, ROWS, Item
from .work_items import item_of, write_item

ATOM_ROWS = gl.constexpr(8)  # rows after which the permutation of a swizzled layout repeats
ATOM_COLUMNS = gl.constexpr(64)  # 16-bit columns that are contiguous in shared memory (128 bytes)


@gluon.jit
@no_type_check
def _load_queries(item, loads, tensors, ctx, c):
    """Load the rows of both consumers; `loads` is the number of query tiles loaded so far.

    Rows behind the end of the request are loaded too, but their outputs are not stored.
    """
    shared, bars = ctx.shared, ctx.bars
    BYTES: gl.constexpr = ROWS * (c.FIRST + c.SECOND) * (tensors.v.dtype.primitive_bitwidth // 8)
    for consumer in gl.static_range(CONSUMERS):
        mbarrier.wait(bars.q_empty.index(consumer), (loads & 1) ^ 1)
        full = bars.q_full.index(consumer)
        mbarrier.expect(full, BYTES)
        token = item.token + consumer * ROWS
        tma.async_copy_global_to_shared(tensors.q_first, [item.head, token, 0], full, shared.q_first.index(consumer))
        if c.SECOND > 0:
            tma.async_copy_global_to_shared(
                tensors.q_second, [item.head, token, c.FIRST], full, shared.q_second.index(consumer)
            )


@gluon.jit
@no_type_check
def _load_keys(tile, item, count, tensors, ctx, c):
    """Load key tile `tile`, the `count`-th key tile of this program, as soon as its stage is empty."""
    shared, bars = ctx.shared, ctx.bars
    BYTES: gl.constexpr = c.KEYS * (c.FIRST + c.SECOND) * (tensors.v.dtype.primitive_bitwidth // 8)
    stage, lap = count % c.STAGES, count // c.STAGES
    mbarrier.wait(bars.k_empty.index(stage), (lap & 1) ^ 1)
    full = bars.k_full.index(stage)
    mbarrier.expect(full, BYTES)
    key = item.key_start + tile * c.KEYS
    tma.async_copy_global_to_shared(tensors.k_first, [item.head, key, 0], full, shared.k_first.index(stage))
    if c.SECOND > 0:
        if c.SHARED:
            tma.async_copy_global_to_shared(tensors.k_second, [0, key, 0], full, shared.k_second.index(stage))
        else:
            tma.async_copy_global_to_shared(
                tensors.k_second, [item.head, key, c.FIRST], full, shared.k_second.index(stage)
            )


@gluon.jit
@no_type_check
def _load_values(tile, item, count, tails, tensors, ctx, c):
    """Load the values of key tile `tile`; return the new number of tails.

    A tail is the last tile of a request whose length is no multiple of KEYS. Its rows behind the end of the request
    become zeros. A tail arrives at the barrier `tail_loaded`, which only the producer uses; the producer then arrives
    at `v_full` itself.
    """
    shared, bars = ctx.shared, ctx.bars
    BYTES: gl.constexpr = c.KEYS * c.VALUE * (tensors.v.dtype.primitive_bitwidth // 8)
    stage, lap = count % c.STAGES, count // c.STAGES
    mbarrier.wait(bars.v_empty.index(stage), (lap & 1) ^ 1)
    full, loaded, buffer = bars.v_full.index(stage), bars.tail_loaded.index(0), shared.v.index(stage)
    coordinates = [item.head, item.key_start + tile * c.KEYS, 0]
    owned = item.keys - tile * c.KEYS
    if owned < c.KEYS:
        mbarrier.expect(loaded, BYTES)
        tma.async_copy_global_to_shared(tensors.v, coordinates, loaded, buffer)
        mbarrier.wait(loaded, tails & 1)
        _zero_from(owned, stage, shared.v, c)
        tails += 1
        fence_async_shared()
        partition_barrier()  # every thread executes the fence before one thread arrives
        arrive(full)
    else:
        mbarrier.expect(full, BYTES)
        tma.async_copy_global_to_shared(tensors.v, coordinates, full, buffer)
    return tails


@gluon.jit
@no_type_check
def _zero_from(first_row, stage, v, c):
    """Overwrite the rows of a value tile with zeros, from `first_row` on.

    A swizzled tile consists of atoms of 8 rows and 64 columns (1024 bytes). All atoms of the first 64 columns come
    first, then all atoms of the next 64 columns.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    SLABS: gl.constexpr = c.VALUE // ATOM_COLUMNS
    ATOMS: gl.constexpr = c.KEYS // ATOM_ROWS  # of a slab, which is 64 columns of all rows
    atoms = v._reinterpret(v.dtype, [c.STAGES * SLABS * ATOMS, ATOM_ROWS, ATOM_COLUMNS], SHARED)
    row = gl.arange(0, ATOM_ROWS, gl.SliceLayout(1, LAYOUT))
    nothing = gl.zeros([ATOM_ROWS, ATOM_COLUMNS], v.dtype, LAYOUT)
    for slab in gl.static_range(SLABS):
        first_atom = (stage * SLABS + slab) * ATOMS
        atom = first_row // ATOM_ROWS
        mixed = atoms.index(first_atom + atom)  # has rows of this request, and rows that become zeros
        mixed.store(gl.where((row < first_row % ATOM_ROWS)[:, None], mixed.load(LAYOUT), nothing))
        for other in range(atom + 1, ATOMS):
            atoms.index(first_atom + other).store(nothing)


@gluon.jit
@no_type_check
def _next_index(num_items, ctx):
    """Return the position of the next work item of this program; `num_items` or more if no work item is left.

    The first work items belong to the programs in turn. Each program then takes the next work item that no program has
    taken. So the programs end at about the same time, although work items have different numbers of keys.
    """
    programs = gl.num_programs(0)
    index = num_items
    if num_items > programs:
        index = programs + gl.atomic_add(ctx.taken, 1, sem="relaxed")
    return index


@gluon.jit
@no_type_check
def produce(tensors, ctx, c):
    """Run the producer: find the work items, write them for the consumers, and load their tiles.

    The tiles of an item come from the last to the first, in the order in which the consumers need them: keys 0,
    queries, keys 1, values 0, keys 2, values 1, ..., the last values. Keys 0 come before the queries, because the stage
    of keys 0 is empty earlier than the memory of the queries.
    """
    sizes, bars, items = ctx.sizes, ctx.bars, ctx.shared.items
    number = 0  # work items written so far
    loads = 0  # query tiles loaded so far
    count = 0  # key tiles loaded so far
    tails = 0
    num_items = sizes.num_candidates * sizes.num_heads
    if c.SPLIT:
        num_items = num_items * sizes.num_splits
    index = gl.program_id(0)
    while index < num_items:
        item = item_of(index, ctx, c)
        if item.rows > 0:
            if number > 0:  # the consumers no longer read the item that is overwritten
                mbarrier.wait(bars.item_begun, (number - 1) & 1)
            write_item(items, number, item, bars.item_written, c)
            number += 1
            steps, end = item.steps, item.end
            if steps > 0:
                for step in range(steps + 1):
                    if step < steps:
                        _load_keys(end - 1 - step, item, count + step, tensors, ctx, c)
                    if step == 0:
                        _load_queries(item, loads, tensors, ctx, c)
                    else:
                        tails = _load_values(end - step, item, count + step - 1, tails, tensors, ctx, c)
                count += steps
                loads += 1
        index = _next_index(num_items, ctx)
    if number > 0:
        mbarrier.wait(bars.item_begun, (number - 1) & 1)
    none = number * 0
    last = Item(none - 1, none, none, none, none, none, none, none, none)
    write_item(items, number, last, bars.item_written, c)
