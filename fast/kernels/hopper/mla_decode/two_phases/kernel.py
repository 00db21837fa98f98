"""The two kernels of a decode in two phases: `_clear_kernel` clears words, then `_two_phases_kernel` decodes.

A word is a 32-bit value in global memory; a program can wait until another program changes the word.

In phase 1, a program computes at most one score block: one pair of tiles (64 keys each) and one row block of 64 rows.
In phase 2, a program computes column blocks: a column block is an eighth of the latent columns of the output of one
split, for one row block.
"""

from __future__ import annotations

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ...common.arrivals import arrive
from ...common.dependent_launch import follow_kernel_early
from ...common.loads import prefetch_queries
from ...common.own_length import TILE
from ...common.records import Inputs, Outputs, Queries, Sizes, SplitPlan, SplitRule, Strides
from ..main_loops.tile_scores import ROWS
from .column_blocks import (
    COLUMN_BLOCKS,
    PROBABILITY_STAGES,
    STAGES,
    first_column_block,
    load_column_blocks,
    multiply_column_blocks,
    seek_column_block,
)
from .score_blocks import (
    NOT_WRITTEN,
    QUARTERS,
    ROW_VALUES,
    Bars,
    PhaseOne,
    Shared,
    compute_score_block,
    flags_behind,
    load_score_block,
    score_block_of_program,
)

CLEARED = gl.constexpr(1024)  # words that a program of `_clear_kernel` clears


@gluon.jit(do_not_specialize=["num_words"])
@no_type_check
def _clear_kernel(words, num_words):
    """Set the words of all score blocks to NOT_WRITTEN."""
    follow_kernel_early()
    word = gl.program_id(0) * CLEARED + gl.arange(0, CLEARED, gl.BlockedLayout([4], [32], [4], [0]))
    gl.store(words + word, gl.full([CLEARED], NOT_WRITTEN, gl.int32, word.type.layout), mask=word < num_words)


@gluon.jit
@no_type_check
def _consume(
    inputs, plan, words, phase_one, outputs, sizes, strides, shared, bars, pairs, splits_bound, c,
):  # fmt: skip
    """Run the consumer (four warps): compute the products of both phases."""
    item, has_block = score_block_of_program(plan, inputs, sizes, pairs, c.HEADS)
    if has_block:
        prefetch_queries(item, shared.queries, sizes, ROWS, c.HEADS, 0, c.LATENT, c.ROPE, 0)
    block = seek_column_block(first_column_block(), plan, inputs, sizes, splits_bound, c.HEADS)
    if has_block:
        compute_score_block(
            item, inputs, words, phase_one, sizes, strides, shared, bars, pairs, c.HEADS, c.LATENT, c.ROPE, c.BLOCK_SIZE
        )
    else:
        arrive(bars.scored)
    multiply_column_blocks(
        block, inputs, plan, outputs, sizes, shared, bars, splits_bound, c.HEADS, c.LATENT, c.BLOCK_SIZE
    )


@gluon.jit
@no_type_check
def _produce(
    inputs, plan, words, row_values, sizes, strides, latent_tma, rope_tma, value_tma, probability_pairs, shared,
    bars, pairs, splits_bound, c,
):  # fmt: skip
    """Run the producer (one warp): issue the loads of both phases."""
    flags = flags_behind(words, sizes, pairs)
    load_score_block(
        plan, inputs, latent_tma, rope_tma, sizes, strides, (shared.latents, shared.rope_tiles), bars.full, pairs,
        c.HEADS, c.LATENT, c.ROPE, c.BLOCK_SIZE,
    )  # fmt: skip
    load_column_blocks(
        plan, inputs, value_tma, row_values, probability_pairs, sizes, strides, shared, bars, flags, pairs,
        splits_bound, c.HEADS, c.LATENT, c.BLOCK_SIZE,
    )  # fmt: skip


