"""Multiply the rows of each head by the matrix of this head, in PyTorch, for weights or results in e4m3."""

from __future__ import annotations

import torch
from torch import Tensor

from reference.interfaces import to_e4m3, wide_dtype


def multiply_heads(
    x: Tensor, weight: Tensor, weight_scale: Tensor | None, output_scale: Tensor | None, out: Tensor
) -> None:
    """Write the products of `x` [T, N, K] and `weight` [N, K, M], multiplied by the scale of the weight, into `out`.

    Args:
        x: [T, N, K].
        weight: [N, K, M] in e4m3, or in the dtype of `x`.
        weight_scale: float32, [] or [N]; None if the weight has the dtype of `x`.
        output_scale: float32, [] or [N], the scale of a result in e4m3; None for a result in the dtype of `x`.
        out: [T, N, M].
    """
    wide = wide_dtype(x.dtype)
    product = torch.bmm(x.transpose(0, 1).to(wide), weight.to(wide))
    if weight_scale is not None:
        product *= weight_scale.to(wide).view(-1, 1, 1)
    if output_scale is not None:
        product = to_e4m3(product, output_scale.view(-1, 1, 1))
    out.copy_(product.transpose(0, 1))
