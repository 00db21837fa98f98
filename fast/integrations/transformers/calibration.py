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

from .attention import restore, use_mla
from .models import mla_layers


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

    The function runs the model under `use_mla` with a cache in the dtype of the model, so that no value is quantised,
    and undoes `use_mla` at the end. Save the result with `save_kv_scales`, and pass the file to `use_mla`:

    - for the scales of caches in `fp8_e4m3`: `use_mla(model, cache_format="fp8_e4m3", kv_scales=file)`;
    - for the scales of queries, with any format in e4m3: `use_mla(.., fp8_mode=mode, q_scales=file)`.

    Args:
        model: a DeepseekV2 or DeepseekV3 model for causal language modelling, in eval mode and not under `use_mla`.
        prompts: batches of prompts, such as the results of a tokenizer: keyword arguments of `model.generate`.
        ops: package that computes the attention, as in `use_mla`.
        max_new_tokens: largest number of tokens that the model generates for each prompt. The values of these tokens
            count for the scales too.
        options: further keyword arguments of `use_mla`, except formats, modes and scales.

    Returns:
        Mapping from the name of a layer, such as "layers.0.self_attn", to the scale of its cache. The attribute
        `queries` has the scales of the queries.

    Raises:
        TypeError: a batch of `prompts` is not a mapping.
        ValueError: there is no prompt, or `use_mla` raises this error for the model or the options.
    """
    check_int("max_new_tokens", max_new_tokens, 1, "at least 1")
    given = sorted({"cache_format", "kv_scales", "kv_scale", "fp8_mode", "q_scales", "q_scale"} & options.keys())
    check(not given, "options", "no formats, modes or scales, because no value may be quantised", ", ".join(given))
    batches = list(prompts)
    check(len(batches) > 0, "prompts", "at least one batch of prompts", "none")
    for batch in batches:
        check_type("prompts", batch, Mapping, "batches that are mappings, such as the result of a tokenizer")
    use_mla(model, ops, **options)
    try:
        with calibrate_kv_scales(mla_layers(model)) as scales:
            for batch in batches:
                model.generate(**batch, max_new_tokens=max_new_tokens, do_sample=False)
    finally:
        restore(model)
    return scales
