"""Softmax attention over packed sequences, with its log-sum-exp.

Arithmetic, here and everywhere in the reference: products accumulate in float32 (float64 where the input is),
scores and softmax are in that wide type, probabilities are rounded to the input's dtype before they meet the
values, as flash attention does. In float64 this is the gold standard; in a kernel's own dtype it is the error a
careful kernel may be expected to have.
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
    """One request's attention: one masked einsum. FLOPs: 2 Sq S N (D + Dv).

    Args:
        q: [Sq, N, D].
        k: [S, N, D].
        v: [S, N, Dv].
        visible: [Sq, S], True where row i sees key j.
        softmax_scale: multiplies the scores.

    Returns:
        The state, out in the wide type; a row that sees nothing has out = 0, lse = -inf.
    """
    wide = wide_dtype(q.dtype)
    scores = einsum(q.to(wide), k.to(wide), "queries heads dim, keys heads dim -> heads queries keys") * softmax_scale
    scores = scores.masked_fill(~visible, -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    probabilities = torch.exp(scores - lse[..., None])
    probabilities = probabilities.masked_fill(~visible | (lse == -torch.inf)[..., None], 0)  # not -inf - -inf
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
    """Attention of packed requests, each over its own keys.

    The causal mask aligns bottom-right: query i of Sq sees keys up to S - Sq + i.

    Args:
        q: [T, N, D].
        k: [S, N, D].
        v: [S, N, Dv]; Dv may differ from D.
        cu_seqlens_q: [B + 1], prefix sum of the query lengths; 0 is a legal length.
        cu_seqlens_k: [B + 1], prefix sum of the key lengths; 0 is a legal length.
        max_seqlen_q: an upper bound on the query lengths (a launch hint; no value depends on it).
        max_seqlen_k: an upper bound on the key lengths (likewise).
        softmax_scale: multiplies the scores.
        causal: mask the keys after each query.
        out_dtype: dtype of `out`; that of `q` where None.

    Returns:
        out [T, N, Dv] and lse [N, T].

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; offsets that fall or end elsewhere.
    """
    check_attention(q, k, v, cu_seqlens_q, cu_seqlens_k)
    check_attention_settings(max_seqlen_q, max_seqlen_k, softmax_scale, causal)
    check_dtype("out_dtype", q.dtype if out_dtype is None else out_dtype)
    check_offsets("cu_seqlens_q", cu_seqlens_q, q.shape[0])
    check_offsets("cu_seqlens_k", cu_seqlens_k, k.shape[0])
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
