"""Phase 2 of a decode in two phases: programs multiply the probabilities of phase 1 by the values.

A split is consecutive tiles (64 keys each) of one request, which are processed in pairs. A row is one (query token,
head) pair. The unit of work of phase 2 is a column block: one split, one row block of 64 rows, and one eighth of the
latent columns. Several programs can thus compute one split. Each program processes the pairs of tiles in order.

A score block is one pair of tiles and one row block. For each score block, phase 1 writes probabilities and row values
to global memory, then sets the flag of the score block. The row values are the reference scores and the sums of
probabilities of the rows. The reference score of a row is the number that is subtracted from the row's scores before
exp2.

In each program the producer (one warp) loads, and the consumer (four warps) multiplies.
"""

from __future__ import annotations

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...common.arrivals import arrive
from ...common.epilogue import (
    LEAST,
    NORMAL,
    STAYS,
    divisor_of,
    in_base_two,
    out_columns,
    partial_out_columns,
    partial_rows,
    store_columns,
    write_lse,
    write_partial_largest,
    write_partial_total,
)
from ...common.gluon_versions import partition_barrier
from ...common.loads import block_table_row_of, cache_block_of, load_columns, rows_at, zero_from
from ...common.own_length import TILE, ceil_div, own_splits, record_progress
from ...common.records import RowState
from ...common.work_items import lens_of, row_block_of
from ..main_loops.tile_scores import ROWS
from .score_blocks import NOT_WRITTEN, ROW_VALUES, ColumnBlock, fence_async_global

COLUMN_BLOCKS = gl.constexpr(8)  # number of column blocks into which the latent columns are divided
STAGES = gl.constexpr(8)  # stages (buffers) of the ring of values; each stage holds one pair of tiles
PROBABILITY_STAGES = gl.constexpr(4)  # stages of the ring of probabilities and row values; each stage holds one pair
LANES = gl.constexpr(32)  # flags that the producer reads at a time, one in each thread


@gluon.jit
@no_type_check
def num_column_blocks(sizes, splits_bound):
    """Return the number of column blocks of the batch, counted as if every request had `splits_bound` splits."""
    return sizes.num_requests * splits_bound * sizes.row_blocks * COLUMN_BLOCKS


