"""Write, gather and copy entries of the paged latent cache, with index operations of PyTorch.

A cache entry is the latent and the rotated key part of one token. A slot is the place of one entry in the cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .rope import apply_rope

CHUNK_TOKENS = 4096  # tokens gathered at a time


def concat_and_cache_mla(kv_c_normed: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write latents [T, Lkv] and keys [T, R] into the cache; `slot_mapping` [>= T] has the slot of each token.

    A token with slot -1 is not written.
    """
    block_size, latent = kv_cache.shape[1], kv_c_normed.shape[1]
    slots = slot_mapping[: kv_c_normed.shape[0]]
    kept = slots >= 0
    if not bool(kept.all()):
        slots, kv_c_normed, k_pe = slots[kept], kv_c_normed[kept], k_pe[kept]
    location = (slots // block_size, slots % block_size)
    kv_cache[..., :latent].index_put_(location, kv_c_normed)
    kv_cache[..., latent:].index_put_(location, k_pe)


def rope_norm_and_cache(
    positions: Tensor,
    q_pe: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    norm_weight: Tensor,
    eps: float,
    frequencies: Tensor,
    magnitude: float,
    interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate q_pe and k_pe, RMS-norm the latents, and write normed latents and rotated keys into the cache.

    `slot_mapping` may have fewer slots than there are tokens; tokens without a slot are not written. See
    `fast.kernels.triton.rope.rope_norm_and_cache` for the arguments.

    Returns:
        The rotated q_pe, the normed latents and the rotated k_pe.
    """
    q_pe, k_pe = apply_rope(positions, q_pe, k_pe, frequencies, magnitude, interleaved)
    kv_c_normed = torch.nn.functional.rms_norm(kv_c, norm_weight.shape, norm_weight, eps)
    end = min(kv_c.shape[0], slot_mapping.shape[0])
    concat_and_cache_mla(kv_c_normed[:end], k_pe[:end], kv_cache, slot_mapping)
    return q_pe, kv_c_normed, k_pe


def gather_and_maybe_dequant_cache(
    kv_cache: Tensor, block_table: Tensor, cu_seq_lens: Tensor, starts: Tensor, out: Tensor
) -> None:
    """Copy tokens of each request from the cache into `out` [num_tokens, Lkv + R], converted to the dtype of `out`.

    See `reference.gather_and_maybe_dequant_cache` for the arguments.
    """
    used = int(cu_seq_lens[-1])
    out[used:] = 0  # rows after the last request
    out = out[:used]
    block_size, width = kv_cache.shape[1:]
    for first in range(0, out.shape[0], CHUNK_TOKENS):  # in chunks, so that the index tensors stay small
        tokens = torch.arange(first, min(first + CHUNK_TOKENS, out.shape[0]), device=out.device)
        request = torch.searchsorted(cu_seq_lens[1:].long(), tokens, right=True)
        position = tokens - cu_seq_lens[request] + starts[request]
        block = block_table[request, position // block_size].long()
        target = out[first : first + CHUNK_TOKENS]
        if kv_cache.is_contiguous() and out.is_contiguous() and kv_cache.dtype == out.dtype:
            slots = block * block_size + position % block_size
            torch.index_select(kv_cache.view(-1, width), 0, slots, out=target)
        else:
            target.copy_(kv_cache[block, position % block_size])


def copy_blocks(kv_caches: list[Tensor], block_mapping: Tensor) -> None:
    """Copy blocks within each cache, for the (source, target) pairs of `block_mapping` [pairs, 2]."""
    source, target = block_mapping.unbind(1)
    for kv_cache in kv_caches:
        kv_cache[target] = kv_cache[source]


def swap_blocks(source: Tensor, target: Tensor, block_mapping: Tensor) -> None:
    """Copy blocks from one cache to another, for the (source, target) pairs of `block_mapping` [pairs, 2]."""
    read, written = block_mapping.unbind(1)
    target[written] = source[read].to(target.device)
