"""Cascade: a decode that attends the shared prefix of its requests once, instead of once for each request.

docs/glossary.md explains the terms and the letters of shapes.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int32, Shaped
from torch import Tensor

from reference.interfaces import (
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

from .. import backends
from ..attention.merge import merge_attn_states
from ..backends import BackendChoice
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
    """Return whether a cascade is faster than an ordinary decode, estimated from FLOPs and bytes.

    `reference.mla.cascade.use_cascade_attention` explains the estimate.

    The estimate is the same for every fp8 mode of a decode (`mla_decode`): the modes read the same bytes of the cache,
    and no cost of a product in e4m3 has been measured.

    Args:
        common_prefix_len: number of context tokens that all requests share (`fast.common_prefix_len`).
        query_lens: [B], new tokens of each request, on the CPU.
        seq_lens: [B], tokens of each request after this step, on the CPU; 0 for padding rows.
        config: config of the layer.
        cache_format: format of the cache.
        dtype: dtype of the queries.
        costs: costs of FLOPs and bytes; None means the defaults of `CascadeCosts`, which were not measured.

    Raises:
        TypeError: `costs` has another type.
        ValueError: shapes, dtypes or devices do not match; `common_prefix_len` is negative; the format does not support
            the dtype or the dimensions.
    """
    check_tensor("query_lens", query_lens, ("B",), (torch.int32,), torch.device("cpu"))
    check_tensor("seq_lens", seq_lens, (query_lens.shape[0],), (torch.int32,), torch.device("cpu"))
    check_int("common_prefix_len", common_prefix_len, 0)
    check_config(config)
    check_format(cache_format)
    check_dtype("dtype", dtype)
    flops_per_byte = check_cascade_costs(costs).flops_per_byte
    if common_prefix_len == 0 or seq_lens.numel() == 0:
        return False
    c, lengths = config, seq_lens.long()
    real = lengths > 0
    requests, keys = int(real.count_nonzero()), int(lengths.sum())
    if requests == 0:
        return False
    tokens, pairs = int(query_lens[real].sum()), int((query_lens * lengths).sum())
    flops = 2 * c.num_heads * pairs * (2 * c.kv_lora_rank + c.qk_rope_head_dim)
    entry_bytes = cache_format.entry_bytes(c.kv_lora_rank, c.qk_rope_head_dim, dtype)
    whole_bytes = keys * entry_bytes
    apart_bytes = whole_bytes - (requests - 1) * common_prefix_len * entry_bytes
    state_elements = 4 * tokens * c.num_heads * (c.kv_lora_rank + 1)  # 4: two states, each written and read once
    state_bytes = state_elements * element_bytes(wide_dtype(dtype))
    apart = max(flops, flops_per_byte * apart_bytes) + flops_per_byte * state_bytes
    return apart < max(flops, flops_per_byte * whole_bytes)


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
    *,
    backend: BackendChoice = None,
) -> AttentionState:
    """Compute a decode as a cascade: attend the shared prefix, attend the suffix of each request, merge both states.

    `reference.mla.cascade.cascade_attention` explains how the result differs from the result of `mla_decode`.

    Args:
        ql_nope: [T, N, Lkv], queries with W_UK absorbed (`query_to_latent`).
        q_pe: [T, N, R], rotated rope parts of the queries.
        kv_cache: cache, which already contains the new tokens.
        metadata: plans of prefix and suffix (`split_shared_prefix`).
        softmax_scale: (P + R)^-1/2, times YaRN's factor.
        cache_format: format of the cache.
        kv_scale: float32 scale of the layer's cache; None if the format has no such scale (`CacheFormat.layer_scale`).
        fp8_mode: one of `converted`, `fp8_query` and `fp8_product` (`mla_decode`).
        q_scale: float32 scale of queries in e4m3, [] or [N]; None for `converted`.
        out_dtype: dtype of `out`; None means the dtype of `ql_nope`, and is refused for queries in e4m3.
        backend: name of a backend, mapping from op to backend name, or None for an automatic choice (`fast.backends`).

    Returns:
        out [T, N, Lkv] in `out_dtype`, lse [N, T].

    Raises:
        ValueError: for the same reasons as `mla_decode`.
        UnsupportedConfiguration: no backend that `backend` allows can serve the call.
    """
    check_type("metadata", metadata, CascadeMetadata)
    given = cache_format, kv_scale, fp8_mode, q_scale
    check_decode(ql_nope, q_pe, kv_cache, metadata.prefix, cache_format, None, *given[1:], out_dtype)
    backend = backends.bind(backend, ("mla_decode", "merge_attn_states"))
    out_dtype = ql_nope.dtype if out_dtype is None else out_dtype
    check_dtype("out_dtype", out_dtype)
    wide = wide_dtype(out_dtype)
    prefix, suffix = (
        mla_decode(ql_nope, q_pe, kv_cache, plan, softmax_scale, None, wide, *given, backend=backend)
        for plan in (metadata.prefix, metadata.suffix)
    )
    state = merge_attn_states(prefix, suffix, backend=backend)
    return AttentionState(state.out.to(out_dtype), state.lse)
