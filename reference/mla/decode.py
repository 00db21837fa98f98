"""Data-movement-friendly decode: multi-query attention over the latent cache itself.

Every head attends the same Lkv + R wide entry; the value is the entry's first Lkv elements. Bytes read per
request: S (Lkv + R) elements, once, whatever N is.
"""

from __future__ import annotations

import torch
from einops import repeat
from jaxtyping import Float, Shaped
from torch import Tensor

from ..attention.varlen import attend_one_request
from ..cache.latent import gather_and_maybe_dequant_cache
from ..interfaces import (
    COMPUTE_FORMAT,
    AttentionState,
    CacheFormat,
    DecodeMetadata,
    DecodeSchedule,
    check_decode,
    check_decode_values,
    check_dtype,
    check_number,
    wide_dtype,
)


def mla_decode(
    ql_nope: Float[Tensor, "T N Lkv"],
    q_pe: Float[Tensor, "T N R"],
    kv_cache: Shaped[Tensor, "num_blocks block_size columns"],
    metadata: DecodeMetadata,
    softmax_scale: float,
    schedule: DecodeSchedule | None = None,
    out_dtype: torch.dtype | None = None,
    cache_format: CacheFormat = COMPUTE_FORMAT,
) -> AttentionState:
    """Absorbed attention of one or several query tokens a request over its cached latents.

    Args:
        ql_nope: [T, N, Lkv], queries with W_UK absorbed (`query_to_latent`).
        q_pe: [T, N, R], rotated.
        kv_cache: the cache; the new tokens are already in it.
        metadata: the requests; row t sees the first `visible_lens[t]` keys of its request.
        softmax_scale: (P + R)^-1/2, with YaRN's factor; never (Lkv + R)^-1/2.
        schedule: how a kernel cuts the work; it changes no value, so the specification does not look at it.
        out_dtype: dtype of `out`; that of `ql_nope` where None.
        cache_format: format of the cache.

    Returns:
        out [T, N, Lkv] (apply `latent_to_value` next), lse [N, T].

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; a plan for another block size; offsets that fall;
            lengths above `max_seq_len`; rows that see more keys than their request has; a block outside the cache.
    """
    check_decode(ql_nope, q_pe, kv_cache, metadata, cache_format, schedule)
    check_number("softmax_scale", softmax_scale)
    out_dtype = ql_nope.dtype if out_dtype is None else out_dtype
    check_dtype("out_dtype", out_dtype)
    tokens, heads, latent = ql_nope.shape
    check_decode_values(metadata, tokens, kv_cache.shape[1], kv_cache.shape[0])
    out = torch.empty_like(ql_nope, dtype=out_dtype)
    lse = torch.empty(heads, tokens, dtype=wide_dtype(out_dtype), device=ql_nope.device)
    q = torch.cat((ql_nope, q_pe), dim=-1)
    offsets = metadata.query_start_loc.tolist()
    for request, length in enumerate(metadata.seq_lens.tolist()):
        rows = slice(offsets[request], offsets[request + 1])
        entries = gather_and_maybe_dequant_cache(
            kv_cache,
            metadata.block_table[request : request + 1],
            torch.tensor([0, length], dtype=torch.int32, device=q.device),
            torch.zeros(1, dtype=torch.int32, device=q.device),
            length,
            cache_format,
            out_dtype=ql_nope.dtype,
        )
        k = repeat(entries, "keys width -> keys heads width", heads=heads)
        visible = torch.arange(length, device=q.device) < metadata.visible_lens[rows, None]
        state = attend_one_request(q[rows], k, k[..., :latent], visible, softmax_scale)
        out[rows], lse[:, rows] = state.out.to(out.dtype), state.lse
    return AttentionState(out, lse)
