"""What a layer is: its dims, its rotary parameters, its softmax scale."""

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
              "a finite number or None", short_text(scale))  # fmt: skip

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
        rope = PRESET_ROPES[name]
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
            TypeError: `model_type` is not a str.
            ValueError: a dim that is not an int, or too small.
            UnsupportedConfiguration: not MLA, a field that is malformed, or one that asks for attention that is not
                implemented: latent scaling, a sparse-attention indexer, a window, a softcap, a bias by position, shared
                keys and values, attention that is not causal, another rope or another scale. Every reason is given. A
                field that is None, False, 0 or empty asks for nothing.
        """
        return cls(**fields_from_hf(config))
