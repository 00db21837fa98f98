"""Launcher of the absorbed decode on Hopper.

A row is one (query token, head) pair, and a row block is the rows of a request that one program processes together.
`select.py` chooses the number of rows of a row block, and the kernel:

| decode | kernel |
|---|---|
| row blocks of 16 or 32 rows | `main_loops/row_blocks_16_32.py` |
| row blocks of 64 rows | `main_loops/row_blocks_64.py` |
| row blocks of 64 rows, not batch-invariant, one request with a schedule | `main_loops/row_blocks_16_or_64.py` |
| row blocks of 64 rows, batch-invariant, few short requests | `two_phases` |
| over a cache in e4m3, queries in 16 bits: row blocks of 16 or 32 rows | `main_loops/row_blocks_16_32_e4m3.py` |
| over a cache in e4m3, queries in e4m3: row blocks of 64 rows | `main_loops/row_blocks_64_e4m3.py` |

If a request was split, `fast.kernels.combine` then adds its partial outputs.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from reference.interfaces import (
    COMPUTE_FORMAT,
    CONVERTED,
    DECODE_TILE,
    E4M3,
    FP8_E4M3,
    CacheFormat,
    InvariantSplitRule,
    ScheduleCosts,
    check,
    most_invariant_splits,
)

from ....backends import launch
from ...combine import SplitDecode, combine_partial_outputs, readable_keys, rows_of_a_request
from ...device import device_facts, device_of
from ...integers import cdiv
from ...prescribed_splits import prescribed_partial_dtype, prescribed_splits
from ...schedule_costs import measured_schedule_costs
from ..common.dependent_launch import LAUNCH
from ..common.descriptors import descriptor
from ..common.records import Constants
from .arguments import BatchSizes, LaunchInputs, LaunchOutputs, Numbers, QueryStrides, RowSizes
from .main_loops.row_blocks_16_32 import _row_blocks_16_32_kernel
from .main_loops.row_blocks_16_32_e4m3 import _row_blocks_16_32_e4m3_kernel
from .main_loops.row_blocks_16_or_64 import _row_blocks_16_or_64_kernel
from .main_loops.row_blocks_64 import _row_blocks_64_kernel
from .main_loops.row_blocks_64_e4m3 import _row_blocks_64_e4m3_kernel
from .select import (
    FEW_ROWS,
    MANY_ROWS,
    Assignment,
    assign_by_length,
    assign_evenly,
    assign_planned,
    choose_program_rows,
    chooses_rows_by_length,
    kept_values_of,
    rows_of_a_program,
)
from .two_phases.launch import launch_two_phases

DTYPES = (torch.bfloat16, torch.float16)
OUT_DTYPES = (*DTYPES, torch.float32)
MOST_SIZES = 4096  # size of the cache of `_launch_sizes`; a new value of `max_seq_len` can add an entry
# Launch option of `row_blocks_16_32` with row blocks of 16 rows: registers per thread at the start of a program.
# Without the option, a program takes all registers of a multiprocessor, so no program of the combine kernel can start
# on a multiprocessor that still decodes. With 144, the consumer still gets 256 registers, and nothing spills.
# Planned decodes get the option, and unplanned ones if a request has one row block. On an H200 a planned decode then
# took 10.5 instead of 11.7 us (1 x 8192, N 16) and 43.9 instead of 46.6 us (1 x 131072, N 16), and an unplanned one
# 9.64 instead of 9.76 us and 43.5 instead of 43.7 us. Planned decodes with several row blocks were measured only
# together with the choice of smaller row blocks (`select._rows_where_alone`). Other decodes do not get the option: the
# unplanned decode 1 x 8192, N 128, with four row blocks of 32 rows, was 5 % slower with it, row blocks of 32 rows spill
# up to 48 bytes more, and batch-invariant decodes were not measured.
ROOM_FOR_COMBINE = {"maxnreg": 144}
# In the mode `fp8_product`, without a schedule and not batch-invariant, at least this number of elements of partial
# outputs are in bfloat16, which halves their memory traffic. On an H200, bfloat16 was faster with 8192 rows of 512
# columns (45.2 -> 41.1 us for 16 x 4096, 49.9 -> 46.2 for 4 x 16384, 68.0 -> 66.3 for 1 x 131072; 128 heads), and
# slower with 4096 rows (22.6 -> 23.5 us for 1 x 8192). Nothing between was measured: the number is the middle. The
# error stayed the same (1.1e-2) when a split had one reference score; with one for each tile the probabilities have
# smaller errors, and the share of bfloat16 was not measured. In `fp8_query` the error rose from 2.1e-3 to 2.5e-3.
# With a schedule, bfloat16 was slower: 321 -> 379 us for 96 ragged requests.
LEAST_IN_BFLOAT16 = 6144 * 512
SIGNS = -0x7F80  # the sign bits of a word of two e4m3 numbers: 0x8080 in int16
LEAST_SCALE = 1e-30  # replaces a softmax scale of 0: masked scores are -inf, and -inf * 0 would be NaN


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
    """Compute the absorbed attention of a few query tokens per request over its cached latents.

    `reference.mla_decode` defines the result. T, N, B and W are the numbers of query tokens, heads, requests and block
    table columns. Lkv is the latent width, and R is the rope width.

    Args:
        ql_nope: [T, N, Lkv], bfloat16 or float16, or float8_e4m3fn in another `fp8_mode` than `converted`; Lkv is 256
            or 512.
        q_pe: [T, N, R]; R is 0, 32 or 64.
        kv_cache: [num_blocks, block_size, Lkv + R], in the dtype of the queries or in the format `fp8_e4m3`. A cache
            entry begins at a multiple of 16 bytes; the block size is 16, 32, 64 or 128.
        block_table: [B, W]; tokens of a block whose number is outside the cache are masked.
        seq_lens: [B], keys of each request, clamped to [0, min(max_seq_len, W * block_size)].
        query_start_loc: [B + 1], first query token of each request.
        visible_lens: [T], number of keys that each query token sees.
        max_query_len: upper bound of the query tokens of a request; it determines the number of row blocks.
        max_seq_len: upper bound of the keys of a request; it determines the number of splits and the size of buffers.
        softmax_scale: factor of the scores.
        out_dtype: dtype of `out`: float32, bfloat16 or float16.
        tile_ranges: [programs, 5] of a schedule (`DecodeSchedule`), or None. Without a schedule, and if
            `batch_invariant` is False, all requests have the same number of splits, which is chosen for `max_seq_len`.
        split_offsets: [B + 1] of the same schedule, or None.
        batch_invariant: if True, the splits of a request depend on its length alone. The bits of its result then do not
            depend on the other requests.
        split_rule: rule by which a batch-invariant decode splits a request; used only if `batch_invariant` is true.
        cache_format: format of the cache: the dtype of the queries, or `fp8_e4m3`.
        kv_scale: scale of a cache in the format `fp8_e4m3`, a float32 number on the device; None for the other format.
        out: [T, N, Lkv] in `out_dtype`, contiguous, written in place; None allocates a tensor.
        fp8_mode: one of `FP8_MODES`; `fp8_query` and `fp8_product` only over a cache in the format `fp8_e4m3`. In these
            two modes the queries are in e4m3. In `fp8_product` the probabilities are rounded to e4m3, and many partial
            outputs to bfloat16 (`partial_dtype`).
        q_scale: float32 scale of queries in e4m3, [] or [N]; None for `converted`.

    Returns:
        out [T, N, Lkv] and lse [N, T].

    Raises:
        ValueError: `ql_nope.dtype` or `out_dtype` is not listed above, the address of the cache or of `out` is not a
            multiple of 16 bytes, or `fp8_mode` does not fit the format of the cache.
    """
    split_decode = decode_splits(
        ql_nope, q_pe, kv_cache, block_table, seq_lens, query_start_loc, visible_lens, max_query_len, max_seq_len,
        softmax_scale, out_dtype, tile_ranges, split_offsets, batch_invariant, split_rule, cache_format, kv_scale, out,
        fp8_mode, q_scale,
    )  # fmt: skip
    combine_partial_outputs(
        split_decode.partial_out, split_decode.partial_lse, query_start_loc, max_query_len, tile_ranges, split_offsets,
        batch_invariant, split_decode.out, split_decode.lse,
    )  # fmt: skip
    return split_decode.out, split_decode.lse


def decode_splits(
    ql_nope, q_pe, kv_cache, block_table, seq_lens, query_start_loc, visible_lens, max_query_len, max_seq_len,
    softmax_scale, out_dtype, tile_ranges, split_offsets, batch_invariant, split_rule,
    cache_format=COMPUTE_FORMAT, kv_scale=None, out=None, fp8_mode=CONVERTED, q_scale=None,
) -> SplitDecode:  # fmt: skip
    """Run `mla_decode` without the combine kernel; return outputs and partial outputs."""
    if fp8_mode == CONVERTED:
        check(ql_nope.dtype in DTYPES, "ql_nope", "dtype bfloat16 or float16", ql_nope.dtype)
    else:
        check(ql_nope.dtype == E4M3, "ql_nope", f"dtype {E4M3} for fp8_mode {fp8_mode}", ql_nope.dtype)
        e4m3_cache = cache_format.name == FP8_E4M3.name
        check(e4m3_cache, "cache_format", f"{FP8_E4M3.name} for fp8_mode {fp8_mode}", cache_format.name)
        ql_nope, q_pe = _as_words(ql_nope), _as_words(q_pe)
    check(out_dtype in OUT_DTYPES, "out_dtype", "float32, bfloat16 or float16", out_dtype)
    if kv_cache.data_ptr() % 16 != 0:
        check(False, "kv_cache", "aligned to 16 bytes", f"address {kv_cache.data_ptr():#x}")
    tokens, heads, latent = ql_nope.shape
    rope = q_pe.shape[2]
    if fp8_mode != CONVERTED:
        latent, rope = 2 * latent, 2 * rope
    num_blocks, block_size, _ = kv_cache.shape
    requests, table_width = block_table.shape
    max_keys = readable_keys(max_seq_len, table_width, block_size)
    device = ql_nope.device
    if out is None:
        out = torch.empty(tokens, heads, latent, dtype=out_dtype, device=device)
    if out.data_ptr() % 16 != 0:
        check(False, "out", "aligned to 16 bytes", f"address {out.data_ptr():#x}")
    lse = torch.empty(heads, tokens, dtype=torch.float32, device=device)
    if tokens == 0 or requests == 0 or heads == 0:
        none = torch.empty(0, dtype=torch.float32, device=device)
        return SplitDecode(out, lse, none, none.clone())
    if softmax_scale < 0:  # kernels find the largest score before they multiply by the scale, which must be positive
        ql_nope, q_pe = (-x if fp8_mode == CONVERTED else x ^ SIGNS for x in (ql_nope, q_pe))
        softmax_scale = -softmax_scale
    ql_nope, latent_strides = _in_words(ql_nope)
    q_pe, rope_strides = _in_words(q_pe)

    planned = tile_ranges is not None
    e4m3 = cache_format.name == FP8_E4M3.name
    launched = _launch_sizes(
        tokens, heads, latent, rope, block_size, requests, max_keys, max_query_len,
        tile_ranges.shape[0] if planned else 0, batch_invariant, split_rule, device_facts(device).processors,
        e4m3, fp8_mode, prescribed_splits(),
    )  # fmt: skip
    assigned, row_sizes, constants = launched.assigned, launched.row_sizes, launched.constants
    if planned:
        tile_ranges, split_offsets = tile_ranges.contiguous(), split_offsets.contiguous()
    dtype_of_partials = partial_dtype(launched.partial_out_size, constants)
    partial_out = torch.empty(launched.partial_out_size, dtype=dtype_of_partials, device=device)
    partial_lse = torch.empty(launched.partial_lse_size, dtype=torch.float32, device=device)
    descriptors = _word_descriptors if e4m3 else _cache_descriptors
    latent_tma, rope_tma = descriptors(kv_cache, latent, rope)
    inputs = LaunchInputs(
        ql_nope, q_pe, latent_tma, rope_tma, block_table, seq_lens.contiguous(), query_start_loc.contiguous(),
        visible_lens.contiguous(),
    )  # fmt: skip
    outputs = LaunchOutputs(out, lse, partial_out, partial_lse)
    numbers = Numbers(
        *split_rule.numbers, max(softmax_scale, LEAST_SCALE) / math.log(2),
        QueryStrides(*latent_strides, *rope_strides), *block_table.stride(),
    )  # fmt: skip
    sizes = BatchSizes(tokens, num_blocks, requests, max_keys)
    arguments = (
        *inputs, tile_ranges if planned else seq_lens, split_offsets if planned else seq_lens,
        outputs, *sizes, assigned.num_splits, *row_sizes, *numbers,
    )  # fmt: skip
    with device_of(ql_nope):
        if assigned.pairs > 0:
            launch_two_phases(
                inputs, outputs, sizes, row_sizes, numbers, constants, assigned.programs, assigned.pairs,
                assigned.num_splits,
            )  # fmt: skip
        elif fp8_mode != CONVERTED:
            stride = q_scale.stride(0) if q_scale.dim() else 0
            launch(
                _row_blocks_64_e4m3_kernel, (assigned.programs,), *arguments, kv_scale, q_scale, stride, c=constants,
                **LAUNCH,
            )  # fmt: skip
        elif e4m3:
            launch(_row_blocks_16_32_e4m3_kernel, (assigned.programs,), *arguments, kv_scale, c=constants, **LAUNCH)
        elif launched.program_rows < MANY_ROWS:
            leaves_room = launched.program_rows == FEW_ROWS[0] and (planned or row_sizes.row_blocks == 1)
            room = ROOM_FOR_COMBINE if leaves_room and not batch_invariant else {}
            launch(_row_blocks_16_32_kernel, (assigned.programs,), *arguments, c=constants, **LAUNCH, **room)
        else:
            # TMA can write a row block as one box only if all 64 rows belong to one token
            in_boxes = heads % MANY_ROWS == 0 and assigned.slices == 1 and not constants.SPLIT
            out_rows = _row_descriptor(out) if in_boxes and out_dtype == ql_nope.dtype else None
            cache = (kv_cache, *kv_cache.stride()[:2])
            ranges = tile_ranges.shape[0] if planned and not batch_invariant else 0
            kernel = _row_blocks_64_kernel
            if chooses_rows_by_length(ranges, requests):
                kernel = _row_blocks_16_or_64_kernel
            launch(kernel, (assigned.programs,), *arguments, out_rows, *cache, c=constants, **LAUNCH)
    return SplitDecode(out, lse, partial_out, partial_lse)


class LaunchSizes(NamedTuple):
    """Settings of a launch that depend on the sizes of a call alone, and not on its tensors.

    Attributes:
        assigned: how requests are assigned to programs.
        program_rows: rows of a row block.
        row_sizes: numbers of rows and of partial outputs.
        partial_out_size: elements of the buffer for partial outputs. Behind them, programs keep states between two
            splits of a work item (`kept_values_of`).
        partial_lse_size: elements of the buffer for partial LSEs. In a batch-invariant decode, two counts of splits for
            each request follow.
        constants: compile-time constants of the kernel.
    """

    assigned: Assignment
    program_rows: int
    row_sizes: RowSizes
    partial_out_size: int
    partial_lse_size: int
    constants: Constants


@functools.lru_cache(MOST_SIZES)
def _launch_sizes(
    tokens: int,
    heads: int,
    latent: int,
    rope: int,
    block_size: int,
    requests: int,
    max_keys: int,
    max_query_len: int,
    ranges: int,
    batch_invariant: bool,
    split_rule: InvariantSplitRule,
    processors: int,
    e4m3: bool,
    fp8_mode: str = CONVERTED,
    prescribed: int | None = None,
) -> LaunchSizes:
    """Return the `LaunchSizes` of a call.

    `ranges` is the number of programs in the schedule, 0 without a schedule. `e4m3` says that the cache is in e4m3.
    `prescribed` is the number of splits that `prescribe_splits` prescribes, or None.
    """
    request_rows = rows_of_a_request(tokens, heads, max_query_len)
    program_rows = MANY_ROWS  # the only kernel for queries in e4m3 has row blocks of 64 rows
    if fp8_mode == CONVERTED:
        program_rows = choose_program_rows(
            ranges, batch_invariant, requests, request_rows, heads, max_keys, processors, e4m3
        )
    row_blocks = cdiv(request_rows, program_rows)
    if ranges > 0:
        most_splits = most_invariant_splits(cdiv(max_keys, DECODE_TILE), split_rule) if batch_invariant else 0
        assigned = assign_planned(ranges, requests, request_rows, row_blocks, most_splits)
    elif batch_invariant:
        assigned = assign_by_length(
            requests, request_rows, program_rows, max_keys, heads, latent, processors, split_rule, e4m3
        )
    else:
        assigned = assign_evenly(
            requests, tokens * heads, program_rows, row_blocks, max_keys, processors, e4m3, prescribed
        )
    kept_values = assigned.programs * kept_values_of(program_rows, latent, e4m3) if assigned.most_splits > 1 else 0
    constants = Constants(
        CONSUMER=0, ROWS=program_rows, HEADS=heads, LATENT=latent, ROPE=rope, BLOCK_SIZE=block_size,
        BY_LENGTH=batch_invariant, SCHEDULED=ranges > 0, SPLIT=assigned.num_splits > 1 and not batch_invariant,
        SLICES=assigned.slices, WEIGHTS_E4M3=fp8_mode == "fp8_product",
    )  # fmt: skip
    return LaunchSizes(
        assigned,
        program_rows,
        RowSizes(row_blocks, request_rows, assigned.num_partials),
        assigned.partial_rows * latent + kept_values,
        2 * assigned.partial_rows + (2 * requests if batch_invariant else 0),
        constants,
    )


def partial_dtype(elements: int, constants: Constants) -> torch.dtype:
    """Return the dtype of the `elements` elements of partial outputs (see `LEAST_IN_BFLOAT16`).

    `constants.SPLIT` says that the decode has splits, has no schedule and is not batch-invariant.
    """
    if not (constants.SPLIT and constants.WEIGHTS_E4M3):
        return torch.float32
    chosen = torch.bfloat16 if elements >= LEAST_IN_BFLOAT16 else torch.float32
    return prescribed_partial_dtype() or chosen


def _as_words(queries: Tensor) -> Tensor:
    """Return queries in e4m3 as words (int16) of two elements.

    The function clones queries that torch cannot view as words. Queries without columns have no words.
    """
    if queries.shape[2] == 0:
        return torch.empty(queries.shape, dtype=torch.int16, device=queries.device)
    if queries.stride(2) != 1 or any(step % 2 for step in (*queries.stride()[:2], queries.storage_offset())):
        queries = queries.clone(memory_format=torch.contiguous_format)
    return queries.view(torch.int16)


def _in_words(queries: Tensor) -> tuple[Tensor, list[int]]:
    """Return queries [T, N, columns] that the kernels can copy, and the strides of tokens and heads in elements.

    The kernels copy 16 bytes at a time, and Triton compiles such copies only for strides that are multiples of 16
    elements. The function therefore clones the queries if a stride is no multiple of 16 elements, the address is no
    multiple of 16 bytes, or a row is not contiguous.
    """
    strides = [stride if size > 1 else 0 for size, stride in zip(queries.shape, queries.stride(), strict=True)]
    if queries.numel() and (queries.stride(2) != 1 or queries.data_ptr() % 16 or any(s % 16 for s in strides[:2])):
        return _in_words(queries.clone(memory_format=torch.contiguous_format))
    return queries, strides[:2]


def _cache_descriptors(kv_cache: Tensor, latent: int, rope: int) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Return two TMA descriptors of the cache: for boxes of latent columns, and for boxes of rope columns."""
    keys = min(kv_cache.shape[1], DECODE_TILE)
    columns = latent // 4 if keys == DECODE_TILE else 64  # 64 columns of 16 bits are 128 bytes, the swizzle width
    whole = (kv_cache.data_ptr(), kv_cache.dtype, tuple(kv_cache.shape), kv_cache.stride())
    latent_tma = descriptor(*whole, (1, keys, columns), 128)
    return latent_tma, latent_tma if rope == 0 else descriptor(*whole, (1, keys, rope), 2 * rope)


