"""Online softmax (arXiv 1805.02867): attention over one block of keys after another, in float32 or float64."""

from __future__ import annotations

import torch
from torch import Tensor


class OnlineSoftmax:
    """Softmax state of query rows over the keys added so far: largest score, sum of exponentials, weighted values.

    Args:
        shape: shape of the batch of rows, such as (N, Sq).
        value_dim: width of the values.
        dtype: accumulation dtype.
        device: device of the tensors.
    """

    def __init__(self, shape: tuple[int, ...], value_dim: int, dtype: torch.dtype, device: torch.device):
        self.shape, self.value_dim, self.dtype, self.device = shape, value_dim, dtype, device
        self.largest = self.total = self.values = None  # until the first block of keys

    def add(self, scores: Tensor, values: Tensor) -> None:
        """Add a block of n keys.

        Args:
            scores: [*shape, n], -inf where masked; this call overwrites the tensor.
            values: [*shape[:-1], n, value_dim].
        """
        largest = scores.amax(-1)
        if self.largest is not None:
            largest = torch.maximum(self.largest, largest)
        shift = largest.masked_fill(largest == -torch.inf, 0)  # a row without keys so far: exp(-inf - 0) = 0
        probabilities = scores.sub_(shift[..., None]).exp_()
        if self.largest is None:
            self.total, self.values = probabilities.sum(-1), torch.matmul(probabilities, values)
        else:
            decay = torch.exp(self.largest - shift)
            self.total.mul_(decay).add_(probabilities.sum(-1))
            self.values.mul_(decay[..., None])
            multiply_add = torch.addmm if self.values.dim() == 2 else torch.baddbmm
            multiply_add(self.values, probabilities, values, out=self.values)
        self.largest = largest

    def finish(self) -> tuple[Tensor, Tensor]:
        """Return the normalised values [*shape, value_dim] and the natural-log LSE [*shape].

        A row without keys gets values 0 and LSE -inf.
        """
        if self.largest is None:
            out = torch.zeros(*self.shape, self.value_dim, dtype=self.dtype, device=self.device)
            return out, torch.full(self.shape, -torch.inf, dtype=self.dtype, device=self.device)
        empty = self.total == 0
        out = self.values.div_(self.total.masked_fill(empty, 1)[..., None])
        return out, self.largest.masked_fill(empty, 0) + self.total.log()
