"""The views of a layer's weights that attention needs; a layer makes the views once and keeps them.

The views come with a signature of the layer: shapes, strides, dtypes and devices of its weights, and its settings. If
this signature and the signature of the arguments are the same as in an earlier call of the layer, the ops inside the
layer skip their checks (`fast.backends.nested_calls`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from reference.interfaces import CacheFormat, MLAConfig, QuantizedWeight, is_plain_linear

from .. import backends
from .module_expansion import expand_kv_by_module
from .weights import absorb, dense_weight, quantize_weight, recover_weight

_CALLS_INSIDE = backends.CallsInside()


@dataclass(frozen=True)
class LayerSignature:
    """Signature of a layer: all its properties on which the checks and kernels of its ops depend.

    Attributes:
        config: config of the layer; its `num_heads` counts the heads of all ranks.
        cache_format: format of the cache.
        fp8_mode: fp8 mode of the decodes.
        workspace_tokens: largest number of context tokens of a chunk.
        parts: signatures (shapes, strides, dtypes, devices) of the weights and of the scales, and the names of the
            backends.
    """

    config: MLAConfig
    cache_format: CacheFormat
    fp8_mode: str
    workspace_tokens: int
    parts: tuple


class Projections(NamedTuple):
    """The modules that a layer calls; reading an attribute of an `nn.Module` takes longer than reading these fields.

    Attributes:
        q_proj: projection H -> N (P + R), or None.
        q_a_proj: projection H -> Lq, or None.
        q_b_proj: projection Lq -> N (P + R), or None.
        q_norm_weight: weight of `q_a_layernorm`, [Lq], or None.
        kv_a_proj_with_mqa: projection H -> Lkv + R.
        o_proj: projection N V -> H.
    """

    q_proj: nn.Module | None
    q_a_proj: nn.Module | None
    q_b_proj: nn.Module | None
    q_norm_weight: Tensor | None
    kv_a_proj_with_mqa: nn.Module
    o_proj: nn.Module

    def join_queries(self, q: Float[Tensor, "T N D"], q_pe: Float[Tensor, "T N R"]) -> Float[Tensor, "T N D"]:
        """Return queries [T, N, P + R] with the rotated rope parts `q_pe` in place of the rope parts of `q`.

        If only the layer can hold the output of the query projection, the rotated parts are written into `q`: joining
        both parts in a new tensor would read and write three times as many bytes. Otherwise the result is a new tensor.
        For example, a hook may keep the output, and a module of another class may return the same tensor again.

        In both cases, the result is contiguous and its address is a multiple of 16. The ops that attend the result may
        therefore reuse the record of a call with the other case (`fast.backends.nested_calls`).

        Args:
            q: [T, N, P + R], rows of the output of the query projection.
            q_pe: [T, N, R], rotated rope parts.
        """
        projection, nope = self.q_b_proj if self.q_proj is None else self.q_proj, q.shape[2] - q_pe.shape[2]
        if (
            torch.compiler.is_compiling()
            or type(projection) is not nn.Linear
            or type(projection._parameters.get("weight")) is not nn.Parameter
            or projection._forward_hooks
            or "forward" in projection.__dict__  # a replaced `forward`
            or _has_any_global_hook()
            or not q.is_contiguous()
            or q.storage_offset() * q.element_size() % 16
        ):
            return torch.cat((q[..., :nope], q_pe), dim=-1)
        q[..., nope:] = q_pe
        return q


class AttentionWeights(NamedTuple):
    """Views of the weights that attention needs, and the weights from which the views were made.

    N is the number of heads, Lkv the latent width, P and V the widths of keys (without rope part) and values of a head.
    The *dense weight* is the weight of `kv_b_proj` as one matrix in the dtype of the layer, not quantised.

    Attributes:
        weight: dense weight, [N (P + V), Lkv]; if the layer keeps no dense weight, the values of `w_uk_t`.
        norm_weight: weight of `kv_a_layernorm`, [Lkv].
        made_from: layouts of the weights, and the modules and settings of the layer; None if the views must not be
            kept.
        w_uk: [Lkv, N, P]; if the layer keeps no dense weight, a tensor of this shape in which one NaN is repeated.
        w_uv: [Lkv, N, V]; if the layer keeps no dense weight, a tensor of this shape in which one NaN is repeated.
        w_uk_t: [N, P, Lkv], which turns queries into absorbed queries; in e4m3 if the layer has `fp8_weights`.
        w_uv_by_head: [N, Lkv, V]; in e4m3 if the layer has `fp8_weights`.
        kv_scale: float32 scale of the layer's cache, []; None if the format has no such scale.
        q_scale: float32 scale of this rank's queries in e4m3, [] or [N]; None in the mode `converted`.
        expand: function that expands latents by calling `kv_b_proj`; None means a product with `w_uk` and `w_uv`.
        projections: the modules that the layer calls.
        softmax_scale: softmax scale of the config.
        signature: signature of the layer; None if the ops of the layer must check their arguments in every call.
    """

    weight: Tensor
    norm_weight: Tensor
    made_from: tuple | None
    w_uk: Tensor
    w_uv: Tensor
    w_uk_t: Tensor | QuantizedWeight
    w_uv_by_head: Tensor | QuantizedWeight
    kv_scale: Tensor | None
    q_scale: Tensor | None
    expand: Callable[[Tensor], tuple[Tensor, Tensor]] | None
    projections: Projections
    softmax_scale: float
    signature: LayerSignature | None

    def calls_inside(self, *arguments: Any) -> contextlib.AbstractContextManager[None]:
        """Return a context manager in which the layer calls its ops; the arguments are those of the layer's call."""
        return contextlib.nullcontext() if self.signature is None else _CALLS_INSIDE.given(self.signature, *arguments)


