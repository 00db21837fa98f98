"""Inputs for tests of the fp8 cache formats. Every byte of a cache that belongs to no token is 0xFF."""

from __future__ import annotations

import math

import torch

from reference.interfaces import FP8_DS_MLA, FP8_E4M3, CacheFormat

from .factories import assert_same_bits, integers, offsets

NAN_CODE, LARGEST = 0x7F, 0x7E  # codes of NaN and of 448
FORMATS = [(FP8_E4M3, 21, 6), (FP8_E4M3, 32, 0), (FP8_E4M3, 512, 64), (FP8_DS_MLA, 512, 64)]  # (format, Lkv, R)


def table_of_values() -> torch.Tensor:
    """Return the value of every e4m3 code in float64, from the definition of the format."""
    values = []
    for code in range(256):
        exponent, mantissa = code >> 3 & 15, code & 7
        size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        values.append(math.nan if code & 0x7F == NAN_CODE else -size if code & 0x80 else size)
    return torch.tensor(values, dtype=torch.float64)


def scale_of(cache_format: CacheFormat) -> torch.Tensor | None:
    """Return a scale that is no power of two, or None if the format has no scale for a layer."""
    return torch.tensor(0.037) if cache_format.layer_scale else None


def difficult_rows(tokens: int, latent: int, rope: int, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers of many magnitudes, [tokens, latent + rope], with 0, infinity and NaN; `tokens` is at least 8."""
    rows = torch.randn(tokens, latent + rope) * 2.0 ** torch.randint(-14, 12, (tokens, latent + rope))
    rows[0, :latent] = 0
    rows[1, 3], rows[2, 4], rows[3, 5] = math.nan, math.inf, -math.inf
    rows[4, :latent] *= 2.0**-12
    if rope:
        rows[5, -1], rows[6, -1], rows[7, -2] = math.nan, math.inf, -math.inf
    return rows.to(dtype)


def new_fp8_cache(
    cache_format: CacheFormat,
    num_blocks: int,
    block_size: int,
    latent: int,
    rope: int,
    strided: bool = False,
    device: torch.device | None = None,
) -> torch.Tensor:
    """Return a cache in which every byte is 0xFF; a strided cache is one layer of a tensor of three layers."""
    shape = (num_blocks, 3 if strided else 1, block_size, cache_format.columns(latent, rope))
    whole = torch.full(shape, cache_format.poison, dtype=torch.uint8, device=device)
    return whole.view(cache_format.storage_dtype)[:, 1 if strided else 0]


def gather_arguments(table: torch.Tensor, lengths: list[int], starts: list[int]) -> tuple:
    """Return four arguments of `gather_and_maybe_dequant_cache`: block table, offsets, starts and number of tokens."""
    return table, offsets(lengths), integers(*starts), sum(lengths)


def assert_same_entries(got: torch.Tensor, wanted: torch.Tensor, cache_format: CacheFormat) -> None:
    """Assert that stored entries have the same bytes. The bits of NaN in a 16-bit rope part may differ."""
    assert got.shape == wanted.shape and got.dtype == wanted.dtype == cache_format.storage_dtype
    got, wanted = got.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8)
    if cache_format.rope_dtype is not None:
        first = cache_format.layout(*cache_format.dims).rope
        parts = [each[..., first:].contiguous().view(cache_format.rope_dtype) for each in (got, wanted)]
        assert_same_bits(*(part.nan_to_num(7) for part in parts))
        got, wanted = got[..., :first], wanted[..., :first]
    assert_same_bits(got, wanted)
