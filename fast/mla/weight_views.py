"""The views of a layer's weights that attention needs; a layer makes them once and keeps them."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from reference.interfaces import CacheFormat, MLAConfig

from .. import backends

_CALLS_INSIDE = backends.CallsInside()


@dataclass(frozen=True)
class LayerSignature:
    """What the calls inside a layer depend on, apart from the arguments of the layer's call.

    Attributes:
        config: config with all heads.
        cache_format: format of the cache.
        workspace_tokens: largest number of context tokens of a chunk.
        parts: signatures of the weights and of the backends.
    """

    config: MLAConfig
    cache_format: CacheFormat
    workspace_tokens: int
    parts: tuple


class AttentionWeights(NamedTuple):
    """Views of the weights that attention needs, and the weights that they were made from.

    Attributes:
        weight: weight of `kv_b_proj`.
        norm_weight: weight of `kv_a_layernorm`.
        made_from: layouts of the two weights, and the settings of the layer; None if the views must not be kept.
        w_uk: [Lkv, N, P].
        w_uv: [Lkv, N, V].
        w_uk_t: [N, P, Lkv], for the absorption of queries.
        w_uv_by_head: [N, Lkv, V].
        signature: what the calls inside the layer depend on; None if these calls are not known.
    """

    weight: Tensor
    norm_weight: Tensor
    made_from: tuple | None
    w_uk: Tensor
    w_uv: Tensor
    w_uk_t: Tensor
    w_uv_by_head: Tensor
    signature: LayerSignature | None

    def calls_inside(self, *arguments: Any) -> contextlib.AbstractContextManager[None]:
        """Return the context manager around the calls inside a call of the layer with these arguments."""
        return contextlib.nullcontext() if self.signature is None else _CALLS_INSIDE.given(self.signature, *arguments)


class WeightViews:
    """The kept `AttentionWeights` of one layer; they are made again if a weight was replaced."""

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
        norm_weight = layer.kv_a_layernorm.weight
        if backends.must_be_dispatched():  # these tensors may have no address
            return _make(layer, weight, norm_weight, None)
        kept = self._kept
        made_from = (
            _layout(weight), _layout(norm_weight), layer.config, layer.cache_format, layer.workspace_tokens,
            layer.backend, layer.context_parallel,
        )  # fmt: skip
        if (
            kept is None
            or kept.weight is not weight
            or kept.norm_weight is not norm_weight
            or kept.made_from != made_from
        ):
            kept = self._kept = _make(layer, weight, norm_weight, made_from)
        return kept

    def __getstate__(self) -> dict[str, None]:
        """Return the state of a copy, which makes its own views."""
        return {"_kept": None}


def _layout(weight: Tensor) -> tuple:
    """Return what the views of a weight depend on, apart from its values."""
    return weight.data_ptr(), weight.shape, weight.stride(), weight.dtype


def _make(layer: nn.Module, weight: Tensor, norm_weight: Tensor, made_from: tuple | None) -> AttentionWeights:
    """Return the views of the layer's weights; without `made_from`, the calls inside the layer are not known."""
    w_uk, w_uv = layer.up_projections()
    signature = None
    if made_from is not None and layer.context_parallel is None:  # otherwise another process takes part in the calls
        with contextlib.suppress(backends.NoSignature):
            parts = backends.signature_of((w_uk, norm_weight, layer.backend))
            signature = LayerSignature(layer.config, layer.cache_format, layer.workspace_tokens, parts)
    return AttentionWeights(
        weight, norm_weight, made_from, w_uk, w_uv, w_uk.permute(1, 2, 0), w_uv.transpose(0, 1), signature
    )
