"""Convert cache entries to the form in which a cache format stores them, and back.

e4m3 is `torch.float8_e4m3fn`. A number is divided by a scale and rounded to the nearest e4m3 number, ties to even. A
number beyond the largest e4m3 number becomes +448 or -448, and NaN stays NaN. All scales are float32.
"""

from __future__ import annotations

import torch
from einops import rearrange
from jaxtyping import Float, Shaped
from torch import Tensor

from ..interfaces import (
    COMPUTE_FORMAT,
    CacheFormat,
    check_dtype,
    check_entries,
    check_scale_values,
    check_stored_entries,
    e4m3_scale,
    to_e4m3,
    wide_dtype,
)


def _tile_scales(latent: Float[Tensor, "T Lkv"], scale_tile: int) -> Float[Tensor, "T tiles"]:
    """Return one float32 scale for each group of `scale_tile` elements of a latent.

    The scale maps the largest absolute value of the group to 448. NaN is ignored, and infinity counts as the largest
    float32 number. The scale is at least the smallest normal float32 number, so that no quotient is 0 / 0.

    Args:
        latent: [T, Lkv].
        scale_tile: number of elements of a group; Lkv is a multiple of it.
    """
    limits = torch.finfo(torch.float32)
    sizes = torch.nan_to_num(latent.to(torch.float32).abs(), nan=0.0, posinf=limits.max)
    tiles = rearrange(sizes, "tokens (tiles columns) -> tokens tiles columns", columns=scale_tile)
    return e4m3_scale(tiles.amax(-1)).clamp(min=limits.tiny)


def quantize_entries(
    kv_c_normed: Float[Tensor, "T Lkv"],
    k_pe: Float[Tensor, "T R"],
    cache_format: CacheFormat = COMPUTE_FORMAT,
    kv_scale: Float[Tensor, ""] | None = None,
) -> Shaped[Tensor, "T columns"]:
    """Return the cache entries of some tokens in the form in which a cache stores them.

    Args:
        kv_c_normed: [T, Lkv], normed latents.
        k_pe: [T, R], rotated rope parts of the keys.
        cache_format: format of the cache.
        kv_scale: float32 scale of the layer's cache; None if the format has no such scale.

    Returns:
        [T, columns] in the dtype of the cache.

    Raises:
        ValueError: shapes, dtypes or devices do not match; the format does not support the dims; the scale is not
            finite and positive.
    """
    check_entries(kv_c_normed, k_pe, cache_format, kv_scale)
    check_scale_values("kv_scale", kv_scale)
    if not cache_format.scaled:
        return torch.cat((kv_c_normed, k_pe), dim=-1)
    if cache_format.layer_scale:
        return to_e4m3(torch.cat((kv_c_normed, k_pe), dim=-1), kv_scale)
    scales = _tile_scales(kv_c_normed, cache_format.scale_tile)
    latent = to_e4m3(kv_c_normed, scales.repeat_interleave(cache_format.scale_tile, dim=-1))
    parts = (latent, scales, k_pe.to(cache_format.rope_dtype))
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=-1)


def dequantize_entries(
    entries: Shaped[Tensor, "S columns"],
    cache_format: CacheFormat = COMPUTE_FORMAT,
    out_dtype: torch.dtype | None = None,
    kv_scale: Float[Tensor, ""] | None = None,
) -> Float[Tensor, "S head_size"]:
    """Return stored cache entries as numbers; dequantise them if the format has scales.

    A stored e4m3 number is multiplied by its scale in float32 (in float64 if `out_dtype` is float64). The product is
    rounded to `out_dtype`.

    Args:
        entries: [S, columns], stored entries.
        cache_format: format of the cache.
        out_dtype: dtype of the result. None means the dtype of `entries`. If the format has a `storage_dtype`, the
            caller must give a dtype.
        kv_scale: float32 scale of the layer's cache; None if the format has no such scale.

    Returns:
        [S, Lkv + R] in `out_dtype`.

    Raises:
        ValueError: shapes, dtypes or devices do not match; the scale is not finite and positive.
    """
    dtype = check_stored_entries(entries, cache_format, out_dtype, kv_scale)
    check_scale_values("kv_scale", kv_scale)
    check_dtype("out_dtype", dtype)
    if not cache_format.scaled:
        return entries.to(dtype)
    wide = wide_dtype(dtype)
    if cache_format.layer_scale:
        return (entries.to(wide) * kv_scale.to(wide)).to(dtype)
    layout = cache_format.layout(*cache_format.dims)
    entries = entries.contiguous()
    latent = entries[:, : layout.scales].view(cache_format.latent_dtype)
    scales = entries[:, layout.scales : layout.rope].contiguous().view(torch.float32)
    rope = entries[:, layout.rope :].contiguous().view(cache_format.rope_dtype)
    scales = scales.repeat_interleave(cache_format.scale_tile, dim=-1)
    return torch.cat(((latent.to(wide) * scales.to(wide)).to(dtype), rope.to(dtype)), dim=-1)
