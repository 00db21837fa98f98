"""Absorbed decode on Hopper: which kernel takes a call, and into how many parts requests are cut.

Up to 32 rows (a row is one head of one query token) go to `few_heads`, and those of one short request; else to
`many_heads`, 64 at a time. Where requests are cut by their own length, the number of heads alone decides, but that
`two_phases` does for few requests what `many_heads` does. Parts are merged as those of portable Triton are.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from reference.interfaces import (
    DECODE_TILE,
    check,
    fold_overhead,
    invariant_cut,
    invariant_split_tiles,
    most_invariant_splits,
)

from ...combine import SplitDecode, combine_partial_outputs, readable_keys, rows_of_a_request, whole_tiles
from ...device import device_facts
from ..common.dependent_launch import LAUNCH
from .main_loops.epilogue_16_32 import SHARED_VALUES
from .main_loops.row_blocks_16_32 import _row_blocks_16_32_kernel
from .main_loops.row_blocks_64 import _row_blocks_64_kernel
from .main_loops.tile_scores import ROWS
from .two_phases.column_blocks import COLUMN_BLOCKS
from .two_phases.launch import launch_two_phases

DTYPES = (torch.bfloat16, torch.float16)
OUT_DTYPES = (*DTYPES, torch.float32)
FEW_ROWS = (16, 32)  # of one request, that `few_heads` takes
MANY_ROWS = ROWS.value
SPREAD_LATENT = 512  # with which several programs may compute one split's rows, where there are programs to spare
SLICES = 2  # of the output of a split, for as many programs
FEW_TILES = 4  # of a request that a program takes at least, where there are programs to spare
LEAST_SCALE = 1e-30  # stands for 0: the scores vanish, and no infinity is multiplied by 0
# nanoseconds on an H200, for the choice of splits: a tile of keys in one program, the least tiles that show in its
# time, a program besides; a tile's bytes over the bandwidth of the whole device; a merge, and a row of it
COSTS_NS = {"few": (1500, 1, 5000), "many": (2000, 4, 6500)}
MEMORY_TILE_NS = 17
COMBINE_NS, COMBINED_ROW_NS = 3000, 1.5


def mla_decode(
    ql_nope: Tensor,
    q_pe: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    visible_lens: Tensor,
    max_query_len: int,
    max_seq_len: int,
    softmax_scale: float,
    out_dtype: torch.dtype,
    tile_ranges: Tensor | None,
    split_offsets: Tensor | None,
    batch_invariant: bool,
) -> tuple[Tensor, Tensor]:
    """Attention of a few query tokens a request over its cached latents.

    Args:
        ql_nope: [T, N, Lkv], bfloat16 or float16; Lkv 256 or 512.
        q_pe: [T, N, R]; R 0, 32 or 64.
        kv_cache: [num_blocks, block_size, Lkv + R], rows of 16-byte words; block size 16, 32, 64 or 128.
        block_table: [B, W]; tokens of a block outside the cache are masked.
        seq_lens: [B], clamped to [0, min(max_seq_len, W * block_size)].
        query_start_loc: [B + 1].
        visible_lens: [T].
        max_query_len: bounds the rows of a request.
        max_seq_len: bounds the keys of a request, for the number of splits and the size of buffers.
        softmax_scale: multiplies the scores.
        out_dtype: of out.
        tile_ranges: [programs, 5] of a schedule, or None: every request is then shared among equally many programs, as
            many as suit the longest request.
        split_offsets: [B + 1] of that schedule.
        batch_invariant: requests are cut by their own length, whoever takes the splits.

    Returns:
        out [T, N, Lkv] and lse [N, T].

    Raises:
        ValueError: another dtype; a cache that does not begin at a 16-byte word.
    """
    found = decode_splits(
        ql_nope, q_pe, kv_cache, block_table, seq_lens, query_start_loc, visible_lens, max_query_len, max_seq_len,
        softmax_scale, out_dtype, tile_ranges, split_offsets, batch_invariant,
    )  # fmt: skip
    combine_partial_outputs(
        found.partial_out, found.partial_lse, query_start_loc, max_query_len, tile_ranges, split_offsets,
        batch_invariant, found.out, found.lse,
    )  # fmt: skip
    return found.out, found.lse


def decode_splits(
    ql_nope, q_pe, kv_cache, block_table, seq_lens, query_start_loc, visible_lens, max_query_len, max_seq_len,
    softmax_scale, out_dtype, tile_ranges, split_offsets, batch_invariant,
) -> SplitDecode:  # fmt: skip
    """Do all of `mla_decode` but the combine."""
    check(ql_nope.dtype in DTYPES, "ql_nope", "dtype bfloat16 or float16", ql_nope.dtype)
    check(out_dtype in OUT_DTYPES, "out_dtype", "float32, bfloat16 or float16", out_dtype)
    check(kv_cache.data_ptr() % 16 == 0, "kv_cache", "aligned to 16 bytes", f"address {kv_cache.data_ptr():#x}")
    tokens, heads, latent = ql_nope.shape
    rope = q_pe.shape[2]
    num_blocks, block_size, _ = kv_cache.shape
    requests, table_width = block_table.shape
    max_keys = readable_keys(max_seq_len, table_width, block_size)
    device = ql_nope.device
    out = torch.empty(tokens, heads, latent, dtype=out_dtype, device=device)
    lse = torch.empty(heads, tokens, dtype=torch.float32, device=device)
    none = torch.empty(0, dtype=torch.float32, device=device)
    if tokens == 0 or requests == 0 or heads == 0:
        return SplitDecode(out, lse, none, none.clone())
    if softmax_scale < 0:  # the kernels take the largest score before they scale
        ql_nope, q_pe, softmax_scale = -ql_nope, -q_pe, -softmax_scale
    ql_nope, latent_strides = _in_words(ql_nope)
    q_pe, rope_strides = _in_words(q_pe)

    request_rows = rows_of_a_request(tokens, heads, max_query_len)
    processors = device_facts(device).processors
    planned = tile_ranges is not None
    program_rows = _program_rows(planned, batch_invariant, requests, request_rows, heads, max_keys, processors)
    row_blocks = triton.cdiv(request_rows, program_rows)
    if planned:
        tile_ranges, split_offsets = tile_ranges.contiguous(), split_offsets.contiguous()
        deal = _deal_planned(tile_ranges.shape[0], batch_invariant, requests, request_rows, row_blocks, max_keys, heads)
    elif batch_invariant:
        deal = _deal_by_length(requests, request_rows, program_rows, max_keys, heads, latent, processors)
    else:
        deal = _deal_evenly(requests, tokens * heads, program_rows, row_blocks, max_keys, processors)
    kept_values = deal.programs * _kept_values(program_rows, latent) if deal.most_splits > 1 else 0
    progress = 2 * requests if batch_invariant else 0
    partial_out = torch.empty(deal.partial_rows * latent + kept_values, dtype=torch.float32, device=device)
    partial_lse = torch.empty(2 * deal.partial_rows + progress, dtype=torch.float32, device=device)
    latent_pages, rope_pages = _page_descriptors(kv_cache, latent, rope)
    inputs = (
        ql_nope, q_pe, latent_pages, rope_pages, block_table, seq_lens.contiguous(), query_start_loc.contiguous(),
        visible_lens.contiguous(),
    )  # fmt: skip
    results = (out, lse, partial_out, partial_lse)
    numbers = (
        *invariant_cut(heads), max(softmax_scale, LEAST_SCALE) / math.log(2), *latent_strides, *rope_strides,
        *block_table.stride(),
    )  # fmt: skip
    widths = {"HEADS": heads, "LATENT": latent, "ROPE": rope, "BLOCK_SIZE": block_size}
    sizes = (tokens, num_blocks, requests, max_keys)
    blocks = (row_blocks, request_rows, deal.num_partials)
    constants = {
        **widths, "BY_LENGTH": batch_invariant, "SCHEDULED": planned,
        "SPLIT": deal.num_splits > 1 and not batch_invariant,
    }  # fmt: skip
    arguments = (
        *inputs, tile_ranges if planned else seq_lens, split_offsets if planned else seq_lens,
        *results, *sizes, deal.num_splits, *blocks, *numbers,
    )  # fmt: skip
    with torch.cuda.device_of(ql_nope):
        if deal.pairs > 0:
            launch_two_phases(
                inputs, results, (*sizes, *blocks), numbers, widths, deal.programs, deal.pairs, deal.num_splits
            )
        elif program_rows < MANY_ROWS:
            _row_blocks_16_32_kernel[(deal.programs,)](*arguments, ROWS=program_rows, **constants, **LAUNCH)
        else:
            in_boxes = heads % MANY_ROWS == 0 and deal.slices == 1 and not constants["SPLIT"]  # rows of one token
            out_rows = _row_descriptor(out) if in_boxes and out_dtype == ql_nope.dtype else None
            cache = (kv_cache, *kv_cache.stride()[:2])
            _row_blocks_64_kernel[(deal.programs,)](
                *arguments, out_rows, *cache, SLICES=deal.slices, **constants, **LAUNCH
            )
    return SplitDecode(out, lse, partial_out, partial_lse)


class Deal(NamedTuple):
    """How requests are dealt to programs.

    Attributes:
        programs: how many.
        num_splits: of each request; where its own length cuts it runs of splits, and in two phases no less than splits.
        num_partials: of parts.
        partial_rows: of all parts.
        most_splits: of a request whose own length cuts it and whose splits a program folds; else 0.
        slices: programs that share a split, each with some columns of the output.
        pairs: of tiles of a request, each scored by a program of its own before any is multiplied; 0: in one phase.
    """

    programs: int
    num_splits: int
    num_partials: int
    partial_rows: int
    most_splits: int = 0
    slices: int = 1
    pairs: int = 0


def _deal_planned(
    ranges: int, batch_invariant: bool, requests: int, request_rows: int, row_blocks: int, keys: int, heads: int
) -> Deal:
    """As a schedule says; every program of it leaves at most one request unfinished."""
    most_splits = most_invariant_splits(triton.cdiv(keys, DECODE_TILE), heads) if batch_invariant else 0
    num_partials = requests * most_splits if batch_invariant else requests + ranges
    return Deal(ranges * row_blocks, 1, num_partials, num_partials * request_rows, most_splits)


def _deal_by_length(
    requests: int, request_rows: int, program_rows: int, keys: int, heads: int, latent: int, processors: int
) -> Deal:
    """Requests that their own lengths cut, to as many programs as suit the longest request."""
    pieces = requests * triton.cdiv(request_rows, program_rows)
    most_splits = most_invariant_splits(triton.cdiv(keys, DECODE_TILE), heads)
    pairs = triton.cdiv(keys, 2 * DECODE_TILE)
    spreads = program_rows == MANY_ROWS and latent == SPREAD_LATENT
    in_two_phases = spreads and _scored_at_once(pieces * pairs, processors)
    num_splits = most_splits
    if not in_two_phases:
        num_splits = _num_runs(pieces, requests * request_rows, whole_tiles(keys), heads, program_rows, processors)
    num_partials = requests * most_splits if num_splits > 1 else 0
    partial_rows = num_partials * request_rows
    if in_two_phases:
        programs = min(processors, pieces * max(pairs, most_splits * COLUMN_BLOCKS.value))
        return Deal(programs, num_splits, num_partials, partial_rows, pairs=pairs)
    slices = SLICES if spreads and SLICES * pieces * num_splits <= processors else 1
    programs = min(processors, slices * pieces * num_splits)
    return Deal(programs, num_splits, num_partials, partial_rows, most_splits, slices)


def _deal_evenly(requests: int, rows: int, program_rows: int, row_blocks: int, keys: int, processors: int) -> Deal:
    """Every request to equally many programs, as many as suit the longest request."""
    num_splits = _num_splits(requests * row_blocks, rows, whole_tiles(keys), program_rows, row_blocks, processors)
    programs = min(processors, requests * num_splits * row_blocks)
    return Deal(programs, num_splits, num_splits, num_splits * rows if num_splits > 1 else 0)


def _scored_at_once(units: int, processors: int) -> bool:
    """Whether all pairs of tiles, times blocks of rows, have a program each, so that a decode takes two phases."""
    return 0 < units <= processors


def _program_rows(
    planned: bool, batch_invariant: bool, requests: int, request_rows: int, heads: int, keys: int, processors: int
) -> int:
    """Of a request's rows, how many a program computes at a time.

    Where requests are cut by their own length, no neighbour's query length may change which kernel takes a request's
    rows; `few_heads` gives a row the same bits among 16 as among 32.
    """
    program_rows = rows_of_a_program(request_rows)
    if batch_invariant:
        return min(program_rows, FEW_ROWS[-1] if heads <= FEW_ROWS[-1] else MANY_ROWS)
    return program_rows if planned else _rows_where_alone(program_rows, requests, request_rows, keys, processors)


def _kept_values(program_rows: int, latent: int) -> int:
    """How many values a program keeps between splits behind all parts, for want of room in shared memory."""
    values = program_rows * latent
    if program_rows == MANY_ROWS:
        return values
    return 0 if values <= SHARED_VALUES.value else values // 2


def _in_words(queries: Tensor) -> tuple[Tensor, list[int]]:
    """Queries [T, N, columns] that the kernels can copy 16 bytes at a time, and the strides of tokens and heads.

    The compiler sees that rows begin at such words where strides are multiples of 16 elements.
    """
    strides = [stride if size > 1 else 0 for size, stride in zip(queries.shape, queries.stride(), strict=True)]
    if queries.numel() and (queries.stride(2) != 1 or queries.data_ptr() % 16 or any(s % 16 for s in strides[:2])):
        return _in_words(queries.clone(memory_format=torch.contiguous_format))
    return queries, strides[:2]


def rows_of_a_program(rows: int) -> int:
    """Of a request's rows, how many a program computes at a time."""
    return next((few for few in FEW_ROWS if rows <= few), MANY_ROWS)


