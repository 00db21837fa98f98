"""Parameters of the rotary embedding, with YaRN's."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .checks import check, check_flag, check_int, check_number, check_type


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
