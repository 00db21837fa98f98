"""Decode of many rows a request: two warp groups share 64 rows and take pairs of tiles (`tile_pairs`).

Each group holds one half of the latent columns of the output. A third partition, one warp, fetches tiles, a quarter of
their columns at a time: each quarter is released, fetched again and multiplied by itself, as no third tile fits.

Where processors would be idle, two programs score the same tiles, and each holds one of two slices of every quarter
(SLICES): what is said here of halves and quarters of the output is then said of that slice of them.
"""

from __future__ import annotations

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ...common.arrivals import arrive
from ...common.gluon_versions import partition_barrier
from ...common.l2_prefetch import ask_ahead
from ...common.loads import page_of, pages_held, seen_at
from ...common.work_items import (
    NOTED,
    NOTES,
    TILE,
    await_before,
    first_piece,
    launch_next,
    next_piece,
    partial_index_of,
    read_note,
    rows_of,
    seek,
    split_tiles_of,
    tiles_of,
    write_note,
)
from .epilogue_64 import ask, based_on_two, folded, keep, write_partial, write_whole
from .tile_pairs import ROWS, attend_pairs, fetch_quarter

LONG = gl.constexpr(8)  # tiles of a program's first piece, from which on its queries go before its tiles


@gluon.jit
@no_type_check
def _consume(
    inputs, cut, results, sizes, strides, shared, bars,
    OWN: gl.constexpr, HEADS: gl.constexpr, LATENT: gl.constexpr, ROPE: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    BY_LENGTH: gl.constexpr, SCHEDULED: gl.constexpr, SPLIT: gl.constexpr, SLICES: gl.constexpr,
):  # fmt: skip
    """One warp group: scores tile OWN of each pair, and holds half OWN of the output's columns."""
    ql_nope, q_pe, block_table, _, _, visible_lens = inputs
    num_partials = cut[3]
    num_blocks, scale_log2 = sizes[1], sizes[6]
    latent_token_stride, latent_head_stride, rope_token_stride, rope_head_stride, table_row_stride, table_stride = (
        strides
    )
    q_latent, q_rope, latents, tails, row_values, kept, notes = shared
    buffers = (latents, tails)
    _, _, _, query_bar, _, noted = bars
    queries = (
        ql_nope, q_pe, q_latent, q_rope, latent_token_stride, latent_head_stride, rope_token_stride, rope_head_stride
    )  # fmt: skip
    SPAN: gl.constexpr = LATENT // 4 // SLICES
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SPAN, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)

    pair = 0  # of all pieces: its parity is that of the barriers
    sums = 0
    piece = 0
    mbarrier.wait(noted, 0)
    note = read_note(notes, 0)
    ask(note, note[0] >= 0, queries, sizes, OWN, HEADS, ROPE)
    visible, pages = seen_at(note, block_table, visible_lens, sizes, strides, ROWS, HEADS, BLOCK_SIZE, ROW)
    while note[0] >= 0:
        request, length, begin, stop = tiles_of(note)
        table_row = block_table + request.to(gl.int64) * table_row_stride
        visible = gl.minimum(visible, length)
        plain = gl.maximum(gl.min(visible, 0), 0) // TILE  # tiles that all rows see whole
        end_key = gl.minimum(stop * TILE, length)
        held = pages_held(pages, begin, end_key, table_row, table_stride, num_blocks, BLOCK_SIZE, 4)
        plain = gl.where(held, gl.minimum(plain, stop), begin)
        seen = (visible, length, table_row, table_stride, num_blocks, gl.where(held, 0, length))
        async_copy.wait_group(0)
        fence_async_shared()
        partition_barrier()  # the fence of every thread, before one of them arrives
        arrive(query_bar)
        mbarrier.wait(query_bar, piece & 1)

        if BY_LENGTH:
            # split by split; the outcome of each waits for the next one's, or is a part by itself (`pieces`)
            split_begin, split_stop = begin, gl.minimum(begin + split_tiles_of(note), stop)
            running = split_begin >= 0
            while running:
                running = split_stop < stop
                state, pair, sums = attend_pairs(
                    split_begin, split_stop, plain, seen, buffers, row_values, q_latent, q_rope, bars, pair, sums,
                    scale_log2, OWN, LATENT, ROPE, BLOCK_SIZE, SCORES, VALUES,
                )  # fmt: skip
                state = based_on_two(state, scale_log2)
                kept_values = results[2] + num_partials.to(gl.int64) * sizes[5] * LATENT  # behind all parts
                if (begin == 0) & (split_begin > 0):
                    state = folded(state, kept, kept_values, OWN, LATENT, SCORES, VALUES)
                if not running:
                    mbarrier.wait(noted, (piece + 1) & 1)
                # asked anew: registers that are held through a split are dear
                written = read_note(notes, piece)
                # the next piece's is not there before the last split, and nothing is asked for before
                following = read_note(notes, piece + gl.where(running, 0, 1))
                asked = (split_stop >= stop) & (following[0] >= 0)
                where, slot = rows_of(written, sizes, HEADS), partial_index_of(written)
                if running & (begin == 0):
                    keep(state, kept, kept_values, OWN, LATENT, VALUES)
                elif running | (slot >= 0):
                    # of a run that folds the first slot, else each split's own
                    slot += gl.where(begin == 0, 0, (split_begin - begin) // split_tiles_of(written))
                    write_partial(state, where, results, 1.0, slot, num_partials, OWN, LATENT, SCORES, VALUES, True)
                else:
                    write_whole(
                        state, where, results, 1.0, following, False, queries, sizes, OWN, HEADS, LATENT, ROPE, SCORES,
                        VALUES,
                    )  # fmt: skip
                ask(following, asked, queries, sizes, OWN, HEADS, ROPE)
                split_begin = split_stop
                split_stop = gl.minimum(split_stop + split_tiles_of(written), stop)
            note = read_note(notes, piece + 1)
            visible, pages = seen_at(note, block_table, visible_lens, sizes, strides, ROWS, HEADS, BLOCK_SIZE, ROW)
        else:
            state, pair, sums = attend_pairs(
                begin, stop, plain, seen, buffers, row_values, q_latent, q_rope, bars, pair, sums, scale_log2, OWN,
                LATENT, ROPE, BLOCK_SIZE, SCORES, VALUES,
            )  # fmt: skip
            mbarrier.wait(noted, (piece + 1) & 1)
            note = read_note(notes, piece + 1)
            asked = note[0] >= 0
            visible, pages = seen_at(note, block_table, visible_lens, sizes, strides, ROWS, HEADS, BLOCK_SIZE, ROW)
            written = read_note(notes, piece)
            where, slot = rows_of(written, sizes, HEADS), partial_index_of(written)
            if SCHEDULED:
                if slot < 0:
                    write_whole(
                        state, where, results, scale_log2, note, asked, queries, sizes, OWN, HEADS, LATENT, ROPE,
                        SCORES, VALUES,
                    )  # fmt: skip
                else:
                    ask(note, asked, queries, sizes, OWN, HEADS, ROPE)
                    write_partial(
                        state, where, results, scale_log2, slot, num_partials, OWN, LATENT, SCORES, VALUES, True
                    )
            elif SPLIT:
                ask(note, asked, queries, sizes, OWN, HEADS, ROPE)
                write_partial(state, where, results, scale_log2, slot, num_partials, OWN, LATENT, SCORES, VALUES, False)
            else:
                write_whole(
                    state, where, results, scale_log2, note, asked, queries, sizes, OWN, HEADS, LATENT, ROPE, SCORES,
                    VALUES,
                )  # fmt: skip
        piece += 1


@gluon.jit
@no_type_check
def _fetch(
    tile, end_key, page, table_row, table_stride, latent_pages, rope_pages, buffers, full, free, phase,
    PLACE: gl.constexpr, NUMBER: gl.constexpr, LATENT: gl.constexpr, ROPE: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """Fetch the quarter of a tile that is multiplied as number NUMBER, once the one before it is released."""
    mbarrier.wait(free.index(4 * PLACE + (2 * PLACE + NUMBER) % 4), phase)
    fetch_quarter(
        tile, end_key, page, table_row, table_stride, latent_pages, rope_pages, buffers, full, PLACE, NUMBER, LATENT,
        ROPE, BLOCK_SIZE,
    )  # fmt: skip


@gluon.jit
@no_type_check
def _produce(
    inputs, cut, sizes, strides, latent_pages, rope_pages, shared, bars,
    HEADS: gl.constexpr, LATENT: gl.constexpr, ROPE: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    BY_LENGTH: gl.constexpr, SCHEDULED: gl.constexpr, SLICES: gl.constexpr,
):  # fmt: skip
    """One warp fetches pairs of tiles, and notes the pieces for the groups that compute."""
    _, _, block_table, seq_lens, query_start_loc, _ = inputs
    num_tokens, _, num_requests, max_keys, row_blocks, _, _ = sizes
    _, _, _, _, table_row_stride, table_stride = strides
    _, _, latents, tails, _, _, notes = shared
    full, free, _, query_bar, _, noted = bars
    lens, piece_sizes = (seq_lens, query_start_loc), (num_tokens, num_requests, max_keys, row_blocks)
    walk = first_piece(cut, num_requests, row_blocks, SCHEDULED, SLICES)
    walk, note = seek(walk, cut, lens, piece_sizes, 2, ROWS, HEADS, BY_LENGTH, SCHEDULED, SLICES)
    write_note(notes, 0, note, noted)
    pair = 0
    piece = 0
    while walk[3]:
        request, length, begin, stop = tiles_of(note)
        table_row = block_table + request.to(gl.int64) * table_row_stride
        end_key = gl.minimum(stop * TILE, length)
        next_pages = (
            page_of(begin * TILE, end_key, table_row, table_stride, BLOCK_SIZE),
            page_of((begin + 1) * TILE, end_key, table_row, table_stride, BLOCK_SIZE),
        )
        # the first tiles of all programs at once would keep the queries waiting: they go first, or, where no other
        # program reads the same tiles, before the second tile; programs in slices are too few for that
        patient = (SLICES == 1) & (piece == 0) & (stop - begin >= LONG)
        if patient & (row_blocks > 1):
            mbarrier.wait(query_bar, 0)
        for first in range(begin, stop, 2):
            phase = (pair & 1) ^ 1
            pages = next_pages
            next_pages = (
                page_of((first + 2) * TILE, end_key, table_row, table_stride, BLOCK_SIZE),
                page_of((first + 3) * TILE, end_key, table_row, table_stride, BLOCK_SIZE),
            )
            for place in gl.static_range(2):
                if (place == 1) & patient & (first == begin):
                    mbarrier.wait(query_bar, 0)
                for number in gl.static_range(4):
                    _fetch(
                        first + place, end_key, pages[place], table_row, table_stride, latent_pages, rope_pages,
                        (latents, tails), full, free, phase, place, number, LATENT, ROPE, BLOCK_SIZE,
                    )  # fmt: skip
            pair += 1
        walk = next_piece(walk, cut, piece_sizes, SCHEDULED, SLICES)
        walk, note = seek(walk, cut, lens, piece_sizes, 2, ROWS, HEADS, BY_LENGTH, SCHEDULED, SLICES)
        mbarrier.wait(query_bar, piece & 1)  # this piece has begun, and nobody reads the note of the one before it
        piece += 1
        write_note(notes, piece, note, noted)


@gluon.jit(
    do_not_specialize=[
        "num_tokens", "num_blocks", "num_requests", "max_keys", "num_splits", "row_blocks", "request_rows",
        "num_partials", "small_tiles", "small_splits", "large_tiles", "max_splits", "table_row_stride", "page_stride",
        "key_stride",
    ],
    do_not_specialize_on_alignment=[
        "block_table", "seq_lens", "query_start_loc", "visible_lens", "tile_ranges", "split_offsets"
    ],
)  # fmt: skip
@no_type_check
def _row_blocks_64_kernel(
    ql_nope, q_pe, latent_pages, rope_pages, block_table, seq_lens, query_start_loc, visible_lens,
    tile_ranges, split_offsets, out, lse, partial_out, partial_lse,
    num_tokens, num_blocks, num_requests, max_keys, num_splits, row_blocks, request_rows, num_partials,
    small_tiles, small_splits, large_tiles, max_splits, scale_log2,
    latent_token_stride, latent_head_stride, rope_token_stride, rope_head_stride, table_row_stride, table_stride,
    out_rows, kv_cache, page_stride, key_stride,
    HEADS: gl.constexpr, LATENT: gl.constexpr, ROPE: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    BY_LENGTH: gl.constexpr, SCHEDULED: gl.constexpr, SPLIT: gl.constexpr, SLICES: gl.constexpr,
):  # fmt: skip
    """A program's pieces for 64 of each request's rows; parts as `fast.kernels.combine` has them.

    `out_rows` is None, or how the copy engine writes whole outputs, whose rows are then all of one token.
    """
    dtype: gl.constexpr = latent_pages.dtype
    BOX_KEYS: gl.constexpr = latent_pages.block_shape[1]
    BOX_COLUMNS: gl.constexpr = latent_pages.block_shape[2]
    TILE_SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    ROPE_SHARED: gl.constexpr = gl.NVMMASharedLayout(2 * ROPE if ROPE > 0 else 128, 16)
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    boxes: gl.constexpr = 2 * (TILE // BOX_KEYS) * (LATENT // BOX_COLUMNS)
    latents = gl.allocate_shared_memory(dtype, [boxes, 1, BOX_KEYS, BOX_COLUMNS], latent_pages.layout)
    q_latent = gl.allocate_shared_memory(dtype, [1, ROWS, LATENT], TILE_SHARED)
    # rope parts of the keys, then the probabilities of their tile
    tails = gl.allocate_shared_memory(dtype, [2, TILE, 64], TILE_SHARED)
    q_rope = q_latent
    if ROPE > 0:
        q_rope = gl.allocate_shared_memory(dtype, [1, ROWS, ROPE], ROPE_SHARED)
    row_values = gl.allocate_shared_memory(gl.float32, [4, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    kept = row_values
    if BY_LENGTH:
        kept = gl.allocate_shared_memory(gl.float32, [4, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [8, 1], BAR)  # quarters of both tiles
    free = gl.allocate_shared_memory(gl.int64, [8, 1], BAR)
    handed = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)  # probabilities and references of both tiles
    sum_bar = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    notes = gl.allocate_shared_memory(gl.int32, [NOTES * NOTED, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    query_bar = gl.allocate_shared_memory(gl.int64, [1], BAR)
    noted = gl.allocate_shared_memory(gl.int64, [1], BAR)
    for i in gl.static_range(8):
        mbarrier.init(full.index(i), 1)
        mbarrier.init(free.index(i), 1)
    for i in gl.static_range(2):
        mbarrier.init(handed.index(i), 1)
        mbarrier.init(sum_bar.index(i), 1)
    mbarrier.init(query_bar, 2)
    mbarrier.init(noted, 1)
    fence_async_shared()
    launch_next()

    inputs = (ql_nope, q_pe, block_table, seq_lens, query_start_loc, visible_lens)
    progress = (partial_lse + 2 * num_partials.to(gl.int64) * request_rows).to(gl.pointer_type(gl.int32), bitcast=True)
    own = (small_tiles, small_splits, large_tiles, max_splits)
    cut = (tile_ranges, split_offsets, num_splits, num_partials, progress, own)
    results = (out, lse, partial_out, partial_lse, out_rows)
    sizes = (num_tokens, num_blocks, num_requests, max_keys, row_blocks, request_rows, scale_log2)
    strides = (
        latent_token_stride, latent_head_stride, rope_token_stride, rope_head_stride, table_row_stride, table_stride
    )  # fmt: skip
    if HEADS <= ROWS and not (BY_LENGTH or SCHEDULED or SPLIT):
        cache = (kv_cache, page_stride, key_stride)
        ask_ahead(inputs, cache, sizes, strides, ROWS, HEADS, LATENT, ROPE, BLOCK_SIZE)
    await_before()
    shared = (q_latent, q_rope, latents, tails, row_values, kept, notes)
    bars = (full, free, handed, query_bar, sum_bar, noted)
    gl.warp_specialize(
        [
            (_consume, (inputs, cut, results, sizes, strides, shared, bars, 0, HEADS, LATENT, ROPE, BLOCK_SIZE,
                        BY_LENGTH, SCHEDULED, SPLIT, SLICES)),
            (_consume, (inputs, cut, results, sizes, strides, shared, bars, 1, HEADS, LATENT, ROPE, BLOCK_SIZE,
                        BY_LENGTH, SCHEDULED, SPLIT, SLICES)),
            (_produce, (inputs, cut, sizes, strides, latent_pages, rope_pages, shared, bars, HEADS, LATENT, ROPE,
                        BLOCK_SIZE, BY_LENGTH, SCHEDULED, SLICES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
