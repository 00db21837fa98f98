"""Absorbed decode over the pages themselves: keys split among programs (flash-decoding), then one merge of the parts.

A program holds the query rows of one request, or 64 of them (a row is one head of one query token), and walks its
share of the request's keys in tiles. One loaded tile serves as key and, without its rope part, as value.
"""

from __future__ import annotations

import functools
import math
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from reference.interfaces import UnsupportedConfiguration, check

from .device import device_facts

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PROGRAM_COST = 256  # what a program costs besides its keys, in keys: its start, its queries, its results
ROWS_MERGED_PER_KEY = 64  # rows of splits that merge in the time that one key takes
FLOAT32_PIECE_COLUMNS = 16  # of a float32 product that are summed one after another
MERGE_COLUMNS = 64
MERGE_SPLITS = 32
LN_2 = tl.constexpr(math.log(2))


@triton.jit
@no_type_check  # the interpreter needs the source and globals of the kernels themselves
def _softmax_step(scores, seen, largest, total, dtype: tl.constexpr):
    """Running maximum, what older values shrink by, running sum, and the probabilities [ROWS, TILE] in a dtype."""
    scores = tl.where(seen, scores, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(scores, 1))
    shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)  # nothing seen yet: exp2(-inf - 0) = 0
    weights = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(largest - shift)
    return new_largest, decay, total * decay + tl.sum(weights, 1), weights.to(dtype)


@triton.jit
@no_type_check
def _products(q, k, PIECE_COLUMNS: tl.constexpr):
    """Scores [ROWS, TILE] of q [ROWS, D] and k [TILE, D]; with PIECE_COLUMNS as a sum of sums over so many columns.

    One sum over all columns rounds by their number, as no float32 library does it.
    """
    if PIECE_COLUMNS == 0:
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    else:
        PIECES: tl.constexpr = q.shape[1] // PIECE_COLUMNS
        q_pieces = tl.permute(q.reshape(q.shape[0], PIECES, PIECE_COLUMNS), (1, 0, 2))
        k_pieces = tl.permute(k.reshape(k.shape[0], PIECES, PIECE_COLUMNS), (1, 2, 0))
        scores = tl.sum(tl.dot(q_pieces, k_pieces, input_precision="ieee"), 0)
    return scores


