"""Order the context that was gathered from all ranks."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from ..interfaces import (
    ContextParallelChunk,
    check_rank_offsets,
    check_reorg,
)


def reorg_kvcache(
    gathered: Float[Tensor, "D padded head_size"], chunk: ContextParallelChunk
) -> Float[Tensor, "S head_size"]:
    """What all ranks handed in of a piece of context, in request order and in the order of the tokens.

    Each rank's tokens stand one request after another, rows past its last one are padding. The result equals the gather
    of one rank that holds everything, bit for bit. (vLLM's function of this name leaves the tokens of a request rank
    after rank: enough for unmasked attention.)

    Args:
        gathered: [D, padded_tokens, Lkv + R], the cache entries that each rank handed in.
        chunk: the plan of the piece.

    Returns:
        [num_tokens, Lkv + R].

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; offsets that are not those of the pieces.
    """
    check_reorg(gathered, chunk)
    local, interleave = chunk.local_cu_seq_lens, chunk.ownership.interleave
    check_rank_offsets(chunk.cu_seq_lens, local, interleave, chunk.num_tokens, chunk.padded_tokens)
    offsets, size = local.tolist(), chunk.ownership.size
    rows = [gathered.new_empty(0, gathered.shape[2])]
    for request, length in enumerate(chunk.cu_seq_lens.diff().tolist()):
        unread = [offsets[rank][request] for rank in range(size)]
        token, rank = 0, 0
        while token < length:  # the ranks in turn, a run of I tokens each
            run = min(interleave, length - token)
            rows.append(gathered[rank, unread[rank] : unread[rank] + run])
            unread[rank] += run
            token, rank = token + run, (rank + 1) % size
    return torch.cat(rows)