def _word_descriptors(kv_cache: Tensor, latent: int, rope: int) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Return two TMA descriptors of an e4m3 cache, which TMA loads in words of two elements."""
    words = kv_cache.view(torch.int16)
    keys = min(words.shape[1], DECODE_TILE)
    whole = (words.data_ptr(), words.dtype, tuple(words.shape), words.stride())
    latent_tma = descriptor(*whole, (1, keys, 64), 128)
    return latent_tma, latent_tma if rope == 0 else descriptor(*whole, (1, keys, rope // 2), rope)


def _row_descriptor(out: Tensor) -> TensorDescriptor:
    """Return the TMA descriptor that writes boxes of `out` [T, N, Lkv]: 64 rows, and a quarter of the columns."""
    tokens, heads, latent = out.shape
    return descriptor(out.data_ptr(), out.dtype, (tokens * heads, latent), (latent, 1), (MANY_ROWS, latent // 4), 128)


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
    """Return the number of programs with which a schedule fills a device.

    Each program of a schedule is launched once for each row block, and a multiprocessor runs one launched program at a
    time. A decode in another `fp8_mode` than `converted` has row blocks of 64 rows.
    """
    rows = num_heads * query_len
    program_rows = MANY_ROWS
    if fp8_mode == CONVERTED:
        program_rows = rows_of_a_program(rows, cache_format.name == FP8_E4M3.name)
    return max(1, device_facts(device).processors // cdiv(rows, program_rows))


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
    """Return the costs of a schedule (`plan_decode`); only `num_heads` and `cache_format` change the costs."""
    return measured_schedule_costs(num_heads, cache_format.name == FP8_E4M3.name)