@triton.jit
@no_type_check
def _attend_tile(
    largest, total, values, q_latent, q_rope, visible, key_end, tile, table_row, table_stride, num_blocks,
    kv_cache, latent_pages, rope_pages, block_stride, entry_stride, element_stride, scale_log2,
    LATENT: tl.constexpr, ROPE: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    LATENT_PAD: tl.constexpr, ROPE_PAD: tl.constexpr, PIECE_COLUMNS: tl.constexpr, PAGED_COPY: tl.constexpr,
    PARTIAL: tl.constexpr,
):  # fmt: skip
    """Take one tile of keys into the running softmax; a PARTIAL tile has keys that some row, or all, must not see."""
    ONE_WARPGROUP_ROWS: tl.constexpr = q_latent.shape[0] == 64
    keys = tile * TILE + tl.arange(0, TILE)
    if BLOCK_SIZE % TILE == 0:  # one page holds the tile, and its first key is there
        page = tl.load(table_row + (tile * TILE // BLOCK_SIZE) * table_stride)
    else:
        page = tl.load(table_row + (keys // BLOCK_SIZE) * table_stride, mask=keys < key_end, other=-1)
    held = (keys < key_end) & (page >= 0) & (page < num_blocks)
    if PAGED_COPY:  # the copy engine fills what lies outside the cache with 0
        first = (tile * TILE) % BLOCK_SIZE
        latent = latent_pages.load([page, first, 0]).reshape(TILE, LATENT)
        if PARTIAL:  # unowned bytes may be NaN, and 0 * NaN is NaN
            latent = tl.where(held[:, None], latent, 0.0)
    else:
        # [TILE] 64-bit offsets; unowned bytes are never loaded
        entries = page.to(tl.int64) * block_stride + (keys % BLOCK_SIZE).to(tl.int64) * entry_stride
        columns = tl.arange(0, LATENT_PAD)
        where = kv_cache + entries[:, None] + columns[None, :].to(tl.int64) * element_stride
        if LATENT == LATENT_PAD:
            latent = tl.load(where, mask=held[:, None], other=0.0)
        else:
            latent = tl.load(where, mask=held[:, None] & (columns < LATENT)[None, :], other=0.0)

    scores = _products(q_latent, latent, PIECE_COLUMNS)
    if ROPE > 0:
        if PAGED_COPY:  # among keys NaN does no harm: their scores are masked
            rope = rope_pages.load([page, first, LATENT]).reshape(TILE, ROPE)
        else:
            rope_columns = tl.arange(0, ROPE_PAD)
            where = kv_cache + entries[:, None] + (LATENT + rope_columns)[None, :].to(tl.int64) * element_stride
            if ROPE == ROPE_PAD:
                rope = tl.load(where, mask=held[:, None], other=0.0)
            else:
                rope = tl.load(where, mask=held[:, None] & (rope_columns < ROPE)[None, :], other=0.0)
        if ONE_WARPGROUP_ROWS:
            scores = scores * scale_log2 + _products(q_rope, rope, PIECE_COLUMNS) * scale_log2
        elif PIECE_COLUMNS > 0:
            scores = (scores + _products(q_rope, rope, PIECE_COLUMNS)) * scale_log2
        else:
            scores = tl.dot(q_rope, tl.trans(rope), acc=scores, input_precision="ieee") * scale_log2
    else:
        scores *= scale_log2

    seen = held[None, :]
    if PARTIAL:
        seen = seen & (keys[None, :] < visible[:, None])
    if ONE_WARPGROUP_ROWS:
        # Where one product feeds another, the compiler gives all warps to rows; two warpgroups on 64 rows then compute
        # the same scores twice. It does not see one feed the other through a branch. This one is always taken.
        new_largest, decay, new_total = largest, largest, total
        probabilities = tl.zeros(scores.shape, latent.dtype)
        if tile >= 0:
            new_largest, decay, new_total, probabilities = _softmax_step(scores, seen, largest, total, latent.dtype)
    else:
        new_largest, decay, new_total, probabilities = _softmax_step(scores, seen, largest, total, latent.dtype)
    values = values * decay[:, None]
    values = tl.dot(probabilities, latent, acc=values, input_precision="ieee")
    return new_largest, new_total, values


@triton.jit(
    do_not_specialize=["num_tokens", "num_blocks", "table_width", "num_splits", "row_blocks", "table_row_stride"],
    do_not_specialize_on_alignment=["block_table", "seq_lens", "query_start_loc", "visible_lens"],
)
@no_type_check
def _decode_kernel(
    ql_nope, q_pe, kv_cache, latent_pages, rope_pages, block_table, seq_lens, query_start_loc, visible_lens, out, lse,
    num_tokens, num_blocks, table_width, num_splits, row_blocks, scale_log2,
    latent_token_stride, latent_head_stride, latent_element_stride,
    rope_token_stride, rope_head_stride, rope_element_stride,
    block_stride, entry_stride, element_stride, table_row_stride, table_stride,
    HEADS: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    LATENT_PAD: tl.constexpr, ROPE_PAD: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    PIECE_COLUMNS: tl.constexpr, PAGED_COPY: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """One split of one request for ROWS of its rows.

    Alone, out [T, N, Lkv] and lse [N, T]. As one of several, in float32, out [splits, T, N, Lkv] is the sum of values
    by exp2(score - largest), not divided yet, and lse [2, splits, N, T] has `largest`, in base 2, and the sum of those
    weights.
    """
    program = tl.program_id(0)
    row_block, split = program % row_blocks, program // row_blocks % num_splits
    request = program // row_blocks // num_splits
    query_start = tl.minimum(tl.maximum(tl.load(query_start_loc + request), 0), num_tokens)
    query_end = tl.minimum(tl.load(query_start_loc + request + 1), num_tokens)
    rows = row_block * ROWS + tl.arange(0, ROWS)
    token, head = query_start + rows // HEADS, rows % HEADS
    real = token < query_end
    if query_start + row_block * ROWS // HEADS < query_end:
        columns = tl.arange(0, LATENT_PAD)
        offsets = token.to(tl.int64) * latent_token_stride + head.to(tl.int64) * latent_head_stride
        q_latent = tl.load(
            ql_nope + offsets[:, None] + (columns.to(tl.int64) * latent_element_stride)[None, :],
            mask=real[:, None] & (columns < LATENT)[None, :],
            other=0.0,
        )
        q_rope = q_latent
        if ROPE > 0:
            rope_columns = tl.arange(0, ROPE_PAD)
            offsets = token.to(tl.int64) * rope_token_stride + head.to(tl.int64) * rope_head_stride
            q_rope = tl.load(
                q_pe + offsets[:, None] + (rope_columns.to(tl.int64) * rope_element_stride)[None, :],
                mask=real[:, None] & (rope_columns < ROPE)[None, :],
                other=0.0,
            )

        length = tl.maximum(0, tl.minimum(tl.load(seq_lens + request), table_width * BLOCK_SIZE))
        visible = tl.minimum(tl.load(visible_lens + token, mask=real, other=0), length)
        key_end = tl.maximum(tl.max(visible, 0), 0)
        full_tiles = tl.maximum(tl.min(tl.where(real, visible, key_end), 0), 0) // TILE  # seen whole by every row
        tiles = tl.cdiv(key_end, TILE)
        split_tiles = tl.cdiv(tiles, num_splits)
        first_tile = tl.minimum(split * split_tiles, tiles)
        last_tile = tl.minimum(first_tile + split_tiles, tiles)

        largest = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        values = tl.zeros([ROWS, LATENT_PAD], tl.float32)
        table_row = block_table + request.to(tl.int64) * table_row_stride
        for tile in tl.range(first_tile, tl.minimum(full_tiles, last_tile)):
            largest, total, values = _attend_tile(
                largest, total, values, q_latent, q_rope, visible, key_end, tile, table_row, table_stride, num_blocks,
                kv_cache, latent_pages, rope_pages, block_stride, entry_stride, element_stride, scale_log2,
                LATENT, ROPE, BLOCK_SIZE, TILE, LATENT_PAD, ROPE_PAD, PIECE_COLUMNS, PAGED_COPY, False,
            )  # fmt: skip
        for tile in tl.range(tl.maximum(full_tiles, first_tile), last_tile, num_stages=1):
            largest, total, values = _attend_tile(
                largest, total, values, q_latent, q_rope, visible, key_end, tile, table_row, table_stride, num_blocks,
                kv_cache, latent_pages, rope_pages, block_stride, entry_stride, element_stride, scale_log2,
                LATENT, ROPE, BLOCK_SIZE, TILE, LATENT_PAD, ROPE_PAD, PIECE_COLUMNS, PAGED_COPY, True,
            )  # fmt: skip

        split_row = split.to(tl.int64) * num_tokens * HEADS
        lse_row = lse + split_row + head.to(tl.int64) * num_tokens + token
        if SPLIT:  # the parts of the sum themselves: a log-sum-exp would round, and the merge would raise that by exp
            tl.store(lse_row, largest, mask=real)
            tl.store(lse_row + num_splits.to(tl.int64) * num_tokens * HEADS, total, mask=real)
        else:
            divisor = tl.where(total == 0, 1.0, total)  # a row that saw nothing: values 0, largest -inf
            values = values / divisor[:, None]
            tl.store(lse_row, (largest + tl.log2(divisor)) * LN_2, mask=real)
        offsets = (split_row + token.to(tl.int64) * HEADS + head) * LATENT
        tl.store(
            out + offsets[:, None] + columns[None, :],
            values.to(out.dtype.element_ty),
            mask=real[:, None] & (columns < LATENT)[None, :],
        )


@triton.jit(do_not_specialize=["num_tokens", "num_splits"])
@no_type_check
def _merge_splits_kernel(
    split_out, split_lse, out, lse, num_tokens, num_splits,
    HEADS: tl.constexpr, LATENT: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one row for COLUMNS of its latent."""
    row = tl.program_id(0).to(tl.int64)
    token, head = row // HEADS, row % HEADS
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    num_rows = num_tokens.to(tl.int64) * HEADS
    largest_row = split_lse + head * num_tokens + token
    total_row = largest_row + num_splits * num_rows
    largest = tl.full([SPLITS], float("-inf"), tl.float32)
    for first in range(0, num_splits, SPLITS):
        splits = first + tl.arange(0, SPLITS)
        part = tl.load(largest_row + splits * num_rows, mask=splits < num_splits, other=float("-inf"))
        largest = tl.maximum(largest, part)
    top = tl.max(largest, 0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros([SPLITS], tl.float32)
    values = tl.zeros([SPLITS, COLUMNS], tl.float32)
    for first in range(0, num_splits, SPLITS):
        splits = first + tl.arange(0, SPLITS)
        part = tl.load(largest_row + splits * num_rows, mask=splits < num_splits, other=float("-inf"))
        weight = tl.load(total_row + splits * num_rows, mask=splits < num_splits, other=0.0)
        share = tl.exp2(part - shift)
        where = split_out + (splits * num_rows + row)[:, None] * LATENT + columns[None, :]
        used = (weight != 0)[:, None] & (columns < LATENT)[None, :]  # a split without keys is not read
        values += share[:, None] * tl.load(where, mask=used, other=0.0)
        total += share * weight
    divisor = tl.sum(total, 0)
    divisor = tl.where(divisor == 0, 1.0, divisor)  # nothing seen at all: values 0, top -inf
    merged = tl.sum(values, 0) / divisor
    tl.store(out + row * LATENT + columns, merged.to(out.dtype.element_ty), mask=columns < LATENT)
    if tl.program_id(1) == 0:
        tl.store(lse + head * num_tokens + token, (top + tl.log2(divisor)) * LN_2)


def mla_decode(
    ql_nope: Tensor,
    q_pe: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    visible_lens: Tensor,
    max_query_len: int,
    softmax_scale: float,
) -> tuple[Tensor, Tensor]:
    """Attention of a few query tokens a request over its cached latents.

    Args:
        ql_nope: [T, N, Lkv], float32, bfloat16 or float16.
        q_pe: [T, N, R].
        kv_cache: [num_blocks, block_size, Lkv + R].
        block_table: [B, W]; tokens of a block outside the cache are masked.
        seq_lens: [B], clamped to [0, W * block_size].
        query_start_loc: [B + 1].
        visible_lens: [T].
        max_query_len: bounds the rows of a request.
        softmax_scale: multiplies the scores.

    Returns:
        out [T, N, Lkv] and lse [N, T].

    Raises:
        ValueError: another dtype.
        UnsupportedConfiguration: entries too wide for the device's shared memory.
    """
    check(ql_nope.dtype in DTYPES, "ql_nope", "dtype float32, bfloat16 or float16", ql_nope.dtype)
    tokens, heads, latent = ql_nope.shape
    rope = q_pe.shape[2]
    num_blocks, block_size, _ = kv_cache.shape
    requests, table_width = block_table.shape
    out = torch.empty_like(ql_nope, memory_format=torch.contiguous_format)
    lse = torch.empty(heads, tokens, dtype=torch.float32, device=ql_nope.device)
    if tokens == 0 or requests == 0 or heads == 0:
        return out, lse

    request_rows = max(1, min(max_query_len, tokens)) * heads
    latent_pad = max(16, triton.next_power_of_2(latent))
    rope_pad = max(16, triton.next_power_of_2(rope))
    facts = device_facts(ql_nope.device)
    shape = _launch_shape(
        request_rows, block_size, latent_pad + rope_pad, ql_nope.dtype, facts.capability, facts.shared
    )
    row_blocks = triton.cdiv(request_rows, shape["ROWS"])
    num_splits = _num_splits(requests * row_blocks, requests * request_rows, table_width * block_size, facts.processors)
    split_out, split_lse = out, lse
    if num_splits > 1:
        split_out = torch.empty(num_splits, tokens, heads, latent, dtype=torch.float32, device=ql_nope.device)
        split_lse = torch.empty(2, num_splits, heads, tokens, dtype=torch.float32, device=ql_nope.device)
    latent_pages, rope_pages = _page_descriptors(kv_cache, latent, rope, shape["TILE"])
    with torch.cuda.device_of(ql_nope):
        _decode_kernel[(requests * num_splits * row_blocks,)](
            ql_nope, q_pe, kv_cache, latent_pages, rope_pages, block_table, seq_lens.contiguous(),
            query_start_loc.contiguous(), visible_lens.contiguous(), split_out, split_lse,
            tokens, num_blocks, table_width, num_splits, row_blocks, softmax_scale / math.log(2),
            *ql_nope.stride(), *q_pe.stride(), *kv_cache.stride(), *block_table.stride(),
            HEADS=heads, LATENT=latent, ROPE=rope, BLOCK_SIZE=block_size,
            LATENT_PAD=latent_pad, ROPE_PAD=rope_pad,
            PIECE_COLUMNS=FLOAT32_PIECE_COLUMNS if ql_nope.dtype == torch.float32 else 0,
            PAGED_COPY=latent_pages is not None, SPLIT=num_splits > 1, **shape,
        )  # fmt: skip
        if num_splits > 1:
            _merge_splits_kernel[(tokens * heads, triton.cdiv(latent, MERGE_COLUMNS))](
                split_out, split_lse, out, lse, tokens, num_splits,
                HEADS=heads, LATENT=latent, COLUMNS=MERGE_COLUMNS, SPLITS=MERGE_SPLITS, num_warps=4,
            )  # fmt: skip
    return out, lse


@functools.lru_cache(maxsize=1024)
def _launch_shape(
    request_rows: int, block_size: int, width: int, dtype: torch.dtype, capability: tuple[int, int], shared: int
) -> dict[str, int]:
    """Rows and tokens a program works on at a time, with how many warps and stages: the first that fits.

    Args:
        request_rows: of one request.
        block_size: tokens a page.
        width: columns of an entry, padded.
        dtype: of the queries.
        capability: of the device.
        shared: bytes of shared memory that a program may have.

    Raises:
        UnsupportedConfiguration: none fits.
    """
    if dtype == torch.float32:  # no matrix unit computes IEEE float32 products
        shapes = ((16, 16, 4, 2), (16, 16, 4, 1))
    elif request_rows <= 16:  # bound by the reads: small tiles, more of them in flight, two programs a processor
        shapes = ((16, 32, 4, 3), (16, 32, 4, 2), (16, 16, 4, 2), (16, 16, 4, 1))
    else:  # 64 rows, even if half of them idle, where products read both sides from shared memory
        shapes = ((32, 32, 8, 2), (32, 16, 8, 2), (32, 16, 8, 1))
        if capability[0] == 9:
            shapes = ((64, 32 if block_size == 32 else 64, 8, 2), *shapes)
    for rows, tile, warps, stages in shapes:
        if ((rows + stages * tile) * width + rows * tile) * dtype.itemsize <= shared:
            return {"ROWS": rows, "TILE": tile, "num_warps": warps, "num_stages": stages}
    raise UnsupportedConfiguration(
        [f"triton: mla_decode has no tile of {width} columns of {dtype} for {shared} bytes of shared memory"]
    )


@functools.lru_cache(maxsize=4096)
def _num_splits(programs: int, rows: int, keys: int, processors: int) -> int:
    """Into how many parts to cut each request's keys, from bounds that the host knows; the least that costs least.

    Args:
        programs: of one split.
        rows: of all requests.
        keys: of the longest request.
        processors: of the device.
    """

    def cost(splits: int) -> int:
        waves = -(-programs * splits // processors)
        merge = splits * rows // ROWS_MERGED_PER_KEY if splits > 1 else 0
        return waves * (-(-keys // splits) + PROGRAM_COST) + merge

    return min(range(1, max(1, min(keys // 64, 2 * processors)) + 1), key=cost)


def _page_descriptors(kv_cache: Tensor, latent: int, rope: int, tile: int) -> tuple[object | None, object | None]:
    """How the copy engine of Hopper and later reads tiles out of the pages, or None where it cannot."""
    device, size = kv_cache.device, kv_cache.element_size()
    block_size = kv_cache.shape[1]
    aligned = kv_cache.data_ptr() % 16 == 0 and all(stride * size % 16 == 0 for stride in kv_cache.stride()[:2])
    # powers of two, none padded, whole 16-byte words
    widths = all(width & (width - 1) == 0 and width * size % 16 == 0 and width not in range(1, 16)
                 for width in (latent, rope))  # fmt: skip
    engine = device_facts(device).has_copy_engine
    strides = kv_cache.stride()
    plain = strides[2] == 1 and strides[0] > 0 and strides[1] > 0
    if not (engine and aligned and widths and plain and kv_cache.numel() and block_size % tile == 0):
        return None, None
    shape, strides = list(kv_cache.shape), list(strides)
    latent_pages = TensorDescriptor(kv_cache, shape, strides, [1, tile, latent])
    return latent_pages, TensorDescriptor(kv_cache, shape, strides, [1, tile, rope]) if rope else None
