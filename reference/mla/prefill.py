"""Prefill on the expanded path: expand latents to keys and values of every head, then compute ordinary attention.

The cached context is expanded chunk by chunk, so that the memory depends on the workspace and not on the context.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from einops import repeat
from jaxtyping import Float, Shaped
from torch import Tensor

from ..attention.merge import merge_attn_states
from ..attention.varlen import flash_attn_varlen
from ..cache.latent import gather_and_maybe_dequant_cache
from ..interfaces import (
    COMPUTE_FORMAT,
    AttentionState,
    CacheFormat,
    ContextChunk,
    PrefillMetadata,
    check_context,
    check_expanded,
    check_function,
    check_prefill,
    wide_dtype,
)
from .weights import expand_kv


def _concat_key(k_nope: Float[Tensor, "S N P"], k_pe: Float[Tensor, "S R"]) -> Float[Tensor, "S N P+R"]:
    """Return the whole key of every head: its own part without rope, then the rope part that all heads share."""
    return torch.cat((k_nope, repeat(k_pe, "tokens rope -> tokens heads rope", heads=k_nope.shape[1])), dim=-1)


def run_prefill_new_tokens(
    q: Float[Tensor, "T N D"],
    k_nope: Float[Tensor, "T N P"],
    k_pe: Float[Tensor, "T R"],
    v: Float[Tensor, "T N V"],
    metadata: PrefillMetadata,
    softmax_scale: float,
) -> AttentionState:
    """Compute the causal attention of each request's new tokens over the new tokens of the same request.

    Args:
        q: [T, N, P + R], queries with the rope part rotated.
        k_nope: [T, N, P], key parts without rope (`expand_kv`).
        k_pe: [T, R], rotated rope parts of the keys.
        v: [T, N, V], values.
        metadata: plan of the prefill.
        softmax_scale: factor of the scores, `MLAConfig.softmax_scale`.

    Returns:
        out [T, N, V] and lse [N, T], both in float32 (float64 if `q` is float64). The output stays in this dtype
        because the state is merged with the states of the context chunks.

    Raises:
        ValueError: shapes, dtypes or devices do not match.
    """
    check_expanded(q, k_nope, k_pe, v, metadata)
    offsets, longest = metadata.query_start_loc, metadata.max_query_len
    k = _concat_key(k_nope, k_pe)
    wide = wide_dtype(q.dtype)
    return flash_attn_varlen(q, k, v, offsets, offsets, longest, longest, softmax_scale, causal=True, out_dtype=wide)


def run_prefill_context_chunk(
    q: Float[Tensor, "T N D"],
    k_nope: Float[Tensor, "S N P"],
    k_pe: Float[Tensor, "S R"],
    v: Float[Tensor, "S N V"],
    metadata: PrefillMetadata,
    chunk: ContextChunk,
    softmax_scale: float,
) -> AttentionState:
    """Compute the attention of the new tokens over one chunk of the context.

    There is no mask, because every new token attends the whole context of its request.

    Args:
        q: [T, N, P + R], queries with the rope part rotated.
        k_nope: [S, N, P], key parts of the chunk without rope (`expand_kv`).
        k_pe: [S, R], rope parts of the chunk's keys, from the cache.
        v: [S, N, V], values of the chunk.
        metadata: plan of the prefill.
        chunk: the chunk.
        softmax_scale: factor of the scores, `MLAConfig.softmax_scale`.

    Returns:
        out [T, N, V] and lse [N, T], both in float32 (float64 if `q` is float64), to be merged with the state over the
        other keys.

    Raises:
        ValueError: shapes, dtypes or devices do not match.
    """
    check_expanded(q, k_nope, k_pe, v, metadata, chunk)
    return flash_attn_varlen(
        q, _concat_key(k_nope, k_pe), v, metadata.query_start_loc, chunk.cu_seq_lens, metadata.max_query_len,
        chunk.max_seq_len, softmax_scale, causal=False, out_dtype=wide_dtype(q.dtype),
    )  # fmt: skip


def gather_context(
    kv_cache: Shaped[Tensor, "num_blocks block_size columns"],
    metadata: PrefillMetadata,
    chunk: ContextChunk,
    cache_format: CacheFormat = COMPUTE_FORMAT,
    out_dtype: torch.dtype | None = None,
) -> Float[Tensor, "S head_size"]:
    """Return the cache entries of one chunk, one request after another.

    Args:
        kv_cache: the cache of the layer.
        metadata: plan of the prefill.
        chunk: one chunk of the prefill's context.
        cache_format: format of the cache.
        out_dtype: dtype of the result; None means the dtype of the cache (see `gather_and_maybe_dequant_cache`).

    Returns:
        [S, Lkv + R] in `out_dtype`.

    Raises:
        ValueError: the plan was made for another block size; shapes, dtypes or devices do not match.
    """
    check_context(kv_cache, metadata, chunk, cache_format, out_dtype)
    return gather_and_maybe_dequant_cache(
        kv_cache, metadata.block_table, chunk.cu_seq_lens, chunk.starts, chunk.num_tokens, cache_format, out_dtype
    )


def forward_prefill(
    q: Float[Tensor, "T N D"],
    kv_c_normed: Float[Tensor, "T Lkv"],
    k_pe: Float[Tensor, "T R"],
    kv_cache: Shaped[Tensor, "num_blocks block_size columns"],
    metadata: PrefillMetadata,
    w_uk: Float[Tensor, "Lkv N P"],
    w_uv: Float[Tensor, "Lkv N V"],
    softmax_scale: float,
    gather: Callable[..., Tensor] = gather_context,
    cache_format: CacheFormat = COMPUTE_FORMAT,
) -> AttentionState:
    """Compute the attention of new tokens over their cached context and over each other, on the expanded path.

    The steps are:

    1. Expand the latents of the new tokens, and attend the resulting keys with the causal mask.
    2. For each chunk of the context, gather the cache entries and expand the latents. Attend the resulting keys without
       a mask, and merge the chunk's state with the state over the keys so far.

    Args:
        q: [T, N, P + R], queries with the rope part rotated.
        kv_c_normed: [T, Lkv], normed latents of the new tokens.
        k_pe: [T, R], rotated rope parts of the new tokens' keys.
        kv_cache: the cache with the context. The new tokens come from the arguments and not from the cache.
        metadata: plan of the prefill: the requests and the chunks of their context.
        w_uk: [Lkv, N, P], key up-projection.
        w_uv: [Lkv, N, V], value up-projection.
        softmax_scale: factor of the scores, `MLAConfig.softmax_scale`: (P + R)^-1/2, times YaRN's factor.
        gather: function that returns the cache entries of a chunk, with the signature of `gather_context`. Under
            context parallelism this function is `dcp_gather_context` with its argument `context_parallel` already
            given.
        cache_format: format of the cache.

    Returns:
        out [T, N, V] in the dtype of `q`, lse [N, T].

    Raises:
        ValueError: shapes, dtypes or devices do not match.
    """
    check_prefill(q, kv_c_normed, k_pe, kv_cache, metadata, w_uk, w_uv, cache_format)
    check_function("gather", gather)
    latent = kv_c_normed.shape[1]
    k_nope, v = expand_kv(kv_c_normed, w_uk, w_uv)
    state = run_prefill_new_tokens(q, k_nope, k_pe, v, metadata, softmax_scale)
    del k_nope, v
    for chunk in metadata.context_chunks:
        context = gather(kv_cache, metadata, chunk, cache_format=cache_format, out_dtype=q.dtype)
        k_nope, v = expand_kv(context[:, :latent], w_uk, w_uv)
        chunk_state = run_prefill_context_chunk(q, k_nope, context[:, latent:], v, metadata, chunk, softmax_scale)
        del k_nope, v, context  # free this chunk's keys and values before the next chunk is expanded
        state = merge_attn_states(chunk_state, state)
    return AttentionState(state.out.to(q.dtype), state.lse)
