"""What a layer is: dims, rotary parameters, presets; and the error of what cannot be served."""

from __future__ import annotations

import enum
import functools
import inspect
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .checks import check, check_flag, check_int, check_number, check_type


class UnsupportedConfiguration(ValueError):
    """A configuration that cannot be served, with every reason.

    Attributes:
        reasons: one clear line each; never empty.
    """

    def __init__(self, reasons: Iterable[str]):
        self.reasons = tuple(reasons)
        super().__init__("; ".join(self.reasons))


class QueryLenSupport(enum.Enum):
    """Which query lengths a decode kernel takes: one token, one length for the whole batch, or any."""

    SINGLE_ONLY = "single_only"
    UNIFORM = "uniform"
    VARLEN = "varlen"


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's m(f, a) = 0.1 a ln f + 1, and 1 where f <= 1 (arXiv 2309.00071, section 3.4, as DeepSeek uses it)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


@dataclass(frozen=True)
class YarnConfig:
    """YaRN context extension (arXiv 2309.00071) with DeepSeek's two magnitude scales.

    Attributes:
        factor: ratio of the extended to the original context.
        original_max_position_embeddings: context of pre-training, in tokens.
        beta_fast: rotations over the original context above which a frequency is left alone.
        beta_slow: rotations below which a frequency is divided by `factor`.
        mscale: numerator of the cos/sin magnitude, or None where the checkpoint gives none.
        mscale_all_dim: its denominator, and where given squared into the softmax scale.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None

    def __post_init__(self):
        for name in ("factor", "beta_fast", "beta_slow"):
            check_number(name, getattr(self, name))
            check(getattr(self, name) > 0, name, "a number above 0", getattr(self, name))
        check_int("original_max_position_embeddings", self.original_max_position_embeddings)
        for name in ("mscale", "mscale_all_dim"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name))

    @property
    def cos_sin_scale(self) -> float:
        """Factor of cos and sin: m(f, mscale) / m(f, mscale_all_dim), or m(f, 1) where either is absent."""
        if self.mscale and self.mscale_all_dim:
            return yarn_mscale(self.factor, self.mscale) / yarn_mscale(self.factor, self.mscale_all_dim)
        return yarn_mscale(self.factor, 1.0)


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of `q_pe` and `k_pe`.

    Attributes:
        theta: base of the geometric frequencies.
        interleaved: True pairs elements (0, 1), (2, 3), ..; False pairs (0, R/2), (1, R/2 + 1), ...
        yarn: YaRN parameters, or None for plain rotary.
    """

    theta: float = 10000.0
    interleaved: bool = True
    yarn: YarnConfig | None = None

    def __post_init__(self):
        check_number("theta", self.theta)
        check(self.theta > 1, "theta", "a number above 1", self.theta)
        check_flag("interleaved", self.interleaved)
        check_type("yarn", self.yarn, (YarnConfig, type(None)), "a YarnConfig or None")


PRESETS: Mapping[str, Mapping[str, int | None]] = {
    # Dims only, from the published configs. `MLAConfig.from_preset` adds the published rope.
    name: dict(
        zip(
            (
                "hidden_size",
                "num_heads",
                "q_lora_rank",
                "kv_lora_rank",
                "qk_nope_head_dim",
                "qk_rope_head_dim",
                "v_head_dim",
            ),
            dims,
            strict=True,
        )
    )
    for name, dims in {
        #                    H     N    Lq    Lkv   P    R   V
        "deepseek-v2-lite": (2048, 16, None, 512, 128, 64, 128),
        "deepseek-v2": (5120, 128, 1536, 512, 128, 64, 128),
        "deepseek-v3": (7168, 128, 1536, 512, 128, 64, 128),  # R1 has the same dims
        "kimi-k2": (7168, 64, 1536, 512, 128, 64, 128),
        "moonlight": (2048, 16, None, 512, 128, 64, 128),
        "minicpm3": (2560, 40, 768, 256, 64, 32, 64),
        "glm-5": (6144, 64, 2048, 512, 192, 64, 256),
        "longcat-flash": (6144, 64, 1536, 512, 128, 64, 128),
    }.items()
}


def _published_yarn(factor: float, mscale: float, beta_fast: float = 32.0) -> YarnConfig:
    """YaRN over a pre-training context of 4096 tokens, both magnitude scales equal, `beta_slow` 1."""
    return YarnConfig(factor, 4096, beta_fast, 1.0, mscale, mscale)


