"""Rotate pairs of elements in PyTorch, for the public function `fast.rotate` and the backend "cpu"."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Return `x` [..., R] with its pairs rotated, in the dtype of `x`; `cos` and `sin` broadcast to [..., R/2].

    If `interleaved`, the pairs are (0, 1), (2, 3), ...; otherwise they are (0, R/2), (1, R/2 + 1), ...
    """
    pairs = x.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else x.unflatten(-1, (2, -1)).unbind(-2)
    a, b = (half.to(cos.dtype) for half in pairs)
    turned = (a * cos - b * sin, b * cos + a * sin)
    return torch.stack(turned, dim=-1 if interleaved else -2).flatten(-2).to(x.dtype)
