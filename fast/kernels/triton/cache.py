"""Kernels that write, gather and copy the entries of the paged latent cache.

A cache entry is the latent and the rotated key part of one token, Lkv + R elements. The cache consists of blocks of
`block_size` entries, and slot number block * block_size + offset names one entry.

- The kernels copy elements as integers of the same width, so every copy is exact bit for bit. Only a gather into
  another dtype converts the elements.
- A block number or a slot may lie outside the cache. A kernel then skips this row: it accesses no memory outside its
  tensors and raises no error.
- By default Triton compiles another variant of a kernel if an integer argument is 1 or a multiple of 16. The option
  `do_not_specialize` prevents these variants for sizes that change from step to step.
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...backends import launch
from ..device import device_of
from ..integers import cdiv, next_power_of_2
from .token_requests import request_of

TILE_BYTES = 4096  # bytes that a program copies at most; rows of 1152 bytes give each thread four or five 16-byte loads
MAX_ROWS = 128  # rows that a program copies at most
WARPS = 1
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by element size


def concat_and_cache_mla(kv_c_normed: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write latents [T, Lkv] and keys [T, R] into the cache; `slot_mapping` [>= T] has the slot of each token.

    A token whose slot lies outside the cache, such as -1, is not written.
    """
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
    kv_cache: Tensor, block_table: Tensor, cu_seq_lens: Tensor, starts: Tensor, out: Tensor
) -> None:
    """Copy tokens of each request from the cache into `out` [num_tokens, Lkv + R], converted to the dtype of `out`.

    A row of `out` becomes 0 if no request owns the row, or if its token lies outside the block table or the cache. See
    `reference.gather_and_maybe_dequant_cache` for the arguments.
    """
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
        _copy_pairs(kv_cache, kv_cache, block_mapping)


def swap_blocks(source: Tensor, target: Tensor, block_mapping: Tensor) -> None:
    """Copy blocks from one cache to another, for the (source, target) pairs of `block_mapping` [pairs, 2].

    A pair with a block outside its cache is skipped. If both caches are on one device, one kernel copies the pairs in
    no defined order. If the caches are on two devices, PyTorch gathers the blocks into a buffer, copies the buffer to
    the other device and scatters it there. In this case the host reads `block_mapping`, and therefore waits for the
    device that holds `block_mapping`.
    """
    if source.device == target.device:
        return _copy_pairs(source, target, block_mapping)
    pairs = block_mapping.cpu()
    limits = torch.tensor([source.shape[0], target.shape[0]], device="cpu")
    read, written = pairs[((pairs >= 0) & (pairs < limits)).all(1)].unbind(1)
    target[written.to(target.device)] = source[read.to(source.device)].to(target.device)


def as_integers(*tensors: Tensor) -> list[Tensor]:
    """Return views of the same bytes as integers of the same width."""
    return [x.view(INTEGERS[x.element_size()]) for x in tensors]


