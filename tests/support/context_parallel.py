"""Ranks that share sequences: sizes, batches of one rank, states and gathered context dealt out card by card."""

from __future__ import annotations

from dataclasses import replace

import torch

import reference
from reference.interfaces import AttentionState

from .factories import DIRECT, LOW_RANK, NO_ROPE
from .ranks import owners

HEADS = 24  # D of 1, 2, 3, 4 and 8 divide them
CONFIGS = {
    "direct": replace(DIRECT, num_heads=HEADS),
    "low-rank": replace(LOW_RANK, num_heads=HEADS),
    "no-rope": replace(NO_ROPE, num_heads=HEADS),
}
SIZES, INTERLEAVES, MERGES = (1, 2, 3, 4, 8), (1, 16, 64), ("a2a", "ag_rs")


def of_rank(common, block_size, ownership):
    """The same batch with a rank's slots instead of one rank's."""
    slots = reference.dcp_slot_mapping(
        common.query_start_loc, common.seq_lens, common.block_table, block_size, common.slot_mapping.shape[0],
        ownership.size, ownership.rank, ownership.interleave,
    )  # fmt: skip
    return replace(common, slot_mapping=slots)


def dealt_pieces(entries, starts, share_size, interleave, padded):
    """What each rank hands in of the pieces [start, end) of requests: dealt tokens, then NaN."""
    gathered = torch.full((share_size, padded, entries[0].shape[1]), torch.nan, dtype=entries[0].dtype)
    for rank in range(share_size):
        rows = [
            own[token]
            for own, start in zip(entries, starts, strict=True)
            for token, owner in enumerate(owners(own.shape[0], share_size, interleave))
            if owner == rank and token >= start
        ]
        if rows:
            gathered[rank, : len(rows)] = torch.stack(rows)
    return gathered


def rank_states(size, tokens, heads, value, dtype):
    """A state for each rank; some ranks hold no key of some rows, and one row has none anywhere."""
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
    """Each rank's heads of the merge, together again."""
    function = {"a2a": ops.cp_lse_a2a, "ag_rs": ops.cp_lse_ag_out_rs}[merge]
    homes = ops.simulate(len(states), interleave, lambda ranks: function(states[ranks.rank], ranks.cp_group))
    return AttentionState(torch.cat([home.out for home in homes], 1), torch.cat([home.lse for home in homes]))
