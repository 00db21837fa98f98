"""Cascade: one call attends the prefix that all requests share, a second call attends the suffix of each request."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int32, Shaped
from torch import Tensor

from ..attention.merge import merge_attn_states
from ..interfaces import (
    COMPUTE_FORMAT,
    CONVERTED,
    AttentionState,
    CacheFormat,
    CascadeCosts,
    CascadeMetadata,
    MLAConfig,
    check_cascade_costs,
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
    costs: CascadeCosts | None = None,
) -> bool:
    """Return whether a decode is estimated to be faster with a cascade, from counted FLOPs and bytes.

    The FLOPs are the same with and without a cascade. With a cascade a kernel reads the prefix once, and without a
    cascade once for each request. But a cascade also writes two attention states (each an output and its log-sum-exp):
    one over the prefix and one over the suffix. It reads both states again to merge them. A cascade is faster if two
    conditions hold: memory traffic limits the decode, and the cascade saves more bytes of the prefix than the states
    add.

    The estimate is the same for every fp8 mode of a decode (`mla_decode`): the modes read the same bytes of the cache,
    and no cost of a product in e4m3 has been measured.

    Args:
        common_prefix_len: number of context tokens that all requests share, as the function `common_prefix_len`
            returns it.
        query_lens: [B], new tokens of each request, on the CPU.
        seq_lens: [B], tokens of each request after this step, on the CPU; 0 for padding rows.
        config: config of the layer.
        cache_format: format of the cache.
        dtype: dtype of the queries.
        costs: costs of FLOPs and bytes; None means the defaults of `CascadeCosts`, which were not measured.

    Raises:
        TypeError: `costs` has another type.
        ValueError: a tensor has a wrong shape, dtype or device; `common_prefix_len` is negative; the format does not
            support the dtype or the dims.
    """
    check_tensor("query_lens", query_lens, ("B",), (torch.int32,), torch.device("cpu"))
    check_tensor("seq_lens", seq_lens, (query_lens.shape[0],), (torch.int32,), torch.device("cpu"))
    check_int("common_prefix_len", common_prefix_len, 0)
    check_config(config)
    check_format(cache_format)
    check_dtype("dtype", dtype)
    flops_per_byte = check_cascade_costs(costs).flops_per_byte
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
    cascade_bytes = whole_bytes - (real - 1) * common_prefix_len * entry_bytes
    state_elements = 4 * tokens * c.num_heads * (c.kv_lora_rank + 1)  # two states, each written and read
    state_bytes = state_elements * element_bytes(wide_dtype(dtype))
    whole = max(flops, flops_per_byte * whole_bytes)
    cascade = max(flops, flops_per_byte * cascade_bytes) + flops_per_byte * state_bytes
    return cascade < whole


def cascade_attention(
    ql_nope: Shaped[Tensor, "T N Lkv"],
    q_pe: Shaped[Tensor, "T N R"],
    kv_cache: Shaped[Tensor, "num_blocks block_size columns"],
    metadata: CascadeMetadata,
    softmax_scale: float,
    cache_format: CacheFormat = COMPUTE_FORMAT,
    kv_scale: Float[Tensor, ""] | None = None,
    fp8_mode: str = CONVERTED,
    q_scale: Float[Tensor, "*heads"] | None = None,
    out_dtype: torch.dtype | None = None,
) -> AttentionState:
    """Compute the result of `mla_decode`, but attend the shared prefix once for all requests.

    The function attends the prefix and the suffixes separately, and merges the two attention states. The merged state
    differs from the result of `mla_decode` by rounding alone.

    Args:
        ql_nope: [T, N, Lkv], queries with W_UK absorbed (`query_to_latent`).
        q_pe: [T, N, R], rotated rope parts of the queries.
        kv_cache: the cache of the layer; it must already contain the new tokens.
        metadata: plans of two decodes, over the prefix and over the suffixes (`split_shared_prefix`).
        softmax_scale: factor of the scores, `MLAConfig.softmax_scale`: (P + R)^-1/2, times YaRN's factor.
        cache_format: format of the cache.
        kv_scale: float32 scale of the layer's cache; None if the format has no such scale (`CacheFormat.layer_scale`).
        fp8_mode: one of `converted`, `fp8_query` and `fp8_product` (`mla_decode`).
        q_scale: float32 scale of queries in e4m3, [] or [N]; None for `converted`.
        out_dtype: dtype of `out`; None means the dtype of `ql_nope`, and is refused for queries in e4m3.

    Returns:
        out [T, N, Lkv] in `out_dtype`, lse [N, T].

    Raises:
        ValueError: for the same reasons as `mla_decode`.
    """
    check_type("metadata", metadata, CascadeMetadata)
    given = cache_format, kv_scale, fp8_mode, q_scale
    check_decode(ql_nope, q_pe, kv_cache, metadata.prefix, cache_format, None, *given[1:], out_dtype)
    out_dtype = ql_nope.dtype if out_dtype is None else out_dtype
    check_dtype("out_dtype", out_dtype)
    wide = wide_dtype(out_dtype)
    prefix, suffix = (
        mla_decode(ql_nope, q_pe, kv_cache, plan, softmax_scale, None, wide, *given)
        for plan in (metadata.prefix, metadata.suffix)
    )
    state = merge_attn_states(prefix, suffix)
    return AttentionState(state.out.to(out_dtype), state.lse)
