"""The requests of the ops of grouped-query attention: what a backend must support to serve a call.

In this module a request is a `KernelRequest`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from reference.interfaces import (
    CAUSAL,
    COMPUTE_FORMAT,
    CONVERTED,
    VISIBLE_LENS,
    CacheFormat,
    GraphSupport,
    QueryLenSupport,
    UnsupportedConfiguration,
)
from reference.interfaces.gqa import AttentionType, GQAConfig

from .kernel_request import KernelRequest
from .registry import support_of
from .selection import BackendChoice, all_ops, name_for, named

# ops of both families that a layer of grouped-query attention, its builder, a cascade or its ranks call
SHARED_OPS = (
    "advance_step", "compute_visible_lens", "copy_blocks", "merge_attn_states", "merge_packed_attn_states",
    "pack_attn_state", "plan_decode", "swap_blocks", "weight_attn_out", "zero_padding_tokens",
)  # fmt: skip
INTEGER_OPS = ("advance_step", "compute_visible_lens", "plan_decode")  # ops that compute with integers only


def paged_attention_request(
    config: GQAConfig,
    device: torch.device,
    dtype: torch.dtype,
    block_size: int,
    query_lens: QueryLenSupport = QueryLenSupport.VARLEN,
    cache_format: CacheFormat = COMPUTE_FORMAT,
    *,
    out_dtype: torch.dtype | None = None,
    first_visible: bool | None = None,
    q_in_e4m3: bool = False,
    batch_invariant: bool = False,
    graph: GraphSupport = GraphSupport.NONE,
    mask: str = VISIBLE_LENS,
    backend: BackendChoice = None,
) -> KernelRequest:
    """Return the request for a call of `gqa_paged_attention`.

    Args:
        config: config of the layer.
        device: device of the tensors.
        dtype: dtype of the queries.
        block_size: tokens of a cache block.
        query_lens: kind of the query lengths of the batch.
        cache_format: format of the cache.
        out_dtype: dtype of the output; None means `dtype`.
        first_visible: whether the plan has first visible keys; None means: if the config has a window. Without a
            window in the config, they need the feature "attention_chunk".
        q_in_e4m3: whether the queries are rounded to e4m3 first.
        batch_invariant: whether the other requests of a batch must not change the result of a request.
        graph: kind of the CUDA graph that captures the call.
        mask: `DecodeMetadata.mask` of the plan.
        backend: the call's `backend=`. A kernel that ignores scales may serve a call that names its backend.
    """
    features = _score_features(config)
    if config.sliding_window is not None if first_visible is None else first_visible:
        features.append("attention_chunk" if config.sliding_window is None else "window")
    return KernelRequest(
        "gqa_paged_attention", device, dtype, (("head_dim", config.head_dim),), block_size, query_lens,
        out_dtype=dtype if out_dtype is None else out_dtype, cache_format=cache_format,
        batch_invariant=batch_invariant, mask=mask, graph=graph, lse=True,
        fp8_mode="fp8_query" if q_in_e4m3 else CONVERTED,
        features=(*features, *_scale_features("gqa_paged_attention", cache_format, backend)),
    )  # fmt: skip


def varlen_attention_request(
    config: GQAConfig, device: torch.device, dtype: torch.dtype, out_dtype: torch.dtype | None = None
) -> KernelRequest:
    """Return the request for a call of `gqa_varlen_attention`; see `paged_attention_request` for the arguments."""
    features = _score_features(config)
    features += ["window"] * (config.sliding_window is not None)
    features += ["attention_chunk"] * (config.attention_chunk_size is not None)
    return KernelRequest(
        "gqa_varlen_attention", device, dtype, (("head_dim", config.head_dim),), query_lens=QueryLenSupport.VARLEN,
        out_dtype=dtype if out_dtype is None else out_dtype, lse=True, features=tuple(features),
        mask="causal" if config.attention_type is AttentionType.DECODER else None,
    )  # fmt: skip


def key_value_write_request(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    block_size: int,
    cache_format: CacheFormat = COMPUTE_FORMAT,
    graph: GraphSupport = GraphSupport.NONE,
    backend: BackendChoice = None,
) -> KernelRequest:
    """Return the request for a call of `reshape_and_cache` with keys of `dtype`."""
    return KernelRequest(
        "reshape_and_cache", device, dtype, (("head_dim", head_dim),), block_size, cache_format=cache_format,
        graph=graph, features=_scale_features("reshape_and_cache", cache_format, backend),
    )  # fmt: skip


def _score_features(config: GQAConfig) -> list[str]:
    """Return the names of the features that the score function of a config needs."""
    needed = {
        "alibi": config.alibi_slopes is not None,
        "sinks": config.attention_sinks,
        "soft_cap": config.logits_soft_cap is not None,
    }
    return [name for name, is_needed in needed.items() if is_needed]


def _scale_features(op: str, cache_format: CacheFormat, backend: BackendChoice) -> tuple[str, ...]:
    """Return ("scales",) if the kernel must multiply by the scales of the cache.

    A kernel that ignores scales gives right results if they are 1. If the call names such a backend, the scales are
    therefore compared with 1 in every call (`check_ignored_scales`).
    """
    if not cache_format.layer_scale:
        return ()
    name = name_for(op, backend)
    found = None if name is None else named(name).ops.get(op)
    return ("scales",) if found is None or "scales" in found.features else ()


def check_ignored_scales(backend: str, op: str, **scales: Tensor | None) -> None:
    """Raise if a kernel ignores the scales of a cache, and a scale is not 1.

    The function reads the scales only for such a kernel; the host then waits for scales on a GPU.

    Args:
        backend: name of the backend of the kernel.
        op: name of the op.
        scales: the scales by their names; None is not compared.

    Raises:
        UnsupportedConfiguration: a scale is not 1; the message names the backend and the scale.
    """
    if "scales" in support_of(backend, op).features:
        return
    wrong = {name: float(scale) for name, scale in scales.items() if scale is not None and float(scale) != 1}
    if wrong:
        raise UnsupportedConfiguration(
            [f"{backend}: ignores {name} and needs 1, got {value}" for name, value in wrong.items()]
        )


def gqa_layer_requests(
    config: GQAConfig,
    device: torch.device,
    dtype: torch.dtype,
    block_size: int,
    cache_format: CacheFormat = COMPUTE_FORMAT,
    fp8_mode: str = CONVERTED,
) -> list[KernelRequest]:
    """Return one request for each op of a layer of grouped-query attention, sorted by op.

    See `fast.backends.layer_requests` for the arguments. `fp8_mode` is "fp8_query" for a layer with a `q_scale`.
    """
    requests = [varlen_attention_request(config, device, dtype)]
    if config.attention_type.cached:
        requests += [
            paged_attention_request(
                config,
                device,
                dtype,
                block_size,
                cache_format=cache_format,
                q_in_e4m3=fp8_mode == "fp8_query",
                mask=VISIBLE_LENS if config.attention_type is AttentionType.CROSS else CAUSAL,
            ),
            key_value_write_request(device, dtype, config.head_dim, block_size, cache_format),
        ]
        for op in SHARED_OPS:
            if op in INTEGER_OPS:
                requests.append(KernelRequest(op, device))
            elif op in ("copy_blocks", "swap_blocks"):  # they copy bytes of any dtype
                width = config.num_kv_heads * config.head_dim
                requests.append(KernelRequest(op, device, head_dims=(("head_dim", width),), block_size=block_size))
            else:
                requests.append(KernelRequest(op, device, dtype, (("head_dim", config.head_dim),)))
    return sorted((each for each in requests if each.op in all_ops()), key=lambda request: request.op)
