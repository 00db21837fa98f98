"""Give the kernels of other libraries softmax scales above 0 alone.

These kernels find the largest score of a row before they multiply by the scale, or multiply a masked score of -inf by
the scale. With a negative scale or 0, such a kernel returns NaN or a wrong result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from reference.interfaces import E4M3

from .own import OWN_BACKENDS

_SIGN, _NAN = 0x80, 0x7F  # bits of a number in e4m3: its sign; all other bits are set in NaN


def serves_scale(backend: str, softmax_scale: float) -> bool:
    """Return whether a backend gets a softmax scale as it is: the scale is above 0, or the kernels are of `fast`."""
    return softmax_scale > 0 or backend in OWN_BACKENDS


def with_positive_scale(backend: str, softmax_scale: float, *queries: Tensor) -> tuple[float, list[Tensor]]:
    """Return a softmax scale and queries that give the same scores, with a scale above 0 for another library's backend.

    For a negative scale, the queries are negated. For the scale 0, the result is the scale 1 and queries of zeros; a
    query number that is NaN or infinite becomes NaN, because the product with 0 is NaN.

    Args:
        backend: name of the backend.
        softmax_scale: factor of the scores.
        queries: queries, or parts of the same queries.
    """
    if serves_scale(backend, softmax_scale):
        return softmax_scale, list(queries)
    if softmax_scale < 0:
        return -softmax_scale, [_negated(each) for each in queries]
    return 1.0, [_zeros(each) for each in queries]


def _negated(q: Tensor) -> Tensor:
    return (q.view(torch.uint8) ^ _SIGN).view(E4M3) if q.dtype == E4M3 else -q  # PyTorch negates no e4m3 numbers


def _zeros(q: Tensor) -> Tensor:
    if q.dtype != E4M3:
        return q * 0
    numbers = q.view(torch.uint8)
    return numbers.masked_fill(numbers & _NAN != _NAN, 0).view(E4M3)