def decode_programs(
    device: torch.device,
    dtype: torch.dtype,
    num_heads: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_size: int,
    query_len: int,
) -> int:
    """How many programs of a schedule fill a device: one a multiprocessor, counting one for each block of rows."""
    rows = num_heads * query_len
    return max(1, device_facts(device).processors // triton.cdiv(rows, rows_of_a_program(rows)))


def _rows_where_alone(program_rows: int, requests: int, request_rows: int, keys: int, processors: int) -> int:
    """Of a request's rows, how many a program computes at a time where requests are cut into equally many parts.

    Where one request's programs of a few tiles each do not fill the device, more of them with fewer rows do, and leave
    smaller parts. `fast.warmup` launches one request of every length for it.

    Args:
        program_rows: otherwise.
        requests: how many.
        request_rows: of one request.
        keys: of the longest request.
        processors: of the device.
    """
    if requests > 1:
        return program_rows
    parts = max(1, triton.cdiv(keys, FEW_TILES * DECODE_TILE))
    fitting = (few for few in FEW_ROWS if parts * triton.cdiv(request_rows, few) <= processors)
    return min(program_rows, next(fitting, program_rows))


@functools.lru_cache(maxsize=4096)
def _num_splits(pieces: int, rows: int, keys: int, program_rows: int, row_blocks: int, processors: int) -> int:
    """Into how many parts to cut each request's keys, from bounds that the host knows; the least that costs least.

    Args:
        pieces: of one split: requests by blocks of rows.
        rows: of all requests.
        keys: of the longest request.
        program_rows: rows that a program computes at a time.
        row_blocks: of a request, whose programs read the same tiles.
        processors: of the device.
    """
    tiles = max(1, triton.cdiv(keys, DECODE_TILE))
    many = program_rows == MANY_ROWS
    tile_ns, least, piece_ns = COSTS_NS["many" if many else "few"]
    step = 2 if many else 1  # tiles are taken in pairs

    def cost(splits: int) -> int | float:
        turns = triton.cdiv(pieces * splits, processors)
        split_tiles = max(least, step * triton.cdiv(tiles, step * splits))
        memory_ns = 0 if many else MEMORY_TILE_NS * min(pieces * splits, processors) / row_blocks
        merge_ns = COMBINE_NS + COMBINED_ROW_NS * splits * rows if splits > 1 else 0
        return turns * (piece_ns + split_tiles * max(tile_ns, memory_ns)) + merge_ns

    return min(range(1, max(1, min(triton.cdiv(tiles, step), 2 * processors)) + 1), key=cost)


@functools.lru_cache(maxsize=4096)
def _num_runs(pieces: int, rows: int, keys: int, heads: int, program_rows: int, processors: int) -> int:
    """Over how many programs to spread each request's splits, where its own length cuts it; the least that costs least.

    Args:
        pieces: of one run: requests by blocks of rows.
        rows: of all requests.
        keys: of the longest request.
        heads: N.
        program_rows: rows that a program computes at a time.
        processors: of the device.
    """
    tiles = max(1, triton.cdiv(keys, DECODE_TILE))
    split_tiles = invariant_split_tiles(tiles, heads)
    splits = triton.cdiv(tiles, split_tiles)
    tile_ns, _, piece_ns = COSTS_NS["many" if program_rows == MANY_ROWS else "few"]
    split_ns = (split_tiles + fold_overhead(heads)) * tile_ns

    def cost(runs: int) -> int | float:
        taken = triton.cdiv(splits, runs)
        merge_ns = COMBINE_NS + COMBINED_ROW_NS * (splits - taken + 1) * rows if taken < splits else 0
        return triton.cdiv(pieces * runs, processors) * (piece_ns + taken * split_ns) + merge_ns

    return min(range(1, splits + 1), key=cost)


def _page_descriptors(kv_cache: Tensor, latent: int, rope: int) -> tuple[TensorDescriptor, TensorDescriptor]:
    """How the copy engine takes boxes out of the pages: of the latents, and of the rope parts."""
    shape, strides = list(kv_cache.shape), list(kv_cache.stride())
    keys = min(kv_cache.shape[1], DECODE_TILE)
    columns = latent // 4 if keys == DECODE_TILE else 64  # of pages that are no whole tile, one swizzled column
    latent_pages = TensorDescriptor(kv_cache, shape, strides, [1, keys, columns], gl.NVMMASharedLayout(128, 16, rank=3))
    if rope == 0:
        return latent_pages, latent_pages
    layout = gl.NVMMASharedLayout(2 * rope, 16, rank=3)
    return latent_pages, TensorDescriptor(kv_cache, shape, strides, [1, keys, rope], layout)


def _row_descriptor(out: Tensor) -> TensorDescriptor:
    """How the copy engine takes a quarter of the columns of 64 rows to out [T, N, Lkv]."""
    return TensorDescriptor.from_tensor(
        out.flatten(0, 1), [MANY_ROWS, out.shape[2] // 4], gl.NVMMASharedLayout(128, 16, rank=2)
    )
