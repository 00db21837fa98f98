"""Functions of Triton kernels for rows of cache entries: compute their pointers, store, copy and gather rows."""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..integers import next_power_of_2
from .token_requests import request_of

TILE_BYTES = 4096  # bytes that a program copies at most; rows of 1152 bytes give each thread four or five 16-byte loads
MAX_ROWS = 128  # rows that a program copies at most
WARPS = 1
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by element size


def as_integers(*tensors: Tensor) -> list[Tensor]:
    """Return views of the tensors in which each element is an integer with the same bytes."""
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


@triton.jit
@no_type_check
def gathered_entries(
    tokens, written, block_table, cu_seq_lens, starts, num_requests, search_steps, num_columns, num_blocks,
    block_stride, entry_stride, table_row, table_column, cu_stride, starts_stride, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Return the offset of the cache entry of each gathered token, and whether there is such an entry.

    `tokens` [ROWS] are the 64-bit indices of tokens among the gathered tokens of all requests. `written` [ROWS] is
    false for an index past the last token. The other arguments are those of `gather_and_maybe_dequant_cache`, with
    their strides.
    """
    request = request_of(tokens, cu_seq_lens, cu_stride, num_requests, search_steps)
    owned = written & (request < num_requests)  # tokens that have a cache entry; the rows of all others become 0
    begin = tl.load(cu_seq_lens + request * cu_stride, owned, 0)
    position = tokens - begin + tl.load(starts + request * starts_stride, owned, 0)
    column = position // BLOCK_SIZE
    owned = owned & (begin <= tokens) & (position >= 0) & (column < num_columns)
    block = tl.load(block_table + request * table_row + column * table_column, owned, -1).to(tl.int64)
    owned = owned & (block >= 0) & (block < num_blocks)
    entry_rows = block * block_stride + position % BLOCK_SIZE * entry_stride
    return entry_rows, owned
