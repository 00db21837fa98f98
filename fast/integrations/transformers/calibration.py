"""Calibrate the scales of a model's caches on a few prompts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

import fast
from reference.interfaces import CalibratedScales, calibrate_kv_scales, check, check_int, check_type

from .attention import use_mla
from .gqa import gqa_layers, use_attention
from .models import mla_layers
from .restoring import has_latent_attention, restore


@torch.no_grad()
def calibrate_model(
    model: PreTrainedModel,
    prompts: Iterable[Mapping[str, Tensor]],
    ops: ModuleType = fast,
    *,
    max_new_tokens: int = 16,
    **options: Any,
) -> CalibratedScales:
    """Return scales for the cache and the queries of each layer, from the largest values in some prompts.

    The function runs the model under `use_mla` or, for a model without latent attention, under `use_attention`, with a
    cache in the dtype of the model, so that no value is quantised, and undoes this at the end. Save the result with
    `save_kv_scales`, and pass the file to the same function:

    - for the scales of caches in `fp8_e4m3`: `use_mla(model, cache_format="fp8_e4m3", kv_scales=file)`, or the same
      arguments of `use_attention`;
    - for the scales of queries, with any format in e4m3: `use_mla(.., fp8_mode=mode, q_scales=file)`, or
      `use_attention(.., q_scales=file)`.

    Args:
        model: a model that `use_mla` or `use_attention` serves and that generates tokens, in eval mode and under
            neither function.
        prompts: batches of prompts, such as the results of a tokenizer: keyword arguments of `model.generate`.
        ops: package that computes the attention, as in `use_mla`.
        max_new_tokens: largest number of tokens that the model generates for each prompt. The values of these tokens
            count for the scales too.
        options: further keyword arguments of `use_mla` or `use_attention`, except formats, modes and scales.

    Returns:
        Mapping from the name of a layer, such as "layers.0.self_attn", to the scale of its cache, or of its cached
        keys. The attribute `queries` has the scales of the queries, and `cached_values` those of cached values. Layers
        without a cache of their own are left out.

    Raises:
        TypeError: a batch of `prompts` is not a mapping.
        ValueError: there is no prompt, or `use_mla` or `use_attention` raises this error for the model or the options.
    """
    check_int("max_new_tokens", max_new_tokens, 1, "at least 1")
    scaled = {"cache_format", "kv_scales", "kv_scale", "k_scale", "v_scale", "fp8_mode", "q_scales", "q_scale"}
    given = sorted(scaled & options.keys())
    check(not given, "options", "no formats, modes or scales, because no value may be quantised", ", ".join(given))
    batches = list(prompts)
    check(len(batches) > 0, "prompts", "at least one batch of prompts", "none")
    for batch in batches:
        check_type("prompts", batch, Mapping, "batches that are mappings, such as the result of a tokenizer")
    latent = has_latent_attention(model)
    (use_mla if latent else use_attention)(model, ops, **options)
    try:
        layers = mla_layers(model) if latent else gqa_layers(model)
        cached = {name: layer for name, layer in layers.items() if latent or layer.config.attention_type.cached}
        with calibrate_kv_scales(cached) as scales:
            for batch in batches:
                model.generate(**batch, max_new_tokens=max_new_tokens, do_sample=False)
    finally:
        restore(model)
    return scales
