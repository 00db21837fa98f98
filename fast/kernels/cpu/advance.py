"""Turn the batch of a step into the batch of the next step, for all requests at once."""

from __future__ import annotations

from torch import Tensor

from reference.interfaces import TokenOwnership, slots_of_tokens


def advance_step(
    sampled_token_ids: Tensor,
    input_ids: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    slot_mapping: Tensor,
    block_table: Tensor,
    block_size: int,
    ownership: TokenOwnership,
    limit: int,
) -> None:
    """Write the inputs of the next step of every request; see `reference.advance_step` for the rule.

    The caller has checked that no request exceeds `limit`.

    Args:
        sampled_token_ids: [B], the token that each request generated in this step.
        input_ids: [T], written.
        positions: [T], written.
        seq_lens: [B], read, then overwritten.
        query_start_loc: [B + 1], read, then overwritten.
        slot_mapping: [T], written.
        block_table: [B, W].
        block_size: tokens per block.
        ownership: the tokens that this rank owns.
        limit: largest length of a request, in tokens; not used by this backend.
    """
    has_token = query_start_loc.diff() > 0
    real = has_token & (seq_lens > 0)
    tokens = int(has_token.sum())
    input_ids[:tokens] = sampled_token_ids.where(real, 0)[has_token]
    positions[:tokens] = seq_lens.long().where(real, 0)[has_token]
    input_ids[tokens:] = 0
    positions[tokens:] = 0
    seq_lens += real
    query_start_loc[1:] = has_token.cumsum(0)
    slot_mapping.copy_(
        slots_of_tokens(query_start_loc, seq_lens, block_table, block_size, slot_mapping.shape[0], ownership)
    )
