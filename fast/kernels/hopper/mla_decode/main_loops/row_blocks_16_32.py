"""Decode of at most 32 rows a program: the products are transposed, so that keys and latents fill the matrix unit.

Scores are keys x rows, outputs latents x rows: 64 rows that mostly idle would cost as much as 64 that work. One warp
group computes, one warp fetches tiles; the reads of the cache are the limit.
"""

from __future__ import annotations

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from ...common.arrivals import arrive
from ...common.gluon_versions import partition_barrier
from ...common.loads import (
    LEAST,
    LN_2,
    STAYS,
    ask_queries,
    combine_weights,
    load_columns,
    page_of,
    pages_held,
    partial_rows_of,
    rows_at,
    seen_at,
    shift_of,
    zero_from,
)
from ...common.work_items import (
    NOTED,
    NOTES,
    TILE,
    first_piece,
    follow_kernel,
    next_piece,
    partial_index_of,
    read_note,
    rows_of,
    seek,
    split_tiles_of,
    tiles_of,
    write_note,
)

STAGES = gl.constexpr(2)
LONG = gl.constexpr(16)  # tiles of a program's first piece, from which on its queries go before its second tile
SHARED_VALUES = gl.constexpr(8192)  # that shared memory keeps between splits, of all rows of a program


@gluon.jit
@no_type_check
def _ask(note, asked, queries, sizes, ROWS: gl.constexpr, HEADS: gl.constexpr, ROPE: gl.constexpr):
    """Ask for a piece's queries, unless they are not wanted."""
    if asked:
        ask_queries(note, queries, sizes, ROWS, HEADS, 0, queries[2].shape[2], ROPE)


@gluon.jit
@no_type_check
def _write_whole(
    state, where, results, scale_log2, following, asked, queries, sizes, ROWS: gl.constexpr, HEADS: gl.constexpr,
    LATENT: gl.constexpr, ROPE: gl.constexpr, TRANSPOSED: gl.constexpr,
):  # fmt: skip
    """Outputs of rows that one program saw whole. The following queries are asked for."""
    largest, total, values = state
    out, lse, _, _ = results
    q_latent = queries[2]
    num_tokens, num_heads = where[4], where[5]
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    _, token, head, real = rows_at(where, ROWS, gl.SliceLayout(0, TRANSPOSED))
    divisor = gl.where(total == 0, 1.0, total)  # a row that saw nothing: values 0
    values = values * (1.0 / divisor)[None, :]
    log = gl.where(total == 0, float("-inf"), largest * scale_log2 + gl.log2(divisor))
    gl.store(lse + head.to(gl.int64) * num_tokens + token, log * LN_2, mask=real)
    if out.dtype.element_ty == q_latent.dtype:
        # by way of the queries' memory, which nobody multiplies by any more, so that whole lines are written
        staged = q_latent.index(0)
        staged.permute([1, 0]).store(values.to(q_latent.dtype))
        _, token, head, real = rows_at(where, ROWS, gl.SliceLayout(1, WIDE))
        lines = staged.load(WIDE)
        partition_barrier()
        _ask(following, asked, queries, sizes, ROWS, HEADS, ROPE)
        columns = gl.arange(0, LATENT, gl.SliceLayout(0, WIDE))
        offsets = (token.to(gl.int64) * num_heads + head) * LATENT
        gl.store(out + offsets[:, None] + columns[None, :], lines, mask=real[:, None])
    else:
        _ask(following, asked, queries, sizes, ROWS, HEADS, ROPE)
        columns = gl.arange(0, LATENT, gl.SliceLayout(1, TRANSPOSED))
        offsets = (token.to(gl.int64) * num_heads + head) * LATENT
        gl.store(out + offsets[None, :] + columns[:, None], values.to(out.dtype.element_ty), mask=real[None, :])