# The published rope of each preset; None where `RopeConfig` cannot express it.
_PRESET_ROPES: Mapping[str, RopeConfig | None] = {
    # github.com/NVIDIA-NeMo/Megatron-Bridge, src/megatron/bridge/models/deepseek/deepseek_provider.py (V2, V2-Lite, V3,
    # Moonlight) and kimi/kimi_provider.py (Kimi-K2-Instruct; Kimi-K2-Instruct-0905 has factor 64)
    "deepseek-v2-lite": RopeConfig(10000.0, True, _published_yarn(40.0, 0.707)),
    "deepseek-v2": RopeConfig(10000.0, True, _published_yarn(40.0, 0.707)),
    "deepseek-v3": RopeConfig(10000.0, True, _published_yarn(40.0, 1.0)),
    "kimi-k2": RopeConfig(50000.0, True, _published_yarn(32.0, 1.0, beta_fast=1.0)),
    "moonlight": RopeConfig(50000.0, True),
    # config.json of huggingface.co/openbmb/MiniCPM3-4B: LongRoPE, a divisor of its own for every pair
    "minicpm3": None,
    # github.com/radixark/miles, scripts/models/glm5-744B-A40B.sh; pairs as in transformers' glm_moe_dsa
    "glm-5": RopeConfig(1e6, True),
    # config.json of huggingface.co/mlx-community/LongCat-Flash-Chat-bf16; pairs as in transformers' longcat_flash
    "longcat-flash": RopeConfig(1e7, True),
}


if TYPE_CHECKING:

    class _SoftmaxScale:
        """A number or None to the constructor, a number to readers."""

        def __get__(self, config: object, owner: object) -> float: ...

        def __set__(self, config: object, value: float | None) -> None: ...


def _take_softmax_scale(cls: type[MLAConfig]) -> type[MLAConfig]:
    """Let the constructor take `softmax_scale`, and keep it in the field `given_softmax_scale`.

    `dataclasses.replace` reads every field of a config and passes it on by the same name. Of a field called
    `softmax_scale` it would read the computed number, and the copy would keep that number as a given one. Where
    `replace` is given a `softmax_scale`, the constructor gets both names, and `softmax_scale` counts.
    """
    generated = cls.__init__

    @functools.wraps(generated)
    def __init__(self: MLAConfig, *args: Any, **fields: Any) -> None:
        if "softmax_scale" in fields:
            fields["given_softmax_scale"] = fields.pop("softmax_scale")
        generated(self, *args, **fields)

    signature = inspect.signature(generated)
    parameters = [
        parameter.replace(name="softmax_scale") if name == "given_softmax_scale" else parameter
        for name, parameter in signature.parameters.items()
    ]
    __init__.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    cls.__init__ = __init__  # type: ignore[method-assign]
    return cls


