"""Write keys and values into a paged cache, with index operations of PyTorch and without a wait for the host."""

from __future__ import annotations

import torch
from torch import Tensor

from reference.interfaces import COMPUTE_FORMAT, CacheFormat, to_e4m3


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

    `slot_mapping` [>= T] has the slot of each token. A token whose slot is -1 or outside the cache is not written. The
    host does not know how many tokens are written. A token that is not written therefore repeats the write of a token
    that is written, with the same bits. If no token is written, all tokens write back what slot 0 has.
    """
    num_blocks, block_size = kv_cache.shape[1:3]
    tokens = key.shape[0]
    if tokens == 0 or num_blocks == 0:
        return
    slots = slot_mapping[:tokens]
    kept = (slots >= 0) & (slots < num_blocks * block_size)
    # [1], the first token that is written; an index without a dimension would make PyTorch read it on the host
    repeated, any_kept = kept.to(torch.uint8).argmax(0, keepdim=True), kept.any()
    slots = torch.where(kept, slots, torch.where(any_kept, slots[repeated], 0))
    location = (slots // block_size, slots % block_size)
    for half, entries, scale in zip(kv_cache.unbind(0), (key, value), (k_scale, v_scale), strict=True):
        if cache_format.scaled:
            half, entries = half.view(torch.uint8), to_e4m3(entries, scale).view(torch.uint8)
        substitute = torch.where(any_kept, entries[repeated], half[0, 0])
        half.index_put_(location, torch.where(kept[:, None, None], entries, substitute))
