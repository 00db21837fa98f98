"""Online softmax (arXiv 1805.02867): attention over keys that arrive in pieces, in float32 or float64."""

from __future__ import annotations

import torch
from torch import Tensor


class OnlineSoftmax:
    """Running maximum, sum and weighted values of a batch of query rows.

    Args:
        shape: leading shape of the rows, such as (N, Sq).
        value_dim: width of the values.
        dtype: accumulation type.
        device: where.
    """

    def __init__(self, shape: tuple[int, ...], value_dim: int, dtype: torch.dtype, device: torch.device):
        self.largest = torch.full(shape, -torch.inf, dtype=dtype, device=device)
        self.total = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(*shape, value_dim, dtype=dtype, device=device)

    def add(self, scores: Tensor, values: Tensor) -> None:
        """Take in one piece of keys.

        Args:
            scores: [*shape, n], -inf where masked; overwritten.
            values: [*shape[:-1], n, value_dim].
        """
        largest = torch.maximum(self.largest, scores.amax(-1))
        shift = largest.masked_fill(largest == -torch.inf, 0)  # a row that saw nothing yet: exp(-inf - 0) = 0
        probabilities = scores.sub_(shift[..., None]).exp_()
        decay = torch.exp(self.largest - shift)
        self.total.mul_(decay).add_(probabilities.sum(-1))
        self.values.mul_(decay[..., None])
        multiply_add = torch.addmm if self.values.dim() == 2 else torch.baddbmm
        multiply_add(self.values, probabilities, values, out=self.values)
        self.largest = largest

    def finish(self) -> tuple[Tensor, Tensor]:
        """Normalised values [*shape, value_dim] and natural-log LSE [*shape]; 0 and -inf for rows that saw nothing."""
        empty = self.total == 0
        out = self.values.div_(self.total.masked_fill(empty, 1)[..., None])
        return out, self.largest.masked_fill(empty, 0) + self.total.log()
