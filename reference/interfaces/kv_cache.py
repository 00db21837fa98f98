"""Allocate the paged latent cache, for one layer or for all layers in one tensor."""

from __future__ import annotations

import torch
from jaxtyping import Shaped
from torch import Tensor

from .cache_format import check_storage_dtype
from .checks import check_device
from .sizes import kv_cache_shape, stride_order


def allocate_kv_cache(
    num_blocks: int,
    block_size: int,
    head_size: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    num_layers: int | None = None,
    layout: str = "layers_first",
) -> Shaped[Tensor, "*layers num_blocks block_size columns"]:
    """Allocate a paged latent cache without initialising its values.

    A value may be NaN until it is written. The functions of this project do not use such values.

    Args:
        num_blocks: number of blocks of one layer, at least 0.
        block_size: tokens per block.
        head_size: columns of a cache entry (`CacheFormat.columns`); Lkv + R in the format `compute_dtype`.
        dtype: dtype of the cache (`CacheFormat.dtype_for`): a float dtype, or the storage dtype of a format.
        device: device of the cache.
        num_layers: number of layers whose caches one tensor contains; `cache[layer]` is then the cache of one layer.
            None allocates the cache of one layer.
        layout: order of the axes in memory (`stride_order`). Every function accepts the cache of a layer with any
            strides.

    Returns:
        [num_blocks, block_size, head_size], or [num_layers, num_blocks, block_size, head_size] if `num_layers` is
        given.

    Raises:
        ValueError: a number is below its smallest valid value, or `dtype` or `layout` is not supported.
    """
    check_storage_dtype("dtype", dtype)
    device = check_device("device", device)
    shape = kv_cache_shape(num_blocks, block_size, head_size, num_layers)
    order = stride_order(num_layers is not None, layout)
    stored = torch.empty([shape[axis] for axis in order], dtype=dtype, device=device)
    return stored.permute([order.index(axis) for axis in range(len(shape))])
