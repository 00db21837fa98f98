"""Implementation of `use_attention` and of its inverse.

`ops` is the package `fast` or `reference`. A padded batch is the usual batch of transformers: B rows with Q new tokens
each, and a mask that marks padding. A packed batch is one row of T tokens without padding; the caller also passes the
plans of the step and the caches. docs/glossary.md explains the terms.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

import fast
from reference.interfaces import COMPUTE_FORMAT, CacheFormat, CalibratedScales, check
from reference.interfaces.gqa import check_key_value_block_size, check_key_value_format, group_layers

from ..cache_options import read_format
from .adapters import DecoderAdapter, EncoderAdapter, StackAdapter
from .configs import ReplacedConfigs
from .interface import SERVED, ServedModule, register
from .models import stacks_of
from .options import planning_options, read_layer_scales
from .steps import Options

NEEDED = ("CommonAttentionMetadata", "GQAAttention", "allocate_key_value_cache", "build_gqa_metadata", "slot_mapping")

register()


def use_attention(
    model: PreTrainedModel,
    ops: ModuleType = fast,
    *,
    block_size: int = 16,
    cache_format: CacheFormat | str = COMPUTE_FORMAT,
    kv_scales: Mapping[str, tuple[float | Tensor, float | Tensor]] | CalibratedScales | str | os.PathLike | None = None,
    q_scales: Mapping[str, float | Tensor] | str | os.PathLike | None = None,
    **options: Any,
) -> PreTrainedModel:
    """Let a model of transformers compute its attention with `ops.GQAAttention`, in place and for inference only.

    The model may have grouped-query, multi-head or multi-query attention. `model.generate` works as before, but keeps
    keys and values in a paged cache: the first forward puts `KeyValueCacheLayer`s into the `DynamicCache`. These models
    are served:

    - decoders whose config `GQAConfig.from_hf` reads, such as Llama, Qwen, Mistral, Gemma, Phi and gpt-oss, with
      windows, attention chunks, soft caps, attention sinks and layers that share the cache of another layer;
    - models with an encoder like BART and Whisper. The keys of cross attention are written once for each input.

    A model without an encoder also accepts a packed batch of T tokens:

        model(input_ids, position_ids=positions, use_cache=False, gqa_metadata=plans, gqa_kv_caches=caches)

    `input_ids` and `positions` have the shape [1, T]. `plans` maps the name of each layer (`gqa_layers`) to the result
    of `ops.build_gqa_metadata` for its config, and `caches` maps it to its paged cache.

    Args:
        model: a transformers model in eval mode; it may have any output head (such as a language model).
        ops: `fast`, `reference`, or another module with the same functions.
        block_size: tokens per block of the cache, a multiple of 16.
        cache_format: format of the caches, as a `CacheFormat` or by its name, such as "fp8_e4m3".
        kv_scales: scales of the caches, only for a format with one scale for each layer. Pass one of these values:

            - a mapping from the name of each layer with a cache of its own, such as "layers.0.self_attn", to the scale
              of its keys and the scale of its values;
            - the result of a calibration;
            - the path of a file of `save_kv_scales`.

            A layer takes its scales from the first of these sources that has them: mapping, checkpoint, file, first
            prefill. A result of a calibration counts as a mapping.
        q_scales: scales with which queries are rounded to e4m3, only for a format with one scale for each layer. Pass a
            mapping from the name of each layer to its scale, a calibration, or the path of its file. None means queries
            in the dtype of the model.
        options: keyword arguments for `ops.GQAAttention` (for example `backend` of `fast`).

    Returns:
        The same model.

    Raises:
        UnsupportedConfiguration: the model cannot be served; the error lists the reasons. The model has Multi-head
            Latent Attention (`use_mla` serves it), several parts such as text and images, or attention that is not
            implemented. Or its layers do not pass keyword arguments on to their attention. Or layers that differ would
            be served by a backend that holds one set of parameters (`check_one_set_of_parameters`).
        ValueError: the model is in training mode or already under `use_attention`; the `forward` of a module was
            replaced on the instance; an option is invalid. The model is unchanged then.
    """
    stacks = stacks_of(model)
    missing = [name for name in NEEDED if not hasattr(ops, name)]
    check(not missing, "ops", "a module that keeps the contract of reference and fast",
          f"{getattr(ops, '__name__', type(ops).__name__)} without {', '.join(missing)}")  # fmt: skip
    modules = {name: module for stack in stacks for name, module in stack.modules.items()}
    configs = {name: config for stack in stacks for name, config in stack.configs.items()}
    bases = [stack.base for stack in stacks]
    check(not is_served(model), "model", "a model that is not under use_attention",
          "a model under use_attention; call restore(model) first")  # fmt: skip
    for module in (*bases, *modules.values()):
        check("forward" not in module.__dict__, "model", "modules that use their class's forward",
              f"a {type(module).__name__} whose forward was replaced")  # fmt: skip
    check(not model.training, "model", "eval mode (inference only); call model.eval()", "training mode")
    check_key_value_block_size("block_size", block_size)
    for name, config in configs.items():
        chunk = config.attention_chunk_size
        check(chunk is None or chunk % block_size == 0, "block_size",
              f"a divisor of the {chunk} tokens of an attention chunk of {name}", block_size)  # fmt: skip
    cache_format = read_format(cache_format)
    check_key_value_format(cache_format)
    scales = read_layer_scales(kv_scales, q_scales, cache_format, modules, configs)

    layers = {}
    for name, module in modules.items():
        config = configs[name]
        stored = cache_format if config.attention_type.cached else COMPUTE_FORMAT
        sinks = {"sinks": module.sinks} if config.attention_sinks else {}
        layers[name] = ops.GQAAttention(config, stored, **sinks, **scales[name], **options)
    replaced = ReplacedConfigs(model, (*bases, *modules.values()))
    adapters = []
    for stack in stacks:
        own = {name: layers[name] for name in stack.modules}
        planning = planning_options(ops, own)
        served = Options(ops, block_size, cache_format, group_layers(own), planning, own, stack.base.dtype)
        served.check_backends(stack.base.device)
        kind = DecoderAdapter if stack.is_decoder else EncoderAdapter
        adapters.append(kind(stack, served, replaced))
    for name, module in modules.items():
        module.__dict__[SERVED] = ServedModule(name, layers[name])
    for adapter in adapters:
        adapter.base.forward = adapter
    replaced.replace()
    return model


def is_served(model: Any) -> bool:
    """Return whether a model is under `use_attention`."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    return any(isinstance(module.__dict__.get("forward"), StackAdapter) for module in modules)


def restore_attention(model: PreTrainedModel) -> PreTrainedModel:
    """Undo `use_attention`: remove the replaced forwards and configs, and return the same model.

    Raises:
        ValueError: the model is not under `use_attention`.
    """
    modules = model.modules() if isinstance(model, nn.Module) else ()
    adapters = [module.__dict__.get("forward") for module in modules]
    adapters = [adapter for adapter in adapters if isinstance(adapter, StackAdapter)]
    check(len(adapters) > 0, "model", "a model under use_attention", "a model that is not under use_attention")
    adapters[0].replaced.restore()
    for adapter in adapters:
        for module in adapter.stack.modules.values():
            module.__dict__.pop(SERVED, None)
        del adapter.base.forward
    return model
