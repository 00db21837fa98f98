"""Copy whole blocks within a paged cache, or from one cache to another. A block has `block_size` tokens."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from ..interfaces import (
    check_block_mapping,
    check_cache,
    check_equal_scales,
    check_readable,
    check_swap,
    check_tensor,
    check_type,
)


def copy_blocks(
    kv_caches: list[Shaped[Tensor, "num_blocks block_size columns"]], block_mapping: Int64[Tensor, "pairs 2"]
) -> None:
    """Copy whole blocks within each cache, bit for bit. An engine needs this for copy on write of a shared block.

    Args:
        kv_caches: caches of all layers, each [num_blocks, block_size, columns], written in place.
        block_mapping: [pairs, 2], pairs of (source block, target block), to be copied in every cache.

    Raises:
        ValueError: a block is outside a cache, is the target of two pairs, or is both a source and a target. If the
            function raises, it has written nothing.
    """
    check_tensor("block_mapping", block_mapping, ("pairs", 2), (torch.int64,))
    check_readable("block_mapping", block_mapping)
    check_type("kv_caches", kv_caches, (list, tuple), "a list of caches")
    for kv_cache in kv_caches:
        check_cache(kv_cache)
        check_readable("kv_caches", kv_cache)
        check_block_mapping(block_mapping, kv_cache.shape[0], kv_cache.shape[0], same_cache=True)
    for kv_cache in kv_caches:
        for source, target in block_mapping.tolist():
            kv_cache[target] = kv_cache[source]


def swap_blocks(
    source: Shaped[Tensor, "source_blocks block_size columns"],
    target: Shaped[Tensor, "target_blocks block_size columns"],
    block_mapping: Int64[Tensor, "pairs 2"],
    source_scale: Float[Tensor, ""] | None = None,
    target_scale: Float[Tensor, ""] | None = None,
) -> None:
    """Copy whole blocks from one cache to another, bit for bit. The caches may be on different devices.

    Args:
        source: [source_blocks, block_size, columns], the cache to read.
        target: [target_blocks, block_size, columns], the cache to write, in the dtype of `source`. `target` may be
            `source` itself.
        block_mapping: [pairs, 2], pairs of (source block, target block).
        source_scale: float32 scale of the source cache, if its format has one (`CacheFormat.layer_scale`). The function
            reads both scales, so the host waits for a scale on a GPU.
        target_scale: float32 scale of the target cache; it must equal `source_scale`.

    Raises:
        ValueError: in one of the following cases. If the function raises, it has written nothing.

            - The caches have different block sizes, columns or dtypes.
            - The caches overlap in memory, but are not the same cache.
            - A block is outside its cache, or is the target of two pairs.
            - The caches are the same cache, and a block is both a source and a target.
    """
    check_swap(source, target, block_mapping)
    check_equal_scales(source_scale, target_scale)
    check_block_mapping(block_mapping, source.shape[0], target.shape[0], source.data_ptr() == target.data_ptr())
    for read, written in block_mapping.tolist():
        target[written] = source[read].to(target.device)
