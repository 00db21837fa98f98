"""TMA descriptors of Gluon kernels: each descriptor is made once and kept in a cache.

TMA is the GPU's bulk copy engine. A descriptor states the tensor, and the shape of the box that one copy moves.
"""

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
    """Return the TMA descriptor of a tensor of 16-bit elements at an address.

    The descriptor depends on the arguments alone, so it is valid for every tensor with this address, dtype, shape and
    strides. The cache keeps no tensor alive.

    Args:
        address: address of the first element in bytes, a multiple of 16.
        dtype: bfloat16 or float16.
        shape: shape of the tensor.
        strides: strides of the tensor, in elements.
        box: shape of the box that one copy moves.
        swizzle: width in bytes of the permuted (swizzled) layout in shared memory, which avoids bank conflicts.
    """
    layout = gl.NVMMASharedLayout(swizzle, 16, rank=len(box))
    return TensorDescriptor(Memory(address, dtype), shape, strides, list(box), layout)
