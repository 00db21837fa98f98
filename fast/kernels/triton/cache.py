"""Kernels that write, gather and copy the entries of the paged latent cache.

A cache entry is the latent and the rotated key part of one token, Lkv + R elements. The cache consists of blocks of
`block_size` entries, and slot number block * block_size + offset names one entry.

- The kernels copy elements as integers with the same number of bytes, so every copy is exact bit for bit. Only a gather
  into another dtype converts the elements.
- A block number or a slot may lie outside the cache. A kernel then skips the cache entry: it accesses no memory outside
  its tensors and raises no error.
- By default Triton compiles another variant of a kernel if an integer argument is 1 or a multiple of 16. The option
  `do_not_specialize` prevents these variants for sizes that change from step to step.
"""

from __future__ import annotations

from typing import NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from reference.interfaces import COMPUTE_FORMAT, CacheFormat

from ...backends import launch
from ..device import device_of
from ..integers import cdiv, next_power_of_2
from .cache_formats import gather_dequantized, write_quantized
from .cache_rows import (
    WARPS,
    as_integers,
    copy_rows,
    gathered_entries,
    row_pointers,
    rows_per_program,
    slot_offsets,
    tiles_of,
    write_entries,
)

LEAST_COPY_BYTES = 1 << 20  # a shorter copy to another device takes less time than the host needs to start it


def concat_and_cache_mla(
    kv_c_normed: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    cache_format: CacheFormat = COMPUTE_FORMAT,
    kv_scale: Tensor | None = None,
) -> None:
    """Write latents [T, Lkv] and keys [T, R] into the cache; `slot_mapping` [>= T] has the slot of each token.

    A token whose slot lies outside the cache, such as -1, is not written.
    """
    if cache_format.scaled:
        return write_quantized(kv_c_normed, k_pe, kv_cache, slot_mapping, cache_format, kv_scale)
    tokens, latent = kv_c_normed.shape
    num_blocks, block_size, width = kv_cache.shape
    if tokens == 0 or num_blocks == 0 or width == 0:
        return
    latents, keys, cache = as_integers(kv_c_normed, k_pe, kv_cache)
    rows = rows_per_program(width * cache.element_size())
    with device_of(cache):
        launch(
            _write_kernel, (cdiv(tokens, rows),),
            latents, keys, cache, slot_mapping, tokens, num_blocks,
            *latents.stride(), *keys.stride(), *cache.stride(), slot_mapping.stride(0),
            BLOCK_SIZE=block_size, LATENT=latent, ROPE=width - latent,
            LATENT_TILE=next_power_of_2(latent), ROPE_TILE=next_power_of_2(width - latent),
            ROWS=rows, num_warps=WARPS,
        )  # fmt: skip


def gather_and_maybe_dequant_cache(
    kv_cache: Tensor,
    block_table: Tensor,
    cu_seq_lens: Tensor,
    starts: Tensor,
    out: Tensor,
    cache_format: CacheFormat = COMPUTE_FORMAT,
    kv_scale: Tensor | None = None,
) -> None:
    """Copy cache entries of each request into `out` [num_tokens, Lkv + R], converted to the dtype of `out`.

    If `out` has the storage dtype of the format, `out` [num_tokens, columns] receives the stored entries. A row of
    `out` becomes 0 if no request owns the row, or if the row's token lies outside the block table or the cache. See
    `reference.gather_and_maybe_dequant_cache` for the arguments.
    """
    if cache_format.scaled and not cache_format.returns_stored(out.dtype):
        return gather_dequantized(kv_cache, block_table, cu_seq_lens, starts, out, cache_format, kv_scale)
    num_blocks, block_size, width = kv_cache.shape
    requests, columns = block_table.shape
    if out.numel() == 0:
        return
    # if the dtypes differ, the kernel gets the tensors in their own dtypes and converts the values as it stores them
    cache, target = as_integers(kv_cache, out) if kv_cache.dtype == out.dtype else (kv_cache, out)
    rows = rows_per_program(width * cache.element_size())
    with device_of(cache):
        launch(
            _gather_kernel, (cdiv(out.shape[0], rows),),
            cache, block_table, cu_seq_lens, starts, target,
            out.shape[0], requests, requests.bit_length(), columns, num_blocks,
            *cache.stride(), *block_table.stride(), cu_seq_lens.stride(0), starts.stride(0), *target.stride(),
            BLOCK_SIZE=block_size, **tiles_of(width), ROWS=rows, num_warps=WARPS,
        )  # fmt: skip


