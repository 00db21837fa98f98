"""Configuration of an MLA layer: dimensions, rotary parameters and softmax scale."""

from __future__ import annotations

import functools
import inspect
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .checks import check, check_int, check_number, check_type, short_text
from .errors import UnsupportedConfiguration
from .hf_config import fields_from_hf
from .presets import PRESET_ROPES, PRESETS
from .rope_config import RopeConfig, yarn_mscale

if TYPE_CHECKING:

    class _SoftmaxScale:
        """Type of `softmax_scale`: the constructor takes a number or None, and the attribute is a number."""

        def __get__(self, config: object, owner: object) -> float: ...

        def __set__(self, config: object, value: float | None) -> None: ...


def _take_softmax_scale(cls: type[MLAConfig]) -> type[MLAConfig]:
    """Let the constructor take `softmax_scale`, and keep the value in the field `given_softmax_scale`.

    The two names differ because of `dataclasses.replace`, which reads every field and passes the values to the
    constructor. If the field had the name `softmax_scale`, `replace` would pass the computed scale to the constructor.
    A copy with other dims would then keep the scale of the old dims. If the caller passes `softmax_scale` to `replace`,
    the constructor gets both names and uses `softmax_scale`.
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
    """Configuration of one MLA attention layer.

    Attributes:
        hidden_size: H, width of the hidden states.
        num_heads: N, number of heads.
        q_lora_rank: Lq, width of the query latent, or None if one projection computes the query.
        kv_lora_rank: Lkv, width of the latent that is cached.
        qk_nope_head_dim: P, dim of a query or key head without rope.
        qk_rope_head_dim: R, dim of the rope part (the rotated part) of a query or key head; an even number, 0 is legal.
        v_head_dim: V, dim of a value head.
        latent_norm_eps: epsilon of the RMS norms over the latents (not the model's `rms_norm_eps`).
        rope: rotary parameters.
        given_softmax_scale: factor of the attention scores, any finite number. The argument of the constructor has the
            name `softmax_scale`. With None the property `softmax_scale` computes the factor from the dims and the rope.
            `dataclasses.replace` keeps a given factor; `replace(config, softmax_scale=None)` removes it.
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
    if TYPE_CHECKING:  # type checkers do not see the argument that `_take_softmax_scale` adds
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
              "a finite number or None", short_text(scale))  # fmt: skip

    @property
    def qk_head_dim(self) -> int:
        """Return P + R, the width of a query or key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def head_size(self) -> int:
        """Return Lkv + R, the elements of one cache entry."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property  # type: ignore[no-redef]
    def softmax_scale(self) -> float:
        """Return the factor by which attention scores are multiplied before the softmax.

        If the caller gave a factor, return this factor. Otherwise the factor is (P + R)^-1/2, multiplied by
        yarn_mscale(yarn.factor, yarn.mscale_all_dim)^2 if the rope has YaRN with `mscale_all_dim`.
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
        """Return the config of a published model: its dims, its rope, and the softmax scale that follows from them.

        `latent_norm_eps` keeps its default. For two models the config does not describe the whole attention:

        - GLM-5 also has an indexer, which selects the keys that a query attends (sparse attention).
        - LongCat-Flash multiplies its normed latents by (H / Lq)^1/2 and (H / Lkv)^1/2. A caller can multiply the
          weights of the latent norms by these factors instead.

        Args:
            name: name of the model, a key of `PRESETS`.
            fields: arguments of the constructor, which replace the values of the preset.

        Raises:
            ValueError: `name` is not in `PRESETS`.
            UnsupportedConfiguration: `fields` has no `rope`, and `RopeConfig` cannot express the rope of the model
                (minicpm3). `MLAConfig(**PRESETS[name])` makes a config with the dims of the model and the default rope.
        """
        check(isinstance(name, str) and name in PRESETS, "name", f"one of {', '.join(PRESETS)}", name)
        rope = PRESET_ROPES[name]
        if rope is None and "rope" not in fields:
            wanted = f"rope: expected a RopeConfig for {name!r}, whose LongRoPE is not implemented"
            raise UnsupportedConfiguration([f"{wanted}, got none (MLAConfig(**PRESETS[{name!r}]) has the dims only)"])
        return cls(**{**PRESETS[name], "rope": rope, **fields})

    @classmethod
    def from_hf(cls, config: Any) -> MLAConfig:
        """Return the config of the attention layers that a transformers config describes.

        `latent_norm_eps` is 1e-6, because the latent norms in transformers have this epsilon and ignore `rms_norm_eps`.
        `MLAAttention.from_hf` reads the epsilon of the module instead.

        Args:
            config: a transformers config, or any object with the same attributes.

        Raises:
            TypeError: `model_type` is not a str.
            ValueError: a dim is not an int, or it is too small.
            UnsupportedConfiguration: the config does not describe an MLA model, a field is malformed, or a field
                enables a feature that is not implemented. The exception lists every reason. A field that is None,
                False, 0 or empty enables no feature. These features are not implemented:

                - scaling of the latents, a sparse-attention indexer;
                - a sliding window, a softcap, a position bias;
                - layers that share keys and values with other layers, attention that is not causal;
                - other kinds of rope, other scales of the scores.
        """
        return cls(**fields_from_hf(config))
