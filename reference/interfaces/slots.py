"""The cache slot of a token, in closed form over all tokens of a batch."""

from __future__ import annotations

import torch
from jaxtyping import Int32, Int64
from torch import Tensor

from .ownership import TokenOwnership


def slots_of_tokens(
    query_start_loc: Int32[Tensor, " offsets"],
    seq_lens: Int32[Tensor, " B"],
    block_table: Int32[Tensor, "B W"],
    block_size: int,
    num_tokens: int,
    ownership: TokenOwnership | None = None,
) -> Int64[Tensor, " num_tokens"]:
    """Compute the cache slot of every new token; read no value on the host.

    Token t of request b has position p = S_b - (query_start_loc[b + 1] - t). With D ranks and interleave I, rank
    (p // I) mod D owns it as its local token l = p // (D I) * I + p mod I; on one rank l = p. Its slot is
    block_table[b, l // block_size] * block_size + l mod block_size.

    Args:
        query_start_loc: [B + 1], prefix sum of the query lengths.
        seq_lens: [B], lengths of the whole sequences after this step.
        block_table: [B, W].
        block_size: tokens a block, a multiple of I.
        num_tokens: length of the result.
        ownership: the tokens that a context-parallel rank owns; None: one rank owns all tokens.

    Returns:
        [num_tokens]; -1 for tokens of padding rows, tokens of other ranks, tokens past the last request, and tokens
        whose column the block table does not have.
    """
    requests, width = block_table.shape
    tokens = torch.arange(num_tokens, device=block_table.device)
    if requests == 0 or width == 0 or num_tokens == 0:
        return torch.full_like(tokens, -1)
    size, rank, interleave = (1, 0, 1) if ownership is None else (ownership.size, ownership.rank, ownership.interleave)
    request = torch.searchsorted(query_start_loc[1:].long(), tokens, right=True)
    inside = request < requests
    request = request.clamp_(max=requests - 1)
    position = seq_lens[request] - (query_start_loc[request + 1] - tokens)
    turn = position.div(interleave, rounding_mode="floor")
    local = turn.div(size, rounding_mode="floor") * interleave + position.remainder(interleave)
    column = local.div(block_size, rounding_mode="floor")
    owned = inside & (seq_lens[request] > 0) & (position >= 0) & (column < width) & (turn.remainder(size) == rank)
    block = block_table[request, column.clamp(0, width - 1)].long()
    return torch.where(owned, block * block_size + local.remainder(block_size), -1)
