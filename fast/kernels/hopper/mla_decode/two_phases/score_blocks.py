"""Phase 1 of a decode in two phases: each program computes the probabilities of one score block.

A score block is one pair of tiles (64 keys each) of a request, and one row block of 64 rows. A row is one (query token,
head) pair. The reference score of a row is the number that is subtracted from the row's scores before exp2. The
reference score depends on the largest scores of all earlier tiles of the same split (`tile_scores.reference_of`), which
other programs compute. Each program therefore publishes the largest scores of its two tiles: it writes them to global
memory. The program then waits until the largest scores of the earlier pairs are published.

A largest score is published as a 32-bit word. Until then, the word has the value NOT_WRITTEN, which no published score
has.
"""

from __future__ import annotations

from typing import Any, NamedTuple, no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma_wait

from ...common.arrivals import arrive
from ...common.epilogue import LEAST, shift_of
from ...common.gluon_versions import partition_barrier
from ...common.loads import block_table_row_of, visibility_of, visible_keys
from ...common.own_length import TILE, ceil_div, own_splits
from ...common.records import WorkItem
from ...common.work_items import lens_of
from ..main_loops.tile_scores import ROWS, load_quarter, masked, reference_of, score_quarter

QUARTERS = gl.constexpr(4)  # quarters of a tile's latent columns, loaded and scored one by one
BEFORE = gl.constexpr(8)  # number of earlier pairs whose largest scores are loaded at a time
NOT_WRITTEN = gl.constexpr(-1)  # sentinel for "not written yet": no published score and no set flag has these bits
CANONICAL_NAN = gl.constexpr(0x7FFFFFFF)  # published instead of a NaN whose bits are NOT_WRITTEN
SCORE_WORDS = gl.constexpr(2 * ROWS.value)  # words of a score block: the largest score of each row in each tile
# float32 row values of a score block: for each row and each tile, the reference score and the sum of probabilities
ROW_VALUES = gl.constexpr(4 * ROWS.value)


class PhaseOne(NamedTuple):
    """Pointers to the results of phase 1 in global memory, which phase 2 reads.

    Attributes:
        row_values: [score blocks, 4, ROWS] float32. Index 0 and 1: reference scores after tile 0 and after tile 1.
            Index 2 and 3: sums of probabilities of tile 0 and of tile 1.
        probabilities: [score blocks, 2, ROWS, TILE], in the dtype of the cache.
    """

    row_values: Any
    probabilities: Any


class ColumnBlock(NamedTuple):
    """One of the eight column blocks of a split and row block: the unit of work of phase 2.

    Attributes:
        number: index among the column blocks of the batch, counted as if every request had `splits_bound` splits, the
            largest number that is possible.
        request: index of the request.
        row_block: index of the row block in the request.
        query_start: first query token of the request.
        query_end: end of the request's query tokens, exclusive.
        length: readable keys of the request.
        begin: first tile of the split.
        stop: end of the split's tiles, exclusive.
        splits: splits of the request.
        split_tiles: tiles of a split.
    """

    number: Any
    request: Any
    row_block: Any
    query_start: Any
    query_end: Any
    length: Any
    begin: Any
    stop: Any
    splits: Any
    split_tiles: Any


class Shared(NamedTuple):
    """Shared memory of a program.

    Attributes:
        queries: `Queries`; phase 1.
        latents: latents of two tiles, in quarters; phase 1.
        rope_tiles: rope parts of two tiles; phase 1.
        row_value_stages: row values of PROBABILITY_STAGES pairs (`column_blocks`); phase 2.
        probability_stages: probabilities of PROBABILITY_STAGES pairs; phase 2, in the memory of the queries.
        tiles: the latent columns of one column block, of STAGES pairs; phase 2, in the memory of `latents`.
    """

    queries: Any
    latents: Any
    rope_tiles: Any
    row_value_stages: Any
    probability_stages: Any
    tiles: Any


class Bars(NamedTuple):
    """Barriers of a program; `two_phases/README.md` says who arrives and who waits."""

    full: Any
    scored: Any
    stage_full: Any
    stage_empty: Any
    probabilities_full: Any


@gluon.jit
@no_type_check
def _num_score_blocks(sizes, pairs):
    """Return the number of score blocks of the batch, counted as if every request had `pairs` pairs of tiles."""
    return sizes.num_requests * pairs * sizes.row_blocks


@gluon.jit
@no_type_check
def flags_behind(words, sizes, pairs):
    """Return the pointer to the flags of all score blocks, which lie behind `words`.

    A set flag means that the probabilities of the score block are written.
    """
    return words + _num_score_blocks(sizes, pairs) * SCORE_WORDS


