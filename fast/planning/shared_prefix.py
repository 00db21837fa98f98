"""Find the prefix that all requests of a decode share, and split the decode into this prefix and the suffixes."""

from __future__ import annotations

import torch

from reference.interfaces import (
    CascadeMetadata,
    CommonAttentionMetadata,
    DecodeMetadata,
    check_host_lens,
    check_prefix_split,
    check_table_width,
)
from reference.interfaces.gqa import PagedAttentionMetadata


def common_prefix_len(common: CommonAttentionMetadata, block_size: int) -> int:
    """Return the length, in tokens, of the context prefix that all requests have in the same blocks of the cache.

    `reference.planning.shared_prefix.common_prefix_len` explains the context of a request and the limits of the result.
    The function reads the values of the block table; if the block table is on a GPU, the host waits for the GPU.

    Args:
        common: batch of the step; padding rows (S = 0) are ignored.
        block_size: tokens per block.

    Raises:
        ValueError: `block_size` is below 1, or the block table has too few columns for a request.
    """
    check_table_width(common, block_size)
    check_host_lens(common)
    real = (common.seq_lens_cpu > 0).nonzero().flatten()
    if real.numel() == 0:
        return 0
    blocks = int(common.num_computed_tokens_cpu[real].min()) // block_size
    if blocks == 0:
        return 0
    table = common.block_table[real.to(common.block_table.device), :blocks]
    differs = (table != table[:1]).any(0)
    return block_size * (int(differs.int().argmax()) if bool(differs.any()) else blocks)


def split_shared_prefix(
    metadata: DecodeMetadata, common_prefix_len: int, block_size: int, row: int = 0
) -> CascadeMetadata:
    """Split a decode in two: all query tokens attend the shared prefix, and each request attends its own suffix.

    See `reference.planning.shared_prefix.split_shared_prefix` for the conditions that the caller must guarantee, and
    for windows.

    Args:
        metadata: decode part of the plan.
        common_prefix_len: number of shared tokens, a multiple of `block_size`. Every request except padding rows must
            have at least this number of context tokens.
        block_size: tokens per block.
        row: index of a request that is not a padding row; its blocks are used as the blocks of the prefix.

    Raises:
        ValueError: `block_size` is not the block size of `metadata`; `common_prefix_len` is not a positive multiple of
            the block size, or has more blocks than the block table has columns; `row` is out of range.
    """
    blocks = check_prefix_split(metadata, common_prefix_len, block_size, row)
    tokens, device = metadata.visible_lens.shape[0], metadata.seq_lens.device
    kind, of_prefix, of_suffix = DecodeMetadata, {}, {}
    if isinstance(metadata, PagedAttentionMetadata):
        kind, first = PagedAttentionMetadata, metadata.first_visible
        if first is not None:
            of_prefix = {"first_visible": first.clamp(max=common_prefix_len)}
            of_suffix = {"first_visible": (first - common_prefix_len).clamp(min=0)}
    prefix = kind(
        **of_prefix,
        block_table=metadata.block_table[row : row + 1, :blocks],
        seq_lens=torch.full((1,), common_prefix_len, dtype=torch.int32, device=device),
        query_start_loc=tokens * torch.arange(2, dtype=torch.int32, device=device),
        max_query_len=tokens,
        visible_lens=metadata.visible_lens.clamp(max=common_prefix_len),
        max_seq_len=common_prefix_len,
        block_size=metadata.block_size,
    )
    suffix = kind(
        **of_suffix,
        block_table=metadata.block_table[:, blocks:],
        seq_lens=(metadata.seq_lens - common_prefix_len).clamp(min=0),
        query_start_loc=metadata.query_start_loc,
        max_query_len=metadata.max_query_len,
        visible_lens=(metadata.visible_lens - common_prefix_len).clamp(min=0),
        max_seq_len=max(0, metadata.max_seq_len - common_prefix_len),
        block_size=metadata.block_size,
        mask=metadata.mask,
    )
    return CascadeMetadata(prefix, suffix)
