"""Find the prefix that all requests of a batch share, and split the plan of a decode into prefix and suffixes."""

from __future__ import annotations

import torch

from ..interfaces import (
    CascadeMetadata,
    CommonAttentionMetadata,
    DecodeMetadata,
    check_host_lens,
    check_prefix_split,
    check_table_width,
)
from ..interfaces.gqa import PagedAttentionMetadata


def common_prefix_len(common: CommonAttentionMetadata, block_size: int) -> int:
    """Return the number of leading context tokens that all requests of a batch have in the same blocks of the cache.

    The context of a request is its tokens before this step. The result is a multiple of `block_size` and at most the
    shortest context. Padding rows (requests of length 0) are ignored. The function reads the values of the block table,
    so it waits for a GPU.

    Args:
        common: the batch.
        block_size: tokens per block.

    Raises:
        ValueError: `block_size` is below 1; the block table has too few columns for a request.
    """
    check_table_width(common, block_size)
    check_host_lens(common)
    contexts, lengths = common.num_computed_tokens_cpu.tolist(), common.seq_lens_cpu.tolist()
    real = [request for request in range(common.num_reqs) if lengths[request] > 0]
    if not real:
        return 0
    tables = common.block_table.tolist()
    blocks = 0
    while all(
        contexts[request] >= (blocks + 1) * block_size and tables[request][blocks] == tables[real[0]][blocks]
        for request in real
    ):
        blocks += 1
    return blocks * block_size


def split_shared_prefix(
    metadata: DecodeMetadata, common_prefix_len: int, block_size: int, row: int = 0
) -> CascadeMetadata:
    """Split the plan of a decode into a plan over the shared prefix and a plan over the suffix of each request.

    The plan over the prefix has one request with all query tokens. This function does not check that the requests
    share the prefix. The function `common_prefix_len` returns the length of the prefix that the requests share.

    Each part counts keys from its own first key. If `metadata` has a window (`first_visible`), each part has the keys
    of the window that lie in this part; a part without such keys is an empty row.

    Args:
        metadata: plan of the decode.
        common_prefix_len: tokens of the shared prefix: a multiple of `block_size`, and at most the context of every
            request except padding rows.
        block_size: tokens per block.
        row: index of a request that is not a padding row. The blocks of the prefix are read from this row of the block
            table.

    Returns:
        The plans of prefix and suffix, for `cascade_attention`.

    Raises:
        ValueError: `block_size` differs from `metadata.block_size`; `common_prefix_len` is not a positive multiple of
            `block_size`, or has more blocks than the block table has columns; `row` is out of range.
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
        seq_lens=torch.tensor([common_prefix_len], dtype=torch.int32, device=device),
        query_start_loc=torch.tensor([0, tokens], dtype=torch.int32, device=device),
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
