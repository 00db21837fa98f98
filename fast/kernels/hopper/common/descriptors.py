"""TMA descriptors of Gluon kernels, each made once."""

from __future__ import annotations

import functools

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...descriptors import MOST_DESCRIPTORS, Memory


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

    A descriptor depends on these arguments alone (`fast.kernels.descriptors.box_descriptor`).

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