def copy_blocks(kv_caches: list[Tensor], block_mapping: Tensor) -> None:
    """Copy blocks within each cache, for the (source, target) pairs of `block_mapping` [pairs, 2].

    A pair with a block outside the cache is skipped. The pairs are copied in no defined order. If two pairs have the
    same target, or if a block is the source of one pair and the target of another, the result is undefined.
    """
    for kv_cache in kv_caches:
        _copy_pairs(kv_cache, kv_cache, block_mapping, kv_cache.device)


class BlockRun(NamedTuple):
    """Consecutive blocks of one cache that are copied to consecutive blocks of another cache.

    Attributes:
        source: first block that is read.
        target: first block that is written.
        length: number of blocks.
    """

    source: int
    target: int
    length: int


def swap_blocks(source: Tensor, target: Tensor, block_mapping: Tensor) -> None:
    """Copy blocks from one cache to another, for the (source, target) pairs of `block_mapping` [pairs, 2].

    A pair with a block outside its cache is skipped. The pairs are copied in no defined order. If both caches are on
    one device, one kernel copies the blocks. Between a GPU and pinned host memory, `copy_to_other_device` copies the
    blocks without a buffer. In all other cases, PyTorch gathers the blocks into a buffer, copies the buffer to the
    other device and scatters it there.

    If the caches are on two devices, the host waits until the blocks are copied. During the capture of a CUDA graph,
    the host does not wait; the capture fails unless the host memory is pinned.
    """
    if source.device == target.device:
        return _copy_pairs(source, target, block_mapping, source.device)
    host, on_gpu = (source, target) if source.device.type == "cpu" else (target, source)
    if host.device.type == "cpu" and host.is_pinned():
        with device_of(on_gpu):
            copy_to_other_device(source, target, block_mapping, on_gpu.device)
            if not torch.cuda.is_current_stream_capturing():
                torch.cuda.current_stream().synchronize()
        return
    pairs = _pairs_inside(block_mapping.cpu(), source.shape[0], target.shape[0])
    read, written = pairs.unbind(1)
    target[written.to(target.device)] = source[read.to(source.device)].to(target.device)


def copy_to_other_device(source: Tensor, target: Tensor, block_mapping: Tensor, device: torch.device) -> None:
    """Copy blocks between `device`, which is a GPU, and pinned host memory; do not wait.

    If `block_mapping` is on the host, each run of consecutive blocks with at least LEAST_COPY_BYTES bytes is one copy.
    One kernel copies all other blocks; it reads or writes the host memory directly. If `block_mapping` is on the GPU,
    the kernel copies all blocks, so that the host does not wait for the mapping.
    """
    if block_mapping.device.type == "cpu" and source.is_contiguous() and target.is_contiguous():
        block_bytes = source[:1].numel() * source.element_size()
        least = cdiv(LEAST_COPY_BYTES, max(1, block_bytes))
        pairs = _pairs_inside(block_mapping, source.shape[0], target.shape[0])
        runs, block_mapping = divide_into_runs(pairs, least)
        for run in runs:
            written = target[run.target : run.target + run.length]
            written.copy_(source[run.source : run.source + run.length], non_blocking=True)
    _copy_pairs(source, target, block_mapping, device)


def divide_into_runs(pairs: Tensor, least: int) -> tuple[list[BlockRun], Tensor]:
    """Return the runs of at least `least` blocks among `pairs` [pairs, 2] on the host, and all other pairs."""
    pairs = pairs[pairs[:, 0].argsort()]
    pairs = pairs[(pairs[:, 1] - pairs[:, 0]).argsort(stable=True)]  # pairs of one run now follow each other
    begins = (pairs.diff(dim=0) != 1).any(1)
    begins = torch.cat((begins.new_ones(min(1, len(pairs))), begins))  # [pairs]: whether a run begins here
    number = begins.cumsum(0) - 1  # [pairs]: number of the run
    lengths = number.bincount()
    firsts = pairs[begins].tolist()
    runs = [
        BlockRun(*first, length)
        for first, length in zip(firsts, lengths.tolist(), strict=True)
        if length >= least
    ]  # fmt: skip
    return runs, pairs[lengths[number] < least]


def _pairs_inside(pairs: Tensor, source_blocks: int, target_blocks: int) -> Tensor:
    """Return the pairs whose blocks are inside both caches; `pairs` [pairs, 2] is on the host."""
    limits = torch.tensor([source_blocks, target_blocks], device="cpu")
    return pairs[((pairs >= 0) & (pairs < limits)).all(1)]


