"""Rotary embedding of the rope parts of queries and keys."""

from __future__ import annotations

from torch import Tensor

from reference.interfaces import to_e4m3

from ..rotation import rotate


def apply_rope(
    positions: Tensor,
    q_pe: Tensor,
    k_pe: Tensor,
    frequencies: Tensor,
    magnitude: float,
    interleaved: bool,
    q_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `q_pe` [T, N, R] and `k_pe` [T, R], rotated by the angles `positions` [T] * `frequencies` [R/2].

    Both results are multiplied by `magnitude`. `reference.apply_rope` explains `interleaved`.
    If `q_scale`, [] or [N], is given, the rotated queries are divided by this scale and rounded to e4m3.
    """
    angles = positions.to(frequencies.dtype)[:, None] * frequencies
    cos, sin = angles.cos() * magnitude, angles.sin() * magnitude
    k_pe = rotate(k_pe, cos, sin, interleaved)
    if q_scale is None:
        return rotate(q_pe, cos[:, None], sin[:, None], interleaved), k_pe
    rotated = rotate(q_pe.to(cos.dtype), cos[:, None], sin[:, None], interleaved)
    return to_e4m3(rotated, q_scale.view(-1, 1)), k_pe
