"""Rotation of pairs in plain PyTorch, for the public function `rotate` and the backend "cpu".

This module imports no kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate the pairs of x [..., R]; `cos` and `sin` broadcast to [..., R/2]. The result has the dtype of x."""
    pairs = x.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else x.unflatten(-1, (2, -1)).unbind(-2)
    a, b = (half.to(cos.dtype) for half in pairs)
    turned = (a * cos - b * sin, b * cos + a * sin)
    return torch.stack(turned, dim=-1 if interleaved else -2).flatten(-2).to(x.dtype)
