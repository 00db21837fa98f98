"""Attention of packed requests of different lengths, one block of queries and keys at a time.

"Packed" means that the tokens of all requests follow each other in one tensor, without padding. To save memory, the
scores exist only for the current block of queries and keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from reference.interfaces import wide_dtype

from .softmax import OnlineSoftmax

QUERY_BLOCK = 256  # query tokens of a block
KEY_BLOCK = 512  # keys of a block


def flash_attn_varlen(
    q: Tensor,
    k_nope: Tensor,
    k_pe: Tensor | None,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    out_dtype: torch.dtype,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention of packed requests of different lengths.

    Args:
        q: [T, N, P + R].
        k_nope: [S, N, P], part of the keys without rope; [S, N, P + R], the whole keys, if `k_pe` is None.
        k_pe: [S, R], rotated part of the keys, which all heads share; or None.
        v: [S, N, V].
        cu_seqlens_q: [B + 1], first query token of each request.
        cu_seqlens_k: [B + 1], first key of each request.
        max_seqlen_q: not used by this backend.
        max_seqlen_k: not used by this backend.
        softmax_scale: factor of the scores.
        causal: if True, the last query of a request sees all keys, and each earlier query sees one key less than the
            query after it.
        out_dtype: dtype of the output.
        out: [T, N, V] in `out_dtype`, any strides, written in place; None allocates `out` and `lse`.
        lse: [N, T], written in place. If `out` is given and `lse` is None, no LSE is stored.
        batch_invariant: if True, each product gets copies of its operands: the order of the additions in a product can
            depend on the addresses of its operands, and these depend on the other requests.

    Returns:
        out [T, N, V], and lse [N, T] or None.
    """
    wide = wide_dtype(q.dtype)
    tokens, heads, _ = q.shape
    if out is None:
        out = torch.empty(tokens, heads, v.shape[2], dtype=out_dtype, device=q.device)
        lse = torch.empty(heads, tokens, dtype=wide_dtype(out_dtype), device=q.device)
    by_head = q.transpose(0, 1).to(wide)  # [N, T, P + R]
    q_offsets, k_offsets = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for request in range(len(q_offsets) - 1):
        key_start, key_end = k_offsets[request], k_offsets[request + 1]
        for start in range(q_offsets[request], q_offsets[request + 1], QUERY_BLOCK):
            rows = slice(start, min(start + QUERY_BLOCK, q_offsets[request + 1]))
            # index in k_nope of the last key that the block's first query sees; with a causal mask, the next query
            # sees one more key
            last_seen = key_end - 1 - (q_offsets[request + 1] - 1 - start) if causal else key_end - 1
            row_count = rows.stop - rows.start
            softmax = OnlineSoftmax((heads, row_count), v.shape[2], wide, q.device)
            seen_end = min(key_end, last_seen + row_count) if causal else key_end
            for first in range(key_start, seen_end, KEY_BLOCK):
                keys = slice(first, min(first + KEY_BLOCK, seen_end))
                k = k_nope[keys].to(wide).transpose(0, 1)  # [N, keys, P]
                if k_pe is not None:  # one product with the whole key is faster than two products with its parts
                    k = torch.cat((k, k_pe[keys].to(wide).expand(heads, -1, -1)), dim=-1)
                scores = torch.empty(heads, row_count, k.shape[1], dtype=wide, device=q.device)
                queries, values = by_head[:, rows], v[keys].to(wide).transpose(0, 1)
                if batch_invariant:
                    queries, k, values = (x.clone(memory_format=torch.contiguous_format) for x in (queries, k, values))
                scores.baddbmm_(queries, k.transpose(1, 2), beta=0, alpha=softmax_scale)
                if causal and keys.stop - 1 > last_seen:
                    hidden = torch.ones(row_count, keys.stop - first, dtype=torch.bool, device=q.device)
                    scores.masked_fill_(hidden.triu_(last_seen - first + 1), -torch.inf)
                softmax.add(scores, values)
            block_out, block_lse = softmax.finish()
            if lse is not None:
                lse[:, rows] = block_lse
            out[rows] = block_out.transpose(0, 1).to(out_dtype)
    return out, lse
