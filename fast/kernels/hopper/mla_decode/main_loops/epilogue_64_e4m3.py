"""Epilogue of `row_blocks_64_e4m3`: functions that load queries and write outputs.

The functions that write partial outputs, or keep a state between splits, are those of `epilogue_16_32_e4m3`. Two
consumers (four warps each) run these functions at the same time. Each consumer loads one half of the latent columns of
the queries, and has one half of the latent columns of the output. The reference scores of its states are in base 2.
"""

from __future__ import annotations

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from ...common.epilogue import NORMAL, divisor_of, lse_in_base_two, out_columns, store_columns, write_lse
from ...common.gluon_versions import partition_barrier
from ...common.loads import prefetch_queries, rows_at
from ...common.records import RowBlock
from ...common.work_items import row_block_of
from .tile_scores import ROWS


@gluon.jit
@no_type_check
def prefetch_next(item, wanted, ctx, c):
    """If `wanted`, issue the loads of a work item's queries, in words of two elements, and of their scales."""
    HALF: gl.constexpr = c.LATENT // 4
    SPREAD: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    shared = ctx.shared
    if wanted:
        rows = rows_at(row_block_of(item, ctx.sizes, c.HEADS), ROWS, SPREAD)
        scales = shared.q_scale + rows.head * shared.q_scale_stride
        async_copy.async_copy_global_to_shared(shared.q_scales.index(c.CONSUMER), scales)
        prefetch_queries(
            item, shared.queries, ctx.sizes, ROWS, c.HEADS, c.CONSUMER * HALF, HALF,
            c.ROPE // 2 if c.CONSUMER == 1 else 0, 0,
        )  # fmt: skip


@gluon.jit
@no_type_check
def write_whole(state, block, scale_log2, following, wanted, ctx, c):
    """Write this consumer's columns of the output; consumer 0 also writes the LSE. Prefetch the queries of `following`.

    `scale_log2` is not used, because the reference scores are in base 2.
    """
    ROW: gl.constexpr = gl.SliceLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16]))
    COLUMNS: gl.constexpr = c.LATENT // 2
    HALF: gl.constexpr = ROWS // 2
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])
    FIRST: gl.constexpr = c.CONSUMER * COLUMNS
    out = ctx.outputs.out
    dtype: gl.constexpr = out.dtype.element_ty
    divisor = divisor_of(state)
    weighted = state.weighted * gl.convert_layout(1.0 / divisor, gl.SliceLayout(0, state.weighted.type.layout))[None, :]
    if c.CONSUMER == 0:
        rows = rows_at(block, ROWS, ROW)
        write_lse(lse_in_base_two(state, divisor, 1.0), state, rows, rows.real, block, ctx.outputs)
    if dtype.primitive_bitwidth == 16:
        # Transpose 32 rows at a time through the memory of this consumer's half of the queries, which are no longer
        # needed. Stores to global memory then fill whole cache lines.
        staged = ctx.shared.queries.q_latent._reinterpret(dtype, [2, HALF, COLUMNS], gl.NVMMASharedLayout(128, 16))
        staged = staged.index(c.CONSUMER)
        halves = gl.split(gl.permute(gl.reshape(weighted.to(dtype), [COLUMNS, 2, HALF]), [0, 2, 1]))
        for half in gl.static_range(2):
            staged.permute([1, 0]).store(halves[half])
            lines = staged.load(WIDE)
            if half == 1:
                partition_barrier()
                prefetch_next(following, wanted, ctx, c)
            some = RowBlock(
                block.query_start, block.query_end, 2 * block.number + half, block.request_rows, block.num_tokens,
                block.num_heads,
            )  # fmt: skip
            rows = rows_at(some, HALF, gl.SliceLayout(1, WIDE))
            stored = out_columns(lines, FIRST, rows, some, ctx.outputs, c.LATENT, ROW_AXIS=0)
            store_columns(lines, stored, 0, NORMAL)
    else:
        prefetch_next(following, wanted, ctx, c)
        rows = rows_at(block, ROWS, gl.SliceLayout(0, weighted.type.layout))
        stored = out_columns(weighted, FIRST, rows, block, ctx.outputs, c.LATENT, ROW_AXIS=1)
        store_columns(weighted, stored, 0, NORMAL)
