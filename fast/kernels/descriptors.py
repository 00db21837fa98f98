"""TMA descriptors on the host, each made once. TMA is the GPU's bulk copy engine."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

MOST_DESCRIPTORS = 4096  # a launch needs up to four, for each address that torch's allocator gives out


class Memory(NamedTuple):
    """Address and dtype of a tensor, in place of the tensor. A kept descriptor therefore keeps no memory alive.

    Attributes:
        address: address of the first element.
        dtype: dtype of the elements.
    """

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        """Return the address; Triton calls this method as it does for a tensor."""
        return self.address


@functools.lru_cache(MOST_DESCRIPTORS)
def box_descriptor(
    address: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
) -> TensorDescriptor | None:
    """Return the descriptor with which a Triton kernel loads boxes of a tensor; None if TMA cannot read the tensor.

    TMA needs at least one element, an address and strides that are multiples of 16 bytes, and contiguous columns.

    A descriptor depends on these arguments alone. If a tensor is freed and another tensor with the same shape, strides
    and dtype begins at the same address, the same descriptor is right for the other tensor.

    Args:
        address: address of the first element.
        dtype: dtype of the elements.
        shape: shape of the tensor.
        strides: strides of the tensor, in elements.
        box: shape of the box that one copy moves.
    """
    own = all(stride > 0 for size, stride in zip(shape, strides, strict=True) if size > 1)
    steps = (address, *(stride * dtype.itemsize for stride in strides[:-1]))
    if 0 in shape or strides[-1] != 1 or not own or any(step % 16 for step in steps):
        return None
    return TensorDescriptor(Memory(address, dtype), list(shape), list(strides), list(box))
