"""Absorbed decode: multi-query attention over the latent cache itself.

Every head attends the same cache entries of Lkv + R elements. The key is the whole entry, and the value is its first
Lkv elements. A kernel therefore reads S (Lkv + R) elements of each request once, for any number of heads.
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
    CONVERTED,
    AttentionState,
    CacheFormat,
    DecodeMetadata,
    DecodeSchedule,
    check_decode,
    check_decode_values,
    check_dtype,
    check_number,
    check_scale_values,
    wide_dtype,
)


def mla_decode(
    ql_nope: Shaped[Tensor, "T N Lkv"],
    q_pe: Shaped[Tensor, "T N R"],
    kv_cache: Shaped[Tensor, "num_blocks block_size columns"],
    metadata: DecodeMetadata,
    softmax_scale: float,
    schedule: DecodeSchedule | None = None,
    out_dtype: torch.dtype | None = None,
    cache_format: CacheFormat = COMPUTE_FORMAT,
    kv_scale: Float[Tensor, ""] | None = None,
    fp8_mode: str = CONVERTED,
    q_scale: Float[Tensor, "*heads"] | None = None,
) -> AttentionState:
    """Attend the cached latents of each request with its query tokens, on the absorbed path.

    The result is an attention state: the output and the log-sum-exp (LSE) of the scores. A caller needs the LSE to
    merge the state with a state over other keys of the same requests. Otherwise a caller may drop the LSE.

    `metadata`, the plan of the decode, determines the keys that each query token attends. `schedule` is optional: it
    assigns the keys to the programs of a kernel. A schedule makes the decode faster if the requests have very different
    lengths.

    A cache in e4m3 (8 bits) can be attended in three modes. In every mode, this function multiplies the stored numbers
    by their scales before it computes attention. A kernel may compute products of the stored numbers, in these dtypes:

    | `fp8_mode` | queries | product of queries and keys | product of probabilities and values |
    |---|---|---|---|
    | `converted` | the dtype of a model, 16 bits or more | in 16 bits | in 16 bits |
    | `fp8_query` | e4m3 with `q_scale` | in e4m3 | in 16 bits |
    | `fp8_product` | e4m3 with `q_scale` | in e4m3 | in e4m3: probabilities are rounded too |

    The cache format `fp8_ds_mla` stores the rope parts in 16 bits, so every mode multiplies them in 16 bits.

    Args:
        ql_nope: [T, N, Lkv], queries with W_UK absorbed (`query_to_latent`).
        q_pe: [T, N, R], rotated rope parts of the queries, in the dtype of `ql_nope`.
        kv_cache: the cache of the layer; it must already contain the new tokens (`concat_and_cache_mla`).
        metadata: plan of the decode; query token t attends the first `visible_lens[t]` keys of its request.
        softmax_scale: factor of the scores, `MLAConfig.softmax_scale`: (P + R)^-1/2, times YaRN's factor. It is not
            (Lkv + R)^-1/2, although the absorbed queries have Lkv + R elements.
        schedule: schedule of the decode (`plan_decode`). This function validates the schedule and does not use it. A
            kernel uses it; the results then change by rounding alone.
        out_dtype: dtype of `out`; None means the dtype of `ql_nope`, and is refused for queries in e4m3. Use float32 if
            the state will be merged.
        cache_format: format of the cache.
        kv_scale: float32 scale of the layer's cache; None if the format has no such scale (`CacheFormat.layer_scale`).
        fp8_mode: one of `converted`, `fp8_query` and `fp8_product`.
        q_scale: float32 scale of queries in e4m3, [] or [N] for one scale for each head; None for `converted`.

    Returns:
        out [T, N, Lkv] and lse [N, T]. `latent_to_value` turns `out` into values. A padding token (a query token behind
        the last request) has out = 0 and lse = -inf.

    Raises:
        ValueError: in one of the following cases:

            - shapes, dtypes or devices do not match, or the plan was made for another block size;
            - `metadata.query_start_loc` decreases, or a number of `metadata.seq_lens` is above `metadata.max_seq_len`;
            - `visible_lens` of a query token is above the number of keys of its request;
            - a block is outside the cache;
            - the queries do not have the dtype that `fp8_mode` needs;
            - `fp8_mode` is not `converted`, and the cache is not in e4m3;
            - a scale is not finite and positive.
    """
    check_decode(ql_nope, q_pe, kv_cache, metadata, cache_format, schedule, kv_scale, fp8_mode, q_scale, out_dtype)
    check_scale_values("q_scale", q_scale)
    check_number("softmax_scale", softmax_scale)
    out_dtype = ql_nope.dtype if out_dtype is None else out_dtype
    check_dtype("out_dtype", out_dtype)
    tokens, heads, latent = ql_nope.shape
    check_decode_values(metadata, tokens, kv_cache.shape[1], kv_cache.shape[0])
    out = torch.zeros_like(ql_nope, dtype=out_dtype)  # padding tokens keep out = 0 and lse = -inf
    lse = torch.full((heads, tokens), -torch.inf, dtype=wide_dtype(out_dtype), device=ql_nope.device)
    if q_scale is None:
        q = torch.cat((ql_nope, q_pe), dim=-1)
    else:
        q = torch.cat((ql_nope.to(lse.dtype), q_pe.to(lse.dtype)), dim=-1) * q_scale.to(lse.dtype).view(-1, 1)
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
            q.dtype,
            kv_scale,
        )
        k = repeat(entries, "keys width -> keys heads width", heads=heads)
        visible = torch.arange(length, device=q.device) < metadata.visible_lens[rows, None]
        state = attend_one_request(q[rows], k, k[..., :latent], visible, softmax_scale)
        out[rows], lse[:, rows] = state.out.to(out.dtype), state.lse
    return AttentionState(out, lse)
