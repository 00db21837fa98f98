"""Find the decoder and the encoder of a transformers model, their attention modules, and the config of each module.

A stack is an encoder or a decoder: a module that runs a list of layers. A decoder-only model is one stack, and an
encoder-decoder model such as BART or Whisper is two.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from reference.interfaces import UnsupportedConfiguration, check
from reference.interfaces.gqa import AttentionType, GQAConfig, encoder_decoder_configs_from_hf

from .cache import KeyValueEntry
from .interface import SERVED, ServedModule


class Stack(NamedTuple):
    """An encoder or a decoder.

    Attributes:
        base: the module whose `forward` runs the layers.
        is_decoder: whether the stack is a decoder.
        modules: attention modules by name; a decoder of an encoder-decoder model has two in each layer.
        configs: config of each attention module, by the same names.
    """

    base: PreTrainedModel
    is_decoder: bool
    modules: dict[str, nn.Module]
    configs: dict[str, GQAConfig]

    @property
    def has_cross_attention(self) -> bool:
        """Return whether the stack is a decoder that attends the output of an encoder."""
        return any(config.attention_type is AttentionType.CROSS for config in self.configs.values())


def stacks_of(model: Any) -> tuple[Stack, ...]:
    """Return the decoder of a model, in front of it the encoder if there is one, with the config of every layer.

    Raises:
        UnsupportedConfiguration: the model is no transformers model for text or speech; its attention is not
            implemented; its attention does not use the attention interface of transformers; or its layers do not pass
            keyword arguments on to their attention. If the config has several reasons, all of them are listed.
        ValueError: a field of the model's config has an invalid value.
    """
    if not isinstance(model, PreTrainedModel):
        got = type(model).__name__
        raise UnsupportedConfiguration(
            [f"model: expected a transformers model with grouped-query attention, got {got}"]
        )
    config = model.config
    if getattr(config, "kv_lora_rank", None):
        wanted = "model: expected grouped-query attention (use_mla serves Multi-head Latent Attention)"
        raise UnsupportedConfiguration([f"{wanted}, got {type(model).__name__}"])
    if getattr(config, "is_encoder_decoder", False):
        stacks = _coded_stacks(model)
    else:
        decoder = model.get_decoder()  # for a Llama 4 with a head, this is the model itself
        stacks = (_decoder_stack(model, decoder if hasattr(decoder, "layers") else getattr(model, "model", decoder)),)
    for stack in stacks:
        uses_interface = getattr(type(stack.base), "_can_set_attn_implementation", None)
        if uses_interface is not None and not uses_interface():
            wanted = "model: expected attention through the attention interface of transformers"
            raise UnsupportedConfiguration([f"{wanted}, got {type(stack.base).__name__}"])
    return stacks


def _layers_of(model: PreTrainedModel, base: Any) -> nn.ModuleList:
    """Return the layers of a stack."""
    layers = getattr(base, "layers", None)
    if not isinstance(base, PreTrainedModel) or not isinstance(layers, nn.ModuleList) or len(layers) == 0:
        wanted = "model: expected a decoder, or an encoder and a decoder, with a list of `layers`"
        raise UnsupportedConfiguration([f"{wanted}, got {type(model).__name__} with {type(base).__name__}"])
    return layers


@functools.cache
def _passes_keyword_arguments(layer: type[nn.Module], attention: type[nn.Module], name: str) -> bool:
    """Return whether a layer passes keyword arguments that it does not know on to its attention module.

    Both `forward`s must have `**kwargs`, and the layer must pass keyword arguments with `**` wherever its source calls
    the attention module. If the source cannot be read or has no such call, the answer is True; the first call of the
    model then finds a layer that does not pass them on (`interface.gqa_attention`).

    Args:
        layer: class of the layer.
        attention: class of the attention module.
        name: name of the attention module in the layer.
    """
    for forward in (layer.forward, attention.forward):
        kinds = {parameter.kind for parameter in inspect.signature(forward).parameters.values()}
        if inspect.Parameter.VAR_KEYWORD not in kinds:
            return False
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(layer.forward))))
    except (OSError, SyntaxError):
        return True
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == f"self.{name}"]
    return all(any(keyword.arg is None for keyword in call.keywords) for call in calls)


def _attention_of(layer: nn.Module, index: int, count: int) -> dict[str, nn.Module]:
    """Return the attention modules of a layer by their names in the layer; the layer must have `count` of them."""
    found = {name: child for name, child in layer.named_children() if hasattr(child, "is_causal")}
    if len(found) != count:
        got = ", ".join(found) or "none"
        wanted = f"model: expected {count} attention module{'s' if count > 1 else ''} in layer {index}"
        raise UnsupportedConfiguration([f"{wanted}, got {got}"])
    for name, module in found.items():
        if not _passes_keyword_arguments(type(layer), type(module), name):
            wanted = f"model: expected layers that pass all keyword arguments on to {name}"
            raise UnsupportedConfiguration([f"{wanted}, got {type(layer).__name__} in layer {index}"])
    return found


def _decoder_stack(model: PreTrainedModel, base: Any) -> Stack:
    """Return the stack of a decoder-only model."""
    layers = _layers_of(model, base)
    if model.config is not base.config:
        GQAConfig.from_hf(model.config)  # raises for a model with several parts, such as text and images
    modules, configs = {}, {}
    for index, layer in enumerate(layers):
        if getattr(layer, "encoder_attn", None) is not None:
            wanted = "model: expected a decoder together with its encoder"
            got = f"{type(model).__name__}, whose decoder has cross attention (encoder_attn) but no encoder"
            raise UnsupportedConfiguration([f"{wanted}, got {got}"])
        (name, module), *_ = _attention_of(layer, index, 1).items()
        name = f"layers.{index}.{name}"
        modules[name], configs[name] = module, GQAConfig.from_hf(base.config, index)
        got = configs[name].attention_type
        if got is not AttentionType.DECODER:
            raise UnsupportedConfiguration([f"model: expected causal attention at {name}, got {got.value}"])
    for name, config in configs.items():
        check(config.kv_sharing_layer in (None, *modules), f"model ({name})", "a cache of a layer of the model",
              config.kv_sharing_layer)  # fmt: skip
    return Stack(base, True, modules, configs)


def _coded_stacks(model: PreTrainedModel) -> tuple[Stack, Stack]:
    """Return the encoder and the decoder of an encoder-decoder model."""
    known = encoder_decoder_configs_from_hf(model.config)
    stacks = []
    for part, base in (("encoder", model.get_encoder()), ("decoder", model.get_decoder())):
        is_decoder = part == "decoder"
        modules, configs = {}, {}
        for index, layer in enumerate(_layers_of(model, base)):
            for name, module in _attention_of(layer, index, 2 if is_decoder else 1).items():
                path = f"{part}.layers.{index}.{name}"
                of_layers = known.encoder
                if is_decoder:
                    of_layers = known.decoder if name == "self_attn" else known.cross
                modules[path], configs[path] = module, of_layers[index]
        stacks.append(Stack(base, is_decoder, modules, configs))
    return tuple(stacks)


def attention_modules(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the attention modules of a model by name.

    The name is the path inside the decoder, such as "layers.0.self_attn". For an encoder-decoder model it begins with
    "encoder." or "decoder.".

    Raises:
        UnsupportedConfiguration: for the same reasons as `stacks_of`.
    """
    return {name: module for stack in stacks_of(model) for name, module in stack.modules.items()}


def gqa_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the `GQAAttention` layers of a model under `use_attention`, by the names of `attention_modules`.

    Raises:
        UnsupportedConfiguration: for the same reasons as `stacks_of`.
        ValueError: the model is not under `use_attention`.
    """
    layers = {}
    for name, module in attention_modules(model).items():
        served = module.__dict__.get(SERVED)
        check(isinstance(served, ServedModule), "model", "a model under use_attention", f"other attention at {name}")
        layers[name] = served.attention
    return layers


def layer_of(module: nn.Module) -> nn.Module:
    """Return the `GQAAttention` of an attention module of a model under `use_attention`."""
    return module.__dict__[SERVED].attention


def entry_of(module: nn.Module, dtype: torch.dtype) -> KeyValueEntry:
    """Return the cache that an attention module of a model under `use_attention` needs.

    Args:
        module: the attention module.
        dtype: dtype of keys and values.
    """
    device, layer = next(module.parameters()).device, layer_of(module)
    config = layer.config
    scales = None if layer.k_scale is None else (layer.k_scale.value, layer.v_scale.value)
    return KeyValueEntry(config.num_kv_heads, config.head_dim, layer.cache_format.dtype_for(dtype), device, scales)
