"""Chunked local attention as a batch of virtual requests."""

from __future__ import annotations

import torch

from ..interfaces import (
    CommonAttentionMetadata,
    check,
    check_batch_block_size,
    check_int,
    check_table_width,
)


def make_local_attention_virtual_batches(
    common: CommonAttentionMetadata, attention_chunk_size: int, block_size: int
) -> CommonAttentionMetadata:
    """Chunked local attention as ordinary attention of virtual requests.

    A token at position i attends the positions from i // chunk x chunk to i. So the part of a request's query that lies
    in one chunk is a request of its own, whose keys are that chunk's: it starts on a block boundary and takes those
    columns of the block table. Tokens keep their order and their slots.

    Args:
        common: the batch.
        attention_chunk_size: positions in a chunk; a multiple of `block_size`.
        block_size: tokens a block.

    Returns:
        The virtual batch; a padding row (S = 0) stays one row, a request without new tokens has none.

    Raises:
        ValueError: a size below 1, slots that were made for another block size, a chunk that is not made of whole
            blocks, or a block table narrower than the longest request.
    """
    check_batch_block_size(common, block_size)
    check_table_width(common, block_size)
    check_int("attention_chunk_size", attention_chunk_size, 1, f"a multiple of the block size {block_size}")
    whole = attention_chunk_size >= 1 and attention_chunk_size % block_size == 0
    check(whole, "attention_chunk_size", f"a multiple of the block size {block_size}", attention_chunk_size)
    starts, lengths = common.query_start_loc_cpu.tolist(), common.seq_lens_cpu.tolist()
    columns, width = attention_chunk_size // block_size, common.block_table.shape[1]
    virtual_starts, virtual_lens, tables = [0], [], []
    for request, length in enumerate(lengths):
        query_len = starts[request + 1] - starts[request]
        position = max(0, length - query_len)
        while query_len > 0:
            first = position // attention_chunk_size * attention_chunk_size
            taken = min(query_len, first + attention_chunk_size - position) if length > 0 else query_len
            virtual_starts.append(virtual_starts[-1] + taken)
            virtual_lens.append(position + taken - first if length > 0 else 0)
            tables.append([(request, min(first // block_size + i, width - 1)) for i in range(columns if width else 0)])
            position, query_len = position + taken, query_len - taken
    device = common.block_table.device
    where = torch.tensor(tables, dtype=torch.int64, device=device).view(len(tables), columns if width else 0, 2)
    return CommonAttentionMetadata.make(
        torch.tensor(virtual_starts, dtype=torch.int32, device="cpu"),
        torch.tensor(virtual_lens, dtype=torch.int32, device="cpu"),
        common.block_table[where[..., 0], where[..., 1]],
        common.slot_mapping,
        common.block_size,
    )
