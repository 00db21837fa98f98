"""Configuration of one layer of grouped-query attention: heads, mask, score function and attention type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..cache_format import COMPUTE_FORMAT, CacheFormat
from ..checks import check, check_flag, check_int, check_number, check_type, is_positive_number, short_text
from ..errors import UnsupportedConfiguration
from ..layer_parameters import GQAHyperparameters
from .attention_type import AttentionType
from .dims import check_head_dim
from .hf_config import configs_from_hf


@dataclass(frozen=True)
class GQAConfig:
    """Configuration of one layer of grouped-query attention.

    N query heads are divided into Nkv groups of consecutive heads. The heads of a group share one key/value head. With
    Nkv = N this is multi-head attention, and with Nkv = 1 multi-query attention.

    The score of a query and a key is their dot product times `softmax_scale`. A soft cap c then replaces each score s
    by c * tanh(s / c). ALiBi then adds -slope * (distance of query and key) to the score.

    Attributes:
        num_heads: N, number of query heads; a multiple of `num_kv_heads`.
        num_kv_heads: Nkv, number of key/value heads.
        head_dim: Dh, dim of a query, key or value head; one of `HEAD_DIMS`.
        v_head_dim: dim of a value head, which must equal `head_dim`; None means `head_dim`.
        scale: factor of the scores, above 0; None means head_dim^-1/2.
        sliding_window: number of keys that a query token attends: itself and the keys before it. In an encoder the
            window has as many keys after the token as before it. None means no window.
        logits_soft_cap: soft cap of the scores; None means no cap.
        alibi_slopes: N slopes of ALiBi, one for each query head; None means no ALiBi.
        attention_sinks: whether the layer has N attention sinks. A sink is a learned score of its head: the softmax
            counts it as one more key, whose value is 0.
        attention_chunk_size: positions in an attention chunk of chunked local attention: a token attends itself and the
            tokens before it in the same attention chunk. None means attention to all tokens.
        attention_type: which keys the layer attends, and whether it has a cache.
        kv_sharing_layer: name of the layer whose cache this layer reads. The layer itself writes no cache. None means a
            cache of its own.

    Raises:
        ValueError: a number is out of range; the heads are not a multiple of the KV heads; `alibi_slopes` has another
            length; a field does not suit the attention type.
        UnsupportedConfiguration: the head dim is not in `HEAD_DIMS`, or the value heads have another dim.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int | None = None
    scale: float | None = None
    sliding_window: int | None = None
    logits_soft_cap: float | None = None
    alibi_slopes: tuple[float, ...] | None = None
    attention_sinks: bool = False
    attention_chunk_size: int | None = None
    attention_type: AttentionType = AttentionType.DECODER
    kv_sharing_layer: str | None = None

    def __post_init__(self):
        for name in ("num_heads", "num_kv_heads"):
            check_int(name, getattr(self, name))
        check(self.num_heads % self.num_kv_heads == 0, "num_heads", f"a multiple of num_kv_heads {self.num_kv_heads}",
              self.num_heads)  # fmt: skip
        check_head_dim(self.head_dim)
        if self.v_head_dim is not None:
            check_int("v_head_dim", self.v_head_dim, 1, "a positive int or None")
            if self.v_head_dim != self.head_dim:
                wanted = f"v_head_dim: expected the head dim {self.head_dim}"
                raise UnsupportedConfiguration([f"{wanted}, got {self.v_head_dim}"])
        for name in ("sliding_window", "attention_chunk_size"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 1, "a positive int or None")
        self._check_scores()
        check_flag("attention_sinks", self.attention_sinks)
        check_type("attention_type", self.attention_type, AttentionType)
        check_type("kv_sharing_layer", self.kv_sharing_layer, (str, type(None)), "the name of a layer or None")
        check(self.kv_sharing_layer != "", "kv_sharing_layer", "the name of a layer or None", "an empty name")
        self._check_type()

    def _check_scores(self) -> None:
        """Check the scale, the soft cap and the slopes of ALiBi."""
        for name in ("scale", "logits_soft_cap"):
            if (value := getattr(self, name)) is not None:
                check(is_positive_number(value), name, "a finite number above 0, or None", short_text(value))
        if (slopes := self.alibi_slopes) is not None:
            check_type("alibi_slopes", slopes, tuple, "a tuple of numbers or None")
            check(len(slopes) == self.num_heads, "alibi_slopes", f"{self.num_heads} slopes, one for each head",
                  len(slopes))  # fmt: skip
            for slope in slopes:
                check_number("alibi_slopes", slope, 0)

    def _check_type(self) -> None:
        """Check that the other fields suit the attention type."""
        kind = self.attention_type
        if kind is AttentionType.DECODER:
            return
        for name in ("attention_chunk_size", "kv_sharing_layer"):
            check(getattr(self, name) is None, name, f"None for attention type {kind.value}", getattr(self, name))
        if kind is AttentionType.CROSS:
            for name in ("sliding_window", "alibi_slopes"):
                check(getattr(self, name) is None, name, f"None for attention type {kind.value}", getattr(self, name))

    @property
    def softmax_scale(self) -> float:
        """Return the factor of the scores: `scale`, or head_dim^-1/2."""
        return self.head_dim**-0.5 if self.scale is None else float(self.scale)

    @property
    def group_size(self) -> int:
        """Return N / Nkv, the number of query heads that share a key/value head."""
        return self.num_heads // self.num_kv_heads

    def hyperparameters(self, cache_format: CacheFormat = COMPUTE_FORMAT) -> GQAHyperparameters:
        """Return the values of a layer that its plan depends on (`infer_global_hyperparameters`).

        Args:
            cache_format: format of the layer's cache.
        """
        check_type("cache_format", cache_format, CacheFormat)
        return GQAHyperparameters(
            sliding_window=self.sliding_window,
            logits_soft_cap=self.logits_soft_cap,
            attention_sinks=self.attention_sinks,
            softmax_scale=self.softmax_scale,
            attention_chunk_size=self.attention_chunk_size,
            cache_format=cache_format,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            attention_type=self.attention_type.value,
            alibi_slopes=self.alibi_slopes,
        )

    @classmethod
    def from_hf(cls, config: Any, layer: int = 0) -> GQAConfig:
        """Return the config of one decoder layer that a transformers config describes.

        Args:
            config: a transformers config of a model with grouped-query attention, or an object with its attributes.
            layer: index of the layer, because window, chunk and KV sharing may differ from layer to layer.

        Raises:
            TypeError: `model_type` is not a str.
            ValueError: a field has an invalid value, or `layer` is not a layer of the model.
            UnsupportedConfiguration: the config describes another kind of attention, or a feature that is not
                implemented. The exception lists every reason.
        """
        layers = configs_from_hf(config)
        check_int("layer", layer, 0, below=len(layers))
        return cls(**layers[layer])
