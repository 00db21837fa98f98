"""Softmax attention over packed sequences, with its log-sum-exp (LSE).

All attention in this package rounds like FlashAttention:

- Scores, softmax and sums are computed in float32 (float64 if the input is float64).
- Probabilities are rounded to the dtype of the input before they are multiplied by the values.

Tests compare a kernel with the result of this module in float64 (*gold*). The result in the dtype of the kernel (*low*)
shows how large an error from rounding may be.
"""

from __future__ import annotations

import torch
from einops import einsum
from jaxtyping import Bool, Float, Int32
from torch import Tensor

from ..interfaces import (
    AttentionState,
    check_attention,
    check_attention_settings,
    check_dtype,
    check_longest,
    check_offsets,
    wide_dtype,
)


def attend_one_request(
    q: Float[Tensor, "Sq N D"],
    k: Float[Tensor, "S N D"],
    v: Float[Tensor, "S N Dv"],
    visible: Bool[Tensor, "Sq S"],
    softmax_scale: float,
) -> AttentionState:
    """Compute the attention of one request with two einsums and a mask. FLOPs: 2 Sq S N (D + Dv).

    The request has Sq queries and S keys of N heads; D is the width of a key, and Dv is the width of a value.

    Args:
        q: [Sq, N, D], queries.
        k: [S, N, D], keys.
        v: [S, N, Dv], values.
        visible: [Sq, S]; element [i, j] is True if query i attends key j.
        softmax_scale: factor of the scores.

    Returns:
        The attention state, in float32 (float64 if `q` is float64). A query that attends no key has output 0 and LSE
        -inf.
    """
    wide = wide_dtype(q.dtype)
    scores = einsum(q.to(wide), k.to(wide), "queries heads dim, keys heads dim -> heads queries keys") * softmax_scale
    scores = scores.masked_fill(~visible, -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    probabilities = torch.exp(scores - lse[..., None])
    # in a row without visible keys, exp(-inf - (-inf)) is NaN: set the probabilities to 0
    probabilities = probabilities.masked_fill(~visible | (lse == -torch.inf)[..., None], 0)
    probabilities = probabilities.to(q.dtype).to(wide)
    out = einsum(probabilities, v.to(wide), "heads queries keys, keys heads value -> queries heads value")
    return AttentionState(out, lse)


def flash_attn_varlen(
    q: Float[Tensor, "T N D"],
    k: Float[Tensor, "S N D"],
    v: Float[Tensor, "S N Dv"],
    cu_seqlens_q: Int32[Tensor, " offsets"],
    cu_seqlens_k: Int32[Tensor, " offsets"],
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    out_dtype: torch.dtype | None = None,
) -> AttentionState:
    """Compute the attention of packed requests; the queries of each request attend the keys of the same request.

    With `causal`, query i of a request with Sq queries and S keys attends the keys 0 to S - Sq + i.

    Args:
        q: [T, N, D], queries of all requests, one request after another; D is the width of a query and of a key.
        k: [S, N, D], keys of all requests; here S is the number of keys of all requests together.
        v: [S, N, Dv], values of all requests; Dv may differ from D.
        cu_seqlens_q: [B + 1], prefix sum of the query lengths; 0 is a legal length.
        cu_seqlens_k: [B + 1], prefix sum of the key lengths; 0 is a legal length.
        max_seqlen_q: upper bound of the query lengths, at least the length of the longest query. A kernel needs this
            bound to size its grid. The result is the same for every valid bound.
        max_seqlen_k: upper bound of the key lengths. The result is the same for every valid bound.
        softmax_scale: factor of the scores.
        causal: whether a query attends only the keys up to its own position.
        out_dtype: dtype of `out`; None means the dtype of `q`.

    Returns:
        out [T, N, Dv] and lse [N, T].

    Raises:
        ValueError: shapes, dtypes or devices do not match; offsets decrease, or do not end at the number of tokens; a
            request is longer than `max_seqlen_q` or `max_seqlen_k`.
    """
    check_attention(q, k, v, cu_seqlens_q, cu_seqlens_k)
    check_attention_settings(max_seqlen_q, max_seqlen_k, softmax_scale, causal)
    check_dtype("out_dtype", q.dtype if out_dtype is None else out_dtype)
    check_offsets("cu_seqlens_q", cu_seqlens_q, q.shape[0])
    check_offsets("cu_seqlens_k", cu_seqlens_k, k.shape[0])
    check_longest("max_seqlen_q", max_seqlen_q, cu_seqlens_q)
    check_longest("max_seqlen_k", max_seqlen_k, cu_seqlens_k)
    out = torch.empty(q.shape[0], q.shape[1], v.shape[2], dtype=out_dtype or q.dtype, device=q.device)
    lse = torch.empty(q.shape[1], q.shape[0], dtype=wide_dtype(out.dtype), device=q.device)
    q_offsets, k_offsets = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for request in range(len(q_offsets) - 1):
        rows = slice(q_offsets[request], q_offsets[request + 1])
        keys = slice(k_offsets[request], k_offsets[request + 1])
        query_len, key_len = rows.stop - rows.start, keys.stop - keys.start
        visible = torch.ones(query_len, key_len, dtype=torch.bool, device=q.device)
        if causal:
            visible = visible.tril(diagonal=key_len - query_len)
        state = attend_one_request(q[rows], k[keys], v[keys], visible, softmax_scale)
        out[rows], lse[:, rows] = state.out.to(out.dtype), state.lse
    return AttentionState(out, lse)
