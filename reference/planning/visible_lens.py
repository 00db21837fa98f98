"""Compute the causal mask of decodes as one number for each query token."""

from __future__ import annotations

import itertools

import torch
from jaxtyping import Int32
from torch import Tensor

from ..interfaces import TokenOwnership, check, check_int, check_lengths, check_ownership, check_tensor


def compute_visible_lens(
    query_start_loc: Int32[Tensor, " offsets"],
    seq_lens: Int32[Tensor, " B"],
    num_tokens: int,
    ownership: TokenOwnership | None = None,
) -> Int32[Tensor, " num_tokens"]:
    """Return the number of keys that each query token of a decode attends (`DecodeMetadata.visible_lens`).

    The query token with index i in a request of Sq query tokens and S keys attends the first S - Sq + i + 1 keys. A
    token of a padding row (a request with S = 0) attends no key, and neither does a token behind the last request.

    The twin in `fast` computes the numbers from tensors on the device alone, so a CUDA graph can contain its kernel.
    Each replay of the graph then computes the numbers from its own lengths. (This function itself cannot be captured,
    because it copies the lengths to the CPU.)

    Args:
        query_start_loc: [B + 1], prefix sum of the query lengths Sq.
        seq_lens: [B], tokens of each request after this step, S; 0 marks a padding row. Under context parallelism S is
            the length of the whole sequence.
        num_tokens: length of the result, at least `query_start_loc[-1]`.
        ownership: the tokens that this context-parallel rank owns; the result is then the number of rank-local keys.
            None if one rank owns all tokens.

    Returns:
        [num_tokens] int32.

    Raises:
        ValueError: shapes, dtypes or devices do not match; the offsets decrease; a request has 0 < S < Sq;
            `num_tokens` is too small.
    """
    check_int("num_tokens", num_tokens, 0)
    check_tensor("seq_lens", seq_lens, ("B",), (torch.int32,))
    check_tensor("query_start_loc", query_start_loc, (seq_lens.shape[0] + 1,), (torch.int32,), seq_lens.device)
    check_ownership(ownership)
    check_lengths(query_start_loc, seq_lens)
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    check(num_tokens >= starts[-1], "num_tokens", f"at least {starts[-1]}", num_tokens)
    visible = _visible_lens(starts, lengths, ownership) + [0] * (num_tokens - starts[-1])
    return torch.tensor(visible, dtype=torch.int32, device=seq_lens.device)


def _visible_lens(starts: list[int], lengths: list[int], ownership: TokenOwnership | None) -> list[int]:
    """Return the number of keys that each query token attends; with `ownership`, count only keys of this rank."""
    visible = []
    for (start, end), length in zip(itertools.pairwise(starts), lengths, strict=True):
        visible += [length - (end - 1 - token) if length > 0 else 0 for token in range(start, end)]
    return visible if ownership is None else [ownership.count(keys) for keys in visible]
