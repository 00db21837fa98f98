"""Absorbed decode: attention of all heads over the cached latents, which the kernels read from the paged cache.

The keys of a request are divided into splits, and different programs attend different splits (flash-decoding). Each
program writes the partial output of its split. `fast.kernels.combine` then adds the partial outputs of each request.

The kernel of this module gives every request the same number of splits. The kernel of `scheduled_decode` follows a
schedule, which assigns tiles of keys to programs. For a batch-invariant decode without a schedule, the kernel of
`scheduled_decode` computes the splits of each request from the request's length alone.
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

from reference.interfaces import (
    COMPUTE_FORMAT,
    CONVERTED,
    DECODE_TILE,
    E4M3,
    CacheFormat,
    InvariantSplitRule,
    ScheduleCosts,
    check,
    most_invariant_splits,
)

from ...backends import launch
from ..combine import SplitDecode, combine_partial_outputs, readable_keys, rows_of_a_request, whole_tiles
from ..device import device_facts, device_of
from ..integers import cdiv, next_power_of_2
from ..prescribed_splits import prescribed_splits
from ..schedule_costs import measured_schedule_costs
from .arguments import DecodeInputs, DecodeSources, DecodeStrides, SourceStrides
from .decode_fp8_tiles import attend
from .decode_shapes import (
    E4M3_COLUMNS,
    RESIDENT,
    best_programs,
    best_splits,
    column_blocks,
    launch_shape,
    prefetch_shape,
    stored_constants,
)
from .decode_tiles import LN_2, Cache, Constants, Queries, RowKeys, load_queries
from .scheduled_decode import launch_scheduled

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Time that a program needs to start, load queries and store its output. The unit is the time to attend one key.
PROGRAM_COST = 256
ROWS_COMBINED_PER_KEY = 64  # rows of partial outputs that the combine kernel adds in the time to attend one key
FLOAT32_SUM_COLUMNS = 16  # a float32 dot product adds partial sums over 16 columns each (smaller rounding error)


@triton.jit(
    do_not_specialize=[
        "q_scale_stride", "num_tokens", "num_blocks", "max_keys", "num_splits", "row_blocks", "table_row_stride",
    ],
    do_not_specialize_on_alignment=[
        "block_table", "seq_lens", "query_start_loc", "visible_lens", "kv_scale", "q_scale",
    ],
)  # fmt: skip
@no_type_check
def _decode_kernel(
    sources, latent_pages, rope_pages, block_table, seq_lens, query_start_loc, visible_lens, kv_scale, q_scale,
    q_scale_stride, out, lse, num_tokens, num_blocks, max_keys, num_splits, row_blocks, scale_log2,
    strides, table_row_stride, table_stride,
    HEADS: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr, c: tl.constexpr,
):  # fmt: skip
    """Attend one split of one request for ROWS rows; a row is one head of one query token.

    If each request has one split (SPLIT is False), write `out` [T, N, Lkv] and `lse` [N, T]. If each request has
    several splits, write partial outputs `out` [splits, T, N, Lkv] and partial LSEs `lse` [2, splits, T, N] in float32.
    A partial LSE has two numbers: the largest score, in base 2, and the sum of exp2(score - largest score).
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
        row_queries = load_queries(
            Queries(
                sources.ql_nope, sources.q_pe, strides.latent_token, strides.latent_head, strides.latent_element,
                strides.rope_token, strides.rope_head, strides.rope_element, q_scale, q_scale_stride,
            ),
            token, head, real, c,
        )  # fmt: skip
        length = tl.maximum(0, tl.minimum(tl.load(seq_lens + request), max_keys))
        visible = tl.minimum(tl.load(visible_lens + token, mask=real, other=0), length)
        key_end = tl.maximum(tl.max(visible, 0), 0)
        # number of tiles in which every row sees every key
        full_tiles = tl.maximum(tl.min(tl.where(real, visible, key_end), 0), 0) // c.TILE
        tiles = tl.cdiv(key_end, c.TILE)
        split_tiles = tl.cdiv(tiles, num_splits)
        first_tile = tl.minimum(split * split_tiles, tiles)
        last_tile = tl.minimum(first_tile + split_tiles, tiles)

        table_row = block_table + request.to(tl.int64) * table_row_stride
        state = attend(
            row_queries, RowKeys(visible, key_end, full_tiles, table_row, table_stride), first_tile, last_tile,
            Cache(
                sources.kv_cache, latent_pages, rope_pages, num_blocks, strides.block, strides.entry,
                strides.element, kv_scale,
            ),
            scale_log2,
            c,
        )  # fmt: skip
        weighted = state.weighted

        columns = tl.arange(0, c.LATENT_PAD)
        split_row = split.to(tl.int64) * num_tokens * HEADS
        if SPLIT:  # one LSE in place of the two numbers would be rounded, and exp2 would magnify the rounding error
            partial_row = lse + split_row + token.to(tl.int64) * HEADS + head
            tl.store(partial_row, state.largest, mask=real)
            tl.store(partial_row + num_splits.to(tl.int64) * num_tokens * HEADS, state.total, mask=real)
        else:
            divisor = tl.where(state.total == 0, 1.0, state.total)  # without keys: `weighted` 0, `largest` -inf
            weighted = weighted / divisor[:, None]
            lse_row = lse + head.to(tl.int64) * num_tokens + token
            tl.store(lse_row, (state.largest + tl.log2(divisor)) * LN_2, mask=real)
        offsets = (split_row + token.to(tl.int64) * HEADS + head) * c.LATENT
        tl.store(
            out + offsets[:, None] + columns[None, :],
            weighted.to(out.dtype.element_ty),
            mask=real[:, None] & (columns < c.LATENT)[None, :],
        )


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
    split_rule: InvariantSplitRule,
    cache_format: CacheFormat = COMPUTE_FORMAT,
    kv_scale: Tensor | None = None,
    out: Tensor | None = None,
    fp8_mode: str = CONVERTED,
    q_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute absorbed attention of the query tokens of each request over its cached latents.

    Args:
        ql_nope: [T, N, Lkv], absorbed queries; float32, bfloat16 or float16 in the fp8 mode "converted", and e4m3 in
            the other fp8 modes.
        q_pe: [T, N, R], rope part of the queries.
        kv_cache: [num_blocks, block_size, columns] in the storage dtype of the format.
        block_table: [B, W]; the keys of a block are masked if the block number lies outside the cache.
        seq_lens: [B], keys of each request, clamped to [0, min(max_seq_len, W * block_size)].
        query_start_loc: [B + 1], first query token of each request.
        visible_lens: [T], number of keys that each query token sees.
        max_query_len: upper bound of the query tokens of a request; it determines the number of programs.
        max_seq_len: upper bound of the keys of a request; it determines the number of splits and the size of buffers.
        softmax_scale: factor of the scores.
        out_dtype: dtype of the output.
        tile_ranges: [programs, 5], from a `DecodeSchedule`; None means no schedule. Without a schedule and without
            `batch_invariant`, every request gets the same number of splits, which depends on `max_seq_len`.
        split_offsets: [B + 1], from the same `DecodeSchedule`; None without a schedule.
        batch_invariant: if True, the splits of each request depend on its length alone.
        split_rule: rule by which a batch-invariant decode splits a request.
        cache_format: format of the cache.
        kv_scale: float32 scale of the layer, [], which the host does not read; None if the format has no such scale.
        out: [T, N, Lkv] in `out_dtype`, contiguous, written in place; None allocates a tensor.
        fp8_mode: one of `FP8_MODES`; `decode_fp8_tiles` says which numbers are rounded in each mode.
        q_scale: float32 scale of queries in e4m3, [] or [N], which the host does not read; None for "converted".

    Returns:
        out [T, N, Lkv] and lse [N, T].

    Raises:
        ValueError: `ql_nope` does not have a dtype of the fp8 mode, `out_dtype` is not float32, bfloat16 or float16, or
            the cache has no e4m3 numbers although the queries are in e4m3.
        UnsupportedConfiguration: no tile of the cache fits into the device's shared memory.
    """
    found = decode_splits(
        ql_nope, q_pe, kv_cache, block_table, seq_lens, query_start_loc, visible_lens, max_query_len, max_seq_len,
        softmax_scale, out_dtype, tile_ranges, split_offsets, batch_invariant, split_rule, cache_format,
        kv_scale, out, fp8_mode, q_scale,
    )  # fmt: skip
    combine_partial_outputs(
        found.partial_out, found.partial_lse, query_start_loc, max_query_len, tile_ranges, split_offsets,
        batch_invariant, found.out, found.lse,
    )  # fmt: skip
    return found.out, found.lse


def decode_splits(
    ql_nope, q_pe, kv_cache, block_table, seq_lens, query_start_loc, visible_lens, max_query_len, max_seq_len,
    softmax_scale, out_dtype, tile_ranges, split_offsets, batch_invariant, split_rule,
    cache_format=COMPUTE_FORMAT, kv_scale=None, out=None, fp8_mode=CONVERTED, q_scale=None,
) -> SplitDecode:  # fmt: skip
    """Run `mla_decode` without its combine kernel; return the tensors that the combine kernel reads and writes."""
    if fp8_mode == CONVERTED:
        check(ql_nope.dtype in DTYPES, "ql_nope", "dtype float32, bfloat16 or float16", ql_nope.dtype)
    else:
        check(ql_nope.dtype == E4M3, "ql_nope", f"dtype {E4M3} for fp8_mode {fp8_mode}", ql_nope.dtype)
        check(cache_format.scaled, "cache_format", f"a format in e4m3 for fp8_mode {fp8_mode}", cache_format.name)
    check(out_dtype in DTYPES, "out_dtype", "float32, bfloat16 or float16", out_dtype)
    tokens, heads, latent = ql_nope.shape
    rope = q_pe.shape[2]
    num_blocks, block_size, _ = kv_cache.shape
    requests, table_width = block_table.shape
    max_keys = readable_keys(max_seq_len, table_width, block_size)
    if out is None:
        out = torch.empty_like(ql_nope, dtype=out_dtype, memory_format=torch.contiguous_format)
    lse = torch.empty(heads, tokens, dtype=torch.float32, device=ql_nope.device)
    none = torch.empty(0, dtype=torch.float32, device=ql_nope.device)
    if tokens == 0 or requests == 0 or heads == 0:
        return SplitDecode(out, lse, none, none.clone())

    request_rows = rows_of_a_request(tokens, heads, max_query_len)
    dtype, q_scale_stride = ql_nope.dtype, None
    if fp8_mode != CONVERTED:
        dtype = torch.float16
        ql_nope, q_pe = ql_nope.view(torch.uint8), q_pe.view(torch.uint8)
        q_scale_stride = q_scale.stride(0) if q_scale.dim() else 0
    latent_pad, rope_pad = _padded(latent, fp8_mode), _padded(rope, fp8_mode)
    facts = device_facts(ql_nope.device)
    # `request_rows` depends on the longest query of the batch, which must not change a batch-invariant result
    shape_rows, shape = heads if batch_invariant else request_rows, None
    if cache_format.scaled and _in_words(kv_cache):
        # the size of a tile depends on the number of requests, which must not change a batch-invariant result either
        many = not batch_invariant and 2 * requests > facts.processors
        if tile_ranges is not None and request_rows > 16:  # row blocks of 32 rows need two programs on each SM
            many = not batch_invariant and tile_ranges.shape[0] > facts.processors
        shape = prefetch_shape(
            shape_rows, latent_pad, rope_pad, cache_format, latent, rope, dtype, facts, fp8_mode, many
        )
    prefetch = shape is not None
    if shape is None:
        shape = launch_shape(
            shape_rows, block_size, latent_pad + rope_pad, dtype, kv_cache.element_size(), facts.capability,
            facts.shared, column_blocks(cache_format, latent), fp8_mode,
        )  # fmt: skip
    row_blocks = cdiv(request_rows, shape["ROWS"])
    if cache_format.scaled:
        kv_cache = kv_cache.view(torch.uint8)
        latent_pages, rope_pages = None, None
        stored = stored_constants(
            cache_format, latent, rope, dtype, facts, shape["ROWS"], shape["TILE"], fp8_mode, prefetch
        )
    else:
        latent_pages, rope_pages = _page_descriptors(kv_cache, latent, rope, shape["TILE"])
        stored = {}
    inputs = DecodeInputs(
        DecodeSources(ql_nope, q_pe, kv_cache), latent_pages, rope_pages, block_table, seq_lens.contiguous(),
        query_start_loc.contiguous(), visible_lens.contiguous(), kv_scale, q_scale, q_scale_stride,
    )  # fmt: skip
    source_strides = SourceStrides(*ql_nope.stride(), *q_pe.stride(), *kv_cache.stride())
    strides = DecodeStrides(source_strides, *block_table.stride())
    constants = {
        "HEADS": heads,
        "c": Constants(
            LATENT=latent, ROPE=rope, BLOCK_SIZE=block_size, TILE=shape["TILE"], LATENT_PAD=latent_pad,
            ROPE_PAD=rope_pad, SUM_COLUMNS=FLOAT32_SUM_COLUMNS if dtype == torch.float32 else 0,
            PAGED_COPY=latent_pages is not None, PREFETCH=prefetch, **stored,
        ),
        **{name: value for name, value in shape.items() if name != "TILE"},
    }  # fmt: skip
    request_programs, rows = requests * row_blocks, requests * request_rows
    resident = facts.processors * (RESIDENT if prefetch else 1)
    if tile_ranges is not None or batch_invariant:
        plan, programs_per_request = (None, None), 1
        if tile_ranges is not None:
            plan = tile_ranges.contiguous(), split_offsets.contiguous()
        else:
            most_splits = most_invariant_splits(cdiv(max_keys, DECODE_TILE), split_rule)
            programs_per_request = min(
                most_splits, _num_splits(request_programs, rows, whole_tiles(max_keys), resident)
            )
        partials = launch_scheduled(
            inputs, strides, constants, *plan, batch_invariant, split_rule, out, lse, request_rows, row_blocks,
            programs_per_request, max_keys, softmax_scale,
        )  # fmt: skip
        return SplitDecode(out, lse, *partials)
    num_splits = prescribed_splits() or _num_splits(request_programs, rows, whole_tiles(max_keys), resident)
    split_out, split_lse = out, lse
    if num_splits > 1:
        split_out = torch.empty(num_splits, tokens, heads, latent, dtype=torch.float32, device=ql_nope.device)
        split_lse = torch.empty(2, num_splits, tokens, heads, dtype=torch.float32, device=ql_nope.device)
    with device_of(ql_nope):
        launch(
            _decode_kernel, (requests * num_splits * row_blocks,),
            *inputs, split_out, split_lse, tokens, num_blocks, max_keys, num_splits, row_blocks,
            softmax_scale / math.log(2), *strides, **constants, SPLIT=num_splits > 1,
        )  # fmt: skip
    if num_splits == 1:
        return SplitDecode(out, lse, none, none.clone())
    return SplitDecode(out, lse, split_out.view(-1), split_lse.view(-1))


def decode_programs(
    device: torch.device,
    dtype: torch.dtype,
    num_heads: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_size: int,
    query_len: int,
    cache_format: CacheFormat = COMPUTE_FORMAT,
    fp8_mode: str = CONVERTED,
) -> int:
    """Return how many programs a schedule should have on this device.

    A row block is ROWS rows of a request. For each program of the schedule, the launch starts one Triton program for
    every row block. The returned number gives the lowest estimated time of a decode (`best_programs`).
    """
    facts = device_facts(device)
    width = _padded(kv_lora_rank, fp8_mode) + _padded(qk_rope_head_dim, fp8_mode)
    rows = num_heads * query_len
    dtype = dtype if fp8_mode == CONVERTED else torch.float16
    element_size = cache_format.dtype_for(dtype).itemsize
    shape = launch_shape(
        rows, block_size, width, dtype, element_size, facts.capability, facts.shared,
        column_blocks(cache_format, kv_lora_rank), fp8_mode,
    )  # fmt: skip
    # programs that run on the GPU at the same time
    resident = (2 if shape["ROWS"] == 16 else 1) * facts.processors
    return best_programs(cdiv(rows, shape["ROWS"]), resident)


def schedule_costs(
    device: torch.device,
    dtype: torch.dtype,
    num_heads: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_size: int,
    cache_format: CacheFormat = COMPUTE_FORMAT,
    fp8_mode: str = CONVERTED,
) -> ScheduleCosts:
    """Return the costs that `plan_decode` uses for these kernels; they depend on the number of heads alone."""
    return measured_schedule_costs(num_heads)


@functools.lru_cache(maxsize=4096)
def _num_splits(programs: int, rows: int, keys: int, resident: int) -> int:
    """Return `best_splits` with the costs of this kernel."""
    return best_splits(programs, rows, keys, resident, PROGRAM_COST, 0, ROWS_COMBINED_PER_KEY)


def _in_words(kv_cache: Tensor) -> bool:
    """Return whether a kernel can read the entries of a cache with 1-byte elements in words of 16 bytes."""
    block, entry, element = kv_cache.stride()
    return element == 1 and block % 16 == 0 and entry % 16 == 0 and kv_cache.data_ptr() % 16 == 0


def _padded(width: int, fp8_mode: str) -> int:
    """Return Lkv or R (`width`), padded to a power of two that is wide enough for `tl.dot`."""
    return max(16 if fp8_mode == CONVERTED else E4M3_COLUMNS, next_power_of_2(width))


def _page_descriptors(kv_cache: Tensor, latent: int, rope: int, tile: int) -> tuple[object | None, object | None]:
    """Return two descriptors with which TMA (the GPU's bulk copy engine) loads a tile from the cache.

    The first descriptor is for the latent part, and the second descriptor is for the rope part. Both are None if TMA
    cannot read the cache: on a GPU before Hopper, or with a layout that TMA does not support. If R is 0, the second
    descriptor is None.
    """
    device, size = kv_cache.device, kv_cache.element_size()
    block_size = kv_cache.shape[1]
    aligned = kv_cache.data_ptr() % 16 == 0 and all(stride * size % 16 == 0 for stride in kv_cache.stride()[:2])
    # each width must be 0, or a power of two of at least 16 (then it is not padded) whose bytes are a multiple of 16
    widths = all(width & (width - 1) == 0 and width * size % 16 == 0 and width not in range(1, 16)
                 for width in (latent, rope))  # fmt: skip
    has_tma = device_facts(device).has_copy_engine
    strides = kv_cache.stride()
    plain = strides[2] == 1 and strides[0] > 0 and strides[1] > 0
    if not (has_tma and aligned and widths and plain and kv_cache.numel() and block_size % tile == 0):
        return None, None
    shape, strides = list(kv_cache.shape), list(strides)
    latent_pages = TensorDescriptor(kv_cache, shape, strides, [1, tile, latent])
    return latent_pages, TensorDescriptor(kv_cache, shape, strides, [1, tile, rope]) if rope else None
