"""Caches in fp8 formats, and entries that a format stores without a rounding error.

Bytes of a cache that belong to no token are 0xFF, which is NaN in every dtype of the formats.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from reference.interfaces import (
    FP8_DS_MLA,
    FP8_E4M3,
    CacheFormat,
    CommonAttentionMetadata,
    MLAConfig,
    wide_dtype,
)

from .factories import LOW_RANK, Batch, integers, offsets

SMALL = replace(LOW_RANK, num_heads=12)
WIDE = replace(SMALL, kv_lora_rank=512, qk_rope_head_dim=64)
# name of a format: the format, a config with dims that the format supports, and a scale of the cache
FORMATS = {"fp8_e4m3": (FP8_E4M3, SMALL, 2.0**-5), "fp8_ds_mla": (FP8_DS_MLA, WIDE, None)}


def poisoned_cache(
    num_blocks: int,
    block_size: int,
    config: MLAConfig,
    cache_format: CacheFormat,
    dtype: torch.dtype,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return a cache of a format in which every byte is 0xFF (`CacheFormat.poison`)."""
    columns = cache_format.columns(config.kv_lora_rank, config.qk_rope_head_dim)
    stored = cache_format.dtype_for(dtype)
    shape = (num_blocks, block_size, columns * stored.itemsize)
    return torch.full(shape, cache_format.poison, dtype=torch.uint8, device=device).view(stored)


def exact_entries(tokens: int, config: MLAConfig, dtype: torch.dtype, scale: float) -> tuple[Tensor, Tensor]:
    """Return latents [T, Lkv] and rope parts [T, R] that every fp8 format stores exactly.

    Every number is `scale`, a power of two, times an e4m3 number. In each group of 128 columns of a latent, the largest
    number is 448 * `scale`, so that the scale of the group is `scale`. The entries have different magnitudes.
    """
    width = config.kv_lora_rank + config.qk_rope_head_dim
    numbers = torch.randn(tokens, width) * 2.0 ** torch.randint(2, 6, (tokens, 1))
    numbers = numbers.clamp(-448, 448).to(torch.float8_e4m3fn).to(wide_dtype(dtype))
    latents, k_pe = numbers.split([config.kv_lora_rank, config.qk_rope_head_dim], dim=1)
    latents[:, ::128] = 448.0
    return (latents * scale).to(dtype), (k_pe * scale).to(dtype)


def step_of(batch: Batch, lens: tuple[tuple[int, int], ...]) -> CommonAttentionMetadata:
    """Return one step of the requests of a batch; `lens` has (new tokens, tokens after the step) of each request."""
    slots = [
        block * batch.block_size + at
        for own, (query_len, length) in zip(batch.slots, lens, strict=True)
        for block, at in own[length - query_len : length]
    ]
    return CommonAttentionMetadata.make(
        offsets([query_len for query_len, _ in lens]).cpu(),
        integers(*(length for _, length in lens)).cpu(),
        batch.common.block_table,
        torch.tensor(slots, dtype=torch.int64),
    )
