"""Cascade: one call attends the prefix that all requests share, a second call attends the suffix of each request.

docs/glossary.md explains the terms and the letters of shapes.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from reference.interfaces import (
    COMPUTE_FORMAT,
    AttentionState,
    CacheFormat,
    CascadeMetadata,
    DecodeMetadata,
    check_out,
    wide_dtype,
)
from reference.interfaces.gqa import GQAConfig, PagedAttentionMetadata, check_gqa_cascade

from .. import backends
from ..attention.merge import merge_attn_states
from ..backends import BackendChoice
from .attention import gqa_paged_attention
from .backend_choice import Attention, choose_cascade_backends

CASCADE_OPS = ("gqa_paged_attention", "merge_attn_states")


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
    *,
    out: Float[Tensor, "T N Dh"] | None = None,
    backend: BackendChoice = None,
) -> AttentionState:
    """Compute attention as a cascade: attend the shared prefix, attend the suffix of each request, merge both states.

    `reference.gqa.cascade.gqa_cascade_attention` explains how the result differs from the result of
    `gqa_paged_attention`, and why the sinks belong to the suffixes alone.

    Args:
        q: [T, N, Dh], queries, rotated if they have rope.
        kv_cache: cache with any strides, which already contains the new tokens.
        cascade: plans over the prefix and over the suffixes (`split_shared_prefix`).
        config: config of the layer: a decoder without ALiBi, window and attention chunks.
        sinks: [N], attention sinks of a config with `attention_sinks`; None for other configs.
        out_dtype: dtype of `out`; None means the dtype of `q`.
        cache_format: format of the cache.
        k_scale: float32 scale of the keys; None if the format has no such scale.
        v_scale: float32 scale of the values; None if the format has no such scale.
        q_scale: float32 scale with which the queries are rounded to e4m3 first; None for queries in the dtype of `q`.
        out: tensor [T, N, Dh] in `out_dtype`, with any strides, that receives the output; `out` must share no memory
            with the other tensors. None allocates a tensor.
        backend: name of a backend, mapping from op to backend name, or None for an automatic choice (`fast.backends`).

    Returns:
        out [T, N, Dh] in `out_dtype`, lse [N, T].

    Raises:
        ValueError: for the same reasons as `gqa_paged_attention`; the config has ALiBi, a window or attention chunks.
        UnsupportedConfiguration: for the same reasons as `gqa_paged_attention`. Nothing has been written then.
    """
    stored = cache_format, k_scale, v_scale, q_scale
    backend = backends.bind(backend, CASCADE_OPS)
    _check_cascade(q, kv_cache, cascade, config, sinks, out_dtype, *stored, backend)
    out_dtype = q.dtype if out_dtype is None else out_dtype
    if out is not None:
        given = q, kv_cache, sinks, *stored[1:], *_tensors_of(cascade.prefix), *_tensors_of(cascade.suffix)
        inputs = [each for each in given if each is not None]
        check_out("out", out, tuple(q.shape), out_dtype, q.device, *inputs)
    wide = wide_dtype(out_dtype)
    without_sinks = replace(config, attention_sinks=False) if config.attention_sinks else config
    prefix, suffix = (
        gqa_paged_attention(q, kv_cache, _paged(plan), *heads, None, wide, *stored, backend=backend)
        for plan, heads in ((cascade.prefix, (without_sinks, None)), (cascade.suffix, (config, sinks)))
    )
    if out is not None and out.is_contiguous():  # the merge writes contiguous tensors only
        target = AttentionState(out, torch.empty_like(prefix.lse))
        return merge_attn_states(prefix, suffix, out=target, backend=backend)
    state = merge_attn_states(prefix, suffix, backend=backend)
    return AttentionState(state.out.to(out_dtype) if out is None else out.copy_(state.out), state.lse)


@backends.CheckedOnce
def _check_cascade(
    q: Tensor,
    kv_cache: Tensor,
    cascade: CascadeMetadata,
    config: GQAConfig,
    sinks: Tensor | None,
    out_dtype: torch.dtype | None,
    cache_format: CacheFormat,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    q_scale: Tensor | None,
    backend: BackendChoice,
) -> None:
    """Check the arguments of `gqa_cascade_attention`, and that backends can serve its calls; read no values."""
    check_gqa_cascade(q, kv_cache, cascade, config, sinks, out_dtype, cache_format, k_scale, v_scale, q_scale)
    wanted = q.dtype if out_dtype is None else out_dtype
    call = Attention(q.device, q.dtype, config, wanted, cache_format, q_scale is not None, backend)
    choose_cascade_backends(call, cascade)


def _tensors_of(plan: DecodeMetadata) -> list[Tensor]:
    """Return the tensors of one part of a cascade."""
    return [plan.block_table, plan.seq_lens, plan.query_start_loc, plan.visible_lens]


def _paged(plan) -> PagedAttentionMetadata:
    """Return a plan as a `PagedAttentionMetadata`; `split_shared_prefix` may return a `DecodeMetadata`."""
    return plan if isinstance(plan, PagedAttentionMetadata) else PagedAttentionMetadata(**vars(plan))
