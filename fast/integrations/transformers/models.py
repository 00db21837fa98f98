"""Find the attention modules of a DeepSeek model, the layers of `use_mla` in it, and the cache that a layer needs."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Attention, DeepseekV2Model
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3Model

from reference.interfaces import CacheFormat, UnsupportedConfiguration, check


def base_of(model: Any) -> PreTrainedModel:
    """Return the DeepseekV2Model or DeepseekV3Model inside a model.

    Raises:
        UnsupportedConfiguration: the model has neither, or a layer has another kind of attention.
    """
    base = model.base_model if isinstance(model, PreTrainedModel) else None
    if not isinstance(base, DeepseekV2Model | DeepseekV3Model):
        got = type(model).__name__
        raise UnsupportedConfiguration([f"model: expected DeepseekV2 or DeepseekV3 with latent attention, got {got}"])
    for index, layer in enumerate(base.layers):
        if not isinstance(layer.self_attn, DeepseekV2Attention | DeepseekV3Attention):
            got = type(layer.self_attn).__name__
            raise UnsupportedConfiguration([f"model: expected Multi-head Latent Attention at layer {index}, got {got}"])
    return base


def attention_modules(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the attention modules by their names inside the base model, such as "layers.0.self_attn".

    Raises:
        UnsupportedConfiguration: for the same reasons as `base_of`.
    """
    return {f"layers.{index}.self_attn": layer.self_attn for index, layer in enumerate(base_of(model).layers)}


def mla_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the `MLAAttention` layers of a model under `use_mla`, by the names of `attention_modules`.

    Raises:
        UnsupportedConfiguration: for the same reasons as `base_of`.
        ValueError: the model is not under `use_mla`.
    """
    layers = {}
    for name, module in attention_modules(model).items():
        layer = getattr(module.__dict__.get("forward"), "attention", None)
        check(layer is not None, "model", "a model under use_mla", f"another forward at {name}")
        layers[name] = layer
    return layers


class CacheEntry(NamedTuple):
    """The cache that an attention module needs.

    Attributes:
        columns: columns of the cache tensor.
        dtype: dtype of the cache tensor.
        device: device of the cache tensor.
        scale: float32 scale of the layer's cache; None if the format of the cache has no such scale.
    """

    columns: int
    dtype: torch.dtype
    device: torch.device
    scale: Tensor | None = None


def entry_of(module: nn.Module, cache_format: CacheFormat, layer: nn.Module | None = None) -> CacheEntry:
    """Return the cache that an attention module needs.

    Args:
        module: the attention module.
        cache_format: format of the cache.
        layer: the `MLAAttention` of the module, which has the scale; None leaves the scale out.

    Raises:
        ValueError: the format does not support the dims or the dtype of the module.
    """
    weight = module.kv_a_layernorm.weight
    columns = cache_format.columns(module.kv_lora_rank, module.qk_rope_head_dim)
    held = getattr(layer, "kv_scale", None)
    return CacheEntry(
        columns, cache_format.dtype_for(weight.dtype), weight.device, None if held is None else held.value
    )


def same_storage(a: Tensor, b: Tensor) -> bool:
    """Return whether both tensors are views of the same storage."""
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
