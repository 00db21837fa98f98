"""Compute masks as numbers of each query token: the end of its keys (causal mask), and their begin.

A window or chunked local attention determines the begin.
"""

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
    sliding_window: int | None,
    ownership: TokenOwnership | None = None,
    attention_chunk_size: int | None = None,
) -> Int32[Tensor, " num_tokens"]:
    """Return the first key that each query token attends (`PagedAttentionMetadata.first_visible`).

    Let p be the position of a query token in its request. Two settings of a layer determine the first key of the token:

    - With a window of W keys, the token attends the keys p - W + 1 to p, itself included, or all keys up to p if there
      are fewer. Its first key is max(0, p - W + 1).
    - With attention chunks of C positions, the token attends the keys of its attention chunk up to p. Its first key is
      (p // C) * C.

    With both settings, the first key is the larger one of the two numbers; with neither of them it is 0. A token of a
    padding row and a token behind the last request get 0.

    Under context parallelism a rank has a part of the keys. The result is then the number of keys before the first key
    that this rank owns, because the token attends the keys of the rank from this index on.

    Args:
        query_start_loc: [B + 1], prefix sum of the query lengths.
        seq_lens: [B], tokens of each request after this step, S; 0 marks a padding row. Under context parallelism S is
            the length of the whole sequence.
        num_tokens: length of the result, at least `query_start_loc[-1]`.
        sliding_window: W, number of keys in the window; None means no window.
        ownership: the tokens that this context-parallel rank owns; None if one rank owns all tokens.
        attention_chunk_size: C, number of positions in an attention chunk; None means no attention chunks.

    Returns:
        [num_tokens] int32; no element is above the element of `compute_visible_lens`.

    Raises:
        ValueError: for the same reasons as `compute_visible_lens`; `sliding_window` or `attention_chunk_size` is below
            1.
    """
    _check_sizes(sliding_window, attention_chunk_size)
    visible = compute_visible_lens(query_start_loc, seq_lens, num_tokens)
    check_ownership(ownership)
    first = [_first_key(end - 1, sliding_window, attention_chunk_size) for end in visible.tolist()]
    if ownership is not None:
        first = [ownership.count(keys) for keys in first]
    return torch.tensor(first, dtype=torch.int32, device=seq_lens.device)


def _check_sizes(sliding_window: int | None, attention_chunk_size: int | None) -> None:
    """Check that the number of keys in a window and the positions in an attention chunk are positive ints or None."""
    for name, size in (("sliding_window", sliding_window), ("attention_chunk_size", attention_chunk_size)):
        if size is not None:
            check_int(name, size)


def _first_key(position: int, sliding_window: int | None, attention_chunk_size: int | None) -> int:
    """Return the first key that the query token at `position` attends; 0 for a padding token, at position -1."""
    first = 0
    if sliding_window is not None:
        first = max(first, position - sliding_window + 1)
    if attention_chunk_size is not None:
        first = max(first, position // attention_chunk_size * attention_chunk_size)
    return first


def scheduled_lens(
    query_start_loc: Int32[Tensor, " offsets"],
    seq_lens: Int32[Tensor, " B"],
    sliding_window: int | None = None,
    ownership: TokenOwnership | None = None,
    attention_chunk_size: int | None = None,
) -> Int32[Tensor, " B"]:
    """Return the number of keys of each request that count for the schedule of a decode.

    A schedule assigns tiles of `DECODE_TILE` keys to programs. Without a window and attention chunks, the tiles of a
    request begin at key 0, and all keys count. Otherwise the first query token of a request does not attend the keys
    before its first key (`compute_first_visible`), and the later query tokens do not attend them either. The kernel
    does not read the tiles before this key. The tiles of the request then begin at the tile with this key, and the keys
    from the begin of this tile on count.

    An attention sink is one more score and no key, so it changes no tile and no schedule.

    Args:
        query_start_loc: [B + 1], prefix sum of the query lengths Sq.
        seq_lens: [B], keys of each request, S. Under context parallelism S is the length of the whole sequence.
        sliding_window: W; None means no window.
        ownership: the tokens that this context-parallel rank owns; the result then counts keys of this rank. None if
            one rank owns all tokens.
        attention_chunk_size: number of positions in an attention chunk; None means no attention chunks. The requests of
            a plan with virtual requests have one attention chunk each, so their schedule needs None.

    Returns:
        [B] int32, on the device of `seq_lens`.

    Raises:
        ValueError: shapes, dtypes or devices do not match; `sliding_window` or `attention_chunk_size` is below 1.
    """
    check_tensor("seq_lens", seq_lens, ("B",), (torch.int32,))
    check_tensor("query_start_loc", query_start_loc, (seq_lens.shape[0] + 1,), (torch.int32,), seq_lens.device)
    check_ownership(ownership)
    _check_sizes(sliding_window, attention_chunk_size)
    counted = []
    for (start, end), length in zip(itertools.pairwise(query_start_loc.tolist()), seq_lens.tolist(), strict=True):
        context = max(0, length - (end - start))  # position of the first query token
        first = _first_key(context, sliding_window, attention_chunk_size)
        if ownership is not None:
            first, length = ownership.count(first), ownership.count(length)
        counted.append(length - first // DECODE_TILE * DECODE_TILE)
    return torch.tensor(counted, dtype=torch.int32, device=seq_lens.device)
