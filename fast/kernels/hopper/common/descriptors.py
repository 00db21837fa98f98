"""TMA descriptors on the host, each made once. TMA is the GPU's bulk copy engine."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

MOST_DESCRIPTORS = 4096  # a layer needs two for its cache and one for each output that torch's allocator gives out


class Memory(NamedTuple):
    """What a descriptor knows of a tensor. It does not keep the tensor, so a kept descriptor keeps no memory alive.

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
def descriptor(
    address: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: int,
) -> TensorDescriptor:
    """Return the descriptor of 16-bit elements in memory.

    A descriptor depends on these arguments alone. If a tensor is freed and another tensor with the same shape, strides
    and dtype begins at the same address, the same descriptor is right for the other tensor.

    Args:
        address: address of the first element, a multiple of 16.
        dtype: bfloat16 or float16.
        shape: shape of the tensor.
        strides: strides of the tensor, in elements.
        box: shape of the box that one copy moves.
        swizzle: bytes over which the addresses of a box in shared memory are permuted.
    """
    layout = gl.NVMMASharedLayout(swizzle, 16, rank=len(box))
    return TensorDescriptor(Memory(address, dtype), shape, strides, list(box), layout)
