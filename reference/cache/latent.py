"""Write cache entries to a paged latent cache, and gather cache entries from it.

The place of a token in the cache is its slot: slot s is in block s // block_size, at the offset s % block_size.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int32, Int64, Shaped
from torch import Tensor

from ..interfaces import (
    COMPUTE_FORMAT,
    CacheFormat,
    check,
    check_blocks,
    check_cache_write,
    check_gather,
    check_offsets,
    check_scale_values,
    check_slots,
)
from .formats import dequantize_entries, quantize_entries


def concat_and_cache_mla(
    kv_c_normed: Float[Tensor, "T Lkv"],
    k_pe: Float[Tensor, "T R"],
    kv_cache: Shaped[Tensor, "num_blocks block_size columns"],
    slot_mapping: Int64[Tensor, " slots"],
    cache_format: CacheFormat = COMPUTE_FORMAT,
    kv_scale: Float[Tensor, ""] | None = None,
) -> None:
    """Write the cache entry of each token (its latent and the rotated rope part of its key) to the slot of the token.

    For a format with scales (`CacheFormat.scaled`), the elements are converted with `quantize_entries`. For any other
    format, they are copied bit for bit.

    Args:
        kv_c_normed: [T, Lkv], normed latents of T tokens.
        k_pe: [T, R], rotated rope parts of the keys of these tokens.
        kv_cache: [num_blocks, block_size, columns], the cache of the layer, written in place.
        slot_mapping: [at least T], slot of each token; -1 = the token is not written. Elements from index T on are
            ignored.
        cache_format: format of the cache.
        kv_scale: float32 scale of the layer's cache; None if the format has no such scale (`CacheFormat.layer_scale`).

    Raises:
        ValueError: shapes, dtypes or devices do not match; a slot is outside the cache. If the function raises, it has
            written nothing.
    """
    check_cache_write(kv_c_normed, k_pe, kv_cache, slot_mapping, cache_format, kv_scale)
    slots = slot_mapping[: kv_c_normed.shape[0]]
    num_blocks, block_size, _ = kv_cache.shape
    check_slots(slots, num_blocks * block_size)
    entries = quantize_entries(kv_c_normed, k_pe, cache_format, kv_scale)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            kv_cache[slot // block_size, slot % block_size] = entries[token]


def gather_and_maybe_dequant_cache(
    kv_cache: Shaped[Tensor, "num_blocks block_size columns"],
    block_table: Int32[Tensor, "B W"],
    cu_seq_lens: Int32[Tensor, " B+1"],
    starts: Int32[Tensor, " B"],
    num_tokens: int,
    cache_format: CacheFormat = COMPUTE_FORMAT,
    out_dtype: torch.dtype | None = None,
    kv_scale: Float[Tensor, ""] | None = None,
) -> Shaped[Tensor, "num_tokens head_size"]:
    """Copy the cache entries of consecutive tokens of each request into one tensor, one request after another.

    The function copies the tokens [starts[b], starts[b] + n) of request b, where n = cu_seq_lens[b + 1] -
    cu_seq_lens[b]. If `out_dtype` is the dtype of the cache, the elements are copied bit for bit. For another
    `out_dtype`, each element is converted with `dequantize_entries`.

    Args:
        kv_cache: [num_blocks, block_size, columns], the cache of the layer.
        block_table: [B, W], the block ids of each of the B requests, in the order of its tokens.
        cu_seq_lens: [B + 1], prefix sum of the number of tokens to copy from each request.
        starts: [B], position of the first token to copy from each request.
        num_tokens: number of rows of the result, equal to cu_seq_lens[-1].
        cache_format: format of the cache.
        out_dtype: dtype of the result. None means the dtype of the cache. If the format has a `storage_dtype`, the
            caller must give a dtype.
        kv_scale: float32 scale of the layer's cache; None if the format has no such scale (`CacheFormat.layer_scale`).

    Returns:
        [num_tokens, Lkv + R] in `out_dtype`.

    Raises:
        ValueError: shapes, dtypes or devices do not match; `cu_seq_lens` decreases; a start is negative; a block is
            outside the cache.
    """
    _, dtype = check_gather(kv_cache, block_table, cu_seq_lens, starts, num_tokens, cache_format, out_dtype, kv_scale)
    check_scale_values("kv_scale", kv_scale)
    check_offsets("cu_seq_lens", cu_seq_lens, num_tokens)
    lengths, first = cu_seq_lens.diff().tolist(), starts.tolist()
    check(all(start >= 0 for start in first), "starts", "values >= 0", first)
    num_blocks, block_size, _ = kv_cache.shape
    check_blocks(block_table, (s + n if n else 0 for s, n in zip(first, lengths, strict=True)), block_size, num_blocks)
    rows = [kv_cache.new_empty(0, kv_cache.shape[2])]
    for table, start, length in zip(block_table.tolist(), first, lengths, strict=True):
        token, end = start, start + length
        while token < end:  # copy to the end of the block, or to `end` if `end` comes first
            copy_end = min(end, (token // block_size + 1) * block_size)
            offset = token % block_size
            rows.append(kv_cache[table[token // block_size], offset : offset + copy_end - token])
            token = copy_end
    entries = torch.cat(rows)
    if cache_format.returns_stored(dtype):
        return entries
    return dequantize_entries(entries, cache_format, dtype, kv_scale)
