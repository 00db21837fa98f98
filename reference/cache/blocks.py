"""Copy whole blocks within a paged cache, or from one cache to another. A block has `block_size` tokens."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from ..interfaces import (
    cache_halves,
    check_block_cache,
    check_block_mapping,
    check_equal_scales,
    check_readable,
    check_swap,
    check_tensor,
    check_type,
)


def copy_blocks(
    kv_caches: list[Shaped[Tensor, "num_blocks block_size columns"] | Shaped[Tensor, "2 num_blocks block_size Nkv Dh"]],
    block_mapping: Int64[Tensor, "pairs 2"],
) -> None:
    """Copy whole blocks within each cache, bit for bit. An engine needs this for copy on write of a shared block.

    Args:
        kv_caches: caches of all layers, written in place. Each is a latent cache [num_blocks, block_size, columns] or a
            key/value cache [2, num_blocks, block_size, Nkv, Dh] with any strides, whose keys and values are copied.
        block_mapping: [pairs, 2], pairs of (source block, target block), to be copied in every cache.

    Raises:
        ValueError: a block is outside a cache, is the target of two pairs, or is both a source and a target. If the
            function raises, it has written nothing.
    """
    check_tensor("block_mapping", block_mapping, ("pairs", 2), (torch.int64,))
    check_readable("block_mapping", block_mapping)
    check_type("kv_caches", kv_caches, (list, tuple), "a list of caches")
    for kv_cache in kv_caches:
        check_block_cache(kv_cache)
        num_blocks = cache_halves(kv_cache)[0].shape[0]
        check_block_mapping(block_mapping, num_blocks, num_blocks, same_cache=True)
    for half in (half for kv_cache in kv_caches for half in cache_halves(kv_cache)):
        for source, target in block_mapping.tolist():
            half[target] = half[source]


def swap_blocks(
    source: Shaped[Tensor, "source_blocks block_size columns"] | Shaped[Tensor, "2 source_blocks block_size Nkv Dh"],
    target: Shaped[Tensor, "target_blocks block_size columns"] | Shaped[Tensor, "2 target_blocks block_size Nkv Dh"],
    block_mapping: Int64[Tensor, "pairs 2"],
    source_scale: Float[Tensor, "*halves"] | None = None,
    target_scale: Float[Tensor, "*halves"] | None = None,
) -> None:
    """Copy whole blocks from one cache to another, bit for bit. The caches may be on different devices.

    Args:
        source: the cache to read: a latent cache [source_blocks, block_size, columns] or a key/value cache
            [2, source_blocks, block_size, Nkv, Dh].
        target: the cache to write, in the dtype of `source` and with the same shape except for the number of blocks.
            The strides may differ. `target` may be `source` itself.
        block_mapping: [pairs, 2], pairs of (source block, target block).
        source_scale: float32 scale of the source cache, if its format has one (`CacheFormat.layer_scale`): [] for a
            latent cache, [2] for a key/value cache (the scales of keys and of values). The function reads both scales,
            so the host waits for a scale on a GPU. A cache does not contain its scale. If both scales are None, the
            function therefore compares nothing, and the caller must ensure that both caches have the same scale.
        target_scale: float32 scale of the target cache; it must equal `source_scale`.

    Raises:
        ValueError: in one of the following cases. If the function raises, it has written nothing.

            - The caches have different block sizes, entries or dtypes, or different scales.
            - A scale is not finite and positive.
            - The caches overlap in memory, but are not the same cache.
            - A block is outside its cache, or is the target of two pairs.
            - The caches are the same cache, and a block is both a source and a target.
    """
    check_swap(source, target, block_mapping)
    check_equal_scales(source_scale, target_scale, source)
    halves = list(zip(cache_halves(source), cache_halves(target), strict=True))
    read, written = halves[0]
    same_cache = source.data_ptr() == target.data_ptr()
    check_block_mapping(block_mapping, read.shape[0], written.shape[0], same_cache)
    for read, written in halves:
        for source_block, target_block in block_mapping.tolist():
            written[target_block] = read[source_block].to(written.device)