def rows_per_program(row_bytes: int) -> int:
    """Return the number of rows that a program copies: a power of two, for at most TILE_BYTES bytes if possible."""
    return max(1, min(MAX_ROWS, TILE_BYTES // next_power_of_2(row_bytes)))


def tiles_of(width: int) -> dict[str, int]:
    """Return the constants that divide the columns of a row into two tiles, such as 576 = 512 + 64.

    Triton requires that the number of columns of a tile is a power of two. A single tile for 576 columns would have
    1024 columns, and many threads would have nothing to copy.
    """
    head = next_power_of_2(width + 1) // 2
    return {"WIDTH": width, "HEAD": head, "TAIL": next_power_of_2(width - head)}


def _copy_pairs(source: Tensor, target: Tensor, block_mapping: Tensor) -> None:
    """Copy whole blocks between two caches on one device; `block_mapping` may be on the host."""
    source_blocks, block_size, width = source.shape
    if block_mapping.shape[0] == 0 or source.numel() == 0 or target.numel() == 0:
        return
    mapping = block_mapping.to(source.device, non_blocking=True)
    read, written = as_integers(source, target)
    tokens, rows = mapping.shape[0] * block_size, rows_per_program(width * read.element_size())
    with device_of(read):
        launch(
            _copy_blocks_kernel, (cdiv(tokens, rows),),
            read, written, mapping, tokens, source_blocks, target.shape[0],
            *read.stride(), *written.stride(), *mapping.stride(),
            BLOCK_SIZE=block_size, **tiles_of(width), ROWS=rows, num_warps=WARPS,
        )  # fmt: skip


@triton.jit
@no_type_check
def row_pointers(base, rows, row_stride, column_stride, FIRST: tl.constexpr, TILE: tl.constexpr):
    """Return pointers [ROWS, TILE] to the columns [FIRST, FIRST + TILE) of the rows at base + rows * row_stride.

    `rows` [ROWS] are 64-bit integers.
    """
    columns = FIRST + tl.arange(0, TILE).to(tl.int64)
    return base + (rows * row_stride)[:, None] + columns[None, :] * column_stride


@triton.jit
@no_type_check
def slot_offsets(slots, block_stride, entry_stride, BLOCK_SIZE: tl.constexpr):
    """Return the offsets of the cache entries at the 64-bit `slots`, in elements from the start of the cache."""
    return slots // BLOCK_SIZE * block_stride + slots % BLOCK_SIZE * entry_stride


@triton.jit
@no_type_check
def write_entries(entries, kv_cache, entry_rows, written, column_stride, FIRST: tl.constexpr, SIZE: tl.constexpr):
    """Store `entries` [ROWS, TILE] in columns [FIRST, FIRST + SIZE) of the cache entries at `entry_rows`.

    `entry_rows` [ROWS] are offsets in elements. A row with `written` [ROWS] false is not stored.
    """
    columns = tl.arange(0, entries.shape[1])
    targets = row_pointers(kv_cache, entry_rows, 1, column_stride, FIRST, entries.shape[1])
    tl.store(targets, entries, written[:, None] & (columns < SIZE)[None, :])


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


@triton.jit
@no_type_check
def copy_rows(
    source, source_rows, source_column, read, target, target_rows, target_column, written,
    WIDTH: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Copy rows of WIDTH columns from `source` to `target`, in tiles of HEAD and TAIL columns.

    `source_rows` and `target_rows` are offsets in elements. Rows that are `written` but not `read` become 0.
    """
    head = tl.load(row_pointers(source, source_rows, 1, source_column, 0, HEAD), read[:, None], 0)
    if HEAD < WIDTH:
        rest = (HEAD + tl.arange(0, TAIL) < WIDTH)[None, :]
        tail = tl.load(row_pointers(source, source_rows, 1, source_column, HEAD, TAIL), read[:, None] & rest, 0)
        tl.store(row_pointers(target, target_rows, 1, target_column, HEAD, TAIL), tail, written[:, None] & rest)
    tl.store(row_pointers(target, target_rows, 1, target_column, 0, HEAD), head, written[:, None])


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
    request = request_of(tokens, cu_seq_lens, cu_stride, num_requests, search_steps)
    owned = written & (request < num_requests)  # rows of `out` that get a cache entry; the other rows become 0
    begin = tl.load(cu_seq_lens + request * cu_stride, owned, 0)
    position = tokens - begin + tl.load(starts + request * starts_stride, owned, 0)
    column = position // BLOCK_SIZE
    owned = owned & (begin <= tokens) & (position >= 0) & (column < num_columns)
    block = tl.load(block_table + request * table_row + column * table_column, owned, -1).to(tl.int64)
    owned = owned & (block >= 0) & (block < num_blocks)
    entry_rows = block * block_stride + position % BLOCK_SIZE * entry_stride
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
    tokens = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # the entries of all pairs are counted through
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