def _copy_pairs(source: Tensor, target: Tensor, block_mapping: Tensor, device: torch.device) -> None:
    """Copy whole blocks with a kernel on `device`; `block_mapping` may be on the host.

    Each cache is on `device`, or in pinned host memory, which the kernel accesses over the bus.
    """
    source_blocks, block_size, width = source.shape
    if block_mapping.shape[0] == 0 or source.numel() == 0 or target.numel() == 0:
        return
    mapping = block_mapping.to(device, non_blocking=True)
    read, written = as_integers(source, target)
    tokens, rows = mapping.shape[0] * block_size, rows_per_program(width * read.element_size())
    with device_of(mapping):
        launch(
            _copy_blocks_kernel, (cdiv(tokens, rows),),
            read, written, mapping, tokens, source_blocks, target.shape[0],
            *read.stride(), *written.stride(), *mapping.stride(),
            BLOCK_SIZE=block_size, **tiles_of(width), ROWS=rows, num_warps=WARPS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens", "num_blocks"], do_not_specialize_on_alignment=["slot_mapping"])
@no_type_check
def _write_kernel(
    kv_c, k_pe, kv_cache, slot_mapping, num_tokens, num_blocks,
    kv_c_row, kv_c_column, k_pe_row, k_pe_column, block_stride, entry_stride, column_stride, slot_stride,
    BLOCK_SIZE: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr,
    LATENT_TILE: tl.constexpr, ROPE_TILE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write the latents and keys of ROWS tokens into their slots."""
    tokens = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = tokens < num_tokens
    slots = tl.load(slot_mapping + tokens * slot_stride, inside, -1)
    written = (slots >= 0) & (slots // BLOCK_SIZE < num_blocks)
    entry_rows = slot_offsets(slots, block_stride, entry_stride, BLOCK_SIZE)
    # load the latents and keys of all tokens: a mask with `written` would make these loads wait for the slots
    read = inside[:, None] & (tl.arange(0, LATENT_TILE) < LATENT)[None, :]
    latents = tl.load(row_pointers(kv_c, tokens, kv_c_row, kv_c_column, 0, LATENT_TILE), read)
    if ROPE > 0:
        read_key = inside[:, None] & (tl.arange(0, ROPE_TILE) < ROPE)[None, :]
        keys = tl.load(row_pointers(k_pe, tokens, k_pe_row, k_pe_column, 0, ROPE_TILE), read_key)
        write_entries(keys, kv_cache, entry_rows, written, column_stride, LATENT, ROPE)
    write_entries(latents, kv_cache, entry_rows, written, column_stride, 0, LATENT)


@triton.jit(
    do_not_specialize=["num_tokens", "num_requests", "search_steps", "num_columns", "num_blocks", "table_row"],
    do_not_specialize_on_alignment=["block_table", "cu_seq_lens", "starts"],
)
@no_type_check
def _gather_kernel(
    kv_cache, block_table, cu_seq_lens, starts, out, num_tokens, num_requests, search_steps, num_columns, num_blocks,
    block_stride, entry_stride, cache_column, table_row, table_column, cu_stride, starts_stride, out_row, out_column,
    BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Copy the cache entries of ROWS tokens to ROWS consecutive rows of `out`."""
    tokens = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    written = tokens < num_tokens
    entry_rows, owned = gathered_entries(
        tokens, written, block_table, cu_seq_lens, starts, num_requests, search_steps, num_columns, num_blocks,
        block_stride, entry_stride, table_row, table_column, cu_stride, starts_stride, BLOCK_SIZE,
    )  # fmt: skip
    copy_rows(kv_cache, entry_rows, cache_column, owned, out, tokens * out_row, out_column, written, WIDTH, HEAD, TAIL)


@triton.jit(
    do_not_specialize=["num_tokens", "source_blocks", "target_blocks"],
    do_not_specialize_on_alignment=["block_mapping"],
)
@no_type_check
def _copy_blocks_kernel(
    source, target, block_mapping, num_tokens, source_blocks, target_blocks,
    source_block, source_entry, source_column, target_block, target_entry, target_column, pair_stride, side_stride,
    BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Copy ROWS cache entries from source blocks to target blocks."""
    tokens = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # number of an entry, counted over all pairs
    pair = block_mapping + tokens // BLOCK_SIZE * pair_stride
    read = tl.load(pair, tokens < num_tokens, -1)
    written = tl.load(pair + side_stride, tokens < num_tokens, -1)
    copied = (read >= 0) & (read < source_blocks) & (written >= 0) & (written < target_blocks)
    offset = tokens % BLOCK_SIZE
    copy_rows(
        source, read * source_block + offset * source_entry, source_column, copied,
        target, written * target_block + offset * target_entry, target_column, copied,
        WIDTH, HEAD, TAIL,
    )  # fmt: skip
