"""Rotary embedding of the rope parts of queries and shared keys."""

from __future__ import annotations

from torch import Tensor

from ..rotation import rotate


def apply_rope(
    positions: Tensor, q_pe: Tensor, k_pe: Tensor, frequencies: Tensor, magnitude: float, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """Return q_pe [T, N, R] and k_pe [T, R], rotated by the angles positions [T] * frequencies [R/2].

    Both results are multiplied by `magnitude`. `interleaved` says which elements form a pair (`reference.apply_rope`).
    """
    angles = positions.to(frequencies.dtype)[:, None] * frequencies
    cos, sin = angles.cos() * magnitude, angles.sin() * magnitude
    return rotate(q_pe, cos[:, None], sin[:, None], interleaved), rotate(k_pe, cos, sin, interleaved)
