"""Rotary position embedding of `q_pe` and `k_pe` (RoFormer, arXiv 2104.09864; YaRN, arXiv 2309.00071).

`q_pe` and `k_pe` are the parts of queries and keys that are rotated. Each part has R elements, and all heads share
`k_pe`. Every rotated element stays at its index (some implementations reorder the elements).
"""

from __future__ import annotations

import math

import torch
from einops import rearrange
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from ..interfaces import (
    RopeConfig,
    check,
    check_dtype,
    check_flag,
    check_int,
    check_scale,
    check_scale_values,
    check_tensor,
    check_type,
    to_e4m3,
    wide_dtype,
)


def rotary_frequencies(rope: RopeConfig, dim: int, dtype: torch.dtype = torch.float32) -> Float[Tensor, " {dim//2}"]:
    """Return the frequency of each pair of elements, in radians per position: `rope.theta`^(-2i/R) for pair i.

    YaRN makes a model usable for longer sequences than those of its training. Let n be the number of rotations that a
    pair makes over `original_max_position_embeddings` positions. With YaRN, the frequency of the pair depends on n:

    - n > `beta_fast`: the frequency does not change;
    - n < `beta_slow`: the frequency is divided by `factor`;
    - otherwise: the frequency lies between the original and the divided frequency, interpolated linearly by the index
      of the pair.

    Args:
        rope: rotary parameters.
        dim: R, an even number.
        dtype: dtype of the computation and the result.

    Returns:
        [R / 2] on the CPU.

    Raises:
        ValueError: `dim` is negative or odd, or `dtype` is not a float dtype.
    """
    check_type("rope", rope, RopeConfig)
    check_int("dim", dim, 0)
    check(dim % 2 == 0, "dim", "an even number", dim)
    check_dtype("dtype", dtype)
    exponents = torch.arange(0, dim, 2, dtype=dtype, device="cpu") / dim
    frequencies = 1.0 / (rope.theta**exponents)
    yarn = rope.yarn
    if yarn is None or dim == 0:
        return frequencies

    def pair_with_rotations(rotations: float) -> float:
        """Return the index, as a float, of the pair that makes `rotations` rotations over the original positions."""
        wavelength = yarn.original_max_position_embeddings / rotations
        return dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(rope.theta))

    low = max(math.floor(pair_with_rotations(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_with_rotations(yarn.beta_slow)), dim - 1)
    ramp = (torch.arange(dim // 2, dtype=dtype, device="cpu") - low) / ((high - low) or 0.001)
    stretched = ramp.clamp(0, 1)  # 0: original frequency; 1: frequency divided by `factor`
    return frequencies / yarn.factor * stretched + frequencies * (1 - stretched)


def rotary_cos_sin(
    positions: Int[Tensor, " T"], rope: RopeConfig, dim: int, dtype: torch.dtype
) -> tuple[Float[Tensor, "T {dim//2}"], Float[Tensor, "T {dim//2}"]]:
    """Return the cosine and sine of every rotation angle; with YaRN, multiply both by `YarnConfig.cos_sin_scale`.

    Args:
        positions: [T], position of each token in its request.
        rope: rotary parameters.
        dim: R, an even number.
        dtype: dtype of the vectors that will be rotated.

    Returns:
        cos and sin, each [T, R/2]; float64 if `dtype` is float64, otherwise float32.

    Raises:
        ValueError: `positions` has a wrong shape or dtype, or `dim` is odd.
    """
    check_tensor("positions", positions, ("T",), (torch.int64, torch.int32))
    check_dtype("dtype", dtype)
    wide = wide_dtype(dtype)
    frequencies = rotary_frequencies(rope, dim, wide).to(positions.device)
    angles = positions.to(wide)[:, None] * frequencies
    scale = 1.0 if rope.yarn is None else rope.yarn.cos_sin_scale
    return angles.cos() * scale, angles.sin() * scale


def rotate(
    x: Float[Tensor, "T *heads R"], cos: Float[Tensor, "T R/2"], sin: Float[Tensor, "T R/2"], interleaved: bool
) -> Float[Tensor, "T *heads R"]:
    """Rotate each pair (a, b) by its angle to (a cos - b sin, b cos + a sin), computed in the dtype of `cos`.

    Args:
        x: [T, R] or [T, N, R], the vectors to rotate.
        cos: [T, R/2], from `rotary_cos_sin`.
        sin: [T, R/2], from `rotary_cos_sin`.
        interleaved: which elements form a pair. True: (0, 1), (2, 3), ...; False: (0, R/2), (1, R/2 + 1), ...

    Returns:
        The rotated vectors, with the shape, dtype and element order of `x`.

    Raises:
        ValueError: shapes or devices do not match.
    """
    check_type("x", x, Tensor, "a tensor")
    check_flag("interleaved", interleaved)
    check_tensor("x", x, ("T", "R") if x.dim() < 3 else ("T", "N", "R"))
    check_tensor("cos", cos, (x.shape[0], x.shape[-1] // 2), device=x.device)
    check_tensor("sin", sin, tuple(cos.shape), (cos.dtype,), x.device)
    pairs = "t ... (pair two) -> two t ... pair" if interleaved else "t ... (two pair) -> two t ... pair"
    a, b = rearrange(x.to(cos.dtype), pairs, two=2)
    if x.dim() == 3:
        cos, sin = cos[:, None], sin[:, None]
    rotated = torch.stack((a * cos - b * sin, b * cos + a * sin))
    back = "two t ... pair -> t ... (pair two)" if interleaved else "two t ... pair -> t ... (two pair)"
    return rearrange(rotated, back).to(x.dtype)


def apply_rope(
    positions: Int[Tensor, " T"],
    q_pe: Float[Tensor, "T N R"],
    k_pe: Float[Tensor, "T R"],
    rope: RopeConfig,
    q_scale: Float[Tensor, "*heads"] | None = None,
) -> tuple[Shaped[Tensor, "T N R"], Float[Tensor, "T R"]]:
    """Rotate the rope parts of queries and keys.

    Args:
        positions: [T], position of each token in its request.
        q_pe: [T, N, R], rope parts of the queries.
        k_pe: [T, R], rope parts of the keys, which all heads share.
        rope: rotary parameters.
        q_scale: float32 scale, [] or [N], of the rotated queries if they are returned in e4m3 (8 bits). They are not
            rounded before they are divided by the scale. None returns queries in the dtype of `q_pe`.

    Returns:
        The rotated `q_pe` and `k_pe`, as new tensors in the dtype of the arguments. If `q_scale` is given, the rotated
        `q_pe` is in e4m3.

    Raises:
        ValueError: shapes, dtypes or devices do not match; the scale is not finite and positive.
    """
    check_tensor("q_pe", q_pe, ("T", "N", "R"))
    check_tensor("k_pe", k_pe, (q_pe.shape[0], q_pe.shape[2]), (q_pe.dtype,), q_pe.device)
    check_tensor("positions", positions, (q_pe.shape[0],), (torch.int64, torch.int32), q_pe.device)
    check_type("rope", rope, RopeConfig)
    cos, sin = rotary_cos_sin(positions, rope, q_pe.shape[-1], q_pe.dtype)
    if q_scale is not None:
        check_scale("q_scale", q_scale, q_pe.shape[1], q_pe.device)
        check_scale_values("q_scale", q_scale)
        rotated = rotate(q_pe.to(cos.dtype), cos, sin, rope.interleaved)
        return to_e4m3(rotated, q_scale.view(-1, 1)), rotate(k_pe, cos, sin, rope.interleaved)
    return rotate(q_pe, cos, sin, rope.interleaved), rotate(k_pe, cos, sin, rope.interleaved)
