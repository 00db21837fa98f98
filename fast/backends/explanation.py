"""Report which backend serves each op of a layer, and why other backends do not serve this op."""

from __future__ import annotations

import torch

from reference.interfaces import (
    COMPUTE_FORMAT,
    CONVERTED,
    E4M3,
    CacheFormat,
    MLAConfig,
    QueryLenSupport,
    UnsupportedConfiguration,
    check_config,
    check_device,
    check_int,
    check_mode_of_format,
    check_type,
)

from .environment import bind_with_environment
from .kernel_request import KernelRequest
from .own import DECODES
from .registry import registered
from .selection import BackendChoice, all_ops, decode_request, name_for, reasons_against, select

CACHE_OPS = (  # ops that read or write cache entries in a cache
    "concat_and_cache_mla",
    "gather_and_maybe_dequant_cache",
    "rope_norm_and_cache",
)
CONVERSIONS = ("dequantize_entries", "quantize_entries")  # ops on cache entries outside a cache
QUERY_OPS = ("multiply_heads", "rope_norm_and_cache")  # ops that make queries in e4m3
COPY_OPS = ("copy_blocks", "swap_blocks")  # ops that copy cache entries unchanged
INTEGER_OPS = ("advance_step", "compute_visible_lens", "plan_decode")  # ops that compute with integers only


def layer_requests(
    config: MLAConfig,
    device: torch.device,
    dtype: torch.dtype,
    block_size: int,
    cache_format: CacheFormat = COMPUTE_FORMAT,
    fp8_mode: str = CONVERTED,
) -> list[KernelRequest]:
    """Return one `KernelRequest` (the capabilities that a backend needs) for each op of a layer, sorted by op.

    The requests for the ops of a decode and for `flash_attn_varlen` need a backend that serves any query lengths.

    Args:
        config: configuration of the layer.
        device: device of the layer's tensors.
        dtype: dtype of the layer's tensors.
        block_size: tokens of a cache block.
        cache_format: format of the layer's cache.
        fp8_mode: fp8 mode of the layer's decodes.
    """
    latent, rope = config.kv_lora_rank, config.qk_rope_head_dim
    entry = (("kv_lora_rank", latent), ("qk_rope_head_dim", rope))
    columns = (("head_dim", cache_format.columns(latent, rope)),)
    widths = {  # op: widths of its tensors; every other op has one width, the columns of a stored entry
        "apply_rope": (("qk_rope_head_dim", rope),),
        "merge_packed_attn_states": (("head_dim", latent),),
        "concat_and_cache_mla": entry,
        "flash_attn_varlen": (("qk_head_dim", config.qk_head_dim), ("v_head_dim", config.v_head_dim)),
        "merge_attn_states": (("head_dim", config.v_head_dim),),
        "pack_attn_state": (("head_dim", latent),),
        "quantize_entries": entry,
        "rope_norm_and_cache": entry,
        "weight_attn_out": (("head_dim", latent),),
        "zero_padding_tokens": (("head_dim", config.v_head_dim),),
    }
    requests, in_e4m3 = [], fp8_mode != CONVERTED
    for op in all_ops():
        if op in DECODES:
            requests.append(
                decode_request(
                    device,
                    dtype,
                    latent,
                    rope,
                    block_size,
                    QueryLenSupport.VARLEN,
                    op=op,
                    cache_format=cache_format,
                    fp8_mode=fp8_mode,
                    out_dtype=dtype if in_e4m3 and op == "mla_decode" else None,
                )
            )
        elif op in INTEGER_OPS:
            requests.append(KernelRequest(op, device))
        else:
            more = {"dtype": dtype}
            if op in CACHE_OPS:
                more |= {"block_size": block_size, "cache_format": cache_format}
            elif op in CONVERSIONS:
                more |= {"cache_format": cache_format}
            elif op in COPY_OPS:
                more = {"block_size": block_size}
            elif op == "reorg_kvcache":  # ranks exchange stored entries
                more = {"dtype": cache_format.storage_dtype or dtype}
            elif op == "flash_attn_varlen":
                more |= {"query_lens": QueryLenSupport.VARLEN, "mask": "causal", "lse": True}
            if in_e4m3 and op in QUERY_OPS:
                more |= {"out_dtype": E4M3}
            requests.append(KernelRequest(op, device, head_dims=widths.get(op, columns), **more))
    return requests


def explain(
    config: MLAConfig,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    block_size: int = 64,
    cache_format: CacheFormat = COMPUTE_FORMAT,
    fp8_mode: str = CONVERTED,
    backend: BackendChoice = None,
) -> str:
    """Return one line for each op of a layer: the backend that serves the op, and the reasons against other backends.

    If `backend` is given or the environment names a backend (`fast.backends.environment`), each line also has the word
    "bound" or "chosen". "bound" means that the argument `backend` names the backend of the op, and "bound by" is
    followed by the variable of the environment that names it. "chosen" means that neither names a backend for the op,
    so that the backend with the highest priority serves the op. The line of `flash_attn_varlen` is about a call with
    the LSE; a prefill without context needs no LSE.

    Args:
        config: configuration of the layer.
        device: device of the layer.
        dtype: dtype of the layer.
        block_size: tokens of a cache block.
        cache_format: format of the layer's cache.
        fp8_mode: fp8 mode of the layer's decodes.
        backend: the layer's `backend=`: a name, a mapping from op to name, or None (`fast.backends`).

    Raises:
        ValueError: `backend` or a variable of the environment has an unknown name, or `backend` has an unknown op.
    """
    check_config(config)
    device = check_device("device", device)
    check_type("dtype", dtype, torch.dtype)
    check_int("block_size", block_size)
    check_mode_of_format(fp8_mode, cache_format)
    bound, lines = bind_with_environment(backend), []
    for request in layer_requests(config, device, dtype, block_size, cache_format, fp8_mode):
        name = name_for(request.op, bound)
        by = "" if bound is None or request.op not in bound.variables else f" by {bound.variables[request.op]}"
        how = "" if bound is None else ", chosen" if name is None else f", bound{by}"
        try:
            served, refused = select(request, bound).name, []
        except UnsupportedConfiguration as error:
            served, refused = "none", list(error.reasons)
            how = how if name is None else f", bound to {name}{by}"
        if name is None and not refused:
            refused = [reason for candidate in registered() for reason in reasons_against(candidate, request)]
        because = f" ({'; '.join(refused)})" if refused else ""
        lines.append(f"{request.op}: {served}{how}{because}")
    return "\n".join(lines)
