"""Cascade: one call attends the prefix that all requests share, a second call attends the suffix of each request."""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from ..attention.merge import merge_attn_states
from ..interfaces import COMPUTE_FORMAT, AttentionState, CacheFormat, CascadeMetadata, DecodeMetadata, wide_dtype
from ..interfaces.gqa import GQAConfig, PagedAttentionMetadata, check_gqa_cascade, check_paged_values
from .attention import gqa_paged_attention


def gqa_cascade_attention(
    q: Float[Tensor, "T N Dh"],
    kv_cache: Shaped[Tensor, "2 num_blocks block_size Nkv Dh"],
    cascade: CascadeMetadata,
    config: GQAConfig,
    sinks: Float[Tensor, " N"] | None = None,
    out_dtype: torch.dtype | None = None,
    cache_format: CacheFormat = COMPUTE_FORMAT,
    k_scale: Float[Tensor, ""] | None = None,
    v_scale: Float[Tensor, ""] | None = None,
    q_scale: Float[Tensor, ""] | None = None,
) -> AttentionState:
    """Compute the result of `gqa_paged_attention`, but attend the shared prefix once for all requests.

    The function attends the prefix and the suffixes separately, and merges the two attention states. The merged state
    differs from the result of `gqa_paged_attention` by rounding alone. The sinks belong to the suffixes alone, because
    exactly one of two merged states may contain them.

    Args:
        q: [T, N, Dh], queries.
        kv_cache: [2, num_blocks, block_size, Nkv, Dh], the cache of the layer; it must already contain the new tokens.
        cascade: plans over the prefix and over the suffixes (`split_shared_prefix`).
        config: config of the layer: a decoder without ALiBi, window and attention chunks.
        sinks: [N], the attention sinks of a config with `attention_sinks`; None for other configs.
        out_dtype: dtype of `out`; None means the dtype of `q`.
        cache_format: format of the cache.
        k_scale: float32 scale of the keys; None if the format has no such scale (`CacheFormat.layer_scale`).
        v_scale: float32 scale of the values; None like `k_scale`.
        q_scale: float32 scale of queries in e4m3 (`gqa_paged_attention`), or None.

    Returns:
        out [T, N, Dh] in `out_dtype`, lse [N, T].

    Raises:
        ValueError: for the same reasons as `gqa_paged_attention`; the config has ALiBi, a window or attention chunks.
        UnsupportedConfiguration: for the same reasons as `gqa_paged_attention`.
    """
    stored = cache_format, k_scale, v_scale, q_scale
    check_gqa_cascade(q, kv_cache, cascade, config, sinks, out_dtype, *stored)
    for name, part in (("prefix", cascade.prefix), ("suffix", cascade.suffix)):
        check_paged_values(part, kv_cache.shape[1], kv_cache.shape[2], f"cascade.{name}")
    wide = wide_dtype(q.dtype if out_dtype is None else out_dtype)

    def attend(plan: DecodeMetadata, config: GQAConfig, sinks: Tensor | None) -> AttentionState:
        paged = PagedAttentionMetadata(**vars(plan))
        return gqa_paged_attention(q, kv_cache, paged, config, sinks, None, wide, *stored)

    prefix = attend(cascade.prefix, replace(config, attention_sinks=False), None)
    state = merge_attn_states(prefix, attend(cascade.suffix, config, sinks))
    return AttentionState(state.out.to(q.dtype if out_dtype is None else out_dtype), state.lse)
