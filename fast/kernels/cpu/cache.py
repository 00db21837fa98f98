"""Write, gather and copy entries of the paged latent cache, with index operations of PyTorch.

A cache entry is the latent and the rotated key part of one token. A slot is the place of one entry in the cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from reference.interfaces import COMPUTE_FORMAT, E4M3, CacheFormat, e4m3_scale, to_e4m3

from .rope import apply_rope

CHUNK_TOKENS = 4096  # tokens gathered at a time


def concat_and_cache_mla(
    kv_c_normed: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    cache_format: CacheFormat = COMPUTE_FORMAT,
    kv_scale: Tensor | None = None,
) -> None:
    """Write latents [T, Lkv] and rotated key parts [T, R] into the cache.

    `slot_mapping` [>= T] has the slot of each token. A token with slot -1 is not written.
    """
    block_size, latent = kv_cache.shape[1], kv_c_normed.shape[1]
    slots = slot_mapping[: kv_c_normed.shape[0]]
    kept = slots >= 0
    if not bool(kept.all()):
        slots, kv_c_normed, k_pe = slots[kept], kv_c_normed[kept], k_pe[kept]
    location = (slots // block_size, slots % block_size)
    if cache_format.scaled:
        as_bytes(kv_cache).index_put_(location, _stored_entries(kv_c_normed, k_pe, cache_format, kv_scale))
        return
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
    cache_format: CacheFormat = COMPUTE_FORMAT,
    kv_scale: Tensor | None = None,
    q_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate `q_pe` and `k_pe`, RMS-norm the latents, and write normed latents and rotated key parts into the cache.

    `slot_mapping` may have fewer slots than there are tokens; tokens without a slot are not written. See
    `fast.kernels.triton.rope.rope_norm_and_cache` for the arguments.

    Returns:
        The rotated q_pe, the normed latents and the rotated k_pe.
    """
    q_pe, k_pe = apply_rope(positions, q_pe, k_pe, frequencies, magnitude, interleaved, q_scale)
    kv_c_normed = torch.nn.functional.rms_norm(kv_c, norm_weight.shape, norm_weight, eps)
    end = min(kv_c.shape[0], slot_mapping.shape[0])
    concat_and_cache_mla(kv_c_normed[:end], k_pe[:end], kv_cache, slot_mapping, cache_format, kv_scale)
    return q_pe, kv_c_normed, k_pe


def gather_and_maybe_dequant_cache(
    kv_cache: Tensor,
    block_table: Tensor,
    cu_seq_lens: Tensor,
    starts: Tensor,
    out: Tensor,
    cache_format: CacheFormat = COMPUTE_FORMAT,
    kv_scale: Tensor | None = None,
) -> None:
    """Copy cache entries of each request into `out` [num_tokens, Lkv + R], converted to the dtype of `out`.

    If `out` has the storage dtype of the format, `out` [num_tokens, columns] receives the stored entries. See
    `reference.gather_and_maybe_dequant_cache` for the arguments.
    """
    scaled = cache_format.scaled and not cache_format.returns_stored(out.dtype)
    if cache_format.scaled and not scaled:
        kv_cache, out = as_bytes(kv_cache), as_bytes(out)
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
        if scaled:
            stored = as_bytes(kv_cache)[block, position % block_size]
            dequantize_entries(stored.view(kv_cache.dtype), target, cache_format, kv_scale)
        elif kv_cache.is_contiguous() and out.is_contiguous() and kv_cache.dtype == out.dtype:
            slots = block * block_size + position % block_size
            torch.index_select(kv_cache.view(-1, width), 0, slots, out=target)
        else:
            target.copy_(kv_cache[block, position % block_size])


def quantize_entries(
    kv_c_normed: Tensor, k_pe: Tensor, out: Tensor, cache_format: CacheFormat, kv_scale: Tensor | None
) -> None:
    """Write entries of latents [T, Lkv] and rotated key parts [T, R] to `out` [T, columns], as a cache stores them."""
    if cache_format.scaled:
        as_bytes(out).copy_(_stored_entries(kv_c_normed, k_pe, cache_format, kv_scale))
    else:
        torch.cat((kv_c_normed, k_pe), -1, out=out)


def dequantize_entries(entries: Tensor, out: Tensor, cache_format: CacheFormat, kv_scale: Tensor | None) -> None:
    """Write stored entries [S, columns] into `out` [S, Lkv + R]; dequantise them if the format has scales."""
    if not cache_format.scaled:
        out.copy_(entries)
        return
    wide = torch.float64 if out.dtype == torch.float64 else torch.float32
    if cache_format.layer_scale:
        out.copy_(entries.to(wide).mul_(kv_scale.to(wide)))
        return
    latent, rope = cache_format.dims
    layout = cache_format.layout(latent, rope)
    codes, scales, keys = entries.split((layout.scales, layout.rope - layout.scales, layout.columns - layout.rope), -1)
    latents = codes.view(E4M3).to(wide).unflatten(-1, (-1, cache_format.scale_tile))
    latents *= as_rows(scales, torch.float32)[..., None].to(wide)
    out[:, :latent] = latents.flatten(-2)
    out[:, latent:] = as_rows(keys, cache_format.rope_dtype)


def _stored_entries(kv_c_normed: Tensor, k_pe: Tensor, cache_format: CacheFormat, kv_scale: Tensor | None) -> Tensor:
    """Return the entries of some tokens as bytes [T, columns], for a format with scales."""
    if cache_format.layer_scale:
        return as_bytes(to_e4m3(torch.cat((kv_c_normed, k_pe), -1), kv_scale))
    limits = torch.finfo(torch.float32)
    tiles = kv_c_normed.float().unflatten(-1, (-1, cache_format.scale_tile))
    sizes = tiles.abs().nan_to_num_(nan=0.0, posinf=limits.max)
    scales = e4m3_scale(sizes.amax(-1)).clamp_(min=limits.tiny)
    codes = as_bytes(to_e4m3(tiles, scales[..., None])).flatten(-2)
    parts = codes, as_bytes(scales), as_bytes(k_pe.to(cache_format.rope_dtype).contiguous())
    return torch.cat(parts, -1)


def as_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a copy of `x` whose bytes are read as numbers of `dtype`; `x` may begin at any address."""
    return x.clone(memory_format=torch.contiguous_format).view(dtype)


def as_bytes(x: Tensor) -> Tensor:
    """Return a view of the bytes of `x`; PyTorch has few operations on 8-bit floats."""
    return x.view(torch.uint8)


def copy_blocks(kv_caches: list[Tensor], block_mapping: Tensor) -> None:
    """Copy blocks within each cache, for the (source, target) pairs of `block_mapping` [pairs, 2]."""
    source, target = block_mapping.unbind(1)
    for kv_cache in kv_caches:
        kv_cache[target] = kv_cache[source]


def swap_blocks(source: Tensor, target: Tensor, block_mapping: Tensor) -> None:
    """Copy blocks from one cache to another, for the (source, target) pairs of `block_mapping` [pairs, 2]."""
    read, written = block_mapping.unbind(1)
    target[written] = source[read].to(target.device)