class WeightViews:
    """Cache of the `AttentionWeights` of one layer; the views are made again if a weight or a setting was replaced."""

    def __init__(self):
        self._kept: AttentionWeights | None = None

    def forget(self) -> None:
        """Drop the views, because they would keep the memory of replaced weights alive."""
        self._kept = None

    def of(self, layer: nn.Module) -> AttentionWeights:
        """Return the views of the current weights of an `MLAAttention`."""
        if backends.must_be_checked():  # for example in `torch.compile`, where tensors may have no address
            norm, q_norm, kv_b_proj = layer.kv_a_layernorm, layer.q_a_layernorm, layer.kv_b_proj
            weight, kv_scale, fp8_weights = layer.recovered_kv_b_weight, layer.kv_scale, layer.fp8_weights
            if weight is None:
                weight = kv_b_proj.weight if layer.has_dense_weight else fp8_weights.w_uk_t.values
            return _make(
                layer, weight, norm.weight, None if q_norm is None else q_norm.weight,
                None if kv_scale is None else kv_scale.value, None,
            )  # fmt: skip
        modules = layer._modules  # reading an attribute of an `nn.Module` takes longer
        weight, q_norm = layer._buffers["recovered_kv_b_weight"], modules.get("q_a_layernorm")
        kv_scale, fp8_weights, q_scale = map(modules.get, ("kv_scale", "fp8_weights", "q_scale"))
        if weight is None:
            weight = _weight_of(modules["kv_b_proj"]) if layer.has_dense_weight else fp8_weights.w_uk_t.values
        norm_weight = _weight_of(modules["kv_a_layernorm"])
        q_norm_weight = None if q_norm is None else _weight_of(q_norm)
        if kv_scale is not None:
            kv_scale = kv_scale.value
        kept = self._kept
        made_from = (
            _layout(weight), _layout(norm_weight), None if q_norm is None else _layout(q_norm_weight), layer.config,
            layer.cache_format, layer.workspace_tokens, layer.backend, layer.context_parallel, layer.expand_by_module,
            modules, None if fp8_weights is None else fp8_weights.w_uk_t,
            None if q_scale is None else (layer.fp8_mode, *_layout(q_scale.value)),
        )  # fmt: skip
        if (
            kept is None
            or kept.weight is not weight
            or kept.norm_weight is not norm_weight
            or kept.projections.q_norm_weight is not q_norm_weight
            or kept.kv_scale is not kv_scale
            or kept.made_from != made_from
        ):
            kept = self._kept = _make(
                layer, weight, norm_weight, q_norm_weight, kv_scale,
                tuple([dict(each) if each is modules else each for each in made_from]),
            )  # fmt: skip
        return kept

    def __getstate__(self) -> dict[str, None]:
        """Return the state for a copy of this object; the copy makes its own views."""
        return {"_kept": None}


