"""The kernels of a decode in two phases: one clears words, the other goes through both phases in each partition."""

from __future__ import annotations

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ...common.arrivals import arrive
from ...common.loads import ask_queries
from ...common.work_items import TILE, follow_kernel
from ..main_loops.tile_pairs import ROWS
from .column_blocks import PLACES, SHARES, STAGES, fetch_shares, first_share, multiply_shares, seek_share
from .score_blocks import QUARTERS, ROW_VALUES, UNTOLD, fetch_unit, flags_behind, score_unit, unit_of_program

CLEARED = gl.constexpr(1024)  # words of a program


@gluon.jit(do_not_specialize=["num_words"])
@no_type_check
def _clear_kernel(words, num_words):
    """Fill words with UNTOLD."""
    follow_kernel()
    word = gl.program_id(0) * CLEARED + gl.arange(0, CLEARED, gl.BlockedLayout([4], [32], [4], [0]))
    gl.store(words + word, gl.full([CLEARED], UNTOLD, gl.int32, word.type.layout), mask=word < num_words)


@gluon.jit
@no_type_check
def _consume(
    inputs, cut, words, findings, results, sizes, strides, shared, bars, pairs, splits_bound,
    HEADS: gl.constexpr, LATENT: gl.constexpr, ROPE: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """The warp group that computes."""
    ql_nope, q_pe, _, seq_lens, query_start_loc, _ = inputs
    lens = (seq_lens, query_start_loc)
    full, scored, _, _, _ = bars
    note, there = unit_of_program(cut, lens, sizes, pairs, HEADS)
    if there:
        queries = (ql_nope, q_pe, shared[0], shared[1], strides[0], strides[1], strides[2], strides[3])
        ask_queries(note, queries, sizes, ROWS, HEADS, 0, LATENT, ROPE)
    share, what = seek_share(first_share(), cut, lens, sizes, splits_bound, HEADS)
    if there:
        score_unit(
            note, inputs, words, findings, sizes, strides, shared, full, scored, pairs, HEADS, LATENT, ROPE, BLOCK_SIZE
        )
    else:
        arrive(scored)
    multiply_shares(share, what, inputs, cut, results, sizes, shared, bars, splits_bound, HEADS, LATENT, BLOCK_SIZE)


@gluon.jit
@no_type_check
def _produce(
    inputs, cut, words, row_values, sizes, strides, descriptors, shared, bars, pairs, splits_bound,
    HEADS: gl.constexpr, LATENT: gl.constexpr, ROPE: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """The warp that fetches."""
    _, _, block_table, seq_lens, query_start_loc, _ = inputs
    _, _, latents, tails, _, _, _ = shared
    latent_pages, rope_pages, value_pages, probability_pairs = descriptors
    lens, flags = (seq_lens, query_start_loc), flags_behind(words, sizes, pairs)
    fetch_unit(
        cut, lens, block_table, latent_pages, rope_pages, sizes, strides, (latents, tails), bars[0], pairs, HEADS,
        LATENT, ROPE, BLOCK_SIZE,
    )  # fmt: skip
    fetch_shares(
        cut, lens, block_table, value_pages, (row_values, probability_pairs), sizes, strides, shared, bars, flags,
        pairs, splits_bound, HEADS, LATENT, BLOCK_SIZE,
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
    ql_nope, q_pe, latent_pages, rope_pages, block_table, seq_lens, query_start_loc, visible_lens,
    out, lse, partial_out, partial_lse, value_pages, probability_pairs, words, row_values, probabilities,
    num_tokens, num_blocks, num_requests, max_keys, row_blocks, request_rows, num_partials, pairs, splits_bound,
    small_tiles, small_splits, large_tiles, max_splits, scale_log2,
    latent_token_stride, latent_head_stride, rope_token_stride, rope_head_stride, table_row_stride, table_stride,
    HEADS: gl.constexpr, LATENT: gl.constexpr, ROPE: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """A unit, then shares, of requests that are cut by their own length; each split of several is a part by itself.

    Parts as `fast.kernels.combine` has them. There are as many programs as units at least, `words` are
    UNTOLD, and `splits_bound` is no less than the splits of any request, as `pairs` of its tiles.
    """
    dtype: gl.constexpr = latent_pages.dtype
    BOX_KEYS: gl.constexpr = latent_pages.block_shape[1]
    BOX_COLUMNS: gl.constexpr = latent_pages.block_shape[2]
    TILE_SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    ROPE_SHARED: gl.constexpr = gl.NVMMASharedLayout(2 * ROPE if ROPE > 0 else 128, 16)
    ONE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    boxes: gl.constexpr = 2 * (TILE // BOX_KEYS) * (LATENT // BOX_COLUMNS)
    # both tiles of a pair, then a share's columns of STAGES pairs
    latents = gl.allocate_shared_memory(dtype, [boxes, 1, BOX_KEYS, BOX_COLUMNS], latent_pages.layout)
    # then the probabilities of PLACES pairs
    q_latent = gl.allocate_shared_memory(dtype, [1, ROWS, LATENT], TILE_SHARED)
    tails = gl.allocate_shared_memory(dtype, [2, TILE, 64], TILE_SHARED)
    q_rope = q_latent
    if ROPE > 0:
        q_rope = gl.allocate_shared_memory(dtype, [1, ROWS, ROPE], ROPE_SHARED)
    row_places = gl.allocate_shared_memory(gl.float32, [PLACES, ROW_VALUES], ONE)
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [2 * QUARTERS, 1], BAR)
    scored = gl.allocate_shared_memory(gl.int64, [1], BAR)
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    released = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    found_bars = gl.allocate_shared_memory(gl.int64, [PLACES, 1], BAR)
    for i in gl.static_range(2 * QUARTERS):
        mbarrier.init(full.index(i), 1)
    for i in gl.static_range(STAGES):
        mbarrier.init(arrived.index(i), 1)
        mbarrier.init(released.index(i), 1)
    for i in gl.static_range(PLACES):
        mbarrier.init(found_bars.index(i), 1)
    mbarrier.init(scored, 1)
    fence_async_shared()
    follow_kernel()

    inputs = (ql_nope, q_pe, block_table, seq_lens, query_start_loc, visible_lens)
    progress = (partial_lse + 2 * num_partials.to(gl.int64) * request_rows).to(gl.pointer_type(gl.int32), bitcast=True)
    own = (small_tiles, small_splits, large_tiles, max_splits)
    cut = (seq_lens, seq_lens, splits_bound, num_partials, progress, own)
    results = (out, lse, partial_out, partial_lse)
    sizes = (num_tokens, num_blocks, num_requests, max_keys, row_blocks, request_rows, scale_log2)
    strides = (
        latent_token_stride, latent_head_stride, rope_token_stride, rope_head_stride, table_row_stride, table_stride
    )  # fmt: skip
    findings = (row_values, probabilities)  # of units, for shares
    VALUE_KEYS: gl.constexpr = value_pages.block_shape[1]
    tiles = latents._reinterpret(
        dtype, [2 * STAGES * (TILE // VALUE_KEYS), 1, VALUE_KEYS, LATENT // SHARES], value_pages.layout
    )
    probability_places = q_latent._reinterpret(dtype, [PLACES, 2 * ROWS, TILE], probability_pairs.layout)
    shared = (q_latent, q_rope, latents, tails, row_places, probability_places, tiles)
    bars = (full, scored, arrived, released, found_bars)
    descriptors = (latent_pages, rope_pages, value_pages, probability_pairs)
    gl.warp_specialize(
        [
            (_consume, (inputs, cut, words, findings, results, sizes, strides, shared, bars, pairs, splits_bound, HEADS,
                        LATENT, ROPE, BLOCK_SIZE)),
            (_produce, (inputs, cut, words, row_values, sizes, strides, descriptors, shared, bars, pairs, splits_bound,
                        HEADS, LATENT, ROPE, BLOCK_SIZE)),
        ],
        [1],
        [96],
    )  # fmt: skip
