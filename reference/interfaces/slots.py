"""Compute the cache slots (places in the paged cache) of the new tokens of a batch, and check their blocks."""

from __future__ import annotations

import torch
from jaxtyping import Int32, Int64
from torch import Tensor

from .checks import check_blocks
from .ownership import ONE_RANK, TokenOwnership


def slots_of_tokens(
    query_start_loc: Int32[Tensor, " offsets"],
    seq_lens: Int32[Tensor, " B"],
    block_table: Int32[Tensor, "B W"],
    block_size: int,
    num_tokens: int,
    ownership: TokenOwnership | None = None,
) -> Int64[Tensor, " num_tokens"]:
    """Compute the cache slot of every new token, without a copy to the CPU.

    D ranks own the tokens of a sequence in turn, I consecutive tokens at a time. Without context parallelism, D = 1.
    Let t be the index of a new token in the batch, b the index of its request, and S_b the length of this request. The
    slot follows in three steps:

    1. The position of the token in the sequence is p = S_b - (query_start_loc[b + 1] - t).
    2. Rank (p // I) mod D owns the token. Among the tokens of the request that this rank owns, the token has the index
       l = p // (D I) * I + p mod I. With one rank, l = p.
    3. The slot of the token is block_table[b, l // block_size] * block_size + l mod block_size.

    Args:
        query_start_loc: [B + 1], prefix sum of the query lengths.
        seq_lens: [B], lengths of the whole sequences after this step.
        block_table: [B, W], block ids of each request.
        block_size: tokens per block, a multiple of I.
        num_tokens: length of the result. Tokens after the last request have slot -1.
        ownership: the tokens that this context-parallel rank owns; None means that one rank owns all tokens.

    Returns:
        [num_tokens] int64. The slot is also -1 in three cases: S_b = 0 (a padding row), another rank owns the token, or
        the block table has too few columns.
    """
    requests, width = block_table.shape
    tokens = torch.arange(num_tokens, device=block_table.device)
    if requests == 0 or width == 0 or num_tokens == 0:
        return torch.full_like(tokens, -1)
    owned = ONE_RANK if ownership is None else ownership
    request = torch.searchsorted(query_start_loc[1:].long(), tokens, right=True)
    inside = request < requests
    request = request.clamp_(max=requests - 1)
    position = seq_lens[request] - (query_start_loc[request + 1] - tokens)
    group = position.div(owned.interleave, rounding_mode="floor")  # index of the token's group of I consecutive tokens
    local = group.div(owned.size, rounding_mode="floor") * owned.interleave + position.remainder(owned.interleave)
    column = local.div(block_size, rounding_mode="floor")
    is_owned = group.remainder(owned.size) == owned.rank
    is_written = inside & (seq_lens[request] > 0) & (position >= 0) & (column < width) & is_owned
    block = block_table[request, column.clamp(0, width - 1)].long()
    return torch.where(is_written, block * block_size + local.remainder(block_size), -1)


def check_new_blocks(
    query_start_loc: Int32[Tensor, " offsets"],
    seq_lens: Int32[Tensor, " B"],
    block_table: Int32[Tensor, "B W"],
    block_tokens: int,
    argument: str = "block_table",
) -> None:
    """Check that the block table has a column for every token, and valid blocks for the new tokens; read the values.

    The other entries are not checked. A window may have left the blocks of earlier tokens behind. Such blocks may have
    been freed, and their entries may then have any value.

    Args:
        query_start_loc: [B + 1], prefix sum of the query lengths.
        seq_lens: [B], lengths of the whole sequences after the step; 0 for a padding row, which has no block.
        block_table: [B, W], block ids of each request.
        block_tokens: tokens of a sequence for each column of the block table: tokens per block times the number of
            context-parallel ranks.
        argument: name of the block table in messages.

    Raises:
        ValueError: the block table has too few columns for a request, or the block of a new token is negative.
    """
    query_lens, lengths = query_start_loc.cpu().diff().long(), seq_lens.cpu().long()
    no_token = 2**62  # first token of a request without new tokens: behind every block
    first_tokens = torch.where((query_lens > 0) & (lengths > 0), lengths - query_lens, no_token)
    check_blocks(block_table, lengths.tolist(), block_tokens, 2**31, argument, first_tokens)
