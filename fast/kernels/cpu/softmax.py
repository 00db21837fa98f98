"""Online softmax (arXiv 1805.02867): compute attention over one block of keys after another."""

from __future__ import annotations

import torch
from torch import Tensor

from reference.interfaces import to_e4m3

WEIGHT_UNIT = 256.0  # factor by which probabilities are multiplied before they are rounded to e4m3 (at most 448)


class OnlineSoftmax:
    """Attention of query rows over the keys that `add` has received so far.

    The state consists of the largest score, the sum of exponentials and the sum of weighted values of each row.

    Args:
        shape: shape of the set of rows, such as (N, Sq) for N heads and Sq query tokens.
        value_dim: width of the values.
        dtype: dtype of the sums, float32 or float64.
        device: device of the tensors.
        rounds_to_e4m3: whether the probabilities exp(score - largest), by which the values are multiplied, are rounded
            to e4m3 (8 bits). A probability is at most 1. It is multiplied by 2^8 before it is rounded, so that a
            probability of at least 2^-14 becomes a normal e4m3 number with full precision. The sum of exponentials is
            a sum of the unrounded probabilities.
        sinks: of the shape `shape`, the score of one more key with value 0 for each row; None means no such key.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        value_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        rounds_to_e4m3: bool = False,
        sinks: Tensor | None = None,
    ):
        self.shape, self.value_dim, self.dtype, self.device = shape, value_dim, dtype, device
        self.rounds_to_e4m3 = rounds_to_e4m3
        self.largest = self.total = self.values = None  # None until the first block of keys
        if sinks is not None:  # the state of a first block that has the sink alone: exp(sink - largest) = 1
            self.largest, self.total = sinks, torch.ones(shape, dtype=dtype, device=device)
            self.values = torch.zeros(*shape, value_dim, dtype=dtype, device=device)

    def add(self, scores: Tensor, values: Tensor) -> None:
        """Add a block of n keys.

        Args:
            scores: [*shape, n], -inf where masked; this call overwrites the tensor.
            values: [*shape[:-1], n, value_dim].
        """
        largest = scores.amax(-1)
        if self.largest is not None:
            largest = torch.maximum(self.largest, largest)
        shift = largest.masked_fill(largest == -torch.inf, 0)  # no key so far: -inf - (-inf) would be NaN
        probabilities = scores.sub_(shift[..., None]).exp_()
        sums = probabilities.sum(-1)
        if self.rounds_to_e4m3:
            probabilities = (
                to_e4m3(probabilities, probabilities.new_tensor(1 / WEIGHT_UNIT)).to(self.dtype) / WEIGHT_UNIT
            )
        if self.largest is None:
            self.total, self.values = sums, torch.matmul(probabilities, values)
        else:
            decay = torch.exp(self.largest - shift)
            self.total.mul_(decay).add_(sums)
            self.values.mul_(decay[..., None])
            multiply_add = torch.addmm if self.values.dim() == 2 else torch.baddbmm
            multiply_add(self.values, probabilities, values, out=self.values)
        self.largest = largest

    def finish(self) -> tuple[Tensor, Tensor]:
        """Return the attention output [*shape, value_dim] and the natural-log LSE [*shape].

        A row without keys gets output 0 and LSE -inf.
        """
        if self.largest is None:
            out = torch.zeros(*self.shape, self.value_dim, dtype=self.dtype, device=self.device)
            return out, torch.full(self.shape, -torch.inf, dtype=self.dtype, device=self.device)
        empty = self.total == 0
        out = self.values.div_(self.total.masked_fill(empty, 1)[..., None])
        return out, self.largest.masked_fill(empty, 0) + self.total.log()
