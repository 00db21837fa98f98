"""Decode kernel for one request with a schedule: the length of the request determines the rows of a row block.

A row is one (query token, head) pair, and a row block is the rows of one request that a program processes together. A
CUDA graph is captured once, for the longest request, and replayed for all lengths. A long request has many splits
(consecutive tiles of 64 keys that one program attends). Row blocks of 64 rows are then faster, because fewer programs
load the same keys. A short request has few splits, so with row blocks of 64 rows most programs of the launch would have
no work. With row blocks of 16 rows, four times as many programs work.

The kernel reads the number of splits from the schedule. If the launch has a program for each pair of a split and a row
block of 16 rows, the kernel runs the main loop of `row_blocks_16_32`, otherwise the main loop of `row_blocks_64`.
"""

from __future__ import annotations

from typing import Any, NamedTuple, no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...common.dependent_launch import follow_kernel
from ...common.own_length import ceil_div
from ...common.records import Context, Inputs, Outputs, Sizes, SplitPlan, SplitRule, Strides, of_consumer, of_rows
from ..arguments import ANY_ALIGNMENT, ANY_VALUE
from .row_blocks_16_32 import consume as consume_16_32
from .row_blocks_16_32 import produce as produce_16_32
from .row_blocks_16_32 import shared_memory as shared_memory_16_32
from .row_blocks_64 import consume as consume_64
from .row_blocks_64 import produce as produce_64
from .row_blocks_64 import shared_memory as shared_memory_64

SMALL_ROWS = gl.constexpr(16)  # rows of a row block of a short request
MOST_RANGES = gl.constexpr(256)  # most programs of a schedule that `_load_ranges` loads


class Ranges(NamedTuple):
    """Columns of `tile_ranges` [programs, 5] of a schedule for one request.

    Attributes:
        number: [MOST_RANGES], index of each row; there are fewer rows.
        works: True for the rows of programs with work.
        split: the split of the request that the program attends.
    """

    number: Any
    works: Any
    split: Any


@gluon.jit
@no_type_check
def _load_ranges(tile_ranges, programs):
    """Load the `Ranges` of a schedule of at most MOST_RANGES programs."""
    number = gl.arange(0, MOST_RANGES, gl.BlockedLayout([1], [32], [4], [0]))
    row, held = tile_ranges + number * 5, number < programs
    first, last = gl.load(row, mask=held, other=1), gl.load(row + 1, mask=held, other=0)
    return Ranges(number, first <= last, gl.load(row + 4, mask=held, other=-1))


@gluon.jit
@no_type_check
def _rest():
    """Do nothing, in the warps of the second consumer of `row_blocks_64`."""


@gluon.jit(do_not_specialize=[*ANY_VALUE, "block_stride", "key_stride"], do_not_specialize_on_alignment=ANY_ALIGNMENT)
@no_type_check
def _row_blocks_16_or_64_kernel(
    ql_nope, q_pe, latent_tma, rope_tma, block_table, seq_lens, query_start_loc, visible_lens,
    tile_ranges, split_offsets, written,
    num_tokens, num_blocks, num_requests, max_keys, num_splits, row_blocks, request_rows, num_partials,
    small_tiles, small_splits, large_tiles, max_splits, scale_log2,
    query_strides, table_row_stride, table_stride,
    out_rows, kv_cache, block_stride, key_stride, c: gl.constexpr,
):  # fmt: skip
    """Attend the only request of a batch, and write its outputs or partial outputs.

    `fast.kernels.combine` adds the partial outputs afterwards. The arguments are those of `_row_blocks_64_kernel`. The
    schedule has at most MOST_RANGES programs.
    """
    follow_kernel()
    inputs = Inputs(ql_nope, q_pe, block_table, seq_lens, query_start_loc, visible_lens)
    rule = SplitRule(small_tiles, small_splits, large_tiles, max_splits)
    plan = SplitPlan(tile_ranges, split_offsets, num_splits, num_partials, None, rule)
    outputs = Outputs(written.out, written.lse, written.partial_out, written.partial_lse, out_rows)
    sizes = Sizes(num_tokens, num_blocks, num_requests, max_keys, row_blocks, request_rows, scale_log2)
    strides = Strides(
        query_strides.latent_token, query_strides.latent_head, query_strides.rope_token, query_strides.rope_head,
        table_row_stride, table_stride,
    )  # fmt: skip
    small_blocks = ceil_div(request_rows, SMALL_ROWS)
    ranges = _load_ranges(tile_ranges, gl.num_programs(0) // row_blocks)  # only short requests use the loaded values
    splits = gl.load(split_offsets + 1) - gl.load(split_offsets)
    if splits * small_blocks > gl.num_programs(0):
        shared, bars = shared_memory_64(inputs, strides, latent_tma, c)
        ctx = Context(inputs, plan, outputs, sizes, strides, shared, bars)
        gl.warp_specialize(
            [
                (consume_64, (ctx, c)),
                (consume_64, (ctx, of_consumer(c, 1))),
                (produce_64, (ctx, latent_tma, rope_tma, c)),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
    else:
        split = gl.program_id(0) // small_blocks
        if split < splits:
            own_range = gl.max(gl.where(ranges.works & (ranges.split == split), ranges.number, 0), 0)
            # `work_items` computes the row of the schedule from the index of the program: `split` without this offset
            moved = tile_ranges + (own_range - split) * 5
            small_plan = SplitPlan(moved, split_offsets, num_splits, num_partials, None, rule)
            small_sizes = Sizes(num_tokens, num_blocks, num_requests, max_keys, small_blocks, request_rows, scale_log2)
            small: gl.constexpr = of_rows(c, SMALL_ROWS)
            shared, bars = shared_memory_16_32(inputs, strides, latent_tma, rope_tma, small)
            ctx = Context(inputs, small_plan, outputs, small_sizes, strides, shared, bars)
            # The consumer gets the registers that the other warps do not take, and a thread can have at most 256. The
            # producer therefore takes more registers than it needs.
            gl.warp_specialize(
                [
                    (consume_16_32, (ctx, small)),
                    (_rest, ()),
                    (produce_16_32, (ctx, latent_tma, rope_tma, small)),
                ],
                [4, 1],
                [24, 224],
            )  # fmt: skip
