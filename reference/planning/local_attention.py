"""Express chunked local attention as ordinary attention of a batch with more requests (virtual requests)."""

from __future__ import annotations

import torch

from ..interfaces import (
    CommonAttentionMetadata,
    check,
    check_batch_block_size,
    check_host_lens,
    check_int,
    check_table_width,
)


def make_local_attention_virtual_batches(
    common: CommonAttentionMetadata, attention_chunk_size: int, block_size: int
) -> CommonAttentionMetadata:
    """Return a batch of virtual requests whose ordinary attention equals chunked local attention of `common`.

    In chunked local attention, positions are divided into attention chunks of `attention_chunk_size` tokens. A token
    attends itself and the tokens before it in the same attention chunk. All query tokens of a request in one attention
    chunk therefore become one virtual request. Its keys are the tokens of this attention chunk up to the last query
    token. An attention chunk begins at the start of a block, so the virtual request gets consecutive columns of the
    request's block table. Tokens keep their order and slots.

    Args:
        common: the batch.
        attention_chunk_size: positions in an attention chunk; a multiple of `block_size`.
        block_size: tokens per block.

    Returns:
        The batch of virtual requests. A padding row (S = 0) with query tokens becomes one virtual request. A request
        without query tokens is left out.

    Raises:
        ValueError: a size is below 1; the slots were computed for another block size; `attention_chunk_size` is not a
            multiple of `block_size`; the block table has too few columns for a request.
    """
    check_batch_block_size(common, block_size)
    check_table_width(common, block_size)
    check_host_lens(common)
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
    indices = torch.tensor(tables, dtype=torch.int64, device=device).view(len(tables), columns if width else 0, 2)
    return CommonAttentionMetadata.make(
        torch.tensor(virtual_starts, dtype=torch.int32, device="cpu"),
        torch.tensor(virtual_lens, dtype=torch.int32, device="cpu"),
        common.block_table[indices[..., 0], indices[..., 1]],
        common.slot_mapping,
        common.block_size,
    )
