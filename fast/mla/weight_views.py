"""The views of a layer's weights that attention needs; a layer makes the views once and keeps them.

The module also keeps a signature of the layer: shapes, strides, dtypes and devices of its weights, and its settings. If
this signature and the signature of the arguments are the same as in an earlier call of the layer, the ops inside the
layer skip their checks (`fast.backends.nested_calls`).
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from reference.interfaces import CacheFormat, MLAConfig, QuantizedWeight

from .. import backends

_CALLS_INSIDE = backends.CallsInside()


@dataclass(frozen=True)
class LayerSignature:
    """Signature of a layer: all its properties on which the checks and kernels of its ops depend.

    Attributes:
        config: config with all heads.
        cache_format: format of the cache.
        fp8_mode: mode of the decodes.
        workspace_tokens: largest number of context tokens of a chunk.
        parts: signatures (shapes, strides, dtypes, devices) of the weights and of the scales, and the names of the
            backends.
    """

    config: MLAConfig
    cache_format: CacheFormat
    fp8_mode: str
    workspace_tokens: int
    parts: tuple


class AttentionWeights(NamedTuple):
    """Views of the weights that attention needs, and the weights from which the views were made.

    N is the number of heads, Lkv the latent width, P and V the widths of keys (without rope part) and values of a head.

    Attributes:
        weight: weight of `kv_b_proj`, [N (P + V), Lkv].
        norm_weight: weight of `kv_a_layernorm`, [Lkv].
        made_from: layouts of the two weights, and the settings of the layer; None if the views must not be kept.
        w_uk: [Lkv, N, P].
        w_uv: [Lkv, N, V].
        w_uk_t: [N, P, Lkv], which turns queries into absorbed queries; in e4m3 if the layer has `fp8_weights`.
        w_uv_by_head: [N, Lkv, V]; in e4m3 if the layer has `fp8_weights`.
        kv_scale: float32 scale of the layer's cache, []; None if the format has no such scale.
        q_scale: float32 scale of this rank's queries in e4m3, [] or [N]; None in the mode `converted`.
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
        weight = layer.recovered_kv_b_weight
        if weight is None:
            weight = layer.kv_b_proj.weight
        norm_weight, kv_scale = layer.kv_a_layernorm.weight, layer.kv_scale
        if kv_scale is not None:
            kv_scale = kv_scale.value
        if backends.must_be_dispatched():  # for example in `torch.compile`, where tensors may have no address
            return _make(layer, weight, norm_weight, kv_scale, None)
        kept = self._kept
        made_from = (
            _layout(weight), _layout(norm_weight), layer.config, layer.cache_format, layer.workspace_tokens,
            layer.backend, layer.context_parallel, None if layer.fp8_weights is None else layer.fp8_weights.w_uk_t,
            None if layer.q_scale is None else (layer.fp8_mode, *_layout(layer.q_scale.value)),
        )  # fmt: skip
        if (
            kept is None
            or kept.weight is not weight
            or kept.norm_weight is not norm_weight
            or kept.kv_scale is not kv_scale
            or kept.made_from != made_from
        ):
            kept = self._kept = _make(layer, weight, norm_weight, kv_scale, made_from)
        return kept

    def __getstate__(self) -> dict[str, None]:
        """Return the state for a copy of this object; the copy makes its own views."""
        return {"_kept": None}


def _layout(weight: Tensor) -> tuple:
    """Return address, shape, strides and dtype of a weight."""
    return weight.data_ptr(), weight.shape, weight.stride(), weight.dtype


def _make(
    layer: nn.Module, weight: Tensor, norm_weight: Tensor, kv_scale: Tensor | None, made_from: tuple | None
) -> AttentionWeights:
    """Return the views of the layer's weights; without `made_from`, they get no signature."""
    w_uk, w_uv = layer.up_projections()
    signature, fp8_weights, ranks = None, layer.fp8_weights, layer.context_parallel
    q_scale = None if layer.q_scale is None else layer.q_scale.value
    if q_scale is not None and q_scale.dim() == 1 and ranks is not None:
        q_scale = ranks.own_heads(q_scale)
    if fp8_weights is None:
        w_uk_t, w_uv_by_head = w_uk.permute(1, 2, 0), w_uv.transpose(0, 1)
    else:
        w_uk_t, w_uv_by_head = fp8_weights.w_uk_t, fp8_weights.w_uv
    if made_from is not None and ranks is None:  # checks on every rank, because ranks exchange data
        with contextlib.suppress(backends.NoSignature):
            parts = backends.signature_of((w_uk, norm_weight, layer.backend, kv_scale, w_uk_t, w_uv_by_head, q_scale))
            signature = LayerSignature(layer.config, layer.cache_format, layer.fp8_mode, layer.workspace_tokens, parts)
    return AttentionWeights(
        weight, norm_weight, made_from, w_uk, w_uv, w_uk_t, w_uv_by_head, kv_scale, q_scale, signature
    )
