"""Find the fields of a transformers config that need an attention which this family does not implement.

A field counts only if attention itself depends on it. Rope, norms of queries and keys, gates on the output and scales
of the queries are the business of the model: they are applied before or after attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from ..checks import short_text
from ..hf_values import enables

# fields with the config of a part of a model; a config with such a field describes several models
_PARTS = (
    "text_config", "vision_config", "audio_config", "speech_config", "thinker_config", "talker_config", "llm_config",
    "language_config", "encoder_config", "decoder_config", "audio_encoder_config", "depth_decoder_config",
    "codec_config", "patcher_config", "global_config", "vq_config", "perceiver_config", "encoder", "decoder",
)  # fmt: skip

_IMAGE_RANGES = "bidirectional ranges of image tokens are not implemented"  # such tokens attend each other
_IMAGE_TOKENS = ("image_token_index", "image_token_id")  # fields with the token that stands for an image

# {feature that is not implemented: fields of transformers configs that enable the feature}
_OTHER_ATTENTION: Mapping[str, tuple[str, ...]] = {
    "latent attention is not implemented in this family (use MLAConfig.from_hf)": ("kv_lora_rank",),
    "block-sparse attention is not implemented": (
        "blocksparse_block_size", "blocksparse_num_local_blocks", "blocksparse_vert_stride",
        "blocksparse_homo_head_pattern", "dense_attention_every_n_layers", "sparse_attention", "use_sparse_attention",
        "sparse_attention_config", "moba_chunk_size", "moba_topk", "dual_chunk_attention_config",
    ),
    "sparse-attention indexers are not implemented": ("index_topk", "index_n_heads", "index_head_dim"),
    "relative position biases are not implemented": (
        "relative_attention", "has_relative_attention_bias", "use_relative_position_bias",
        "relative_attention_num_buckets", "relative_max_distance", "position_bias_num_buckets",
    ),
    "attention that is not causal is not implemented": (
        "use_bidirectional_attention", "bidirectional_attention", "prefix_lm", "use_prefix_lm",
    ),
    _IMAGE_RANGES: ("mm_tokens_per_image",),
    "cross attention is not implemented for decoders without an encoder": (
        "add_cross_attention", "cross_attention_layers", "cross_attention_hidden_size", "cross_attention_frequency",
        "cross_layer_interval",
    ),
    "decoders of encoder-decoder models are not implemented without their encoder": ("decoder_attention_heads",),
    "layers without attention are not implemented": (
        "mamba_d_state", "mamba_num_heads", "mamba_expand", "ssm_state_size", "state_size", "layers_block_type",
        "hybrid_override_pattern", "block_types", "attn_layer_period", "attn_layer_indices",
    ),
    "windows under this name are not implemented (only sliding_window)": (
        "attention_window", "attention_window_size", "window_size", "sliding_window_size", "local_window_size",
    ),
    "softcapping of the scores under this name is not implemented (only attn_logit_softcapping)": (
        "attention_logit_softcapping", "attention_logit_cap", "attn_logit_softcap", "attn_logits_soft_cap",
        "attention_softcap", "logits_soft_cap",
    ),
    "heads that differ between layers are not implemented under this name (only per_layer_config)": (
        "global_head_dim", "num_global_key_value_heads", "swa_head_dim", "swa_num_attention_heads",
        "swa_num_key_value_heads",
    ),
    "differential attention is not implemented": ("lambda_std_dev",),
    "masks that depend on the values are not implemented": ("keep_window_size",),
    "this way to share keys and values is not implemented (only num_kv_shared_layers)": ("use_cla", "cla_share_factor"),
}  # fmt: skip

# {switch: fields that have no effect if the config has the switch and the switch is off}
_SWITCHES: Mapping[str, tuple[str, ...]] = {"use_cla": ("cla_share_factor",)}

# {model type: why its attention is refused although its fields look ordinary}
_OTHER_MODELS: Mapping[str, str] = {
    "deepseek_ocr2_encoder": "attention that is causal for a part of the tokens is not implemented",
    "jetmoe": "query heads that are divided among the key/value heads in another order are not implemented",
    "openai_privacy_filter": "attention that is not causal is not implemented for this model",
    "t5_gemma_module": "a part of an encoder-decoder model is not implemented",
    "t5gemma2_decoder": "a part of an encoder-decoder model is not implemented",
    "t5gemma2_text": "a part of an encoder-decoder model is not implemented",
    "ultrabert": "attention that is not causal is not implemented for this model",
    "xlnet": "two-stream attention is not implemented",
}


def composite_reasons(config: Any, model_type: str) -> list[str]:
    """Return a reason for each field of a config that describes several models, such as a text and a vision model."""
    parts = [name for name in _PARTS if enables(getattr(config, name, None))]
    text = "text_config" in parts
    reasons = [
        f"config.{name}: models with several parts are not implemented"
        + ("; pass config.text_config, the config of the text model" if text else "")
        + f", got {type(getattr(config, name)).__name__} in a config of {model_type!r}"
        for name in (["text_config"] if text else parts)
    ]
    if text:
        reasons += _image_ranges(config)
    if enables(getattr(config, "is_encoder_decoder", None)):
        reasons.append("config.is_encoder_decoder: expected False, or a call of encoder_decoder_configs_from_hf, got "
                       f"{short_text(config.is_encoder_decoder)}")  # fmt: skip
    return reasons


def _image_ranges(config: Any) -> list[str]:
    """Return a reason for each field of a config with a text config that makes image tokens attend each other.

    An image token alone is no such field: in models such as Llama 4, image tokens are attended causally.
    """
    found = next((name for name in _IMAGE_TOKENS if getattr(config, name, None) is not None), None)
    token = "" if found is None else f" ({found} {short_text(getattr(config, found))})"
    reasons = []
    if enables(count := getattr(config, "mm_tokens_per_image", None)):
        reasons.append(f"config.mm_tokens_per_image: {_IMAGE_RANGES}, got {short_text(count)}{token}")
    asked = getattr(config.text_config, "use_bidirectional_attention", None)
    if asked == "vision" or (enables(asked) and asked != "all" and found is not None):
        reasons.append(
            f"config.text_config.use_bidirectional_attention: {_IMAGE_RANGES}, got {short_text(asked)}{token}"
        )
    return reasons


def refused_fields(config: Any, model_type: str, path: str = "config", ignored: tuple[str, ...] = ()) -> list[str]:
    """Return a reason for each field of a transformers config that enables a feature that is not implemented.

    Args:
        config: the config.
        model_type: name of the architecture.
        path: name of the config in the reasons.
        ignored: names of fields that the caller implements.
    """
    reasons = []
    if path == "config" and model_type in _OTHER_MODELS:
        reasons.append(f"config.model_type: {_OTHER_MODELS[model_type]}, got {model_type!r}")
    switched_off = [
        name
        for switch, names in _SWITCHES.items()
        if (value := getattr(config, switch, None)) is not None and not enables(value)
        for name in names
    ]
    for what, names in _OTHER_ATTENTION.items():
        asked = {name: getattr(config, name, None) for name in names if name not in (*switched_off, *ignored)}
        for name, value in asked.items():
            if enables(value):  # Gemma 4 has "vision" for image tokens, and "all" for all tokens
                named = _IMAGE_RANGES if name == "use_bidirectional_attention" and value == "vision" else what
                reasons.append(f"{path}.{name}: {named}, got {short_text(value)}")
    if enables(local := getattr(config, "local_attention", None)) and getattr(config, "sliding_window", None) is None:
        reasons.append(f"{path}.local_attention: windows under this name are not implemented (only sliding_window), "
                       f"got {short_text(local)}")  # fmt: skip
    for name in ("is_causal", "causal"):
        value = getattr(config, name, None)
        if value is not None and not (isinstance(value, int) and value == 1):
            reasons.append(f"{path}.{name}: attention that is not causal is not implemented, got {short_text(value)}")
    for name in ("position_embedding_type", "position_biased_input_type"):
        value = getattr(config, name, None)
        if isinstance(value, str) and value.startswith(("relative", "alibi")):
            reasons.append(f"{path}.{name}: position biases of the scores are not implemented, got {short_text(value)}")
    kind = getattr(config, "attention_type", None)
    if isinstance(kind, str) and "sparse" in kind:
        reasons.append(f"{path}.attention_type: block-sparse attention is not implemented, got {short_text(kind)}")
    sources = getattr(config, "kv_source_layers", None)  # for each layer: the layer whose keys and values it reads
    if enables(sources) and not (isinstance(sources, list | tuple) and list(sources) == list(range(len(sources)))):
        reasons.append(f"{path}.kv_source_layers: this way to share keys and values is not implemented "
                       f"(only num_kv_shared_layers), got {short_text(sources)}")  # fmt: skip
    nested = getattr(config, "attn_config", None) if path == "config" else None  # some configs nest these fields
    if isinstance(nested, Mapping):
        nested = SimpleNamespace(**{str(name): value for name, value in nested.items()})
    if isinstance(nested, bool | int | float | str | list | tuple):
        if enables(nested):
            reasons.append(f"config.attn_config: expected a dict or None, got {short_text(nested)}")
    elif nested is not None:
        reasons += refused_fields(nested, model_type, "config.attn_config")
    return reasons
