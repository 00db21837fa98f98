"""Slots of the paged cache for the new tokens of a step."""

from __future__ import annotations

import torch
from jaxtyping import Int32, Int64
from torch import Tensor

from ..interfaces import (
    TokenOwnership,
    check,
    check_blocks,
    check_int,
    check_interleave,
    check_lengths,
    check_rank,
    check_tensor,
)


def slot_mapping(
    query_start_loc: Int32[Tensor, " offsets"],
    seq_lens: Int32[Tensor, " B"],
    block_table: Int32[Tensor, "B W"],
    block_size: int,
    num_tokens: int,
) -> Int64[Tensor, " num_tokens"]:
    """Cache slot of every new token: the last Sq tokens of each request.

    Args:
        query_start_loc: [B + 1], prefix sum of the query lengths.
        seq_lens: [B], lengths after this step; 0 for padding rows, whose slots are -1.
        block_table: [B, W].
        block_size: tokens a block.
        num_tokens: length of the result, at least query_start_loc[-1]; the rest is -1.

    Returns:
        [num_tokens] int64.

    Raises:
        ValueError: shapes or dtypes that do not fit; offsets that fall; 0 < S < Sq; too few columns or tokens.
    """
    check_int("block_size", block_size, 1, "at least 1")
    check_int("num_tokens", num_tokens, 0)
    check_tensor("block_table", block_table, ("B", "W"), (torch.int32,))
    requests = block_table.shape[0]
    check_tensor("seq_lens", seq_lens, (requests,), (torch.int32,), block_table.device)
    check_tensor("query_start_loc", query_start_loc, (requests + 1,), (torch.int32,), block_table.device)
    check_lengths(query_start_loc, seq_lens)
    starts, lengths, tables = query_start_loc.tolist(), seq_lens.tolist(), block_table.tolist()
    check(num_tokens >= starts[-1], "num_tokens", f"at least {starts[-1]}", num_tokens)
    check_blocks(block_table, lengths, block_size, num_blocks=2**31)
    slots = [-1] * num_tokens
    for request, length in enumerate(lengths):
        for token in range(starts[request], starts[request + 1]):
            position = length - (starts[request + 1] - token)
            if length > 0:
                slots[token] = tables[request][position // block_size] * block_size + position % block_size
    return torch.tensor(slots, dtype=torch.int64, device=block_table.device)


def dcp_slot_mapping(
    query_start_loc: Int32[Tensor, " offsets"],
    seq_lens: Int32[Tensor, " B"],
    block_table: Int32[Tensor, "B W"],
    block_size: int,
    num_tokens: int,
    context_parallel_size: int,
    rank: int,
    interleave: int = 1,
) -> Int64[Tensor, " num_tokens"]:
    """Cache slot of every new token that lies on a rank, -1 for those that lie elsewhere.

    Args:
        query_start_loc: [B + 1], prefix sum of the query lengths.
        seq_lens: [B], lengths of the whole sequences after this step; 0 for padding rows, whose slots are -1.
        block_table: [B, W], the same on all ranks.
        block_size: tokens a block, a multiple of I.
        num_tokens: length of the result, at least query_start_loc[-1]; the rest is -1.
        context_parallel_size: D.
        rank: of D.
        interleave: I.

    Returns:
        [num_tokens] int64.

    Raises:
        ValueError: numbers out of range; shapes or dtypes that do not fit; offsets that fall; 0 < S < Sq; too few
            columns or tokens.
    """
    check_rank(context_parallel_size, rank, interleave)
    ownership = TokenOwnership(context_parallel_size, rank, interleave)
    check_interleave(interleave, block_size)
    check_int("rank", rank, 0, f"an int in [0, {context_parallel_size})")
    check_int("num_tokens", num_tokens, 0)
    check_tensor("block_table", block_table, ("B", "W"), (torch.int32,))
    requests = block_table.shape[0]
    check_tensor("seq_lens", seq_lens, (requests,), (torch.int32,), block_table.device)
    check_tensor("query_start_loc", query_start_loc, (requests + 1,), (torch.int32,), block_table.device)
    check_lengths(query_start_loc, seq_lens)
    starts, lengths, tables = query_start_loc.tolist(), seq_lens.tolist(), block_table.tolist()
    check(num_tokens >= starts[-1], "num_tokens", f"at least {starts[-1]}", num_tokens)
    check_blocks(block_table, lengths, block_size * ownership.size, num_blocks=2**31)
    slots = [-1] * num_tokens
    for request, length in enumerate(lengths):
        for token in range(starts[request], starts[request + 1]):
            position = length - (starts[request + 1] - token)
            if length == 0:
                continue
            if ownership.count(position + 1) > ownership.count(position):  # one more lies here than before this token
                column, offset = divmod(ownership.count(position), block_size)
                slots[token] = tables[request][column] * block_size + offset
    return torch.tensor(slots, dtype=torch.int64, device=block_table.device)
