"""Read the attention fields of a transformers config; find fields that need a feature that is not implemented."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from .checks import MOST_NUMBER, check, check_int, check_type, short_text
from .errors import UnsupportedConfiguration
from .hf_values import enables
from .rope_config import RopeConfig, YarnConfig

# {feature that is not implemented: fields of transformers configs that enable the feature}
_OTHER_ATTENTION: Mapping[str, tuple[str, ...]] = {
    "sliding windows are": (
        "sliding_window", "sliding_window_size", "attention_window", "attention_window_size", "window_size",
        "local_attention", "local_window_size",
    ),
    "attention in chunks is": ("attention_chunk_size",),
    "softcapping of the scores is": (
        "attn_logit_softcapping", "attention_logit_softcapping", "attention_logit_cap", "attn_logit_softcap",
        "attn_logits_soft_cap", "attention_softcap", "logits_soft_cap",
    ),
    "ALiBi is": ("alibi", "use_alibi", "alibi_bias_max"),
    "relative position biases are": (
        "relative_attention", "has_relative_attention_bias", "use_relative_position_bias",
    ),
    "layers that share keys and values are": (
        "num_kv_shared_layers", "attention_k_eq_v", "use_cla", "cla_share_factor",
    ),
    "attention that is not causal is": ("use_bidirectional_attention",),
    "encoder or cross attention is": (
        "is_encoder", "is_encoder_decoder", "add_cross_attention", "cross_attention_layers",
        "cross_attention_hidden_size", "cross_attention_frequency", "cross_layer_interval",
    ),
    "layers without rope are": ("mla_use_nope", "use_mla_nope", "no_rope"),
    "rope parameters that differ between layers are": ("layer_rope_theta", "rope_scaling_layers"),
    "attention sinks are": (
        "attention_sinks", "use_attention_sinks", "add_full_attention_sink_bias", "add_swa_attention_sink_bias",
    ),
    "norms of queries and keys are": (
        "use_qk_norm", "qk_norm", "use_qk_layernorm", "qk_layernorm", "qk_layer_norms", "qk_ln", "qk_norm_type",
    ),
    "clipping of queries, keys and values is": ("clip_qkv", "qk_l2_clip_threshold"),
    "another scale of the scores is": (
        "query_pre_attn_scalar", "attention_multiplier", "attn_scale", "qk_scale_factor", "key_multiplier",
        "scale_attn_by_inverse_layer_idx",
    ),
    "a scale that depends on the position is": ("attn_temperature_tuning", "log_scaling_n_floor"),
    "scaling of values or outputs is": (
        "attention_value_scale", "attention_in_multiplier", "attention_out_multiplier",
    ),
    "gates on the output of attention are": (
        "attn_output_gate", "attention_output_gate", "use_attention_gate", "use_gated_attention", "gated_attn",
    ),
}  # fmt: skip

# {switch: fields that have no effect if the config has the switch and the switch is off}
_SWITCHES: Mapping[str, tuple[str, ...]] = {
    "use_sliding_window": _OTHER_ATTENTION["sliding windows are"],
    "alibi": ("alibi_bias_max",),
    "use_cla": ("cla_share_factor",),
}


def _list_of(config: Any, path: str, name: str, reasons: list[str]) -> list[Any]:
    """Return the elements of a field that has one element for each layer.

    The result is empty if the field is missing, or if its value is neither a list nor a tuple. For a value of another
    type that enables a feature (`enables`), the function also adds a reason to `reasons`.
    """
    value = getattr(config, name, None)
    if isinstance(value, list | tuple):
        return list(value)
    if enables(value):
        reasons.append(f"{path}.{name}: expected a list or None, got {short_text(value)}")
    return []


def _other_attention(config: Any, path: str = "config") -> list[str]:
    """Return a reason for each field of a transformers config that enables a feature that is not implemented."""
    reasons = []
    switched_off = [
        name
        for switch, names in _SWITCHES.items()
        if (value := getattr(config, switch, None)) is not None and not enables(value)
        for name in names
    ]
    for what, names in _OTHER_ATTENTION.items():
        asked = {name: getattr(config, name, None) for name in names if name not in switched_off}
        reasons += [f"{path}.{name}: {what} not implemented, got {short_text(value)}" for name, value in asked.items()
                    if enables(value)]  # fmt: skip
    layer_types = _list_of(config, path, "layer_types", reasons)
    if others := dict.fromkeys(short_text(kind) for kind in layer_types if kind != "full_attention"):
        reasons.append(f"{path}.layer_types: only 'full_attention' is implemented, got {', '.join(others)}")
    for name in ("is_causal", "causal"):
        value = getattr(config, name, None)
        if value is not None and not (isinstance(value, int) and value == 1):
            reasons.append(f"{path}.{name}: attention that is not causal is not implemented, got {short_text(value)}")
    position = getattr(config, "position_embedding_type", None)
    if position is not None and not (isinstance(position, str) and position in ("rope", "rotary")):
        reasons.append(f"{path}.position_embedding_type: only 'rope' is implemented, got {short_text(position)}")
    rope_layers = _list_of(config, path, "no_rope_layers", reasons)  # 1: the layer has rope; 0: the layer has no rope
    if not all(map(enables, rope_layers)):
        reasons.append(f"{path}.no_rope_layers: layers without rope are not implemented, got {short_text(rope_layers)}")
    sources = _list_of(config, path, "kv_source_layers", reasons)  # for each layer: the layer whose KV cache it reads
    if not all(isinstance(source, int) and source == layer for layer, source in enumerate(sources)):
        reasons.append(f"{path}.kv_source_layers: layers that share keys and values are not implemented, "
                       f"got {short_text(sources)}")  # fmt: skip
    nested = getattr(config, "attn_config", None) if path == "config" else None  # some configs nest these fields
    if isinstance(nested, Mapping):
        nested = SimpleNamespace(**{str(name): value for name, value in nested.items()})
    if isinstance(nested, bool | int | float | str | list | tuple):
        if enables(nested):
            reasons.append(f"config.attn_config: expected a dict or None, got {short_text(nested)}")
    elif nested is not None:
        reasons += _other_attention(nested, "config.attn_config")
    return reasons


def _rope_from_hf(config: Any, model_type: str) -> RopeConfig:
    """Return the rotary parameters of a transformers config; raise an error with every unsupported parameter."""
    fields = ("rope_parameters", "rope_scaling")  # `rope_scaling` is the older name
    field = next((name for name in fields if enables(getattr(config, name, None))), fields[0])
    given = getattr(config, field, None) if enables(getattr(config, field, None)) else {}
    if not isinstance(given, Mapping):
        raise UnsupportedConfiguration([f"config.{field}: expected a dict or None, got {short_text(given)}"])
    parameters = dict(given)
    reasons = []

    def number(name: str, default: float | None, *, beside: bool = False) -> Any:
        """Return the rope parameter `name`, or `default` if the parameter is missing or not a number.

        With `beside`, a parameter that is missing in `config.{field}` is read from `config.{name}`.
        """
        at, value = f"config.{field}[{name!r}]", parameters.get(name)
        if beside and value is None:
            at, value = f"config.{name}", getattr(config, name, None)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < MOST_NUMBER:
            reasons.append(f"{at}: expected a finite number, got {short_text(value)}")
            return default
        return value

    kind = next((parameters[name] for name in ("rope_type", "type") if enables(parameters.get(name))), "default")
    theta = float(number("rope_theta", 10000.0, beside=True))
    if theta <= 1:
        reasons.append(f"config.rope_theta: expected a number above 1, got {theta}")
    interleaved = getattr(config, "rope_interleave", None)
    if model_type == "deepseek_v2":
        interleaved = True  # DeepSeek-V2 rotates pairs of neighbours, and its config lacks the field
    if not isinstance(interleaved, bool):
        got = f"no value for model type {model_type!r}" if interleaved is None else short_text(interleaved)
        reasons.append(f"config.rope_interleave: expected True or False, got {got}")
    if kind not in ("default", "yarn"):
        got = short_text(kind)
        reasons.append(f"config.{field}: rope type {got} is not implemented; expected default or yarn")
    if kind == "yarn" and parameters.get("attention_factor") is not None:
        reasons.append(f"config.{field}: an explicit attention_factor is not implemented")
    if kind == "yarn" and not enables(parameters.get("truncate", True)):
        reasons.append(f"config.{field}: truncate=False is not implemented")
    original = number("original_max_position_embeddings", None)
    if kind == "yarn" and not original:
        reasons.append(f"config.{field}: YaRN needs original_max_position_embeddings, got none")
    if nested := [str(name) for name, value in parameters.items() if isinstance(value, Mapping)]:
        reasons.append(f"config.{field}: rope parameters that differ between layers are not implemented, "
                       f"got {', '.join(nested)}")  # fmt: skip
    reasons += [
        f"config.{field}: {name} is not implemented, got {short_text(parameters[name])}"
        for name in ("llama_4_scaling_beta", "mrope_section")
        if enables(parameters.get(name))
    ]
    if (factor := number("partial_rotary_factor", 1.0, beside=True)) != 1:
        reasons.append(f"config.{field}: a partial_rotary_factor is not implemented, got {factor}")
    longest, yarn = number("max_position_embeddings", None, beside=True), None
    if kind == "yarn":
        factor = number("factor", longest / original if longest and original else None)
        if factor is None:
            reasons.append(f"config.{field}: YaRN needs a factor or max_position_embeddings, got neither")
        try:
            yarn = YarnConfig(
                factor=1.0 if factor is None else float(factor),
                original_max_position_embeddings=int(original or 1),
                beta_fast=float(number("beta_fast", 32.0)),
                beta_slow=float(number("beta_slow", 1.0)),
                mscale=number("mscale", None),
                mscale_all_dim=number("mscale_all_dim", None),
            )
        except ValueError as error:
            reasons.append(f"config.{field}: {error}")
    if reasons:
        raise UnsupportedConfiguration(reasons)
    return RopeConfig(theta=theta, interleaved=bool(interleaved), yarn=yarn)


def fields_from_hf(config: Any) -> dict[str, Any]:
    """Return the arguments of `MLAConfig` for a transformers config, as `MLAConfig.from_hf` describes."""
    required = (
        "hidden_size", "num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
    )  # fmt: skip
    model_type = getattr(config, "model_type", type(config).__name__)
    check_type("config.model_type", model_type, str)
    missing = [name for name in required if getattr(config, name, None) is None]
    if missing:
        wanted = f"config: expected a Multi-head Latent Attention model, got {model_type!r}"
        raise UnsupportedConfiguration([f"{wanted} without {', '.join(missing)}"])
    reasons = [
        f"config.{name}: latent scaling is not implemented, got {short_text(getattr(config, name))}"
        for name in ("mla_scale_q_lora", "mla_scale_kv_lora")
        if enables(getattr(config, name, None))
    ]
    if model_type == "longcat_flash" and not reasons:  # transformers scales the latents even if both fields are off
        reasons.append("config.model_type: latent scaling is not implemented, got 'longcat_flash'")
    if enables(top_k := getattr(config, "index_topk", None)):
        reasons.append(f"config.index_topk: sparse-attention indexers are not implemented, got {short_text(top_k)}")
    reasons += _other_attention(config)
    rope = RopeConfig()
    try:
        rope = _rope_from_hf(config, model_type)
    except UnsupportedConfiguration as error:
        reasons += error.reasons
    if reasons:
        raise UnsupportedConfiguration(reasons)
    q_lora_rank = getattr(config, "q_lora_rank", None)
    for name in required:
        check_int(f"config.{name}", getattr(config, name), 0 if name == "qk_rope_head_dim" else 1)
    check(config.qk_rope_head_dim % 2 == 0, "config.qk_rope_head_dim", "an even int", config.qk_rope_head_dim)
    if enables(q_lora_rank):
        check_int("config.q_lora_rank", q_lora_rank, 1, "a positive int or None")
    return dict(
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        q_lora_rank=q_lora_rank or None,
        kv_lora_rank=config.kv_lora_rank,
        qk_nope_head_dim=config.qk_nope_head_dim,
        qk_rope_head_dim=config.qk_rope_head_dim,
        v_head_dim=config.v_head_dim,
        rope=rope,
    )
