"""Decode over a shared prefix once for all requests, and over the suffix of each."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int32, Shaped
from torch import Tensor

from ..attention.merge import merge_attn_states
from ..interfaces import (
    COMPUTE_FORMAT,
    FLOPS_PER_BYTE,
    AttentionState,
    CacheFormat,
    CascadeMetadata,
    MLAConfig,
    check_config,
    check_decode,
    check_dtype,
    check_format,
    check_int,
    check_tensor,
    check_type,
    element_bytes,
    wide_dtype,
)
from .decode import mla_decode


def use_cascade_attention(
    common_prefix_len: int,
    query_lens: Int32[Tensor, " B"],
    seq_lens: Int32[Tensor, " B"],
    config: MLAConfig,
    cache_format: CacheFormat = COMPUTE_FORMAT,
    dtype: torch.dtype = torch.bfloat16,
) -> bool:
    """Whether a decode is faster with the shared prefix apart, by counted FLOPs and bytes.

    The FLOPs are the same either way. Apart, the prefix is read once and not once a request, but the states of both
    parts are written and read again to be merged. So it pays where reading is what a decode waits for, and the prefix
    is long beside the states.

    Args:
        common_prefix_len: what the function of that name says.
        query_lens: [B], on the CPU.
        seq_lens: [B], on the CPU; 0 for padding rows.
        config: the layer.
        cache_format: format of the cache.
        dtype: dtype of the queries.

    Raises:
        ValueError: tensors that do not fit; a negative prefix; a dtype or dims that the format does not exist for.
    """
    check_tensor("query_lens", query_lens, ("B",), (torch.int32,), torch.device("cpu"))
    check_tensor("seq_lens", seq_lens, (query_lens.shape[0],), (torch.int32,), torch.device("cpu"))
    check_int("common_prefix_len", common_prefix_len, 0)
    check_config(config)
    check_format(cache_format)
    check_dtype("dtype", dtype)
    c, real, tokens, pairs, keys = config, 0, 0, 0, 0
    for query_len, length in zip(query_lens.tolist(), seq_lens.tolist(), strict=True):
        if length > 0:
            real, tokens = real + 1, tokens + query_len
            pairs, keys = pairs + query_len * length, keys + length
    if real == 0 or common_prefix_len == 0:
        return False
    flops = 2 * c.num_heads * pairs * (2 * c.kv_lora_rank + c.qk_rope_head_dim)
    entry_bytes = cache_format.entry_bytes(c.kv_lora_rank, c.qk_rope_head_dim, dtype)
    whole_bytes = keys * entry_bytes
    apart_bytes = whole_bytes - (real - 1) * common_prefix_len * entry_bytes
    state_elements = 4 * tokens * c.num_heads * (c.kv_lora_rank + 1)  # two states, each written and read
    state_bytes = state_elements * element_bytes(wide_dtype(dtype))
    whole = max(flops, FLOPS_PER_BYTE * whole_bytes)
    apart = max(flops, FLOPS_PER_BYTE * apart_bytes) + FLOPS_PER_BYTE * state_bytes
    return apart < whole


def cascade_attention(
    ql_nope: Float[Tensor, "T N Lkv"],
    q_pe: Float[Tensor, "T N R"],
    kv_cache: Shaped[Tensor, "num_blocks block_size columns"],
    metadata: CascadeMetadata,
    softmax_scale: float,
    cache_format: CacheFormat = COMPUTE_FORMAT,
) -> AttentionState:
    """`mla_decode` with the shared prefix attended once: equal to it, for attention over parts of the keys merges.

    Args:
        ql_nope: [T, N, Lkv].
        q_pe: [T, N, R], rotated.
        kv_cache: the cache; the new tokens are already in it.
        metadata: of `split_shared_prefix`.
        softmax_scale: (P + R)^-1/2, with YaRN's factor.
        cache_format: format of the cache.

    Returns:
        out [T, N, Lkv] in the dtype of `ql_nope`, lse [N, T].

    Raises:
        ValueError: as `mla_decode`.
    """
    check_type("metadata", metadata, CascadeMetadata)
    check_decode(ql_nope, q_pe, kv_cache, metadata.prefix, cache_format)
    wide = wide_dtype(ql_nope.dtype)
    prefix = mla_decode(
        ql_nope, q_pe, kv_cache, metadata.prefix, softmax_scale, out_dtype=wide, cache_format=cache_format
    )
    suffix = mla_decode(
        ql_nope, q_pe, kv_cache, metadata.suffix, softmax_scale, out_dtype=wide, cache_format=cache_format
    )
    state = merge_attn_states(prefix, suffix)
    return AttentionState(state.out.to(ql_nope.dtype), state.lse)