@gluon.jit
@no_type_check
def _write_partial(
    state, where, results, scale_log2, slot, num_partials, ROWS: gl.constexpr, LATENT: gl.constexpr,
    TRANSPOSED: gl.constexpr, OF_REQUEST: gl.constexpr,
):  # fmt: skip
    """Parts of rows for the merge."""
    largest, total, values = state
    _, _, partial_out, partial_lse = results
    row, partial_rows, real = partial_rows_of(slot, where, ROWS, gl.SliceLayout(0, TRANSPOSED), OF_REQUEST)
    gl.store(partial_lse + row, gl.where(total == 0, float("-inf"), largest * scale_log2), mask=real)
    gl.store(partial_lse + num_partials.to(gl.int64) * partial_rows + row, total, mask=real)
    columns = gl.arange(0, LATENT, gl.SliceLayout(1, TRANSPOSED))
    place = partial_out + (row * LATENT)[None, :] + columns[:, None]
    gl.store(place, values, mask=real[None, :], eviction_policy=STAYS)


@gluon.jit
@no_type_check
def _based_on_two(state, scale_log2):
    """A state with its largest scores in base 2, -inf where nothing was seen."""
    largest, total, values = state
    return gl.where(total == 0, float("-inf"), largest * scale_log2), total, values


@gluon.jit
@no_type_check
def _kept_at(kept_values, half):
    """Where half of the values is kept that shared memory has no room for, in squares of 8 by 8, as threads have it."""
    LATENTS: gl.constexpr = half.shape[0]
    ROWS: gl.constexpr = half.shape[1]
    LAYOUT: gl.constexpr = half.type.layout
    row = gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT))
    column = gl.arange(0, LATENTS, gl.SliceLayout(1, LAYOUT))
    place = kept_values + gl.program_id(0).to(gl.int64) * (ROWS * LATENTS)
    return place + (column * 8)[:, None] + (row // 8 * (8 * LATENTS) + row % 8)[None, :]


@gluon.jit
@no_type_check
def _halves(values):
    """Both halves of the latents of some values; no thread gives another what it has."""
    LATENT: gl.constexpr = values.shape[0]
    ROWS: gl.constexpr = values.shape[1]
    return gl.split(gl.permute(gl.reshape(values, [2, LATENT // 2, ROWS]), [1, 2, 0]))


@gluon.jit
@no_type_check
def _ask_kept(kept_values, k_latent, step, full, free, stored, number, ROWS: gl.constexpr, LATENT: gl.constexpr):
    """Ask for what is kept in memory, in the place of a tile: it is there when the tiles before are done."""
    CHUNK: gl.constexpr = 1024  # elements
    NUMBER: gl.constexpr = ROWS * LATENT // 2 // CHUNK
    BUFFERS: gl.constexpr = k_latent.shape[0] // STAGES
    stage = step % STAGES
    mbarrier.wait(free.index(stage), ((step // STAGES) & 1) ^ 1)
    mbarrier.wait(stored, number & 1)
    shared = k_latent.index(stage * BUFFERS)._reinterpret(
        gl.float32, [NUMBER, CHUNK], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    element = gl.arange(0, CHUNK, gl.BlockedLayout([4], [32], [1], [0]))
    place = kept_values + gl.program_id(0).to(gl.int64) * (NUMBER * CHUNK)
    for chunk in range(NUMBER):
        async_copy.async_copy_global_to_shared(shared.index(chunk), place + chunk * CHUNK + element)
    async_copy.mbarrier_arrive(full.index(stage))  # each thread, once its copies are there; then the one that counts
    mbarrier.arrive(full.index(stage))


@gluon.jit
@no_type_check
def _taken_kept(half, k_latent, step, full, free):
    """What `_ask_kept` asked for, as `half` lies; the place is free again."""
    LATENTS: gl.constexpr = half.shape[0]
    ROWS: gl.constexpr = half.shape[1]
    HALF: gl.constexpr = half.type.layout
    BUFFERS: gl.constexpr = k_latent.shape[0] // STAGES
    squares = gl.permute(gl.reshape(half, [LATENTS, ROWS // 8, 8]), [1, 0, 2])
    SQUARES: gl.constexpr = squares.type.layout
    stage = step % STAGES
    shared = k_latent.index(stage * BUFFERS)._reinterpret(
        gl.float32, [ROWS // 8, LATENTS, 8], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    )
    mbarrier.wait(full.index(stage), (step // STAGES) & 1)
    before = gl.reshape(gl.permute(shared.load(SQUARES), [1, 0, 2]), [LATENTS, ROWS])
    fence_async_shared()  # tiles come there by another way
    partition_barrier()  # the fence of every thread, before one of them arrives
    arrive(free.index(stage))
    return gl.convert_layout(before, HALF)


@gluon.jit
@no_type_check
def _folded(
    state, kept, k_latent, step, full, free, ROWS: gl.constexpr, LATENT: gl.constexpr, TRANSPOSED: gl.constexpr
):
    """What was kept of the splits before, and a state, as one; the steps counted on."""
    largest, total, values = state
    rows_kept, values_shared, _ = kept
    ROW: gl.constexpr = gl.SliceLayout(0, TRANSPOSED)
    largest, old, new = combine_weights(rows_kept.index(0).load(ROW), largest)
    total = gl.fma(rows_kept.index(1).load(ROW), old, total * new)
    if ROWS * LATENT <= SHARED_VALUES:
        values = gl.fma(values_shared.load(TRANSPOSED), old[None, :], values * new[None, :])
    else:
        near, far = _halves(values)
        HALF: gl.constexpr = near.type.layout
        old = gl.convert_layout(old, gl.SliceLayout(0, HALF))[None, :]
        new = gl.convert_layout(new, gl.SliceLayout(0, HALF))[None, :]
        near = gl.fma(values_shared.load(HALF), old, near * new)
        far = gl.fma(_taken_kept(far, k_latent, step, full, free), old, far * new)
        both = gl.reshape(gl.permute(gl.join(near, far), [2, 0, 1]), [LATENT, ROWS])
        values = gl.convert_layout(both, TRANSPOSED)
        step += 1
    return largest, total, values, step


@gluon.jit
@no_type_check
def _keep(state, kept, kept_values, ROWS: gl.constexpr, LATENT: gl.constexpr, TRANSPOSED: gl.constexpr):
    """Keep a state for the next split of the run."""
    largest, total, values = state
    rows_kept, values_shared, stored = kept
    rows_kept.index(0).store(largest)
    rows_kept.index(1).store(total)
    if ROWS * LATENT <= SHARED_VALUES:
        values_shared.store(values)
    else:
        near, far = _halves(values)
        values_shared.store(near)
        gl.store(_kept_at(kept_values, far), far, eviction_policy=STAYS)
        arrive(stored)


@gluon.jit
@no_type_check
def _attend_tiles(
    begin, stop, end, plain, seen, tiles_shared, q_latent, q_rope, weights_shared, bars, step, scale_log2,
    ROWS: gl.constexpr, LATENT: gl.constexpr, ROPE: gl.constexpr, BLOCK_SIZE: gl.constexpr, TRANSPOSED: gl.constexpr,
):  # fmt: skip
    """The tiles [begin, stop) of a piece that ends at tile `end`: the state, and the tiles of all pieces counted on."""
    visible, length, table_row, table_stride, num_blocks, unsure = seen
    k_latent, k_rope = tiles_shared
    full, free, _, _ = bars
    dtype: gl.constexpr = k_latent.dtype
    TILE_SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    ROPE_SHARED: gl.constexpr = gl.NVMMASharedLayout(2 * ROPE if ROPE > 0 else 128, 16)
    BUFFERS: gl.constexpr = k_latent.shape[0] // STAGES
    ROPE_BUFFERS: gl.constexpr = k_rope.shape[0] // STAGES
    ROW: gl.constexpr = gl.SliceLayout(0, TRANSPOSED)
    KEY: gl.constexpr = gl.SliceLayout(1, TRANSPOSED)
    largest = gl.full([ROWS], LEAST, gl.float32, ROW)
    totals = gl.zeros([TILE, ROWS], gl.float32, TRANSPOSED)
    values = warpgroup_mma_init(gl.zeros([LATENT, ROWS], gl.float32, TRANSPOSED))
    for tile in range(begin, stop):
        stage = step % STAGES
        phase = (step // STAGES) & 1
        zero = step >> 30  # the compiler must not see that this is 0: it would keep the queries' addresses
        k_tile = k_latent.index(stage * BUFFERS)._reinterpret(dtype, [TILE, LATENT], TILE_SHARED)
        values = warpgroup_mma_wait(0, deps=[values])
        arrive(free.index((step + STAGES - 1) % STAGES), pred=tile > begin)
        mbarrier.wait(full.index(stage), phase)
        scores = gl.zeros([TILE, ROWS], gl.float32, TRANSPOSED)
        scores = warpgroup_mma(k_tile, q_latent.index(zero).permute([1, 0]), scores, use_acc=False, is_async=True)
        if ROPE > 0:
            rope_tile = k_rope.index(stage * ROPE_BUFFERS)._reinterpret(dtype, [TILE, ROPE], ROPE_SHARED)
            scores = warpgroup_mma(rope_tile, q_rope.index(zero).permute([1, 0]), scores, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
        if tile >= plain:
            key = tile * TILE + gl.arange(0, TILE, KEY)
            page = gl.load(table_row + (key // BLOCK_SIZE).to(gl.int64) * table_stride, mask=key < unsure, other=0)
            held_keys = (page >= 0) & (page < num_blocks) & (key < end * TILE)
            scores = gl.where(held_keys[:, None] & (key[:, None] < visible[None, :]), scores, float("-inf"))
            if (tile + 1) * TILE > length:
                for column in gl.static_range(0, LATENT, 64):
                    zero_from(k_tile.slice(column, 64, dim=1), length - tile * TILE)
        new_largest = gl.maximum(largest, gl.max(scores, 0))
        weights = gl.exp2(scores * scale_log2 - shift_of(new_largest, scale_log2)[None, :])
        decay = gl.exp2((largest - new_largest) * scale_log2)
        largest = new_largest
        totals = totals * decay[None, :] + weights
        weights_shared.index(zero).store(weights.to(dtype))
        fence_async_shared()
        partition_barrier()
        values = values * decay[None, :]
        values = warpgroup_mma(k_tile.permute([1, 0]), weights_shared.index(zero), values, is_async=True)
        step += 1
    values = warpgroup_mma_wait(0, deps=[values])
    arrive(free.index((step + STAGES - 1) % STAGES), pred=begin < stop)
    return (largest, gl.sum(totals, 0), values), step


@gluon.jit
@no_type_check
def _consume(
    inputs, cut, results, sizes, strides, shared, bars,
    ROWS: gl.constexpr, HEADS: gl.constexpr, LATENT: gl.constexpr, ROPE: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    BY_LENGTH: gl.constexpr, SCHEDULED: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """The one warp group that computes."""
    ql_nope, q_pe, block_table, _, _, visible_lens = inputs
    num_partials = cut[3]
    num_blocks, scale_log2 = sizes[1], sizes[6]
    latent_token_stride, latent_head_stride, rope_token_stride, rope_head_stride, table_row_stride, table_stride = (
        strides
    )
    q_latent, q_rope, k_latent, k_rope, weights_shared, kept, notes = shared
    tiles_shared = (k_latent, k_rope)
    full, free, begun, noted = bars
    queries = (
        ql_nope, q_pe, q_latent, q_rope, latent_token_stride, latent_head_stride, rope_token_stride, rope_head_stride
    )  # fmt: skip
    TRANSPOSED: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    ROW: gl.constexpr = gl.SliceLayout(0, TRANSPOSED)

    step = 0  # tiles of all pieces
    piece = 0
    mbarrier.wait(noted, 0)
    note = read_note(notes, 0)
    _ask(note, note[0] >= 0, queries, sizes, ROWS, HEADS, ROPE)
    visible, pages = seen_at(note, block_table, visible_lens, sizes, strides, ROWS, HEADS, BLOCK_SIZE, ROW)
    while note[0] >= 0:
        request, length, begin, stop = tiles_of(note)
        table_row = block_table + request.to(gl.int64) * table_row_stride
        visible = gl.minimum(visible, length)
        plain = gl.maximum(gl.min(visible, 0), 0) // TILE  # tiles that all rows see whole
        end_key = gl.minimum(stop * TILE, length)
        held = pages_held(pages, begin, end_key, table_row, table_stride, num_blocks, BLOCK_SIZE, 4)
        plain = gl.where(held, plain, begin)
        seen = (visible, length, table_row, table_stride, num_blocks, gl.where(held, 0, length))
        async_copy.wait_group(0)
        fence_async_shared()
        partition_barrier()  # the fence of every thread, before one of them arrives
        arrive(begun)

        if BY_LENGTH:
            # split by split; the outcome of each waits for the next one's, or is a part by itself (`pieces`)
            split_begin, split_stop = begin, gl.minimum(begin + split_tiles_of(note), stop)
            running = split_begin >= 0
            while running:
                running = split_stop < stop
                state, step = _attend_tiles(
                    split_begin, split_stop, stop, plain, seen, tiles_shared, q_latent, q_rope, weights_shared, bars,
                    step, scale_log2, ROWS, LATENT, ROPE, BLOCK_SIZE, TRANSPOSED,
                )  # fmt: skip
                state = _based_on_two(state, scale_log2)
                kept_values = results[2] + num_partials.to(gl.int64) * sizes[5] * LATENT  # behind all parts
                if (begin == 0) & (split_begin > 0):
                    largest, total, values, step = _folded(
                        state, kept, k_latent, step, full, free, ROWS, LATENT, TRANSPOSED
                    )
                    state = (largest, total, values)
                if not running:
                    mbarrier.wait(noted, (piece + 1) & 1)
                # asked anew: registers that are held through a split are dear
                written = read_note(notes, piece)
                # the next piece's is not there before the last split, and nothing is asked for before
                following = read_note(notes, piece + gl.where(running, 0, 1))
                asked = (split_stop >= stop) & (following[0] >= 0)
                where, slot = rows_of(written, sizes, HEADS), partial_index_of(written)
                if running & (begin == 0):
                    _keep(state, kept, kept_values, ROWS, LATENT, TRANSPOSED)
                elif running | (slot >= 0):
                    _ask(following, asked, queries, sizes, ROWS, HEADS, ROPE)
                    # of a run that folds the first slot, else each split's own
                    slot += gl.where(begin == 0, 0, (split_begin - begin) // split_tiles_of(written))
                    _write_partial(state, where, results, 1.0, slot, num_partials, ROWS, LATENT, TRANSPOSED, True)
                else:
                    _write_whole(
                        state, where, results, 1.0, following, asked, queries, sizes, ROWS, HEADS, LATENT, ROPE,
                        TRANSPOSED,
                    )  # fmt: skip
                split_begin = split_stop
                split_stop = gl.minimum(split_stop + split_tiles_of(written), stop)
            note = read_note(notes, piece + 1)
            visible, pages = seen_at(note, block_table, visible_lens, sizes, strides, ROWS, HEADS, BLOCK_SIZE, ROW)
        else:
            state, step = _attend_tiles(
                begin, stop, stop, plain, seen, tiles_shared, q_latent, q_rope, weights_shared, bars, step, scale_log2,
                ROWS, LATENT, ROPE, BLOCK_SIZE, TRANSPOSED,
            )  # fmt: skip
            mbarrier.wait(noted, (piece + 1) & 1)
            note = read_note(notes, piece + 1)
            asked = note[0] >= 0
            visible, pages = seen_at(note, block_table, visible_lens, sizes, strides, ROWS, HEADS, BLOCK_SIZE, ROW)
            written = read_note(notes, piece)
            where, slot = rows_of(written, sizes, HEADS), partial_index_of(written)
            if SCHEDULED:
                if slot < 0:
                    _write_whole(
                        state, where, results, scale_log2, note, asked, queries, sizes, ROWS, HEADS, LATENT, ROPE,
                        TRANSPOSED,
                    )  # fmt: skip
                else:
                    _ask(note, asked, queries, sizes, ROWS, HEADS, ROPE)
                    _write_partial(
                        state, where, results, scale_log2, slot, num_partials, ROWS, LATENT, TRANSPOSED, True
                    )
            elif SPLIT:
                _ask(note, asked, queries, sizes, ROWS, HEADS, ROPE)
                _write_partial(state, where, results, scale_log2, slot, num_partials, ROWS, LATENT, TRANSPOSED, False)
            else:
                _write_whole(
                    state, where, results, scale_log2, note, asked, queries, sizes, ROWS, HEADS, LATENT, ROPE,
                    TRANSPOSED,
                )  # fmt: skip
        piece += 1


@gluon.jit
@no_type_check
def _produce(
    inputs, cut, results, sizes, strides, latent_pages, rope_pages, shared, bars,
    ROWS: gl.constexpr, HEADS: gl.constexpr, LATENT: gl.constexpr, ROPE: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    BY_LENGTH: gl.constexpr, SCHEDULED: gl.constexpr,
):  # fmt: skip
    """One warp fetches tiles into the ring, and notes the pieces for the group that computes."""
    _, _, block_table, seq_lens, query_start_loc, _ = inputs
    num_tokens, _, num_requests, max_keys, row_blocks, _, _ = sizes
    _, _, _, _, table_row_stride, table_stride = strides
    _, _, k_latent, k_rope, _, kept, notes = shared
    full, free, begun, noted = bars
    BUFFERS: gl.constexpr = k_latent.shape[0] // STAGES
    ROPE_BUFFERS: gl.constexpr = k_rope.shape[0] // STAGES
    BYTES: gl.constexpr = TILE * (LATENT + ROPE) * 2
    KEEPS: gl.constexpr = BY_LENGTH and ROWS * LATENT > SHARED_VALUES  # in memory
    kept_values = results[2] + cut[3].to(gl.int64) * sizes[5] * LATENT  # behind all parts
    lens, piece_sizes = (seq_lens, query_start_loc), (num_tokens, num_requests, max_keys, row_blocks)
    walk = first_piece(cut, num_requests, row_blocks, SCHEDULED, 1)
    walk, note = seek(walk, cut, lens, piece_sizes, 1, ROWS, HEADS, BY_LENGTH, SCHEDULED, 1)
    write_note(notes, 0, note, noted)
    step = 0
    folds = 0
    piece = 0
    while walk[3]:
        request, length, begin, stop = tiles_of(note)
        table_row = block_table + request.to(gl.int64) * table_row_stride
        end_key = gl.minimum(stop * TILE, length)
        page = page_of(begin * TILE, end_key, table_row, table_stride, BLOCK_SIZE)
        ahead = page_of((begin + 1) * TILE, end_key, table_row, table_stride, BLOCK_SIZE)
        if KEEPS:
            split_tiles = split_tiles_of(note)
            fold_at = gl.where((begin == 0) & (stop > split_tiles), gl.minimum(2 * split_tiles, stop), 0)
        # the first tiles of all programs at once would keep the queries waiting
        patient = (piece == 0) & (stop - begin >= LONG)
        for tile in range(begin, stop):
            stage = step % STAGES
            bar = full.index(stage)
            if patient & (tile == begin + 1):
                mbarrier.wait(begun, 0)
            mbarrier.wait(free.index(stage), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(bar, BYTES)
            load_columns(
                tile, end_key, page, table_row, table_stride, latent_pages, k_latent, stage * BUFFERS, bar,
                BLOCK_SIZE, 0, LATENT,
            )  # fmt: skip
            if ROPE > 0:
                load_columns(
                    tile, end_key, page, table_row, table_stride, rope_pages, k_rope, stage * ROPE_BUFFERS, bar,
                    BLOCK_SIZE, LATENT, ROPE,
                )  # fmt: skip
            page = ahead
            ahead = page_of((tile + 2) * TILE, end_key, table_row, table_stride, BLOCK_SIZE)
            step += 1
            if KEEPS and tile + 1 == fold_at:
                _ask_kept(kept_values, k_latent, step, full, free, kept[2], folds, ROWS, LATENT)
                step += 1
                folds += 1
                fold_at = gl.minimum(fold_at + split_tiles, stop)
        walk = next_piece(walk, cut, piece_sizes, SCHEDULED, 1)
        walk, note = seek(walk, cut, lens, piece_sizes, 1, ROWS, HEADS, BY_LENGTH, SCHEDULED, 1)
        mbarrier.wait(begun, piece & 1)  # this piece has begun, and nobody reads the note of the one before it
        piece += 1
        write_note(notes, piece, note, noted)


@gluon.jit(
    do_not_specialize=[
        "num_tokens", "num_blocks", "num_requests", "max_keys", "num_splits", "row_blocks", "request_rows",
        "num_partials", "small_tiles", "small_splits", "large_tiles", "max_splits", "table_row_stride",
    ],
    do_not_specialize_on_alignment=[
        "block_table", "seq_lens", "query_start_loc", "visible_lens", "tile_ranges", "split_offsets"
    ],
)  # fmt: skip
@no_type_check
def _row_blocks_16_32_kernel(
    ql_nope, q_pe, latent_pages, rope_pages, block_table, seq_lens, query_start_loc, visible_lens,
    tile_ranges, split_offsets, out, lse, partial_out, partial_lse,
    num_tokens, num_blocks, num_requests, max_keys, num_splits, row_blocks, request_rows, num_partials,
    small_tiles, small_splits, large_tiles, max_splits, scale_log2,
    latent_token_stride, latent_head_stride, rope_token_stride, rope_head_stride, table_row_stride, table_stride,
    ROWS: gl.constexpr, HEADS: gl.constexpr, LATENT: gl.constexpr, ROPE: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    BY_LENGTH: gl.constexpr, SCHEDULED: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """A program's pieces for ROWS of each request's rows; parts as `fast.kernels.combine` has them."""
    dtype: gl.constexpr = latent_pages.dtype
    BOX_KEYS: gl.constexpr = latent_pages.block_shape[1]
    BOX_COLUMNS: gl.constexpr = latent_pages.block_shape[2]
    TILE_SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    ROPE_SHARED: gl.constexpr = gl.NVMMASharedLayout(2 * ROPE if ROPE > 0 else 128, 16)
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    parts: gl.constexpr = TILE // BOX_KEYS
    k_latent = gl.allocate_shared_memory(
        dtype, [STAGES * parts * (LATENT // BOX_COLUMNS), 1, BOX_KEYS, BOX_COLUMNS], latent_pages.layout
    )
    q_latent = gl.allocate_shared_memory(dtype, [1, ROWS, LATENT], TILE_SHARED)
    k_rope, q_rope = k_latent, q_latent
    if ROPE > 0:
        k_rope = gl.allocate_shared_memory(dtype, [STAGES * parts, 1, BOX_KEYS, ROPE], rope_pages.layout)
        q_rope = gl.allocate_shared_memory(dtype, [1, ROWS, ROPE], ROPE_SHARED)
    weights_shared = gl.allocate_shared_memory(dtype, [1, TILE, ROWS], gl.NVMMASharedLayout(2 * ROWS, 16))
    rows_kept, values_kept, stored = weights_shared, weights_shared, weights_shared
    if BY_LENGTH:
        rows_kept = gl.allocate_shared_memory(gl.float32, [2, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        # all latents, or half of them; 8 of them by 8 rows meet no bank twice
        SHARED_LATENTS: gl.constexpr = LATENT if ROWS * LATENT <= SHARED_VALUES else LATENT // 2
        values_kept = gl.allocate_shared_memory(
            gl.float32, [SHARED_LATENTS, ROWS], gl.SwizzledSharedLayout(8, 32 // ROWS, ROWS // 8, [1, 0])
        )
        stored = gl.allocate_shared_memory(gl.int64, [1], BAR)
        mbarrier.init(stored, 1)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    notes = gl.allocate_shared_memory(gl.int32, [NOTES * NOTED, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    begun = gl.allocate_shared_memory(gl.int64, [1], BAR)
    noted = gl.allocate_shared_memory(gl.int64, [1], BAR)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), 1)
        mbarrier.init(free.index(i), 1)
    mbarrier.init(begun, 1)
    mbarrier.init(noted, 1)
    fence_async_shared()
    follow_kernel()

    inputs = (ql_nope, q_pe, block_table, seq_lens, query_start_loc, visible_lens)
    progress = (partial_lse + 2 * num_partials.to(gl.int64) * request_rows).to(gl.pointer_type(gl.int32), bitcast=True)
    own = (small_tiles, small_splits, large_tiles, max_splits)
    cut = (tile_ranges, split_offsets, num_splits, num_partials, progress, own)
    results = (out, lse, partial_out, partial_lse)
    sizes = (num_tokens, num_blocks, num_requests, max_keys, row_blocks, request_rows, scale_log2)
    strides = (
        latent_token_stride, latent_head_stride, rope_token_stride, rope_head_stride, table_row_stride, table_stride
    )  # fmt: skip
    shared = (q_latent, q_rope, k_latent, k_rope, weights_shared, (rows_kept, values_kept, stored), notes)
    bars = (full, free, begun, noted)
    gl.warp_specialize(
        [
            (_consume, (inputs, cut, results, sizes, strides, shared, bars, ROWS, HEADS, LATENT, ROPE, BLOCK_SIZE,
                        BY_LENGTH, SCHEDULED, SPLIT)),
            (_produce, (inputs, cut, results, sizes, strides, latent_pages, rope_pages, shared, bars, ROWS, HEADS,
                        LATENT, ROPE, BLOCK_SIZE, BY_LENGTH, SCHEDULED)),
        ],
        [1],
        [24],
    )  # fmt: skip
