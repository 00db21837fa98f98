"""Read the parts of a layer from an attention module of transformers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from .cache_format import COMPUTE_FORMAT, CacheFormat
from .config import MLAConfig
from .errors import UnsupportedConfiguration
from .kv_scales import ScaleSource, checkpoint_scale
from .layer_arguments import latent_norm_eps
from .quantization import CONVERTED, FP8_MODES
from .query_scales import checkpoint_query_scale


class HFAttention(NamedTuple):
    """The parts of a DeepseekV2Attention or DeepseekV3Attention from which `MLAAttention.from_hf` builds a layer.

    Attributes:
        config: config of the layer, with all heads.
        modules: projections and norms, by the names of the arguments of `MLAAttention`; None for a missing module.
        kv_scale: scale that the checkpoint stores for the cache; None if the checkpoint has none, if the cache format
            has no such scale, or if the caller gives `kv_scale`.
        q_scale: scale that the checkpoint stores for queries in e4m3; None if the checkpoint has none, if the fp8 mode
            has no such scale, or if the caller gives `q_scale`.
    """

    config: MLAConfig
    modules: dict[str, nn.Module | None]
    kv_scale: Tensor | float | None
    q_scale: Tensor | float | None


def layer_from_hf(layer_class: Callable[..., Any], module: nn.Module, options: dict[str, Any]) -> Any:
    """Return the layer of `reference` or `fast` for an attention module of transformers (`MLAAttention.from_hf`).

    Args:
        layer_class: the class `MLAAttention` of one of the two packages.
        module: the attention module, with the projections of all heads.
        options: keyword arguments of the layer.
    """
    parts = parts_of_hf_attention(module, options)
    if parts.q_scale is not None:
        options = {**options, "q_scale": parts.q_scale}
    layer = layer_class(parts.config, **parts.modules, **options)
    if parts.kv_scale is not None:
        layer.kv_scale.choose(parts.kv_scale, ScaleSource.CHECKPOINT)
    if parts.q_scale is not None:
        layer.q_scale.choose(parts.q_scale, ScaleSource.CHECKPOINT)
    return layer


def parts_of_hf_attention(module: nn.Module, options: dict[str, Any]) -> HFAttention:
    """Return the parts of an attention module of transformers.

    With context parallelism, the projections that have heads keep only the heads of this rank.

    Args:
        module: the attention module, with the projections of all heads.
        options: keyword arguments of the layer. The function reads `context_parallel`, `cache_format`, `kv_scale`,
            `fp8_mode` and `q_scale`.

    Raises:
        UnsupportedConfiguration: for the same reasons as `MLAConfig.from_hf`; the latent norms have different epsilons;
            with `context_parallel`, a projection is not a plain linear module, so its heads cannot be separated.
        ValueError: the module has two different scales for the cache, or scales for another scheme than e4m3 with one
            static scale.
    """
    if not hasattr(module, "config") or not hasattr(module, "kv_a_layernorm"):
        wanted = "module: expected a DeepseekV2Attention or DeepseekV3Attention"
        raise UnsupportedConfiguration([f"{wanted}, got {type(module).__name__}"])
    if getattr(module, "is_causal", True) is False:
        raise UnsupportedConfiguration(["module.is_causal: only causal attention is implemented, got False"])
    config = MLAConfig.from_hf(module.config)
    low_rank = config.q_lora_rank is not None
    eps = latent_norm_eps(module.kv_a_layernorm, module.q_a_layernorm if low_rank else None)
    config = dataclasses.replace(config, latent_norm_eps=eps)
    # name of each projection with heads, and the dimension of its weight that contains the heads
    with_heads = {"kv_b_proj": 0, "o_proj": 1, "q_b_proj" if low_rank else "q_proj": 0}
    modules = {name: getattr(module, name) for name in with_heads}
    if (context_parallel := options.get("context_parallel")) is not None:
        modules = {
            name: context_parallel.shard_linear(name, modules[name], dim, config.num_heads)
            for name, dim in with_heads.items()
        }
    for name in ("kv_a_proj_with_mqa", "kv_a_layernorm"):
        modules[name] = getattr(module, name)
    for name in ("q_a_proj", "q_a_layernorm"):
        modules[name] = getattr(module, name) if low_rank else None
    cache_format, kv_scale, q_scale = options.get("cache_format", COMPUTE_FORMAT), None, None
    if isinstance(cache_format, CacheFormat) and cache_format.layer_scale and options.get("kv_scale") is None:
        kv_scale = checkpoint_scale(module)
    if options.get("fp8_mode", CONVERTED) in FP8_MODES[1:] and options.get("q_scale") is None:
        q_scale = checkpoint_query_scale(module)
    return HFAttention(config, modules, kv_scale, q_scale)