def _weight_of(module: nn.Module) -> Tensor:
    """Return the weight of a module; a parameter is found without the search of `nn.Module`."""
    parameters = module._parameters
    if "weight" in parameters:  # the mapping of a `torch.jit.ScriptModule` has no `get`
        return parameters["weight"]
    return module.weight


def _layout(weight: Tensor) -> tuple:
    """Return address, shape, strides and dtype of a weight."""
    return weight.data_ptr(), weight.shape, weight.stride(), weight.dtype


def _make(
    layer: nn.Module, weight: Tensor, norm_weight: Tensor, q_norm_weight: Tensor | None, kv_scale: Tensor | None,
    made_from: tuple | None,
) -> AttentionWeights:  # fmt: skip
    """Return the views of the layer's weights; if `made_from` is None, the views get no signature."""
    w_uk, w_uv = layer.up_projections() if layer.has_dense_weight else _stand_ins(layer)
    signature, fp8_weights, ranks = None, layer.fp8_weights, layer.context_parallel
    q_scale = None if layer.q_scale is None else layer.q_scale.value
    if q_scale is not None and q_scale.dim() == 1 and ranks is not None:
        q_scale = ranks.own_heads(q_scale)
    if fp8_weights is None:
        w_uk_t, w_uv_by_head = w_uk.permute(1, 2, 0), w_uv.transpose(0, 1)
    else:
        w_uk_t, w_uv_by_head = fp8_weights.w_uk_t, fp8_weights.w_uv
    if made_from is not None and ranks is None:  # ranks exchange data, so with several ranks every call is checked
        with contextlib.suppress(backends.NoSignature):
            parts = backends.signature_of(
                (w_uk, norm_weight, q_norm_weight, layer.backend, kv_scale, w_uk_t, w_uv_by_head, q_scale)
            )
            signature = LayerSignature(layer.config, layer.cache_format, layer.fp8_mode, layer.workspace_tokens, parts)
    expand = None
    if layer.expand_by_module:
        c = layer.local_config
        dims = {"num_heads": c.num_heads, "qk_nope_head_dim": c.qk_nope_head_dim, "v_head_dim": c.v_head_dim}
        expand = functools.partial(expand_kv_by_module, kv_b_proj=layer.kv_b_proj, **dims)
    projections = Projections(
        layer.q_proj, layer.q_a_proj, layer.q_b_proj, q_norm_weight, layer.kv_a_proj_with_mqa, layer.o_proj
    )
    return AttentionWeights(
        weight, norm_weight, made_from, w_uk, w_uv, w_uk_t, w_uv_by_head, kv_scale, q_scale, expand, projections,
        layer.config.softmax_scale, signature,
    )  # fmt: skip


def _stand_ins(layer: nn.Module) -> tuple[Tensor, Tensor]:
    """Return tensors without memory of their own in the shapes, dtype and device of W_UK and W_UV.

    The checks of the layer read these properties. A product with the numbers of a stand-in would be NaN.
    """
    c, one = layer.local_config, layer.kv_a_layernorm.weight.new_full((), torch.nan)
    return tuple(one.expand(c.kv_lora_rank, c.num_heads, width) for width in (c.qk_nope_head_dim, c.v_head_dim))


def dense_weight_of(layer: nn.Module) -> Tensor:
    """Return the dense weight of `kv_b_proj`, [N (P + V), Lkv]; recover the weight if the layer does not keep it."""
    if layer.recovered_kv_b_weight is not None:
        return layer.recovered_kv_b_weight
    if layer.has_dense_weight:
        return layer.kv_b_proj.weight.detach()
    return dense_weight(layer.kv_b_proj, layer.config.kv_lora_rank, layer.kv_a_layernorm.weight.dtype)


def refresh(layer: nn.Module) -> None:
    """Read the weight of `kv_b_proj` again, as `MLAAttention.refresh_weights` does, and set `has_dense_weight`."""
    latent, dtype, held = layer.config.kv_lora_rank, layer.kv_a_layernorm.weight.dtype, layer.recovered_kv_b_weight
    unread = layer.expand_by_module and layer.fp8_weights is not None
    layer.has_dense_weight = not unread or is_plain_linear(layer.kv_b_proj, dtype)
    recovered = recover_weight(layer.kv_b_proj, latent, dtype, held) if layer.has_dense_weight else None
    layer.recovered_kv_b_weight = recovered
    if layer.fp8_weights is not None:
        layer.fp8_weights.store(*(quantize_weight(each, True) for each in absorb(*layer.up_projections())))