@_take_softmax_scale
@dataclass(frozen=True)
class MLAConfig:
    """One MLA attention layer.

    Attributes:
        hidden_size: H.
        num_heads: N.
        q_lora_rank: Lq, or None where the query is projected in one step.
        kv_lora_rank: Lkv, the latent that is cached.
        qk_nope_head_dim: P.
        qk_rope_head_dim: R; 0 is legal.
        v_head_dim: V.
        latent_norm_eps: epsilon of the RMS norms over the latents (not the model's `rms_norm_eps`).
        rope: rotary parameters.
        given_softmax_scale: the argument `softmax_scale` of the constructor: the scale of the scores on both paths, any
            finite number (also 0 or below), or None. None computes it from the dims and the rope, again in every
            `dataclasses.replace`; a given scale is kept there until `softmax_scale` is given anew, and None again
            computes it.
    """

    hidden_size: int
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    latent_norm_eps: float = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)
    given_softmax_scale: float | None = None
    if TYPE_CHECKING:  # what type checkers see of `_take_softmax_scale`
        softmax_scale: _SoftmaxScale = _SoftmaxScale()

    def __post_init__(self):
        check_number("latent_norm_eps", self.latent_norm_eps, 0)
        check_type("rope", self.rope, RopeConfig)
        for name in ("hidden_size", "num_heads", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim"):
            check_int(name, getattr(self, name))
        if self.q_lora_rank is not None:
            check_int("q_lora_rank", self.q_lora_rank, 1, "a positive int or None")
        check_int("qk_rope_head_dim", self.qk_rope_head_dim, 0, "an even int >= 0")
        check(self.qk_rope_head_dim % 2 == 0, "qk_rope_head_dim", "an even int >= 0", self.qk_rope_head_dim)
        scale = self.given_softmax_scale
        number = isinstance(scale, int | float) and not isinstance(scale, bool)
        check(scale is None or (number and abs(scale) <= sys.float_info.max), "softmax_scale",
              "a finite number or None", _short(scale))  # fmt: skip

    @property
    def qk_head_dim(self) -> int:
        """P + R, the query/key width on the expanded path."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def head_size(self) -> int:
        """Lkv + R, elements of one cache entry."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property  # type: ignore[no-redef]
    def softmax_scale(self) -> float:
        """The given scale, or (P + R)^-1/2, times m(f, mscale_all_dim)^2 where YaRN gives mscale_all_dim.

        It is the same number on both paths.
        """
        if self.given_softmax_scale is not None:
            return float(self.given_softmax_scale)
        scale = self.qk_head_dim**-0.5
        yarn = self.rope.yarn
        if yarn is not None and yarn.mscale_all_dim:
            scale *= yarn_mscale(yarn.factor, yarn.mscale_all_dim) ** 2
        return scale

    @classmethod
    def from_preset(cls, name: str, **fields: Any) -> MLAConfig:
        """Return a config with the published dims and rope of `name`, hence with its softmax scale.

        The epsilon is the default. What a config cannot say, the caller must know: GLM-5 adds a sparse-attention
        indexer; LongCat-Flash scales its normed latents by (H / Lq)^1/2 and (H / Lkv)^1/2, which the weights of the
        latent norms can carry.

        Args:
            name: a key of `PRESETS`.
            fields: arguments of the constructor; they replace those of the preset.

        Raises:
            ValueError: `name` is not in `PRESETS`.
            UnsupportedConfiguration: `RopeConfig` cannot express the published rope (minicpm3), and `fields` has no
                `rope`. `MLAConfig(**PRESETS[name])` is a config with its dims alone.
        """
        check(isinstance(name, str) and name in PRESETS, "name", f"one of {', '.join(PRESETS)}", name)
        rope = _PRESET_ROPES[name]
        if rope is None and "rope" not in fields:
            wanted = f"rope: expected a RopeConfig for {name!r}, whose LongRoPE is not implemented"
            raise UnsupportedConfiguration([f"{wanted}, got none (MLAConfig(**PRESETS[{name!r}]) has its dims alone)"])
        return cls(**{**PRESETS[name], "rope": rope, **fields})

    @classmethod
    def from_hf(cls, config: Any) -> MLAConfig:
        """Read a transformers config (any object with its attributes).

        `latent_norm_eps` is transformers' own 1e-6, which its modules use whatever `rms_norm_eps` says;
        `MLAAttention.from_hf` reads the module's own.

        Raises:
            UnsupportedConfiguration: not MLA, or a field that asks for attention that is not implemented: latent
                scaling, a sparse-attention indexer, a window, a softcap, a bias by position, shared keys and values,
                attention that is not causal, another rope or another scale. Every reason is given. A field that is
                None, False, 0 or empty asks for nothing.
        """
        required = ("hidden_size", "num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")
        model_type = getattr(config, "model_type", type(config).__name__)
        missing = [name for name in (*required, "v_head_dim") if getattr(config, name, None) is None]
        if missing:
            wanted = f"config: expected a Multi-head Latent Attention model, got {model_type!r}"
            raise UnsupportedConfiguration([f"{wanted} without {', '.join(missing)}"])
        reasons = [
            f"config.{name}: latent scaling is not implemented, got {getattr(config, name)!r}"
            for name in ("mla_scale_q_lora", "mla_scale_kv_lora")
            if getattr(config, name, None)
        ]
        if model_type == "longcat_flash" and not reasons:  # transformers scales whatever the flags say
            reasons.append("config.model_type: latent scaling is not implemented, got 'longcat_flash'")
        if getattr(config, "index_topk", None):
            reasons.append(f"config.index_topk: sparse-attention indexers are not implemented, got {config.index_topk}")
        reasons += _other_attention(config)
        rope = RopeConfig()
        try:
            rope = _rope_from_hf(config, model_type)
        except UnsupportedConfiguration as error:
            reasons += error.reasons
        if reasons:
            raise UnsupportedConfiguration(reasons)
        return cls(
            hidden_size=config.hidden_size,
            num_heads=config.num_attention_heads,
            q_lora_rank=getattr(config, "q_lora_rank", None) or None,
            kv_lora_rank=config.kv_lora_rank,
            qk_nope_head_dim=config.qk_nope_head_dim,
            qk_rope_head_dim=config.qk_rope_head_dim,
            v_head_dim=config.v_head_dim,
            rope=rope,
        )


# Fields of transformers configs that change attention, and what each asks for.
_OTHER_ATTENTION: Mapping[str, tuple[str, ...]] = {
    "sliding windows are": (
        "sliding_window", "sliding_window_size", "attention_window", "attention_window_size", "window_size",
    ),
    "attention in chunks is": ("attention_chunk_size",),
    "softcapping of the scores is": ("attn_logit_softcapping", "attention_logit_softcapping", "attention_logit_cap"),
    "ALiBi is": ("alibi", "use_alibi"),
    "relative position biases are": (
        "relative_attention", "has_relative_attention_bias", "use_relative_position_bias",
    ),
    "layers that share keys and values are": ("num_kv_shared_layers", "attention_k_eq_v"),
    "attention that is not causal is": ("use_bidirectional_attention",),
    "encoder or cross attention is": (
        "is_encoder_decoder", "add_cross_attention", "cross_attention_layers", "cross_attention_hidden_size",
        "cross_attention_frequency", "cross_layer_interval",
    ),
    "layers without rope are": ("mla_use_nope", "use_mla_nope", "no_rope"),
    "rope by layer is": ("layer_rope_theta", "rope_scaling_layers"),
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


def _other_attention(config: Any) -> list[str]:
    """Return a reason for each field of a transformers config that asks for attention that is not implemented."""
    reasons = []
    windows = _OTHER_ATTENTION["sliding windows are"] if getattr(config, "use_sliding_window", None) is False else ()
    for what, names in _OTHER_ATTENTION.items():
        asked = {name: getattr(config, name, None) for name in names if name not in windows}
        reasons += [f"config.{name}: {what} not implemented, got {_short(value)}" for name, value in asked.items()
                    if value]  # fmt: skip
    layer_types = dict.fromkeys(getattr(config, "layer_types", None) or ())
    if others := [kind for kind in layer_types if kind != "full_attention"]:
        got = ", ".join(map(repr, others))
        reasons.append(f"config.layer_types: only 'full_attention' is implemented, got {got}")
    for name in ("is_causal", "causal"):
        if getattr(config, name, None) is False:
            reasons.append(f"config.{name}: attention that is not causal is not implemented, got False")
    position = getattr(config, "position_embedding_type", None)
    if position not in (None, "rope", "rotary"):
        reasons.append(f"config.position_embedding_type: only 'rope' is implemented, got {position!r}")
    rope_layers = getattr(config, "no_rope_layers", None) or ()  # 1: the layer has rope, 0: it has none
    if not all(rope_layers):
        reasons.append(f"config.no_rope_layers: layers without rope are not implemented, got {_short(rope_layers)}")
    sources = list(getattr(config, "kv_source_layers", None) or ())  # of each layer: whose keys and values it reads
    if sources != list(range(len(sources))):
        reasons.append(f"config.kv_source_layers: layers that share keys and values are not implemented, "
                       f"got {_short(sources)}")  # fmt: skip
    return reasons


def _short(value: object) -> str:
    """Return `repr(value)`, cut after 60 characters: a list has an entry for every layer."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _rope_from_hf(config: Any, model_type: str) -> RopeConfig:
    parameters = dict(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {})
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    theta = float(parameters.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0)
    reasons = []
    interleaved = getattr(config, "rope_interleave", None)
    if model_type == "deepseek_v2":
        interleaved = True  # complex multiplication of neighbouring elements, with no switch in the config
    if interleaved is None:
        reasons.append(f"config.rope_interleave: expected True or False, got nothing from {model_type!r}")
    if kind not in ("default", "yarn"):
        reasons.append(f"config.rope_parameters: rope type {kind!r} is not implemented (default and yarn are)")
    if kind == "yarn" and parameters.get("attention_factor") is not None:
        reasons.append("config.rope_parameters: an explicit attention_factor is not implemented")
    if kind == "yarn" and not parameters.get("truncate", True):
        reasons.append("config.rope_parameters: truncate=False is not implemented")
    if kind == "yarn" and not parameters.get("original_max_position_embeddings"):
        reasons.append("config.rope_parameters: YaRN needs original_max_position_embeddings, got none")
    if nested := [name for name, value in parameters.items() if isinstance(value, Mapping)]:
        reasons.append(f"config.rope_parameters: rope by layer type is not implemented, got {', '.join(nested)}")
    reasons += [
        f"config.rope_parameters: {name} is not implemented, got {_short(parameters[name])}"
        for name in ("llama_4_scaling_beta", "mrope_section")
        if parameters.get(name)
    ]
    if float(parameters.get("partial_rotary_factor") or 1.0) != 1.0:
        reasons.append("config.rope_parameters: a partial_rotary_factor is not implemented")
    if reasons:
        raise UnsupportedConfiguration(reasons)
    if kind == "default":
        return RopeConfig(theta=theta, interleaved=bool(interleaved))
    original = parameters["original_max_position_embeddings"]
    return RopeConfig(
        theta=theta,
        interleaved=bool(interleaved),
        yarn=YarnConfig(
            factor=float(parameters.get("factor") or config.max_position_embeddings / original),
            original_max_position_embeddings=int(original),
            beta_fast=float(parameters.get("beta_fast") or 32.0),
            beta_slow=float(parameters.get("beta_slow") or 1.0),
            mscale=parameters.get("mscale"),
            mscale_all_dim=parameters.get("mscale_all_dim"),
        ),
    )
