"""Compute the cache slots (places in the paged cache) of the new tokens of a step."""

from __future__ import annotations

import torch
from jaxtyping import Int32, Int64
from torch import Tensor

from ..interfaces import (
    TokenOwnership,
    check,
    check_int,
    check_interleave,
    check_lengths,
    check_new_blocks,
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
    """Return the cache slot of every new token; the new tokens of a request are the last tokens of its sequence.

    The token at position p of request b has the slot block_table[b, p // block_size] * block_size + p mod block_size.

    Args:
        query_start_loc: [B + 1], prefix sum of the query lengths.
        seq_lens: [B], tokens of each request after this step; 0 marks a padding row, whose slots are -1.
        block_table: [B, W], block ids of each request. Only the blocks of new tokens are read.
        block_size: tokens per block.
        num_tokens: length of the result, at least `query_start_loc[-1]`. Later tokens are padding and have slot -1.

    Returns:
        [num_tokens] int64.

    Raises:
        ValueError: shapes, dtypes or devices do not match; the offsets decrease; a request has 0 < S < Sq; the block
            table has too few columns, or the block of a new token is negative; `num_tokens` is too small.
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
    check_new_blocks(query_start_loc, seq_lens, block_table, block_size)
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
    """Return the cache slot of every new token on one context-parallel rank; -1 for tokens that another rank owns.

    D ranks own the tokens of a sequence in turn, I consecutive tokens at a time.

    Args:
        query_start_loc: [B + 1], prefix sum of the query lengths.
        seq_lens: [B], tokens of each whole sequence after this step; 0 marks a padding row, whose slots are -1.
        block_table: [B, W], block ids of each request, the same on all ranks. Only the blocks of new tokens are read.
        block_size: tokens per block, a multiple of I.
        num_tokens: length of the result, at least `query_start_loc[-1]`. Later tokens are padding and have slot -1.
        context_parallel_size: D, ranks that share each sequence.
        rank: this rank, in [0, D).
        interleave: I, consecutive tokens on one rank.

    Returns:
        [num_tokens] int64.

    Raises:
        ValueError: a number is out of range; shapes, dtypes or devices do not match; the offsets decrease; a request
            has 0 < S < Sq; the block table has too few columns, or the block of a new token is negative; `num_tokens`
            is too small.
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
    check_new_blocks(query_start_loc, seq_lens, block_table, block_size * ownership.size)
    slots = [-1] * num_tokens
    for request, length in enumerate(lengths):
        for token in range(starts[request], starts[request + 1]):
            position = length - (starts[request + 1] - token)
            if length == 0:
                continue
            if ownership.count(position + 1) > ownership.count(position):  # this rank owns the token
                column, offset = divmod(ownership.count(position), block_size)
                slots[token] = tables[request][column] * block_size + offset
    return torch.tensor(slots, dtype=torch.int64, device=block_table.device)