@gluon.jit(
    do_not_specialize=[
        "num_tokens", "num_blocks", "num_requests", "max_keys", "row_blocks", "request_rows", "num_partials",
        "small_tiles", "small_splits", "large_tiles", "max_splits", "table_row_stride", "pairs", "splits_bound",
    ],
    do_not_specialize_on_alignment=["block_table", "seq_lens", "query_start_loc", "visible_lens"],
)  # fmt: skip
@no_type_check
def _two_phases_kernel(
    ql_nope, q_pe, latent_tma, rope_tma, block_table, seq_lens, query_start_loc, visible_lens,
    written, value_tma, probability_pairs, words, row_values, probabilities,
    num_tokens, num_blocks, num_requests, max_keys, row_blocks, request_rows, num_partials, pairs, splits_bound,
    small_tiles, small_splits, large_tiles, max_splits, scale_log2,
    query_strides, table_row_stride, table_stride, c: gl.constexpr,
):  # fmt: skip
    """In each program, compute at most one score block of a batch-invariant decode, and then column blocks.

    If a request has several splits, each split becomes a partial output, and `fast.kernels.combine` adds these partial
    outputs. The launcher guarantees:

    - All programs run at the same time, and there is at least one program for each score block.
    - All `words` are NOT_WRITTEN at the beginning.
    - No request has more than `splits_bound` splits or more than `pairs` pairs of tiles.
    """
    dtype: gl.constexpr = latent_tma.dtype
    BOX_KEYS: gl.constexpr = latent_tma.block_shape[1]
    BOX_COLUMNS: gl.constexpr = latent_tma.block_shape[2]
    TILE_SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    ROPE_SHARED: gl.constexpr = gl.NVMMASharedLayout(2 * c.ROPE if c.ROPE > 0 else 128, 16)
    ONE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    boxes: gl.constexpr = 2 * (TILE // BOX_KEYS) * (c.LATENT // BOX_COLUMNS)
    # phase 1: both tiles of one pair; phase 2: the columns of one column block, of STAGES pairs of tiles
    latents = gl.allocate_shared_memory(dtype, [boxes, 1, BOX_KEYS, BOX_COLUMNS], latent_tma.layout)
    # phase 1: the queries; phase 2: the probabilities of PROBABILITY_STAGES pairs of tiles
    q_latent = gl.allocate_shared_memory(dtype, [1, ROWS, c.LATENT], TILE_SHARED)
    rope_tiles = gl.allocate_shared_memory(dtype, [2, TILE, 64], TILE_SHARED)
    q_rope = q_latent
    if c.ROPE > 0:
        q_rope = gl.allocate_shared_memory(dtype, [1, ROWS, c.ROPE], ROPE_SHARED)
    row_value_stages = gl.allocate_shared_memory(gl.float32, [PROBABILITY_STAGES, ROW_VALUES], ONE)
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [2 * QUARTERS, 1], BAR)
    scored = gl.allocate_shared_memory(gl.int64, [1], BAR)
    stage_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    stage_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    probabilities_full = gl.allocate_shared_memory(gl.int64, [PROBABILITY_STAGES, 1], BAR)
    for i in gl.static_range(2 * QUARTERS):
        mbarrier.init(full.index(i), 1)
    for i in gl.static_range(STAGES):
        mbarrier.init(stage_full.index(i), 1)
        mbarrier.init(stage_empty.index(i), 1)
    for i in gl.static_range(PROBABILITY_STAGES):
        mbarrier.init(probabilities_full.index(i), 1)
    mbarrier.init(scored, 1)
    fence_async_shared()
    follow_kernel_early()

    inputs = Inputs(ql_nope, q_pe, block_table, seq_lens, query_start_loc, visible_lens)
    progress = written.partial_lse + 2 * num_partials.to(gl.int64) * request_rows
    progress = progress.to(gl.pointer_type(gl.int32), bitcast=True)
    rule = SplitRule(small_tiles, small_splits, large_tiles, max_splits)
    plan = SplitPlan(None, None, splits_bound, num_partials, progress, rule)
    outputs = Outputs(written.out, written.lse, written.partial_out, written.partial_lse, None)
    sizes = Sizes(num_tokens, num_blocks, num_requests, max_keys, row_blocks, request_rows, scale_log2)
    strides = Strides(
        query_strides.latent_token, query_strides.latent_head, query_strides.rope_token, query_strides.rope_head,
        table_row_stride, table_stride,
    )  # fmt: skip
    VALUE_KEYS: gl.constexpr = value_tma.block_shape[1]
    tiles = latents._reinterpret(
        dtype, [2 * STAGES * (TILE // VALUE_KEYS), 1, VALUE_KEYS, c.LATENT // COLUMN_BLOCKS], value_tma.layout
    )
    probability_stages = q_latent._reinterpret(dtype, [PROBABILITY_STAGES, 2 * ROWS, TILE], probability_pairs.layout)
    queries = Queries(ql_nope, q_pe, q_latent, q_rope, strides)
    shared = Shared(queries, latents, rope_tiles, row_value_stages, probability_stages, tiles)
    bars = Bars(full, scored, stage_full, stage_empty, probabilities_full)
    phase_one = PhaseOne(row_values, probabilities)
    gl.warp_specialize(
        [
            (_consume, (inputs, plan, words, phase_one, outputs, sizes, strides, shared, bars, pairs, splits_bound, c)),
            (_produce, (inputs, plan, words, row_values, sizes, strides, latent_tma, rope_tma, value_tma,
                        probability_pairs, shared, bars, pairs, splits_bound, c)),
        ],
        [1],
        [96],
    )  # fmt: skip
