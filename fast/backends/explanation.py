"""Report which backend serves each op of a layer, and why other backends do not serve this op."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch

from reference.interfaces import (
    COMPUTE_FORMAT,
    CONVERTED,
    E4M3,
    CacheFormat,
    MLAConfig,
    QueryLenSupport,
    UnsupportedConfiguration,
    check,
    check_device,
    check_int,
    check_mode_of_format,
    check_type,
)
from reference.interfaces.gqa import GQAConfig, check_key_value_block_size, check_key_value_format

from . import measured
from .devices import check_present_device
from .environment import bind_with_environment
from .fp8_mode_times import cost_of_conversion
from .gqa_requests import gqa_layer_requests
from .kernel_request import GQA_OPS, KernelRequest
from .own import DECODES, HOPPER
from .registry import registered
from .selection import (
    BackendChoice,
    BoundOps,
    all_ops,
    candidates,
    decode_request,
    labelled_by_part,
    name_for,
    named,
    reasons_against,
    select,
)

CACHE_OPS = (  # ops that read or write cache entries in a cache
    "concat_and_cache_mla",
    "gather_and_maybe_dequant_cache",
    "rope_norm_and_cache",
)
CONVERSIONS = ("dequantize_entries", "quantize_entries")  # ops on cache entries outside a cache
QUERY_OPS = ("multiply_heads", "rope_norm_and_cache")  # ops that make queries in e4m3
COPY_OPS = ("copy_blocks", "swap_blocks")  # ops that copy cache entries unchanged
BOUND, PRIORITY, MEASURED = "bound", "chosen by priority", "chosen by measured times"
INTEGER_OPS = ("advance_step", "compute_visible_lens", "plan_decode")  # ops that compute with integers only


def layer_requests(
    config: MLAConfig | GQAConfig,
    device: torch.device,
    dtype: torch.dtype,
    block_size: int,
    cache_format: CacheFormat = COMPUTE_FORMAT,
    fp8_mode: str = CONVERTED,
) -> list[KernelRequest]:
    """Return one `KernelRequest` (the capabilities that a backend needs) for each op of a layer, sorted by op.

    The requests for the ops of attention need a backend that serves any query lengths.

    Args:
        config: configuration of the layer.
        device: device of the layer's tensors.
        dtype: dtype of the layer's tensors.
        block_size: tokens of a cache block.
        cache_format: format of the layer's cache.
        fp8_mode: fp8 mode of the layer's decodes. A layer of grouped-query attention with a `q_scale` has the mode
            "fp8_query".
    """
    if isinstance(config, GQAConfig):
        return gqa_layer_requests(config, device, dtype, block_size, cache_format, fp8_mode)
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
        if op in GQA_OPS:
            continue
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


class Choice(NamedTuple):
    """The backend of an op, and how it was chosen.

    Attributes:
        name: the backend; None if no backend can serve the op. If measured times choose, it is the backend with the
            highest priority.
        how: `BOUND`, `PRIORITY` or `MEASURED`; None if no backend is named and none can serve the op.
        bound_to: the backend that the caller or the environment names; None if neither names one.
        variable: the variable of the environment that names the backend; None if no variable does.
        gpu: the GPU on which the times were measured; None if measured times do not choose.
        shapes: mapping from each other backend that measured times choose to the shapes for which they choose it.
    """

    name: str | None
    how: str | None
    bound_to: str | None = None
    variable: str | None = None
    gpu: str | None = None
    shapes: Mapping[str, tuple[str, ...]] = MappingProxyType({})

    @property
    def in_words(self) -> str:
        """Return how the backend was chosen, in words for one line; an empty text if `how` is None."""
        if self.how is None:
            return ""
        if self.how == BOUND:
            to = "" if self.name is not None else f" to {self.bound_to}"
            return BOUND + to + ("" if self.variable is None else f" by {self.variable}")
        if self.how == PRIORITY:
            return PRIORITY
        others = "; ".join(f"{name} for {', for '.join(shapes)}" for name, shapes in self.shapes.items())
        nearest = f"{MEASURED} for the nearest shape (measured on {self.gpu})"
        return f"{nearest}; for other shapes: {others}" if others else f"{nearest}, for every measured shape"


def choice_of(request: KernelRequest, bound: BoundOps | None) -> Choice:
    """Return the backend that serves an op, and how it is chosen.

    Args:
        request: properties of the calls, without sizes.
        bound: result of `bind_with_environment`.
    """
    name = name_for(request.op, bound)
    if name is not None:
        variable = bound.variables.get(request.op)
        served = None if named(name).validate_configuration(request) else name
        return Choice(served, BOUND, name, variable)
    able = _able(request)
    if not able:
        return Choice(None, None)
    table, shapes, decides = measured.table_of(request.device), {}, False
    for row in () if table is None or request.op != "flash_attn_varlen" else table.rows:
        if not row.causal and not request.lse:  # a call over a chunk of context needs the LSE
            continue
        call = dataclasses.replace(request, sizes=row.sizes, mask="causal" if row.causal else None)
        if not row.serves(call):
            continue
        names = _able(call)
        times = measured.expected_times(names, [call]) if names else {}
        if times:
            decides = True
            chosen = min(times, key=times.get)
            if chosen != able[0]:
                shapes[chosen] = (*shapes.get(chosen, ()), row.shape)
    return Choice(able[0], MEASURED, gpu=table.gpu, shapes=shapes) if decides else Choice(able[0], PRIORITY)


def _able(request: KernelRequest) -> list[str]:
    """Return the names of the backends that may be chosen for a request, the highest priority first."""
    tried = candidates(request.op, request.device, None)
    return [each.name for each in tried if not each.validate_configuration(request)]


def explain(
    config: MLAConfig | GQAConfig,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    block_size: int = 64,
    cache_format: CacheFormat = COMPUTE_FORMAT,
    fp8_mode: str = CONVERTED,
    backend: BackendChoice = None,
) -> str:
    """Return one line for each op of a layer: the backend that serves the op, and the reasons against other backends.

    Each line says how the backend was chosen:

    - "bound": the argument `backend` names the backend of the op.
    - "bound by": a variable of the environment names it (`fast.backends.environment`); the variable follows.
    - "chosen by priority": of the backends that can serve the op, it has the highest priority.
    - "chosen by measured times": each call takes the backend that was the fastest for the nearest measured shape. The
      line has the GPU on which the times were measured, and the shapes for which another backend is chosen. The backend
      that the line names first has the highest priority; it also serves calls whose sizes are not known. A step with
      several calls takes the backend with the smallest sum of times.

    A decode of "hopper" over a cache in e4m3 in the mode `converted` can take longer than over a cache in 16 bits. If
    this was measured, the line of `mla_decode` says by how much, and names the faster mode (`fp8_mode_times`).

    The line of `flash_attn_varlen` is about a call with the LSE; a prefill without context needs no LSE. If different
    backends may serve the decodes and the prefills of grouped-query attention, the lines "gqa_decode" and "gqa_prefill"
    stand in the place of the line "gqa_paged_attention".

    Args:
        config: configuration of the layer; its type determines the attention family.
        device: device of the layer.
        dtype: dtype of the layer.
        block_size: tokens of a cache block.
        cache_format: format of the layer's cache.
        fp8_mode: fp8 mode of the layer's decodes: "fp8_query" for a layer of grouped-query attention with a `q_scale`.
        backend: the layer's `backend=`: a name, a mapping from op to name, or None (`fast.backends`).

    Raises:
        ValueError: `backend` or a variable of the environment has an unknown name, or `backend` has an unknown op; the
            layer cannot have this block size, cache format or fp8 mode; torch does not see the device.
        UnsupportedConfiguration: a layer of grouped-query attention cannot have this cache format.
    """
    check_type("config", config, (MLAConfig, GQAConfig))
    device = check_device("device", device)
    check_present_device("device", device)
    check_type("dtype", dtype, torch.dtype)
    check_int("block_size", block_size)
    check_mode_of_format(fp8_mode, cache_format)
    if isinstance(config, GQAConfig):
        check_key_value_block_size("block_size", block_size)
        check_key_value_format(cache_format)
        check(fp8_mode != "fp8_product", "fp8_mode", f"{CONVERTED} or fp8_query for a GQAConfig", fp8_mode)
    bound, lines = bind_with_environment(backend), []
    calls = [
        (label, request, named_backends)
        for request in layer_requests(config, device, dtype, block_size, cache_format, fp8_mode)
        for label, named_backends in labelled_by_part(request.op, request.op, bound).items()
    ]
    for label, request, named_backends in calls:
        choice, refused = choice_of(request, named_backends), []
        if choice.name is None:
            try:
                select(request, named_backends)
            except UnsupportedConfiguration as error:
                refused = list(error.reasons)
        elif choice.how != BOUND:
            refused = [reason for candidate in registered() for reason in reasons_against(candidate, request)]
        because = f" ({'; '.join(refused)})" if refused else ""
        how = f", {choice.in_words}" if choice.in_words else ""
        cost = None
        if request.op == "mla_decode" and choice.name == HOPPER.name:
            cost = cost_of_conversion(cache_format, fp8_mode, config.num_heads)
        lines.append(f"{label}: {choice.name or 'none'}{how}{because}{'' if cost is None else f'; {cost}'}")
    return "\n".join(lines)
