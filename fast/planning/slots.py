"""Compute the cache slots of the new tokens of a step. A slot is the place of one token in the paged cache."""

from __future__ import annotations

import torch
from jaxtyping import Int32, Int64
from torch import Tensor

from reference.interfaces import (
    TokenOwnership,
    check,
    check_int,
    check_interleave,
    check_lengths,
    check_new_blocks,
    check_rank,
    check_tensor,
    slots_of_tokens,
)


def slot_mapping(
    query_start_loc: Int32[Tensor, " offsets"],
    seq_lens: Int32[Tensor, " B"],
    block_table: Int32[Tensor, "B W"],
    block_size: int,
    num_tokens: int,
) -> Int64[Tensor, " num_tokens"]:
    """Return the cache slot of every new token; the new tokens are the last Sq tokens of each request.

    See `reference.planning.slots.slot_mapping` for the formula.

    Args:
        query_start_loc: [B + 1], prefix sum of the query lengths Sq.
        seq_lens: [B], tokens S of each request after this step; 0 marks a padding row, whose slots are -1.
        block_table: [B, W], blocks of each request. Only the blocks of new tokens are read.
        block_size: tokens per block.
        num_tokens: length of the result, at least `query_start_loc[-1]`. Tokens from this index on get slot -1.

    Returns:
        [num_tokens] int64.

    Raises:
        ValueError: shapes or dtypes do not match. For CPU tensors also: a value of `query_start_loc` is smaller than
            the value before it, a request has 0 < S < Sq, the block table has too few columns, the block of a new token
            is negative, or `num_tokens` is too small.
    """
    check_int("block_size", block_size, 1, "at least 1")
    check_int("num_tokens", num_tokens, 0)
    check_tensor("block_table", block_table, ("B", "W"), (torch.int32,))
    requests, device = block_table.shape[0], block_table.device
    check_tensor("seq_lens", seq_lens, (requests,), (torch.int32,), device)
    check_tensor("query_start_loc", query_start_loc, (requests + 1,), (torch.int32,), device)
    if device.type == "cpu":
        check_lengths(query_start_loc, seq_lens)
        check(num_tokens >= int(query_start_loc[-1]), "num_tokens", f"at least {int(query_start_loc[-1])}", num_tokens)
        check_new_blocks(query_start_loc, seq_lens, block_table, block_size)
    return slots_of_tokens(query_start_loc, seq_lens, block_table, block_size, num_tokens)


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
    """Return the cache slot of every new token that this rank owns, and -1 for tokens of other ranks.

    See `reference.planning.slots.dcp_slot_mapping` for the tokens that each of the D ranks owns.

    Args:
        query_start_loc: [B + 1], prefix sum of the query lengths Sq.
        seq_lens: [B], tokens S of each request after this step, counted over all ranks; 0 marks a padding row, whose
            slots are -1.
        block_table: [B, W], blocks of each request; all ranks have the same block table. Only the blocks of new tokens
            are read.
        block_size: tokens per block, a multiple of I.
        num_tokens: length of the result, at least `query_start_loc[-1]`. Tokens from this index on get slot -1.
        context_parallel_size: D, number of ranks.
        rank: this rank, in [0, D).
        interleave: I, number of consecutive tokens that each rank gets in turn.

    Returns:
        [num_tokens] int64.

    Raises:
        ValueError: a number is out of range; shapes or dtypes do not match. For CPU tensors also: a value of
            `query_start_loc` is smaller than the value before it, a request has 0 < S < Sq, the block table has too few
            columns, the block of a new token is negative, or `num_tokens` is too small.
    """
    check_rank(context_parallel_size, rank, interleave)
    check_interleave(interleave, block_size)
    check_int("rank", rank, 0, f"an int in [0, {context_parallel_size})")
    check_int("num_tokens", num_tokens, 0)
    check_tensor("block_table", block_table, ("B", "W"), (torch.int32,))
    requests = block_table.shape[0]
    check_tensor("seq_lens", seq_lens, (requests,), (torch.int32,), block_table.device)
    check_tensor("query_start_loc", query_start_loc, (requests + 1,), (torch.int32,), block_table.device)
    if block_table.device.type == "cpu":
        check_lengths(query_start_loc, seq_lens)
        total = int(query_start_loc[-1])
        check(num_tokens >= total, "num_tokens", f"at least {total}", num_tokens)
        check_new_blocks(query_start_loc, seq_lens, block_table, block_size * context_parallel_size)
    ownership = TokenOwnership(context_parallel_size, rank, interleave)
    return slots_of_tokens(query_start_loc, seq_lens, block_table, block_size, num_tokens, ownership)
