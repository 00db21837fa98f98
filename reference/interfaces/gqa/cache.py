"""Shape, order in memory and allocation of the paged key/value cache.

The logical axes are always [2, num_blocks, block_size, Nkv, Dh]: keys at index 0 of the first axis, values at index 1.
The layout is the order of these axes in memory.
"""

from __future__ import annotations

import torch
from jaxtyping import Shaped
from torch import Tensor

from ..cache_format import CACHE_FORMATS
from ..checks import FLOAT_DTYPES, check, check_device, check_flag, check_int
from .arguments import KEY_VALUE_FORMATS, check_key_value_block_size
from .dims import check_head_dim

KEY_VALUE_LAYOUTS = {  # order in memory of the logical axes [layers, 2, num_blocks, block_size, Nkv, Dh]
    "NHD": (0, 1, 2, 3, 4, 5),  # all heads of a token are contiguous
    "HND": (0, 1, 2, 4, 3, 5),  # all tokens of a block and a head are contiguous
}


def key_value_cache_shape(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, num_layers: int | None = None
) -> tuple[int, int, int, int, int] | tuple[int, int, int, int, int, int]:
    """Return the shape of the paged key/value cache: [2, num_blocks, block_size, Nkv, Dh] for one layer.

    Args:
        num_blocks: blocks of one layer; may be 0.
        block_size: tokens per block, a multiple of 16.
        num_kv_heads: Nkv, number of key/value heads.
        head_dim: Dh, one of `HEAD_DIMS`.
        num_layers: number of layers, if one tensor has the caches of all layers. The shape is then
            [num_layers, 2, num_blocks, block_size, Nkv, Dh].

    Raises:
        ValueError: an argument is below 1 (`num_blocks` may be 0); the block size is not a multiple of 16.
        UnsupportedConfiguration: the head dim is not in `HEAD_DIMS`.
    """
    check_int("num_blocks", num_blocks, 0)
    check_key_value_block_size("block_size", block_size)
    check_int("num_kv_heads", num_kv_heads)
    check_head_dim(head_dim)
    shape = (2, num_blocks, block_size, num_kv_heads, head_dim)
    if num_layers is None:
        return shape
    check_int("num_layers", num_layers, 1, "a positive int or None")
    return (num_layers, *shape)


def key_value_stride_order(include_layers: bool = False, layout: str = "NHD") -> tuple[int, ...]:
    """Return the order in memory of the axes of `key_value_cache_shape`, the axis with the largest stride first.

    Args:
        include_layers: whether the shape begins with a layers dimension. This dimension has the largest stride.
        layout: "NHD" (the heads of a token are contiguous) or "HND" (the tokens of a block and a head are contiguous).

    Raises:
        TypeError: `include_layers` is not a bool.
        ValueError: `layout` is neither "NHD" nor "HND".
    """
    check_flag("include_layers", include_layers)
    known = isinstance(layout, str) and layout in KEY_VALUE_LAYOUTS
    check(known, "layout", f"one of {', '.join(KEY_VALUE_LAYOUTS)}", layout)
    order = KEY_VALUE_LAYOUTS[layout]
    return order if include_layers else tuple(axis - 1 for axis in order[1:])


def allocate_key_value_cache(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    num_layers: int | None = None,
    layout: str = "NHD",
) -> Shaped[Tensor, "*layers 2 num_blocks block_size Nkv Dh"]:
    """Allocate a paged key/value cache without initialising its values.

    A value may be NaN until it is written. The functions of this project do not use such values.

    Args:
        num_blocks: number of blocks of one layer, at least 0.
        block_size: tokens per block, a multiple of 16.
        num_kv_heads: Nkv, number of key/value heads.
        head_dim: Dh, one of `HEAD_DIMS`.
        dtype: dtype of the cache (`CacheFormat.dtype_for`): a float dtype, or the storage dtype of a format.
        device: device of the cache.
        num_layers: number of layers whose caches one tensor contains; `cache[layer]` is then the cache of one layer.
            None allocates the cache of one layer.
        layout: order of the axes in memory (`key_value_stride_order`). Every function accepts the cache of a layer with
            any strides.

    Returns:
        [2, num_blocks, block_size, Nkv, Dh], or [num_layers, 2, num_blocks, block_size, Nkv, Dh] if `num_layers` is
        given.

    Raises:
        TypeError: `device` is neither a device nor the name of a device.
        ValueError: a number is below its smallest valid value, the block size is not a multiple of 16, or `dtype` or
            `layout` is not supported.
        UnsupportedConfiguration: the head dim is not in `HEAD_DIMS`.
    """
    stored = [CACHE_FORMATS[name].storage_dtype for name in KEY_VALUE_FORMATS]
    allowed = (*FLOAT_DTYPES, *(one for one in stored if one is not None))
    check(isinstance(dtype, torch.dtype) and dtype in allowed, "dtype", f"one of {', '.join(map(str, allowed))}", dtype)
    device = check_device("device", device)
    shape = key_value_cache_shape(num_blocks, block_size, num_kv_heads, head_dim, num_layers)
    order = key_value_stride_order(num_layers is not None, layout)
    memory = torch.empty([shape[axis] for axis in order], dtype=dtype, device=device)
    return memory.permute([order.index(axis) for axis in range(len(shape))])
