"""Prefill on the expanded path: latents are expanded into keys and values, and ordinary attention follows.

The cached context is expanded chunk by chunk, so the workspace limits the memory. The attention kernels read the rope
part of the keys from one tensor that all heads share, so this part is never copied for each head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from reference.interfaces import (
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

from .. import backends
from ..attention.merge import merge_attn_states
from ..attention.varlen import flash_attn_varlen_shared_rope
from ..backends import BackendChoice
from ..cache.latent import gather_and_maybe_dequant_cache
from .weights import expand_kv

PREFILL_OPS = ("flash_attn_varlen", "gather_and_maybe_dequant_cache", "merge_attn_states")


def run_prefill_new_tokens(
    q: Float[Tensor, "T N D"],
    k_nope: Float[Tensor, "T N P"],
    k_pe: Float[Tensor, "T R"],
    v: Float[Tensor, "T N V"],
    metadata: PrefillMetadata,
    softmax_scale: float,
    *,
    backend: BackendChoice = None,
) -> AttentionState:
    """Compute causal attention of the new tokens of each request over the new tokens of the same request.

    Returns:
        out [T, N, V] and lse [N, T], both in float32 (float64 if `q` is float64). The state is not rounded to the dtype
        of `q`, because context may be merged into it.
    """
    check_expanded(q, k_nope, k_pe, v, metadata)
    offsets, longest = metadata.query_start_loc, metadata.max_query_len
    return flash_attn_varlen_shared_rope(
        q, k_nope, k_pe, v, offsets, offsets, longest, longest, softmax_scale, causal=True,
        out_dtype=wide_dtype(q.dtype), backend=backend,
    )  # fmt: skip


def run_prefill_context_chunk(
    q: Float[Tensor, "T N D"],
    k_nope: Float[Tensor, "S N P"],
    k_pe: Float[Tensor, "S R"],
    v: Float[Tensor, "S N V"],
    metadata: PrefillMetadata,
    chunk: ContextChunk,
    softmax_scale: float,
    *,
    backend: BackendChoice = None,
) -> AttentionState:
    """Compute unmasked attention of the new tokens over one chunk of the cached context.

    Returns:
        out [T, N, V] and lse [N, T], both in float32 (float64 if `q` is float64).
    """
    check_expanded(q, k_nope, k_pe, v, metadata, chunk)
    return flash_attn_varlen_shared_rope(
        q, k_nope, k_pe, v, metadata.query_start_loc, chunk.cu_seq_lens, metadata.max_query_len, chunk.max_seq_len,
        softmax_scale, causal=False, out_dtype=wide_dtype(q.dtype), backend=backend,
    )  # fmt: skip


def gather_context(
    kv_cache: Shaped[Tensor, "num_blocks block_size columns"],
    metadata: PrefillMetadata,
    chunk: ContextChunk,
    cache_format: CacheFormat = COMPUTE_FORMAT,
    out_dtype: torch.dtype | None = None,
    *,
    backend: BackendChoice = None,
) -> Float[Tensor, "S head_size"]:
    """Return the cache entries of one chunk, in the order of the requests.

    Returns:
        [S, Lkv + R] in `out_dtype`, or in the dtype of the cache if `out_dtype` is None.

    Raises:
        ValueError: the plan was made for another block size; shapes, dtypes or devices do not match.
    """
    check_context(kv_cache, metadata, chunk, cache_format, out_dtype)
    return gather_and_maybe_dequant_cache(
        kv_cache, metadata.block_table, chunk.cu_seq_lens, chunk.starts, chunk.num_tokens, cache_format, out_dtype,
        backend=backend,
    )  # fmt: skip


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
    *,
    backend: BackendChoice = None,
) -> AttentionState:
    """Compute attention of new tokens over the cached context and the new tokens, on the expanded path.

    Args:
        q: [T, N, P + R], rope part rotated.
        kv_c_normed: [T, Lkv], normed latents of the new tokens.
        k_pe: [T, R], rotated keys of the new tokens.
        kv_cache: cache, from which only the context is read.
        metadata: prefill part of the plan: the requests and the chunks of context.
        w_uk: [Lkv, N, P].
        w_uv: [Lkv, N, V].
        softmax_scale: (P + R)^-1/2, times YaRN's factor.
        gather: function `(kv_cache, metadata, chunk, cache_format=, out_dtype=) -> [S, Lkv + R]` that returns the
            entries of a chunk in `out_dtype`, the dtype of `q`; context parallelism passes `dcp_gather_context`.
        cache_format: format of the cache.
        backend: name of a backend, mapping from op to backend name, or None to choose by capability (`fast.backends`).

    Returns:
        out [T, N, V] in the dtype of `q`, lse [N, T].

    Raises:
        ValueError: shapes, dtypes or devices do not match.
        UnsupportedConfiguration: no backend that `backend` allows can serve the call.
    """
    check_prefill(q, kv_c_normed, k_pe, kv_cache, metadata, w_uk, w_uv, cache_format)
    check_function("gather", gather)
    backend = backends.bind(backend, PREFILL_OPS)
    latent = kv_c_normed.shape[1]
    if gather is gather_context:
        gather = functools.partial(gather_context, backend=backend)
    k_nope, v = expand_kv(kv_c_normed, w_uk, w_uv)
    state = run_prefill_new_tokens(q, k_nope, k_pe, v, metadata, softmax_scale, backend=backend)
    del k_nope, v
    for chunk in metadata.context_chunks:
        context = gather(kv_cache, metadata, chunk, cache_format=cache_format, out_dtype=q.dtype)
        k_nope, v = expand_kv(context[:, :latent], w_uk, w_uv)
        chunk_state = run_prefill_context_chunk(
            q, k_nope, context[:, latent:], v, metadata, chunk, softmax_scale, backend=backend
        )
        del k_nope, v, context  # frees the memory of this chunk before the next chunk is expanded
        state = merge_attn_states(chunk_state, state, backend=backend)
    return AttentionState(state.out.to(q.dtype), state.lse)
