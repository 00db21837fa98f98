"""Put cache entries that were gathered from all ranks into the order of the tokens.

With context parallelism, D ranks own the tokens of a sequence in turn, I consecutive tokens at a time. The rank-local
tokens are the tokens that one rank owns.
"""

from __future__ import annotations

import torch
from jaxtyping import Shaped
from torch import Tensor

from ..interfaces import (
    ContextParallelChunk,
    check_offsets,
    check_rank_offsets,
    check_reorg,
)


def reorg_kvcache(
    gathered: Shaped[Tensor, "D padded head_size"], chunk: ContextParallelChunk
) -> Shaped[Tensor, "S head_size"]:
    """Return the cache entries of a chunk from all ranks, one request after another and in the order of the tokens.

    The result has the same bits as a gather on one rank that owns all tokens. (In vLLM, the function of this name
    returns for each request first all tokens of rank 0, then all tokens of rank 1, and so on.)

    Args:
        gathered: [D, `chunk.padded_tokens`, Lkv + R], cache entries of each rank: its rank-local tokens of the chunk,
            one request after another, then padding. If the ranks exchanged stored entries, the last dimension has
            `columns` elements instead of Lkv + R.
        chunk: the context tokens whose cache entries were gathered.

    Returns:
        [`chunk.num_tokens`, Lkv + R]. If `num_tokens` is an upper bound (`chunk.bounded`), the rows behind the last
        request are 0.

    Raises:
        TypeError: `chunk` is no chunk.
        ValueError: shapes, dtypes or devices do not match; the offsets of the chunk do not fit the numbers of tokens
            that each rank owns.
    """
    check_reorg(gathered, chunk)
    local, interleave = chunk.local_cu_seq_lens, chunk.ownership.interleave
    if not chunk.bounded:
        check_offsets("chunk.cu_seq_lens", chunk.cu_seq_lens, chunk.num_tokens)
    check_rank_offsets(chunk.cu_seq_lens, local, interleave, chunk.num_tokens, chunk.padded_tokens)
    offsets, size = local.tolist(), chunk.ownership.size
    rows = [gathered.new_empty(0, gathered.shape[2])]
    for request, length in enumerate(chunk.cu_seq_lens.diff().tolist()):
        next_row = [offsets[rank][request] for rank in range(size)]
        token, rank = 0, 0
        while token < length:  # take I tokens of each rank in turn
            taken = min(interleave, length - token)
            rows.append(gathered[rank, next_row[rank] : next_row[rank] + taken])
            next_row[rank] += taken
            token, rank = token + taken, (rank + 1) % size
    rows.append(gathered.new_zeros(chunk.num_tokens - int(chunk.cu_seq_lens[-1]), gathered.shape[2]))
    return torch.cat(rows)
