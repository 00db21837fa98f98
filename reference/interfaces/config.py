"""What a layer is: dims, rotary parameters, presets; and the error of what cannot be served."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

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
    # Dims only, from the published configs; rotary parameters and norms' epsilons are the checkpoint's business.
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

    def __post_init__(self):
        check_number("latent_norm_eps", self.latent_norm_eps, 0)
        check_type("rope", self.rope, RopeConfig)
        for name in ("hidden_size", "num_heads", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim"):
            check_int(name, getattr(self, name))
        if self.q_lora_rank is not None:
            check_int("q_lora_rank", self.q_lora_rank, 1, "a positive int or None")
        check_int("qk_rope_head_dim", self.qk_rope_head_dim, 0, "an even int >= 0")
        check(self.qk_rope_head_dim % 2 == 0, "qk_rope_head_dim", "an even int >= 0", self.qk_rope_head_dim)

    @property
    def qk_head_dim(self) -> int:
        """P + R, the query/key width on the expanded path."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def head_size(self) -> int:
        """Lkv + R, elements of one cache entry."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """(P + R)^-1/2, times m(f, mscale_all_dim)^2 where YaRN gives mscale_all_dim; the same on both paths."""
        scale = self.qk_head_dim**-0.5
        yarn = self.rope.yarn
        if yarn is not None and yarn.mscale_all_dim:
            scale *= yarn_mscale(yarn.factor, yarn.mscale_all_dim) ** 2
        return scale

    @classmethod
    def from_preset(cls, name: str, **fields: Any) -> MLAConfig:
        """A config with the published dims of `name`; rope and epsilon are the defaults unless given in `fields`.

        Raises:
            ValueError: `name` is not in `PRESETS`.
        """
        check(isinstance(name, str) and name in PRESETS, "name", f"one of {', '.join(PRESETS)}", name)
        return cls(**{**PRESETS[name], **fields})

    @classmethod
    def from_hf(cls, config: Any) -> MLAConfig:
        """Read a transformers config (any object with its attributes).

        `latent_norm_eps` is transformers' own 1e-6, which its modules use whatever `rms_norm_eps` says;
        `MLAAttention.from_hf` reads the module's own.

        Raises:
            UnsupportedConfiguration: not MLA, or latent scaling, a sparse-attention indexer or a rope that is
                not implemented; every reason is given.
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
