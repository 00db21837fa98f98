"""Parameters of the rotary position embedding (rope) and of YaRN, which extends rope to longer sequences."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from .checks import check, check_flag, check_int, check_number, check_type


def yarn_mscale(factor: float, mscale: float) -> float:
    """Return YaRN's magnitude m(f, a) = 0.1 a ln f + 1, or 1 if f <= 1.

    arXiv 2309.00071, section 3.4, has the formula with a = 1. DeepSeek added the factor a.

    Args:
        factor: f, as in `YarnConfig`.
        mscale: a, one of the two magnitude scales of `YarnConfig`.
    """
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


@dataclass(frozen=True)
class YarnConfig:
    """YaRN context extension (arXiv 2309.00071) with DeepSeek's two magnitude scales.

    Attributes:
        factor: f, the factor by which YaRN extends the longest sequence of the pre-training.
        original_max_position_embeddings: tokens of the longest sequence of the pre-training.
        beta_fast: a rope frequency with more than this number of rotations over the longest sequence of the
            pre-training does not change.
        beta_slow: a rope frequency with fewer than this number of rotations is divided by `factor`. For numbers of
            rotations between `beta_slow` and `beta_fast`, `rotary_frequencies` interpolates.
        mscale: magnitude scale in the numerator of `cos_sin_scale`, or None.
        mscale_all_dim: magnitude scale in the denominator of `cos_sin_scale`, or None. The softmax scale is multiplied
            by yarn_mscale(factor, mscale_all_dim)^2.

    Raises:
        ValueError: `factor`, `beta_fast` or `beta_slow` is not above 0; `original_max_position_embeddings` is not a
            positive int; a magnitude scale is not a finite number.
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

    @functools.cached_property  # cached, because every layer reads this property in every step
    def cos_sin_scale(self) -> float:
        """Return the factor by which cos and sin of the rotation angles are multiplied.

        The factor is yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim). If one of the two magnitude
        scales is None or 0, the factor is yarn_mscale(factor, 1).
        """
        if self.mscale and self.mscale_all_dim:
            return yarn_mscale(self.factor, self.mscale) / yarn_mscale(self.factor, self.mscale_all_dim)
        return yarn_mscale(self.factor, 1.0)


@dataclass(frozen=True)
class RopeConfig:
    """Parameters of the rotary embedding of `q_pe` and `k_pe`, the rotated parts of queries and keys.

    Attributes:
        theta: base of the frequencies: pair i of the R rotated elements has the frequency theta^(-2i/R).
        interleaved: which elements are rotated as a pair. True: (0, 1), (2, 3), ...; False: (0, R/2), (1, R/2 + 1), ...
        yarn: YaRN parameters; None for a rotary embedding without YaRN.

    Raises:
        TypeError: `interleaved` is not a bool, or `yarn` has another type.
        ValueError: `theta` is not above 1.
    """

    theta: float = 10000.0
    interleaved: bool = True
    yarn: YarnConfig | None = None

    def __post_init__(self):
        check_number("theta", self.theta)
        check(self.theta > 1, "theta", "a number above 1", self.theta)
        check_flag("interleaved", self.interleaved)
        check_type("yarn", self.yarn, (YarnConfig, type(None)), "a YarnConfig or None")
