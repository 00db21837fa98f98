"""Write keys and values into the paged key/value cache, with index operations of PyTorch."""

from __future__ import annotations

from torch import Tensor

from reference.interfaces import COMPUTE_FORMAT, CacheFormat, to_e4m3

from .cache import as_bytes


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    cache_format: CacheFormat = COMPUTE_FORMAT,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Write keys [T, Nkv, Dh] and values [T, Nkv, Dh] into the cache [2, num_blocks, block_size, Nkv, Dh].

    `slot_mapping` [>= T] has the slot of each token. A token with slot -1 is not written.
    """
    block_size = kv_cache.shape[2]
    slots = slot_mapping[: key.shape[0]]
    kept = slots >= 0
    if not bool(kept.all()):
        slots, key, value = slots[kept], key[kept], value[kept]
    location = (slots // block_size, slots % block_size)
    for half, entries, scale in zip(kv_cache.unbind(0), (key, value), (k_scale, v_scale), strict=True):
        if cache_format.scaled:
            half, entries = as_bytes(half), as_bytes(to_e4m3(entries, scale))
        half.index_put_(location, entries)
