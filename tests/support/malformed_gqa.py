"""Valid calls of the contract of grouped-query attention (GQA), for `tests.malformed_calls`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from reference.interfaces import FP8_E4M3
from reference.interfaces.gqa import AttentionType, GQAConfig, encoder_decoder_configs_from_hf

FIELDS = dict(
    num_heads=6, num_kv_heads=2, head_dim=32, v_head_dim=32, scale=0.3, sliding_window=5, logits_soft_cap=2.0,
    alibi_slopes=(0.5,) * 6, attention_sinks=True, attention_chunk_size=16, attention_type=AttentionType.DECODER,
    kv_sharing_layer="layers.1",
)  # fmt: skip


@dataclasses.dataclass
class LayerTypesHFConfig:
    """A config with fields of a transformers config that `GQAConfig.from_hf` reads; its layers have different types."""

    model_type: str = "llama"
    num_attention_heads: int = 6
    num_key_value_heads: int | None = 2
    num_hidden_layers: int = 3
    head_dim: int | None = 32
    v_head_dim: int | None = 32
    sliding_window: int | None = 5
    use_sliding_window: bool | None = True
    attention_chunk_size: int | None = 16
    layer_types: list | None = dataclasses.field(
        default_factory=lambda: ["sliding_attention", "chunked_attention", "sliding_attention"]
    )
    attn_logit_softcapping: float | None = 30.0
    query_pre_attn_scalar: float | None = 64.0
    num_kv_shared_layers: int | None = 1
    attention_sinks: bool | None = True
    alibi: bool | None = None
    is_causal: bool | None = True
    kv_lora_rank: int | None = None
    num_attention_heads_per_layer: list | None = None
    per_layer_config: list | None = None


@dataclasses.dataclass
class EqualLayersHFConfig:
    """A config with other fields that `GQAConfig.from_hf` reads, for layers without types."""

    model_type: str = "gpt2"
    hidden_size: int = 192
    num_attention_heads: int = 6
    num_hidden_layers: int = 3
    sliding_window: int | None = 5
    max_window_layers: int | None = 1
    scale_attn_weights: bool | None = False
    scale_attn_by_inverse_layer_idx: bool | None = True


@dataclasses.dataclass
class GraniteHFConfig:
    """A config with the field of Granite for the scale."""

    model_type: str = "llama"
    hidden_size: int = 192
    num_attention_heads: int = 6
    num_hidden_layers: int = 3
    attention_multiplier: float | None = 0.5


@dataclasses.dataclass
class EncoderDecoderHFConfig:
    """A config with the fields of a transformers config that `encoder_decoder_configs_from_hf` reads."""

    model_type: str = "bart"
    d_model: int = 64
    encoder_layers: int = 2
    decoder_layers: int = 1
    encoder_attention_heads: int = 2
    decoder_attention_heads: int = 1
    is_encoder_decoder: bool | None = True
    relative_attention: bool | None = None


def contract_calls(ops: Any, call_type: type, call: Callable[..., Any]) -> list[Any]:
    """Return calls that succeed for the public names of the contract of this family.

    Args:
        ops: the package.
        call_type: the class `Call` of `tests.malformed_calls`.
        call: function that makes a `Call` from the name of a function of `ops`, and its arguments.
    """
    config = GQAConfig(**FIELDS)
    owner = dataclasses.replace(config, kv_sharing_layer=None)
    layers = {"first": owner, "second": dataclasses.replace(config, kv_sharing_layer="first")}
    sizes = dict(num_blocks=3, block_size=16, num_kv_heads=2, head_dim=32, num_layers=2)
    from_encoder_decoder = encoder_decoder_configs_from_hf
    return [
        call("GQAConfig", **FIELDS),
        call("GQAConfig.from_hf", config=LayerTypesHFConfig(), layer=2),
        call_type("GQAConfig.from_hf of equal layers", GQAConfig.from_hf, dict(config=EqualLayersHFConfig(), layer=2)),
        call_type("GQAConfig.from_hf of Granite", GQAConfig.from_hf, dict(config=GraniteHFConfig())),
        call_type("GQAConfig.hyperparameters", config.hyperparameters, dict(cache_format=FP8_E4M3)),
        call_type("encoder_decoder_configs_from_hf", from_encoder_decoder, dict(config=EncoderDecoderHFConfig())),
        call("key_value_cache_shape", **sizes),
        call("key_value_stride_order", include_layers=True, layout="HND"),
        call("allocate_key_value_cache", **sizes, dtype=torch.float32, device=torch.device("cpu"), layout="HND"),
        call("get_per_layer_parameters", layers=layers, kind=object),
        call("group_layers", layers=layers),
        call_type("infer_global_hyperparameters of GQA", ops.infer_global_hyperparameters, dict(layers=layers)),
    ]
