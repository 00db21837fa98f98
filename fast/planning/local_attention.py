"""Express chunked local attention as ordinary attention of virtual requests.

In chunked local attention, the positions of a request are divided into attention chunks. A token attends only itself
and the earlier tokens of its own attention chunk. A virtual request is one attention chunk of a request, with the query
tokens in this attention chunk.
"""

from __future__ import annotations

import torch

from reference.interfaces import (
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
    """Return a batch of virtual requests, on which ordinary attention computes the local attention of `common`.

    See `reference.planning.local_attention.make_local_attention_virtual_batches` for the rule.

    Args:
        common: batch of the step.
        attention_chunk_size: positions per attention chunk; a multiple of `block_size`.
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
    chunk = attention_chunk_size
    check(chunk >= 1 and chunk % block_size == 0, "attention_chunk_size", f"a multiple of the block size {block_size}",
          chunk)  # fmt: skip
    starts, lengths = common.query_start_loc_cpu.long(), common.seq_lens_cpu.long()
    query_lens = starts.diff()
    first_position = (lengths - query_lens).clamp_(min=0)
    counts = (lengths - 1).div(chunk, rounding_mode="floor") - first_position.div(chunk, rounding_mode="floor") + 1
    counts = torch.where(lengths > 0, counts, 1) * (query_lens > 0)  # [B], virtual requests; 1 for a padding row
    request = torch.repeat_interleave(counts)
    number = torch.arange(request.shape[0], device="cpu") - (counts.cumsum(0) - counts)[request]
    first_key = (first_position[request] // chunk + number) * chunk
    end = torch.minimum(first_key + chunk, lengths[request])
    taken = torch.where(lengths[request] > 0, end - torch.maximum(first_key, first_position[request]),
                        query_lens[request])  # fmt: skip
    virtual_lens = (end - first_key).to(torch.int32)
    virtual_starts = torch.nn.functional.pad(taken.cumsum(0), (1, 0)).to(torch.int32)

    width, device = common.block_table.shape[1], common.block_table.device
    columns = torch.arange(chunk // block_size if width else 0, device="cpu")
    columns = (first_key[:, None] // block_size + columns).clamp_(max=max(0, width - 1))
    table = common.block_table[request[:, None].to(device, non_blocking=True), columns.to(device, non_blocking=True)]
    return CommonAttentionMetadata(
        seq_lens=virtual_lens.to(device, non_blocking=True),
        query_start_loc=virtual_starts.to(device, non_blocking=True),
        seq_lens_cpu=virtual_lens,
        query_start_loc_cpu=virtual_starts,
        block_table=table,
        slot_mapping=common.slot_mapping,
        max_query_len=int(taken.max()) if taken.numel() else 0,
        num_actual_tokens=common.num_actual_tokens,
        max_seq_len=int(virtual_lens.max()) if virtual_lens.numel() else 0,
        block_size=common.block_size,
    )
