"""Compute on the device which keys of a sequence this rank owns, and the first key of query tokens with a window."""

from __future__ import annotations

import torch
from jaxtyping import Int32
from torch import Tensor

from reference.interfaces import TokenOwnership, get_dcp_local_seq_lens


def first_keys(
    positions: Int32[Tensor, " X"],
    sliding_window: int | None,
    attention_chunk_size: int | None,
    ownership: TokenOwnership | None,
) -> Int32[Tensor, " X"] | None:
    """Return the first key of query tokens as a new tensor; None without a window and attention chunks.

    Args:
        positions: position of each query token in its whole sequence; -1 for padding tokens.
        sliding_window: number of keys in a window, or None.
        attention_chunk_size: positions in an attention chunk, or None.
        ownership: the tokens that this rank owns; the result then counts only keys of this rank.
    """
    first = None
    if attention_chunk_size is not None:
        first = positions.clamp(min=0)
        first.sub_(first.remainder(attention_chunk_size))
    if sliding_window is not None:
        begin = positions.sub(sliding_window - 1).clamp_(min=0)
        first = begin if first is None else torch.maximum(first, begin)
    return None if first is None else local_counts(first, ownership)


def local_counts(num_keys: Int32[Tensor, " X"], ownership: TokenOwnership | None) -> Int32[Tensor, " X"]:
    """Return how many of the first `num_keys` keys of a sequence this rank owns."""
    if ownership is None:
        return num_keys
    return get_dcp_local_seq_lens(num_keys, ownership.size, ownership.rank, ownership.interleave)
