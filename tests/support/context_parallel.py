"""Helpers for tests of decode context parallelism, in which D ranks divide the tokens of every sequence.

Each rank in turn keeps I consecutive tokens; I is the interleave.
"""

from __future__ import annotations

from dataclasses import replace

import torch

import reference
from reference.interfaces import AttentionState

from .factories import DIRECT, LOW_RANK, NO_ROPE
from .ranks import owners

HEADS = 24  # divisible by every D in SIZES
CONFIGS = {
    "direct": replace(DIRECT, num_heads=HEADS),
    "low-rank": replace(LOW_RANK, num_heads=HEADS),
    "no-rope": replace(NO_ROPE, num_heads=HEADS),
}
SIZES, INTERLEAVES, MERGES = (1, 2, 3, 4, 8), (1, 16, 64), ("a2a", "ag_rs")


def of_rank(common, block_size, ownership):
    """Return the batch with the slot mapping of one rank; tokens that another rank keeps have slot -1."""
    slots = reference.dcp_slot_mapping(
        common.query_start_loc, common.seq_lens, common.block_table, block_size, common.slot_mapping.shape[0],
        ownership.size, ownership.rank, ownership.interleave,
    )  # fmt: skip
    return replace(common, slot_mapping=slots)


def gathered_chunk(entries, starts, size, interleave, padded):
    """Return the cache entries of a chunk of the context as all ranks gather them, [D, padded, width].

    The first rows of a rank are the entries that this rank keeps, request after request. The entries of a request begin
    with the first token of the request in the chunk. The remaining rows of the rank are NaN.

    Args:
        entries: entries of each request, [tokens, width].
        starts: for each request, the position of its first token in the chunk.
        size: number of ranks D.
        interleave: number of consecutive tokens I.
        padded: number of rows of each rank.
    """
    gathered = torch.full((size, padded, entries[0].shape[1]), torch.nan, dtype=entries[0].dtype)
    for rank in range(size):
        rows = [
            own[token]
            for own, start in zip(entries, starts, strict=True)
            for token, owner in enumerate(owners(own.shape[0], size, interleave))
            if owner == rank and token >= start
        ]
        if rows:
            gathered[rank, : len(rows)] = torch.stack(rows)
    return gathered


def rank_states(size, tokens, heads, value, dtype):
    """Return a random attention state for each rank, in which some rows (token, head) have no keys.

    On each rank, about 30 % of the rows have no keys. The rows of head 0 have no keys on the last rank. The row of head
    1 and token 2 has no keys on any rank.
    """
    lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    states = []
    for rank in range(size):
        out, lse = torch.randn(tokens, heads, value, dtype=torch.float64), 9 * torch.randn(heads, tokens)
        empty = torch.rand(heads, tokens) < 0.3
        empty[1, 2] = True
        if rank == size - 1:
            empty[0] = True
        out = out.masked_fill(empty.T[..., None], 0)
        states.append(AttentionState(out.to(dtype), lse.masked_fill(empty, -torch.inf).to(lse_dtype)))
    return states


def over_ranks(ops, states, merge, interleave=1):
    """Merge the states of all ranks; return one state, which has each head's result from the owner rank of the head."""
    function = {"a2a": ops.cp_lse_a2a, "ag_rs": ops.cp_lse_ag_out_rs}[merge]
    merged = ops.simulate(len(states), interleave, lambda ranks: function(states[ranks.rank], ranks.cp_group))
    return AttentionState(torch.cat([own.out for own in merged], 1), torch.cat([own.lse for own in merged]))
