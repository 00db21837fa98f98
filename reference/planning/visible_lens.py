"""Compute masks as numbers of each query token: the end of its keys (causal mask), and their begin (window)."""

from __future__ import annotations

import itertools

import torch
from jaxtyping import Int32
from torch import Tensor

from ..interfaces import (
    DECODE_TILE,
    TokenOwnership,
    check,
    check_int,
    check_lengths,
    check_ownership,
    check_tensor,
)


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


def compute_first_visible(
    query_start_loc: Int32[Tensor, " offsets"],
    seq_lens: Int32[Tensor, " B"],
    num_tokens: int,
    sliding_window: int,
    ownership: TokenOwnership | None = None,
) -> Int32[Tensor, " num_tokens"]:
    """Return the first key that each query token attends through a window (`PagedAttentionMetadata.first_visible`).

    The query token at position p of its request attends the W keys p - W + 1 to p, itself included, or all keys up to p
    if there are fewer. Its first key is therefore max(0, p - W + 1). A token of a padding row and a token behind the
    last request get 0.

    Under context parallelism a rank has a part of the keys. The result is then the number of keys before the window
    that this rank owns, because its keys from this index on are in the window.

    Args:
        query_start_loc: [B + 1], prefix sum of the query lengths.
        seq_lens: [B], tokens of each request after this step, S; 0 marks a padding row. Under context parallelism S is
            the length of the whole sequence.
        num_tokens: length of the result, at least `query_start_loc[-1]`.
        sliding_window: W, number of keys in the window.
        ownership: the tokens that this context-parallel rank owns; None if one rank owns all tokens.

    Returns:
        [num_tokens] int32; no element is above the element of `compute_visible_lens`.

    Raises:
        ValueError: for the same reasons as `compute_visible_lens`; `sliding_window` is below 1.
    """
    check_int("sliding_window", sliding_window)
    visible = compute_visible_lens(query_start_loc, seq_lens, num_tokens)
    check_ownership(ownership)
    first = [max(0, end - sliding_window) for end in visible.tolist()]
    if ownership is not None:
        first = [ownership.count(keys) for keys in first]
    return torch.tensor(first, dtype=torch.int32, device=seq_lens.device)


def scheduled_lens(
    query_start_loc: Int32[Tensor, " offsets"],
    seq_lens: Int32[Tensor, " B"],
    sliding_window: int | None = None,
    ownership: TokenOwnership | None = None,
) -> Int32[Tensor, " B"]:
    """Return the number of keys of each request that count for the schedule of a decode.

    A schedule assigns tiles of `DECODE_TILE` keys to programs. Without a window, the tiles of a request begin at key 0,
    and all keys count. With a window of W keys, the first query token of a request with Sq query tokens and S keys
    attends no key before max(0, S - Sq - W + 1). The kernel does not read the tiles before this key. The tiles of the
    request then begin at the tile with this key, and the keys from the begin of this tile on count.

    An attention sink is one more score and no key, so it changes no tile and no schedule.

    Args:
        query_start_loc: [B + 1], prefix sum of the query lengths Sq.
        seq_lens: [B], keys of each request, S. Under context parallelism S is the length of the whole sequence.
        sliding_window: W; None means no window.
        ownership: the tokens that this context-parallel rank owns; the result then counts keys of this rank. None if
            one rank owns all tokens.

    Returns:
        [B] int32, on the device of `seq_lens`.

    Raises:
        ValueError: shapes, dtypes or devices do not match; `sliding_window` is below 1.
    """
    check_tensor("seq_lens", seq_lens, ("B",), (torch.int32,))
    check_tensor("query_start_loc", query_start_loc, (seq_lens.shape[0] + 1,), (torch.int32,), seq_lens.device)
    check_ownership(ownership)
    if sliding_window is not None:
        check_int("sliding_window", sliding_window)
    counted = []
    for (start, end), length in zip(itertools.pairwise(query_start_loc.tolist()), seq_lens.tolist(), strict=True):
        first = 0 if sliding_window is None else max(0, length - (end - start) - sliding_window + 1)
        if ownership is not None:
            first, length = ownership.count(first), ownership.count(length)
        counted.append(length - first // DECODE_TILE * DECODE_TILE)
    return torch.tensor(counted, dtype=torch.int32, device=seq_lens.device)