@gluon.jit
@no_type_check
def score_block_of_program(plan, inputs, sizes, pairs, HEADS: gl.constexpr):
    """Return the score block of this program as a `WorkItem`, and whether the score block exists.

    Program i computes score block i.
    """
    score_block = gl.program_id(0)
    row_blocks = sizes.row_blocks
    request = gl.minimum(score_block // row_blocks // pairs, sizes.num_requests - 1)
    row_block, begin = score_block % row_blocks, score_block // row_blocks % pairs * 2
    lens = lens_of(request, inputs, sizes)
    split_tiles, _ = own_splits(lens, plan)
    stop = gl.minimum(begin + 2, ceil_div(lens.readable, TILE))
    has_block = (score_block < _num_score_blocks(sizes, pairs)) & (begin < stop)
    has_block = has_block & (lens.query_start + row_block * ROWS // HEADS < lens.query_end)
    item = WorkItem(
        request, row_block, lens.query_start, lens.query_end, lens.readable, begin, stop, begin * 0, split_tiles
    )
    return item, has_block


@gluon.jit
@no_type_check
def _first_cache_blocks(block_table, sizes, strides, pairs, BLOCK_SIZE: gl.constexpr):
    """Load the numbers of the cache blocks that contain the first keys of both tiles of this program's score block.

    To save time, the numbers are loaded before the length of the request is known. The caller checks the length.
    """
    score_block, max_keys, row_blocks = gl.program_id(0), sizes.max_keys, sizes.row_blocks
    request, key = score_block // row_blocks // pairs, score_block // row_blocks % pairs * (2 * TILE)
    table_row = block_table + gl.minimum(request, sizes.num_requests - 1).to(gl.int64) * strides.table_row
    first, second = key // BLOCK_SIZE, (key + TILE) // BLOCK_SIZE
    stride = strides.table_entry
    first_block = gl.load(table_row + first.to(gl.int64) * stride, mask=key < max_keys, other=-1)
    return first_block, gl.load(table_row + second.to(gl.int64) * stride, mask=key + TILE < max_keys, other=-1)


@gluon.jit
@no_type_check
def load_score_block(
    plan, inputs, latent_tma, rope_tma, sizes, strides, buffers, full, pairs,
    HEADS: gl.constexpr, LATENT: gl.constexpr, ROPE: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """Issue the TMA (bulk copy) loads of both tiles of this program's score block, if the program has one."""
    first_blocks = _first_cache_blocks(inputs.block_table, sizes, strides, pairs, BLOCK_SIZE)
    item, has_block = score_block_of_program(plan, inputs, sizes, pairs, HEADS)
    if has_block:
        blocks = block_table_row_of(item, inputs.block_table, strides)
        tile_blocks = (first_blocks[0], gl.where((item.begin + 1) * TILE < blocks.end_key, first_blocks[1], -1))
        for pointers in gl.static_range(2):
            for number in gl.static_range(QUARTERS):
                load_quarter(
                    item.begin + pointers, tile_blocks[pointers], blocks, latent_tma, rope_tma, buffers, full, pointers,
                    number, LATENT, ROPE, BLOCK_SIZE,
                )  # fmt: skip


@gluon.jit
@no_type_check
def _publish_largest_scores(words, score_block, TILE_INDEX: gl.constexpr, largest):
    """Publish the largest scores of a tile, one word per row; no published word has the value NOT_WRITTEN."""
    row = gl.arange(0, ROWS, largest.type.layout)
    bits = largest.to(gl.int32, bitcast=True)
    bits = gl.where(bits == NOT_WRITTEN, CANONICAL_NAN, bits)
    gl.atomic_xchg(words + score_block * SCORE_WORDS + TILE_INDEX * ROWS + row, bits, sem="relaxed", scope="gpu")


@gluon.jit
@no_type_check
def _largest_scores_before(words, score_block, back, row_blocks, ALL: gl.constexpr):
    """Load the words of BEFORE consecutive pairs; the first pair is `back` pairs before this program's pair.

    The result is a tuple with two tensors [ROWS] of 32-bit words per pair, one for each tile. A word that is not
    published yet is NOT_WRITTEN. This program's pair and later pairs get the bits of -inf instead of their words.
    """
    row = gl.arange(0, ROWS, ALL)
    loaded = ()
    for i in gl.static_range(BEFORE):
        pointers = words + (score_block - (back - i) * row_blocks) * SCORE_WORDS + row
        has_block = (row >= 0) & (back > i)
        for tile in gl.static_range(2):
            bits = gl.load(pointers + tile * ROWS, mask=has_block, other=-8388608, volatile=True)
            loaded = loaded + (bits,)  # noqa: RUF005  Triton cannot unpack a tuple
    return loaded


@gluon.jit
@no_type_check
def _not_written(loaded):
    """Return whether any word is NOT_WRITTEN; every warp checks all words, so the warps need no barrier."""
    waiting = loaded[0] == NOT_WRITTEN
    for i in gl.static_range(1, 2 * BEFORE):
        waiting = waiting | (loaded[i] == NOT_WRITTEN)
    return gl.max(waiting.to(gl.int32), 0) > 0


@gluon.jit
@no_type_check
def _reference_before(words, score_block, count, row_blocks, scale_log2, ALL: gl.constexpr):
    """Wait for the largest scores of the `count` earlier pairs of the split; return the resulting reference scores."""
    reference = gl.full([ROWS], LEAST, gl.float32, ALL)
    for first in range(0, count, BEFORE):
        loaded = _largest_scores_before(words, score_block, count - first, row_blocks, ALL)
        while _not_written(loaded):
            loaded = _largest_scores_before(words, score_block, count - first, row_blocks, ALL)
        for i in gl.static_range(2 * BEFORE):
            reference = reference_of(reference, loaded[i].to(gl.float32, bitcast=True), scale_log2)
    return reference


@gluon.jit
@no_type_check
def fence_async_global():
    """Order the earlier accesses of this thread to global memory before later reads by TMA (the bulk copy engine)."""
    gl.inline_asm_elementwise("fence.proxy.async.global; // dummy $0", "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
@no_type_check
def _write_tile(scores, reference, phase_one, score_block, scale_log2, TILE_INDEX: gl.constexpr, SCORES: gl.constexpr):
    """Write a tile's probabilities, and each row's reference score and sum of probabilities, to global memory."""
    row_values, probabilities = phase_one.row_values, phase_one.probabilities
    # Four threads store a row. Each thread stores two groups of 8 consecutive keys, which fills whole 32-byte sectors.
    LINES: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32]], [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [],
        [64, 64],
    )  # fmt: skip
    weights = gl.exp2(scores * scale_log2 - shift_of(reference, scale_log2)[:, None])
    row, key = gl.arange(0, ROWS, gl.SliceLayout(1, LINES)), gl.arange(0, TILE, gl.SliceLayout(0, LINES))
    pointers = (
        probabilities
        + (2 * score_block + TILE_INDEX).to(gl.int64) * (ROWS * TILE)
        + (row * TILE)[:, None]
        + key[None, :]
    )
    gl.store(pointers, gl.convert_layout(weights.to(probabilities.dtype.element_ty), LINES))
    pointers = row_values + score_block.to(gl.int64) * ROW_VALUES + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
    gl.store(pointers + TILE_INDEX * ROWS, reference)
    gl.store(pointers + (2 + TILE_INDEX) * ROWS, gl.sum(weights, 1))


@gluon.jit
@no_type_check
def compute_score_block(
    item, inputs, words, phase_one, sizes, strides, shared, bars, pairs,
    HEADS: gl.constexpr, LATENT: gl.constexpr, ROPE: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """Compute the score block of this program and write its probabilities to global memory.

    The loads of the queries must already be issued. This function arrives at the barrier `scored` when its products
    have finished: from then on, phase 2 may overwrite the shared memory of tiles and queries.
    """
    scale_log2, full = sizes.scale_log2, bars.full
    q_latent, q_rope, buffers = shared.queries.q_latent, shared.queries.q_rope, (shared.latents, shared.rope_tiles)
    score_block, flags = gl.program_id(0), flags_behind(words, sizes, pairs)
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    ALL: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    begin, stop = item.begin, item.stop
    visible, first_blocks = visible_keys(item, inputs, sizes, strides, ROWS, HEADS, BLOCK_SIZE, ROW)
    visible = gl.minimum(visible, item.length)
    table_row = inputs.block_table + item.request.to(gl.int64) * strides.table_row
    visibility = visibility_of(item, visible, first_blocks, table_row, sizes, strides, BLOCK_SIZE, False)
    async_copy.wait_group(0)
    fence_async_shared()
    partition_barrier()

    first = gl.zeros([ROWS, TILE], gl.float32, SCORES)
    for number in gl.static_range(QUARTERS):
        first = score_quarter(first, buffers, q_latent, q_rope, full, 0, 0, True, 0, number, LATENT, ROPE)
    second = gl.zeros([ROWS, TILE], gl.float32, SCORES)
    first = warpgroup_mma_wait(0, deps=[first])
    for number in gl.static_range(QUARTERS):
        second = score_quarter(second, buffers, q_latent, q_rope, full, 0, 0, True, 1, number, LATENT, ROPE)
    if begin >= visibility.first_masked:
        first = masked(first, begin, stop, visibility, SCORES, BLOCK_SIZE)
    first_largest = gl.max(first, 1)
    _publish_largest_scores(words, score_block, 0, first_largest)
    second = warpgroup_mma_wait(0, deps=[second])
    if begin + 1 >= visibility.first_masked:
        second = masked(second, begin + 1, stop, visibility, SCORES, BLOCK_SIZE)
    partition_barrier()  # the products of all warps finish before one warp arrives
    arrive(bars.scored)
    second_largest = gl.max(second, 1)
    _publish_largest_scores(words, score_block, 1, second_largest)

    count = begin % item.split_tiles // 2
    before = _reference_before(words, score_block, count, sizes.row_blocks, scale_log2, ALL)
    first_reference = reference_of(gl.convert_layout(before, ROW), first_largest, scale_log2)
    second_reference = reference_of(first_reference, second_largest, scale_log2)
    _write_tile(first, first_reference, phase_one, score_block, scale_log2, 0, SCORES)
    _write_tile(second, second_reference, phase_one, score_block, scale_log2, 1, SCORES)
    fence_async_global()
    partition_barrier()  # every thread writes and executes the fence before one thread sets the flag
    gl.atomic_xchg(flags + score_block, 0, sem="release", scope="gpu")
