"""The values of a layer that the plan of a step, or a backend that plans for all layers at once, depends on."""

from __future__ import annotations

from dataclasses import dataclass

from .cache_format import CacheFormat


@dataclass(frozen=True)
class LayerParameters:
    """The values of one layer that a backend needs to plan a step (`get_per_layer_parameters`).

    Attributes:
        sliding_window: number of keys that a query token attends; None means no window.
        logits_soft_cap: soft cap of the scores; None means no cap.
        attention_sinks: whether the layer has attention sinks.
        softmax_scale: factor of the scores.
        attention_chunk_size: positions in an attention chunk; None means attention to all tokens.
        cache_format: format of the layer's cache.
    """

    sliding_window: int | None
    logits_soft_cap: float | None
    attention_sinks: bool
    softmax_scale: float
    attention_chunk_size: int | None
    cache_format: CacheFormat


@dataclass(frozen=True)
class GQAHyperparameters(LayerParameters):
    """Values that must be equal in all layers with grouped-query attention (GQA), so that all layers can use one plan.

    Attributes:
        num_heads: N.
        num_kv_heads: Nkv.
        head_dim: Dh.
        attention_type: value of the `AttentionType`, such as "decoder".
        alibi_slopes: N slopes of ALiBi; None means no ALiBi.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    attention_type: str
    alibi_slopes: tuple[float, ...] | None
