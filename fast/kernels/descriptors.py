"""Make and keep the descriptors with which TMA, the GPU's bulk copy engine, loads tiles of a tensor."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

MOST_DESCRIPTORS = 4096  # a launch needs up to four; tensors at new addresses need new descriptors


class Memory(NamedTuple):
    """Address and dtype of a tensor; a descriptor holds them in place of the tensor, whose memory can then be freed.

    Attributes:
        address: address of the first element.
        dtype: dtype of the elements.
    """

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        """Return the address. Triton calls this method, because it treats this object like a tensor."""
        return self.address


@functools.lru_cache(MOST_DESCRIPTORS)
def box_descriptor(
    address: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
) -> TensorDescriptor | None:
    """Return the descriptor with which a Triton kernel loads boxes of a tensor; None if TMA cannot read the tensor.

    TMA needs a tensor with at least one element, and with a last stride of 1. The other strides must be multiples of 16
    bytes, and positive in a dim with several elements. The address must be a multiple of 16 bytes too.

    The descriptor depends on the arguments alone. If the tensor is freed and a tensor with the same shape, strides and
    dtype is allocated at the same address, the descriptor is correct for the new tensor.

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
