"""Read the configs of grouped-query attention from a transformers config.

The fields describe the call of attention alone: queries and keys arrive as transformers passes them. A model that
scales its queries before the call, such as OPT, therefore has a scale of 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..checks import check, check_int, check_type, is_positive_number, short_text
from ..errors import UnsupportedConfiguration
from ..hf_values import enables, is_given, is_switched_on
from .alibi import mpt_alibi_slopes, standard_alibi_slopes
from .attention_type import AttentionType
from .dims import head_dim_reason
from .hf_refusals import composite_reasons, refused_fields

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"  # values of `layer_types`

# models whose queries are scaled before the call of attention, or whose scores have no scale
_SCALE_ONE = frozenset({"gemma3n_text", "gemma4_text", "gemma4_unified_text", "opt"})
# models with attention sinks in every layer; their configs have no field for the sinks
_SINKS = frozenset({"flint", "gpt_oss", "granite_swa", "granitemoe_swa"})
# models whose attention does not read `attn_logit_softcapping`, although their configs have it
_NO_SOFT_CAP = frozenset({"gemma3_text", "gemma3n_text"})
# models whose windows or attention chunks differ between layers, so that their configs need `layer_types`
_NEEDS_LAYER_TYPES = frozenset({
    "cohere2", "cohere2_moe", "exaone4", "flint", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "gpt_oss",
    "granite_swa", "granitemoe_swa", "lfm2", "lfm2_moe", "llama4_text", "modernbert", "modernbert-decoder", "olmo3",
    "vaultgemma",
})  # fmt: skip
# models that attend all tokens of a request, unless their config has `is_decoder`
_ENCODER_ONLY = frozenset({
    "albert", "bert", "bert-generation", "camembert", "data2vec-text", "distilbert", "electra", "ernie", "eurobert",
    "gte", "jina_embeddings_v3", "modernbert", "nomic_bert", "roberta", "roberta-prelayernorm", "roc_bert",
    "xlm-roberta", "xlm-roberta-xl", "xmod",
})  # fmt: skip
# causal language models whose configs may lack one of `_DECODER_FIELDS`
_DECODERS = frozenset({
    "biogpt", "bloom", "codegen", "ctrl", "dbrx", "falcon", "gemma", "gemma2", "gemma3_text", "gemma3n_text", "gpt2",
    "gpt-sw3", "gpt_bigcode", "gpt_neox", "gpt_oss", "gptj", "imagegpt", "llama", "llama4_text", "ministral",
    "ministral3", "mistral", "mixtral", "modernbert-decoder", "mpt", "opt", "persimmon", "phi", "phi3", "qwen2",
    "qwen2_moe", "qwen3", "qwen3_moe",
})  # fmt: skip
_DECODER_FIELDS = ("num_key_value_heads", "vocab_size", "use_cache")  # fields of every other causal language model


class _Model(NamedTuple):
    """The fields of a transformers config that all layers share.

    Attributes:
        config: the config.
        model_type: name of the architecture.
        attention_type: attention type of all layers.
        layers: the config of each layer; the same object for all layers if they do not differ.
        layer_types: type of each layer, such as "sliding_attention"; None if the config has none.
    """

    config: Any
    model_type: str
    attention_type: AttentionType
    layers: Sequence[Any]
    layer_types: Sequence[str] | None


def configs_from_hf(config: Any) -> tuple[dict[str, Any], ...]:
    """Return the fields of the `GQAConfig` of each layer that a transformers config describes.

    Fields with their default value are left out.

    Args:
        config: config of a decoder, or of an encoder without a decoder; an object with the attributes of such a config
            is enough.

    Raises:
        TypeError: `model_type` is not a str.
        ValueError: a field has an invalid value.
        UnsupportedConfiguration: the config describes another kind of attention, or a feature that is not implemented.
            The exception lists every reason.
    """
    model_type = getattr(config, "model_type", type(config).__name__)
    check_type("config.model_type", model_type, str)
    if reasons := composite_reasons(config, model_type):
        raise UnsupportedConfiguration(reasons)
    required = ("num_attention_heads", "num_hidden_layers")
    if missing := [name for name in required if not _has(config, name)]:
        wanted = f"config: expected a model with grouped-query attention, got {model_type!r}"
        raise UnsupportedConfiguration([f"{wanted} without {', '.join(missing)}"])
    check_int("config.num_hidden_layers", config.num_hidden_layers)
    lacks = [name for name in _DECODER_FIELDS if not _has(config, name)]
    if lacks and model_type not in _DECODERS | _ENCODER_ONLY:
        raise UnsupportedConfiguration([f"config: expected a causal language model, got {model_type!r} without "
                                        f"{', '.join(lacks)}"])  # fmt: skip
    reasons = []
    layers = _layer_configs(config, reasons)
    for each in {id(each): each for each in layers}.values():
        reasons += refused_fields(each, model_type)
    encoder = model_type in _ENCODER_ONLY and not is_switched_on(config, "is_decoder")
    kind = AttentionType.ENCODER_ONLY if encoder else AttentionType.DECODER
    model = _Model(config, model_type, kind, layers, _layer_types(config, model_type, reasons))
    found = [_layer_fields(model, layer, reasons) for layer in range(len(layers))]
    for layer, source in _shared_layers(model, reasons).items():
        found[layer]["kv_sharing_layer"] = f"layers.{source}.self_attn"
    if reasons:
        raise UnsupportedConfiguration(dict.fromkeys(reasons))
    return tuple(found)


def _has(config: Any, name: str) -> bool:
    """Return whether a config has a field. A field that differs between layers is present, but cannot be read."""
    try:
        return getattr(config, name, None) is not None
    except RuntimeError:  # transformers raises it for such a field
        return True


def _layer_configs(config: Any, reasons: list[str]) -> Sequence[Any]:
    """Return the config of each layer. They differ if the config has `per_layer_config`, as Gemma 4 has."""
    count, given = config.num_hidden_layers, getattr(config, "per_layer_config", None)
    listed = isinstance(given, Sequence) and not isinstance(given, str)
    if listed and len(given) > 0 and enables(getattr(config, "is_heterogeneous", True)):
        if len(given) == count:
            layers = [given[layer] for layer in range(count)]
            skipped = [layer for layer, each in enumerate(layers) if enables(getattr(each, "skip", None))]
            if skipped:
                wanted = "config.per_layer_config: layers that skip a module are not implemented"
                reasons.append(f"{wanted}, got layer {skipped[0]}")
            return layers
        reasons.append(f"config.per_layer_config: expected a config of each of {count} layers, got {len(given)}")
    elif not listed and enables(given):
        reasons.append(f"config.per_layer_config: expected a list of configs or None, got {short_text(given)}")
    return [config] * count


def _layer_types(config: Any, model_type: str, reasons: list[str]) -> Sequence[str] | None:
    """Return the type of each layer, or None if the config has no such field."""
    given, count = getattr(config, "layer_types", None), config.num_hidden_layers
    if not enables(given):
        needed = ["sliding_window_pattern", "attention_chunk_size"]
        needed += ["use_sliding_window"] if model_type == "qwen2_moe" else []
        if model_type in _NEEDS_LAYER_TYPES or any(enables(getattr(config, name, None)) for name in needed):
            wanted = f"config.layer_types: expected the type of each layer of {model_type!r}"
            reasons.append(f"{wanted}, got {short_text(given)}")
        return None
    if not isinstance(given, list | tuple):
        reasons.append(f"config.layer_types: expected a list or None, got {short_text(given)}")
        return None
    check(len(given) == count, "config.layer_types", f"one type for each of {count} layers", len(given))
    if others := dict.fromkeys(short_text(kind) for kind in given if kind not in (FULL, SLIDING, CHUNKED)):
        reasons.append(f"config.layer_types: only {FULL!r}, {SLIDING!r} and {CHUNKED!r} are implemented, "
                       f"got {', '.join(others)}")  # fmt: skip
    return given


def _layer_fields(model: _Model, layer: int, reasons: list[str]) -> dict[str, Any]:
    """Return the fields of the `GQAConfig` of one layer; add a reason for each field that is not supported."""
    config = model.layers[layer]
    heads = config.num_attention_heads
    if enables(given := getattr(model.config, "num_attention_heads_per_layer", None)):
        check_type("config.num_attention_heads_per_layer", given, (list, tuple), "a list or None")
        check(len(given) == len(model.layers), "config.num_attention_heads_per_layer",
              f"one number for each of {len(model.layers)} layers", len(given))  # fmt: skip
        heads = given[layer]
    check_int("config.num_attention_heads", heads)
    kv_heads = _kv_heads(config, model.model_type, heads)
    check_int("config.num_key_value_heads", kv_heads)
    check(heads % kv_heads == 0, "config.num_attention_heads", f"a multiple of num_key_value_heads {kv_heads}", heads)
    head_dim = getattr(config, "head_dim", None)
    if not enables(head_dim):
        hidden = getattr(config, "hidden_size", None)
        check_int("config.hidden_size", hidden)
        check(hidden % heads == 0, "config.hidden_size", f"a multiple of num_attention_heads {heads}", hidden)
        head_dim = hidden // heads
    if reason := head_dim_reason(head_dim, "config.head_dim"):
        reasons.append(reason)
    value_dim = getattr(config, "v_head_dim", None)
    if enables(value_dim):
        check_int("config.v_head_dim", value_dim, 1, "a positive int or None")
    if enables(value_dim) and value_dim != head_dim:
        reasons.append(f"config.v_head_dim: expected the head dim {head_dim}, got {short_text(value_dim)}")
    fields = dict(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim)
    if model.attention_type is not AttentionType.DECODER:
        fields["attention_type"] = model.attention_type
    if (scale := _scale(config, model.model_type, layer, head_dim)) is not None:
        fields["scale"] = scale
    if is_given(cap := getattr(config, "attn_logit_softcapping", None)):
        if model.model_type in _NO_SOFT_CAP:
            wanted = f"expected None for {model.model_type!r}, whose attention ignores it"
            reasons.append(f"config.attn_logit_softcapping: {wanted}, got {short_text(cap)}")
        _check_positive("config.attn_logit_softcapping", cap)
        fields["logits_soft_cap"] = float(cap)
    fields |= _mask(model, layer, reasons)
    if _sinks(config, model.model_type, model.layer_types[layer] if model.layer_types else FULL):
        fields["attention_sinks"] = True
    if slopes := _alibi_slopes(config, model.model_type, heads, reasons):
        fields["alibi_slopes"] = slopes
    return fields


def _kv_heads(config: Any, model_type: str, heads: int) -> Any:
    """Return the number of key/value heads, which is a field of its own in some models."""
    if model_type == "falcon":
        one = is_switched_on(config, "multi_query") and not is_switched_on(config, "new_decoder_architecture")
        return 1 if one else getattr(config, "num_kv_heads", None) or heads
    found = getattr(config, "num_key_value_heads", None)
    if found is None and model_type == "gpt_bigcode" and is_switched_on(config, "multi_query", True):
        return 1
    if found is None:
        found = _nested(config, "kv_n_heads")
    return heads if found is None else found


def _nested(config: Any, name: str) -> Any:
    """Return a field of `attn_config`, in which MPT and DBRX have some fields of their attention; None if missing."""
    nested = getattr(config, "attn_config", None)
    return nested.get(name) if isinstance(nested, Mapping) else getattr(nested, name, None)


def _check_positive(argument: str, value: object) -> None:
    """Check that a field is a finite number above 0."""
    check(is_positive_number(value), argument, "a finite number above 0", short_text(value))


def _scale(config: Any, model_type: str, layer: int, head_dim: int) -> float | None:
    """Return the factor of the scores, or None for head_dim^-1/2."""
    if model_type in _SCALE_ONE:
        return 1.0
    if is_given(scalar := getattr(config, "query_pre_attn_scalar", None)):
        _check_positive("config.query_pre_attn_scalar", scalar)
        return float(scalar) ** -0.5
    if (factor := getattr(config, "attention_multiplier", None)) is not None:
        _check_positive("config.attention_multiplier", factor)
        return float(factor)
    if model_type == "mpt":
        factor = _nested(config, "softmax_scale")
        if factor is not None:
            _check_positive("config.attn_config.softmax_scale", factor)
        return factor
    scaled, by_layer = (
        is_switched_on(config, "scale_attn_weights", True),
        is_switched_on(config, "scale_attn_by_inverse_layer_idx"),
    )
    if scaled and not by_layer:
        return None
    return (head_dim**-0.5 if scaled else 1.0) / (layer + 1 if by_layer else 1)


def _mask(model: _Model, layer: int, reasons: list[str]) -> dict[str, int]:
    """Return the window or the attention chunk of a layer, if it has one."""
    config = model.layers[layer]
    kind = model.layer_types[layer] if model.layer_types else None
    window = getattr(config, "sliding_window", None)
    if not is_switched_on(config, "use_sliding_window", True):
        window = None
    if kind == CHUNKED:
        size = getattr(config, "attention_chunk_size", None)
        check_int("config.attention_chunk_size", size, 1, f"a positive int for layers of type {CHUNKED!r}")
        return dict(attention_chunk_size=size)
    if kind == SLIDING:
        check_int("config.sliding_window", window, 1, f"a positive int for layers of type {SLIDING!r}")
    elif kind is not None or not is_given(window):
        return {}
    elif (first := getattr(config, "max_window_layers", None)) is not None:
        check_int("config.max_window_layers", first, 0)
        if layer < first:
            return {}
    check_int("config.sliding_window", window, 1, "a positive int or None")
    # in an encoder, transformers counts the tokens on one side of the token, which is not one of them
    return dict(sliding_window=window if model.attention_type is AttentionType.DECODER else window + 1)


def _sinks(config: Any, model_type: str, kind: str) -> bool:
    """Return whether a layer has attention sinks."""
    names = ["attention_sinks", "use_attention_sinks"]
    names.append("add_swa_attention_sink_bias" if kind == SLIDING else "add_full_attention_sink_bias")
    return model_type in _SINKS or any(is_switched_on(config, name) for name in names)


def _shared_layers(model: _Model, reasons: list[str]) -> dict[int, int]:
    """Return {layer: layer whose cache it reads} for the last layers, which share keys and values (Gemma 3n).

    Such a layer reads the cache of the last layer of its type that has a cache.
    """
    shared, count = getattr(model.config, "num_kv_shared_layers", None), len(model.layers)
    if not enables(shared):
        return {}
    check_int("config.num_kv_shared_layers", shared, 0, f"an int below num_hidden_layers {count}")
    check(shared < count, "config.num_kv_shared_layers", f"an int below num_hidden_layers {count}", shared)
    if model.layer_types is None:
        reasons.append("config.layer_types: expected the type of each layer for num_kv_shared_layers, got None")
        return {}
    own, sources = count - shared, {}
    for layer in range(own, count):
        kind = model.layer_types[layer]
        alike = [source for source in range(own) if model.layer_types[source] == kind]
        if not alike:
            wanted = f"expected a layer of type {kind!r} with a cache for layer {layer}"
            reasons.append(f"config.num_kv_shared_layers: {wanted}, got none before layer {own}")
            continue
        sources[layer] = alike[-1]
    return sources


def _alibi_slopes(config: Any, model_type: str, heads: int, reasons: list[str]) -> tuple[float, ...] | None:
    """Return the slopes of ALiBi, or None for a model without ALiBi."""
    if model_type == "bloom":
        return standard_alibi_slopes(heads)
    if model_type == "mpt":
        largest, used = (_nested(config, name) for name in ("alibi_bias_max", "alibi"))
        if used is not None and not enables(used):
            reasons.append("config.attn_config.alibi: models without ALiBi are not implemented, got False")
        if largest not in (None, 8):
            reasons.append(f"config.attn_config.alibi_bias_max: only 8 is implemented, got {short_text(largest)}")
        return mpt_alibi_slopes(heads)
    for name in ("alibi", "use_alibi"):
        if enables(value := getattr(config, name, None)):
            wanted = f"the ALiBi slopes of {model_type!r} are not implemented (only those of bloom and mpt)"
            reasons.append(f"config.{name}: {wanted}, got {short_text(value)}")
    return None
