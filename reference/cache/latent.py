"""The paged latent cache: allocate, write and gather."""

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
    check_device,
    check_gather,
    check_offsets,
    check_slots,
    check_storage_dtype,
    kv_cache_shape,
    stride_order,
)


def allocate_kv_cache(
    num_blocks: int,
    block_size: int,
    head_size: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    num_layers: int | None = None,
    layout: str = "layers_first",
) -> Shaped[Tensor, "*layers num_blocks block_size columns"]:
    """An empty cache; its bytes are undefined until written (they may be NaN and reach nothing).

    Args:
        num_blocks: how many, 0 is legal.
        block_size: tokens a block.
        head_size: Lkv + R.
        dtype: float32, float64, bfloat16 or float16.
        device: where.
        num_layers: of one tensor for all layers, whose index gives a layer's cache; None for one layer.
        layout: how that tensor lies in memory (`stride_order`); every op takes a layer's cache with any strides.

    Returns:
        [num_blocks, block_size, Lkv + R], with `num_layers` in front where given.

    Raises:
        ValueError: a size below 1, or another dtype or layout.
    """
    check_storage_dtype("dtype", dtype)
    device = check_device("device", device)
    shape = kv_cache_shape(num_blocks, block_size, head_size, num_layers)
    order = stride_order(num_layers is not None, layout)
    stored = torch.empty([shape[axis] for axis in order], dtype=dtype, device=device)
    return stored.permute([order.index(axis) for axis in range(len(shape))])


def concat_and_cache_mla(
    kv_c_normed: Float[Tensor, "T Lkv"],
    k_pe: Float[Tensor, "T R"],
    kv_cache: Shaped[Tensor, "num_blocks block_size columns"],
    slot_mapping: Int64[Tensor, " slots"],
    cache_format: CacheFormat = COMPUTE_FORMAT,
) -> None:
    """Write each token's latent and rotated key into its slot; bit-exact. Slots past T are ignored.

    Args:
        kv_c_normed: [T, Lkv], RMS-normed latents.
        k_pe: [T, R], rotated keys.
        kv_cache: written in place.
        slot_mapping: [>= T], -1 = padding.
        cache_format: format of the cache.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; a slot outside the cache. Nothing is written then.
    """
    check_cache_write(kv_c_normed, k_pe, kv_cache, slot_mapping, cache_format)
    slots = slot_mapping[: kv_c_normed.shape[0]]
    num_blocks, block_size, _ = kv_cache.shape
    check_slots(slots, num_blocks * block_size)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            kv_cache[slot // block_size, slot % block_size] = torch.cat((kv_c_normed[token], k_pe[token]))


def gather_and_maybe_dequant_cache(
    kv_cache: Shaped[Tensor, "num_blocks block_size columns"],
    block_table: Int32[Tensor, "B W"],
    cu_seq_lens: Int32[Tensor, " B+1"],
    starts: Int32[Tensor, " B"],
    num_tokens: int,
    cache_format: CacheFormat = COMPUTE_FORMAT,
    out_dtype: torch.dtype | None = None,
) -> Float[Tensor, "num_tokens head_size"]:
    """Copy a piece of each request's tokens out of the pages, packed one request after another.

    Request b contributes its tokens [starts[b], starts[b] + cu_seq_lens[b + 1] - cu_seq_lens[b]). In the dtype of the
    cache the copy is bit-exact; another `out_dtype` rounds each element once.

    Args:
        kv_cache: the cache.
        block_table: [B, W].
        cu_seq_lens: [B + 1], prefix sum of the pieces' lengths.
        starts: [B], first token of each piece.
        num_tokens: cu_seq_lens[-1].
        cache_format: format of the cache.
        out_dtype: dtype of the result; None for that of the cache. A format with a storage dtype of its own needs it.

    Returns:
        [num_tokens, Lkv + R] in `out_dtype`.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; offsets that fall; a block outside the cache.
    """
    width, dtype = check_gather(kv_cache, block_table, cu_seq_lens, starts, num_tokens, cache_format, out_dtype)
    check_offsets("cu_seq_lens", cu_seq_lens, num_tokens)
    lengths, first = cu_seq_lens.diff().tolist(), starts.tolist()
    check(all(start >= 0 for start in first), "starts", "values >= 0", first)
    num_blocks, block_size, _ = kv_cache.shape
    check_blocks(block_table, (s + n if n else 0 for s, n in zip(first, lengths, strict=True)), block_size, num_blocks)
    rows = [kv_cache.new_empty(0, width)]
    for table, start, length in zip(block_table.tolist(), first, lengths, strict=True):
        token, end = start, start + length
        while token < end:  # page by page: the rest of the page, or of the piece where it ends earlier
            page_end = min(end, (token // block_size + 1) * block_size)
            offset = token % block_size
            rows.append(kv_cache[table[token // block_size], offset : offset + page_end - token])
            token = page_end
    return torch.cat(rows).to(dtype)