@gluon.jit
@no_type_check
def seek_column_block(number, plan, inputs, sizes, splits_bound, HEADS: gl.constexpr):
    """Return the first column block of this program, from `number` on, whose split and rows exist.

    The result is a `ColumnBlock`. If no column block is left, the number in the result is at least `num_column_blocks`.
    """
    row_blocks = sizes.row_blocks
    none = number * 0
    request, row_block, query_start, query_end, readable = none, none, none, none, none
    begin, stop, split_tiles, splits = none, none, none + 2, none
    column_blocks = num_column_blocks(sizes, splits_bound)
    searching = number < column_blocks
    while searching:
        split = number // COLUMN_BLOCKS // row_blocks
        request, split = split // splits_bound, split % splits_bound
        row_block = number // COLUMN_BLOCKS % row_blocks
        lens = lens_of(request, inputs, sizes)
        query_start, query_end, readable = lens.query_start, lens.query_end, lens.readable
        split_tiles, splits = own_splits(lens, plan)
        begin = split * split_tiles
        stop = gl.minimum(begin + split_tiles, ceil_div(readable, TILE))
        if (split < splits) & (query_start + row_block * ROWS // HEADS < query_end):
            searching = request < 0
        else:
            number += gl.num_programs(0)
            searching = number < column_blocks
    return ColumnBlock(number, request, row_block, query_start, query_end, readable, begin, stop, splits, split_tiles)


@gluon.jit
@no_type_check
def first_column_block():
    """Return the number of the first column block of this program.

    Programs with high numbers may have no score block in phase 1. They are free first, so they get the first column
    blocks.
    """
    return gl.num_programs(0) - 1 - gl.program_id(0)


@gluon.jit
@no_type_check
def _cache_blocks_of_pair(block, pair, block_table, strides, BLOCK_SIZE: gl.constexpr):
    """Return the numbers of the cache blocks that contain the first keys of both tiles of a pair."""
    blocks, key = block_table_row_of(block, block_table, strides), (block.begin + 2 * pair) * TILE
    first = cache_block_of(key, blocks, BLOCK_SIZE)
    return first, cache_block_of(key + TILE, blocks, BLOCK_SIZE)


@gluon.jit
@no_type_check
def _cache_blocks_of_column_block(block, block_table, strides, BLOCK_SIZE: gl.constexpr):
    """Return `_cache_blocks_of_pair` for the first STAGES pairs of a column block."""
    blocks = ()
    for pair in gl.static_range(STAGES):
        blocks = blocks + (_cache_blocks_of_pair(block, pair, block_table, strides, BLOCK_SIZE),)  # noqa: RUF005
    return blocks


@gluon.jit
@no_type_check
def _await_stage(empty, step):
    """Wait until the stage of pair `step` is free: until the consumer has multiplied pair `step - STAGES`."""
    mbarrier.wait(empty.index(step % STAGES), ((step // STAGES) & 1) ^ 1)


@gluon.jit
@no_type_check
def _load_pair(
    block, pair, tile_blocks, block_table, strides, value_tma, tiles, full, first_column, step,
    BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """Issue the TMA (bulk copy) loads of the values of a pair, in the columns of a column block.

    `step` is the number of pairs that the program has loaded before.
    """
    WIDTH: gl.constexpr = value_tma.block_shape[2]
    BUFFERS: gl.constexpr = TILE // value_tma.block_shape[1]
    ELEMENTS: gl.constexpr = 2 * TILE * WIDTH
    BYTES: gl.constexpr = ELEMENTS * (tiles.dtype.primitive_bitwidth // 8)
    blocks = block_table_row_of(block, block_table, strides)
    stage = step % STAGES
    mbarrier.expect(full.index(stage), BYTES)
    for tile_index in gl.static_range(2):
        load_columns(
            block.begin + 2 * pair + tile_index, tile_blocks[tile_index], blocks, value_tma, tiles,
            (2 * stage + tile_index) * BUFFERS, full.index(stage), BLOCK_SIZE, first_column, WIDTH,
        )  # fmt: skip


@gluon.jit
@no_type_check
def _pairs_scored(flags, first_score_block, pair, count, row_blocks):
    """Read the flags of LANES pairs from `pair` on, in one warp; return the first pair whose flag is not set."""
    lane = gl.arange(0, LANES, gl.BlockedLayout([1], [32], [1], [0]))
    pointers = (flags + first_score_block + gl.minimum(pair + lane, count - 1) * row_blocks).to(gl.int64)
    flag = gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [pointers], gl.int32, is_pure=False, pack=1
    )
    seen = gl.min(gl.where(flag == NOT_WRITTEN, lane, LANES), 0)
    partition_barrier()  # every lane now sees the results of every pair whose flag was set
    fence_async_global()
    return gl.minimum(pair + seen, count)


@gluon.jit
@no_type_check
def _load_phase_one(score_block, row_values, probability_pairs, shared, full, stage):
    """Load the results of a score block: threads of one warp copy the row values, and TMA copies the probabilities."""
    element = gl.arange(0, ROW_VALUES, gl.BlockedLayout([4], [32], [1], [0]))
    source = row_values + score_block.to(gl.int64) * ROW_VALUES + element
    async_copy.async_copy_global_to_shared(shared.row_value_stages.index(stage), source)
    ELEMENTS: gl.constexpr = 2 * ROWS * TILE
    BYTES: gl.constexpr = ELEMENTS * (shared.probability_stages.dtype.primitive_bitwidth // 8)
    bar = full.index(stage)
    # Each thread adds one expected arrival to the barrier, and arrives after its copies. At `partition_barrier` the
    # threads wait for each other, so that all expected arrivals are added before `expect`, which also arrives.
    async_copy.mbarrier_arrive(bar)
    partition_barrier()
    mbarrier.expect(bar, BYTES)
    tma.async_copy_global_to_shared(
        probability_pairs, [score_block * (2 * ROWS), 0], bar, shared.probability_stages.index(stage)
    )


@gluon.jit
@no_type_check
def load_column_blocks(
    plan, inputs, value_tma, row_values, probability_pairs, sizes, strides, shared, bars, flags, pairs, splits_bound,
    HEADS: gl.constexpr, LATENT: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """Issue all loads of phase 2 for the column blocks of this program: values, probabilities and row values.

    The loads begin after the barrier `scored`, because they overwrite the shared memory of phase 1. The values are
    loaded first, because other programs may still compute the probabilities.
    """
    block_table, row_blocks, tiles = inputs.block_table, sizes.row_blocks, shared.tiles
    column_blocks = num_column_blocks(sizes, splits_bound)
    block = seek_column_block(first_column_block(), plan, inputs, sizes, splits_bound, HEADS)
    first = _cache_blocks_of_column_block(block, block_table, strides, BLOCK_SIZE)
    mbarrier.wait(bars.scored, 0)
    step = block.number * 0  # number of pairs in the earlier column blocks of this program
    while block.number < column_blocks:
        first_column = block.number % COLUMN_BLOCKS * (LATENT // COLUMN_BLOCKS)
        begin = block.begin
        count = ceil_div(block.stop - begin, 2)
        first_score_block = (block.request * pairs + begin // 2) * row_blocks + block.row_block
        # The first column block fills all stages at once. A later column block fills only half of the stages before its
        # first probabilities are loaded: the other half may still hold the last pairs of the previous column block.
        ahead = gl.where(step == 0, STAGES, STAGES - PROBABILITY_STAGES)
        for i in gl.static_range(STAGES):
            if (i < ahead) & (i < count):
                _await_stage(bars.stage_empty, step + i)
                _load_pair(
                    block, i, first[i], block_table, strides, value_tma, tiles, bars.stage_full, first_column,
                    step + i, BLOCK_SIZE,
                )  # fmt: skip
        pair, scored_pairs = begin * 0, begin * 0
        while pair < count:
            while scored_pairs <= pair:
                scored_pairs = _pairs_scored(flags, first_score_block, pair, count, row_blocks)
            # When the consumer has multiplied pair number `pair - PROBABILITY_STAGES`, it releases two stages at once:
            # the stage of values for pair `later`, and the stage of probabilities for `pair`.
            later = pair + STAGES - PROBABILITY_STAGES
            _await_stage(bars.stage_empty, step + later)
            _load_phase_one(
                first_score_block + pair * row_blocks, row_values, probability_pairs, shared, bars.probabilities_full,
                (step + pair) % PROBABILITY_STAGES,
            )  # fmt: skip
            if (later >= ahead) & (later < count):
                blocks = _cache_blocks_of_pair(block, later, block_table, strides, BLOCK_SIZE)
                _load_pair(
                    block, later, blocks, block_table, strides, value_tma, tiles, bars.stage_full, first_column,
                    step + later, BLOCK_SIZE,
                )  # fmt: skip
            pair += 1
        step += count
        block = seek_column_block(block.number + gl.num_programs(0), plan, inputs, sizes, splits_bound, HEADS)
        first = _cache_blocks_of_column_block(block, block_table, strides, BLOCK_SIZE)


@gluon.jit
@no_type_check
def _row_values(row_value_stages, stage, WHICH: gl.constexpr, LAYOUT: gl.constexpr):
    """Load one of the four row values of a pair for each row.

    WHICH 0 and 1: reference scores after tiles 0 and 1. WHICH 2 and 3: sums of probabilities of tiles 0 and 1.
    """
    each = row_value_stages._reinterpret(
        gl.float32, [4 * PROBABILITY_STAGES, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    return each.index(4 * stage + WHICH).load(LAYOUT)


@gluon.jit
@no_type_check
def _zero_unowned(values, first_row, WIDTH: gl.constexpr):
    """Overwrite key `first_row` of a tile and all later keys with zeros (`zero_from`)."""
    if first_row < TILE:
        for column in gl.static_range(0, WIDTH, 64):
            zero_from(values.slice(column, 64, dim=1), first_row)
        fence_async_shared()
        partition_barrier()


@gluon.jit
@no_type_check
def _rescaled(values, moved, before, after, scale_log2):
    """Rescale sums of (probability * value) from reference scores `before` to `after`; do nothing unless `moved`."""
    if moved:
        values = values * gl.exp2((before - after) * scale_log2)[:, None]
    return values


@gluon.jit
@no_type_check
def _write_partial(state, block, partial, plan, outputs, first_column, LATENT: gl.constexpr, VALUES: gl.constexpr):
    """Write a column block of a partial output, and with the first column block also the partial LSE."""
    rows = partial_rows(partial, block, ROWS, gl.SliceLayout(1, VALUES), True)
    written = rows.real & (first_column == 0)
    write_partial_largest(state, 1.0, rows, written, outputs)
    write_partial_total(state, rows, written, plan, outputs)
    stored = partial_out_columns(state.weighted, first_column, rows, outputs, LATENT, ROW_AXIS=0)
    store_columns(state.weighted, stored, 0, STAYS)


@gluon.jit
@no_type_check
def _write_whole(state, block, outputs, first_column, LATENT: gl.constexpr, VALUES: gl.constexpr):
    """Write a column block of the output of a request with one split, and with the first column block also the LSE."""
    rows = rows_at(block, ROWS, gl.SliceLayout(1, VALUES))
    divisor = divisor_of(state)
    # `one` is 1.0, but the compiler cannot know its value. Otherwise the compiler would fuse the product in `largest`
    # with this sum, and the bits would differ from those of `row_blocks_64`.
    one = gl.full([ROWS], gl.where(block.num_tokens > 0, 1.0, 0.0), gl.float32, state.largest.type.layout)
    log = gl.fma(state.largest, one, gl.log2(divisor))
    write_lse(log, state, rows, rows.real & (first_column == 0), block, outputs)
    stored = out_columns(state.weighted, first_column, rows, block, outputs, LATENT, ROW_AXIS=0)
    weighted = state.weighted * (1.0 / divisor)[:, None]
    store_columns(weighted, stored, 0, NORMAL)


@gluon.jit
@no_type_check
def multiply_column_blocks(
    block, inputs, plan, outputs, sizes, shared, bars, splits_bound,
    HEADS: gl.constexpr, LATENT: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """Compute all column blocks of this program from `block` on, and write their outputs or partial outputs."""
    scale_log2 = sizes.scale_log2
    row_value_stages, probability_stages, tiles = shared.row_value_stages, shared.probability_stages, shared.tiles
    WIDTH: gl.constexpr = LATENT // COLUMN_BLOCKS
    BUFFERS: gl.constexpr = tiles.shape[0] // (2 * STAGES)
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, VALUES)
    ALL: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    column_blocks = num_column_blocks(sizes, splits_bound)
    step = 0  # number of pairs multiplied so far, in all column blocks
    while block.number < column_blocks:
        first_column = block.number % COLUMN_BLOCKS * WIDTH
        length, begin = block.length, block.begin
        count = ceil_div(block.stop - begin, 2)
        largest = gl.full([ROWS], LEAST, gl.float32, ROW)
        # every warp has a copy of all reference scores, so that all warps take the same branch in `_rescaled`
        all_before = gl.full([ROWS], LEAST, gl.float32, ALL)
        first_total = gl.zeros([ROWS], gl.float32, ROW)
        second_total = gl.zeros([ROWS], gl.float32, ROW)
        values = gl.zeros([ROWS, WIDTH], gl.float32, VALUES)
        for pair in range(0, count):
            probability_stage, stage = step % PROBABILITY_STAGES, step % STAGES
            mbarrier.wait(bars.probabilities_full.index(probability_stage), (step // PROBABILITY_STAGES) & 1)
            first_reference, second_reference = (
                _row_values(row_value_stages, probability_stage, 0, ROW),
                _row_values(row_value_stages, probability_stage, 1, ROW),
            )
            all_first, all_second = (
                _row_values(row_value_stages, probability_stage, 0, ALL),
                _row_values(row_value_stages, probability_stage, 1, ALL),
            )
            moved = gl.max(((all_before != all_first) | (all_first != all_second)).to(gl.int32), 0) > 0
            all_before = all_second
            first = tiles.index(2 * stage * BUFFERS)._reinterpret(tiles.dtype, [TILE, WIDTH], SHARED)
            second = tiles.index((2 * stage + 1) * BUFFERS)._reinterpret(tiles.dtype, [TILE, WIDTH], SHARED)
            probabilities = probability_stages.index(probability_stage)
            owned = length - (begin + 2 * pair) * TILE
            mbarrier.wait(bars.stage_full.index(stage), (step // STAGES) & 1)
            _zero_unowned(first, owned, WIDTH)
            values = _rescaled(values, moved, largest, first_reference, scale_log2)
            values = warpgroup_mma(probabilities.slice(0, ROWS), first, values, is_async=True)
            first_decay, second_decay = (
                gl.exp2((largest - first_reference) * scale_log2),
                gl.exp2((largest - second_reference) * scale_log2),
            )
            first_total = first_total * first_decay + _row_values(row_value_stages, probability_stage, 2, ROW)
            second_total = second_total * second_decay + _row_values(row_value_stages, probability_stage, 3, ROW)
            first_total = first_total * gl.exp2((first_reference - second_reference) * scale_log2)
            values = warpgroup_mma_wait(0, deps=[values])
            _zero_unowned(second, owned - TILE, WIDTH)
            values = _rescaled(values, moved, first_reference, second_reference, scale_log2)
            largest = second_reference
            values = warpgroup_mma(probabilities.slice(ROWS, ROWS), second, values, is_async=True)
            values = warpgroup_mma_wait(0, deps=[values])
            partition_barrier()  # every warp finishes reading and multiplying before one warp arrives
            arrive(bars.stage_empty.index(stage))
            step += 1

        partial = record_progress(
            block.request, block.row_block, begin, begin + block.split_tiles, first_column == 0, block.split_tiles,
            block.splits, plan, sizes.num_requests,
        )  # fmt: skip
        total = first_total + second_total
        unscaled = RowState(largest, total, values)
        state = RowState(in_base_two(unscaled, scale_log2), total, values)
        row_block = row_block_of(block, sizes, HEADS)
        if partial >= 0:
            _write_partial(state, row_block, partial, plan, outputs, first_column, LATENT, VALUES)
        else:
            _write_whole(state, row_block, outputs, first_column, LATENT, VALUES)
        block = seek_column_block(block.number + gl.num_programs(0), plan, inputs, sizes, splits_bound, HEADS)
