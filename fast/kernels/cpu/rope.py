"""Rotary embedding of the query's and the shared key's rope parts."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_rope(
    positions: Tensor, q_pe: Tensor, k_pe: Tensor, frequencies: Tensor, magnitude: float, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """Rotate q_pe [T, N, R] and k_pe [T, R] by positions [T] x frequencies [R/2]."""
    angles = positions.to(frequencies.dtype)[:, None] * frequencies
    cos, sin = angles.cos() * magnitude, angles.sin() * magnitude
    return rotate(q_pe, cos[:, None], sin[:, None], interleaved), rotate(k_pe, cos, sin, interleaved)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Turn the pairs of x [..., R] by cos and sin, broadcastable to [..., R/2]."""
    pairs = x.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else x.unflatten(-1, (2, -1)).unbind(-2)
    a, b = (half.to(cos.dtype) for half in pairs)
    turned = (a * cos - b * sin, b * cos + a * sin)
    return torch.stack(turned, dim=-1 if interleaved else -2).flatten(-2).to(x.dtype)
