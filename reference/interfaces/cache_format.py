"""Formats of the paged latent cache: the dtype, columns, parts and scales of a cache entry.

The cache of a layer is a tensor [num_blocks, block_size, columns] with one cache entry for each token. An entry has the
latent (Lkv elements) and then the rope part: the rotated part of the key (R elements).

| format | stored | scales | bytes of an entry, Lkv 512 and R 64 |
|---|---|---|---|
| `compute_dtype` | all elements in the dtype of the queries | none | 1152 if this dtype has 16 bits |
| `fp8_e4m3` | all elements in e4m3 | one float32 for the whole cache | 576 |
| `fp8_ds_mla` | the latent in e4m3, the rope part in bfloat16 | one float32 for every 128 latent elements | 656 |

e4m3 is `torch.float8_e4m3fn`: 8 bits, the largest value is 448, no infinity.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .checks import FLOAT_DTYPES, check, check_flag, check_int, check_tensor, check_type
from .config import MLAConfig

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0  # largest value of e4m3
SCALE_BYTES = 4  # bytes of a float32 scale


class EntryLayout(NamedTuple):
    """Columns of the cache tensor at which the parts of a cache entry begin; the latent begins at column 0.

    Attributes:
        scales: first column of the scales; equal to `rope` if the entry has no scales.
        rope: first column of the rope part.
        columns: number of columns of an entry.
    """

    scales: int
    rope: int
    columns: int


@dataclass(frozen=True)
class CacheFormat:
    """Layout of one cache entry. The format determines the dtype and the columns of a cache.

    Attributes:
        name: name of the format, unique among formats.
        storage_dtype: dtype of the cache tensor; None means the dtype of the queries that attend over the cache.
        query_dtypes: dtypes of queries that may attend over caches of this format.
        dims: the only (Lkv, R) that the format supports; None if the format supports every (Lkv, R).
        latent_dtype: dtype of the stored latents; None means `storage_dtype`.
        rope_dtype: dtype of the stored rope parts; None means `storage_dtype`.
        layer_scale: whether the cache of a layer has one float32 scale, which every function takes as `kv_scale`. An
            element x is stored as x / kv_scale.
        scale_tile: number of consecutive elements of the latent that have one float32 scale in the entry; 0 if the
            entry has no scales.
        alignment: the address and the strides of a cache must be multiples of this number of bytes.
        poison: tests fill the cache entries that belong to no token with this byte. In e4m3, bfloat16 and float32, a
            number whose bytes all have this value is NaN.
    """

    name: str
    storage_dtype: torch.dtype | None = None
    query_dtypes: tuple[torch.dtype, ...] = FLOAT_DTYPES
    dims: tuple[int, int] | None = None
    latent_dtype: torch.dtype | None = None
    rope_dtype: torch.dtype | None = None
    layer_scale: bool = False
    scale_tile: int = 0
    alignment: int = 1
    poison: int = 0xFF

    def __post_init__(self):
        check_type("name", self.name, str)
        for name in ("storage_dtype", "latent_dtype", "rope_dtype"):
            check_type(name, getattr(self, name), (torch.dtype, type(None)), "a dtype or None")
        check_type("query_dtypes", self.query_dtypes, tuple, "a tuple of dtypes")
        for dtype in self.query_dtypes:
            check_type("query_dtypes", dtype, torch.dtype, "a tuple of dtypes")
        check_type("dims", self.dims, (tuple, type(None)), "(Lkv, R) or None")
        check_flag("layer_scale", self.layer_scale)
        check_int("scale_tile", self.scale_tile, 0)
        check_int("alignment", self.alignment)
        check_int("poison", self.poison, 0, below=256)

    @property
    def scaled(self) -> bool:
        """Return whether the format has scales. A stored e4m3 number must then be multiplied by a scale."""
        return self.layer_scale or self.scale_tile > 0

    def dtype_for(self, query_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of a cache tensor over which queries of `query_dtype` attend.

        Raises:
            ValueError: queries of this dtype cannot attend over caches of this format.
        """
        if query_dtype not in self.query_dtypes:
            check(False, "dtype", f"one of {', '.join(map(str, self.query_dtypes))}", query_dtype)
        return query_dtype if self.storage_dtype is None else self.storage_dtype

    def layout(self, kv_lora_rank: int, qk_rope_head_dim: int) -> EntryLayout:
        """Return the columns at which the parts of an entry begin.

        Raises:
            ValueError: the format does not support this (Lkv, R).
        """
        check_int("kv_lora_rank", kv_lora_rank)
        check_int("qk_rope_head_dim", qk_rope_head_dim, 0)
        dims = (kv_lora_rank, qk_rope_head_dim)
        if self.dims is not None and self.dims != dims:
            check(False, "cache_format", f"(Lkv, R) = {self.dims} for format {self.name}", dims)
        if self.storage_dtype is None:
            return EntryLayout(kv_lora_rank, kv_lora_rank, kv_lora_rank + qk_rope_head_dim)
        size = self.storage_dtype.itemsize
        scales = kv_lora_rank * (self.latent_dtype or self.storage_dtype).itemsize // size
        rope = scales
        if self.scale_tile > 0:
            rope += kv_lora_rank // self.scale_tile * SCALE_BYTES // size
        end = rope + qk_rope_head_dim * (self.rope_dtype or self.storage_dtype).itemsize // size
        return EntryLayout(scales, rope, end)

    def columns(self, kv_lora_rank: int, qk_rope_head_dim: int) -> int:
        """Return the number of columns of the cache tensor.

        Raises:
            ValueError: the format does not support this (Lkv, R).
        """
        return self.layout(kv_lora_rank, qk_rope_head_dim).columns

    def entry_bytes(self, kv_lora_rank: int, qk_rope_head_dim: int, query_dtype: torch.dtype) -> int:
        """Return the number of bytes of one cache entry, if queries of `query_dtype` attend over the cache.

        Raises:
            ValueError: the format does not support queries of this dtype, or this (Lkv, R).
        """
        return self.columns(kv_lora_rank, qk_rope_head_dim) * element_bytes(self.dtype_for(query_dtype))

    def gathered_dtype(self, cache_dtype: torch.dtype, out_dtype: torch.dtype | None = None) -> torch.dtype:
        """Return the dtype of cache entries after they were copied out of a cache (gathered).

        Args:
            cache_dtype: dtype of the cache tensor.
            out_dtype: dtype that the caller wants. None means the dtype of the cache tensor. If the format has a
                `storage_dtype`, the caller must give a dtype. If `out_dtype` is the `storage_dtype` itself, the entries
                are returned as stored, without a conversion.

        Raises:
            ValueError: the wanted dtype is neither in `query_dtypes` nor the `storage_dtype`; `out_dtype` is None,
                although the format has a `storage_dtype`.
        """
        out_dtype = cache_dtype if out_dtype is None and self.storage_dtype is None else out_dtype
        if self.returns_stored(out_dtype):
            return out_dtype
        if not isinstance(out_dtype, torch.dtype) or out_dtype not in self.query_dtypes:
            check(False, "out_dtype", f"one of {', '.join(map(str, self.query_dtypes))}", out_dtype)
        return out_dtype

    def returns_stored(self, out_dtype: torch.dtype | None) -> bool:
        """Return whether a gather with this `out_dtype` returns the stored entries, without a conversion."""
        return self.storage_dtype is not None and out_dtype == self.storage_dtype

    def gathered_width(self, columns: int, out_dtype: torch.dtype | None = None) -> int:
        """Return the number of elements of a gathered cache entry, for a cache with `columns` columns.

        The result is Lkv + R, or the number of columns if the entries are returned as stored (`returns_stored`).

        Raises:
            ValueError: the format has `dims`, and a cache of these dims has another number of columns.
        """
        if self.dims is None:
            return columns
        wanted = self.columns(*self.dims)
        check(columns == wanted, "kv_cache", f"{wanted} columns for format {self.name}", columns)
        return columns if self.returns_stored(out_dtype) else sum(self.dims)


def element_bytes(dtype: torch.dtype) -> int:
    """Return the number of bytes of one element of a query, key or value (for a cache: `CacheFormat.entry_bytes`)."""
    return dtype.itemsize


COMPUTE_FORMAT = CacheFormat("compute_dtype")  # the cache has the dtype of the queries
FP8_E4M3 = CacheFormat("fp8_e4m3", E4M3, layer_scale=True)
FP8_DS_MLA = CacheFormat(  # the format of DeepSeek-V3.2 and of FlashMLA's sparse decode: 656 bytes for each token
    "fp8_ds_mla", torch.uint8, dims=(512, 64), latent_dtype=E4M3, rope_dtype=torch.bfloat16, scale_tile=128,
    alignment=16,
)  # fmt: skip
CACHE_FORMATS: Mapping[str, CacheFormat] = {each.name: each for each in (COMPUTE_FORMAT, FP8_E4M3, FP8_DS_MLA)}


def format_named(name: str) -> CacheFormat:
    """Return the format of `CACHE_FORMATS` with this name.

    Ops of torch.library take this name, because they cannot take a `CacheFormat`.
    """
    return CACHE_FORMATS[name]


def storage_dtypes() -> tuple[torch.dtype, ...]:
    """Return every dtype that a cache tensor may have in at least one format."""
    stored = [each.storage_dtype for each in CACHE_FORMATS.values() if each.storage_dtype is not None]
    return tuple(dict.fromkeys((*FLOAT_DTYPES, *stored)))


def check_storage_dtype(argument: str, dtype: torch.dtype) -> None:
    """Check that a cache tensor may have the given dtype in at least one format.

    Raises:
        ValueError: no format has a cache of this dtype, or the argument is not a dtype.
    """
    allowed = storage_dtypes()
    check(dtype in allowed, argument, f"one of {', '.join(map(str, allowed))}", dtype)


def check_format(cache_format: CacheFormat, config: MLAConfig | None = None) -> None:
    """Check that a cache format is one of `CACHE_FORMATS`, and that it supports the dims of a config if one is given.

    Raises:
        TypeError: the argument is not a `CacheFormat`.
        ValueError: the format is not implemented, or does not support (Lkv, R) of the config.
    """
    check_type("cache_format", cache_format, CacheFormat)
    known = CACHE_FORMATS.get(cache_format.name)
    if known is not cache_format and known != cache_format:  # compare identities first, which is faster
        check(False, "cache_format", f"one of {', '.join(CACHE_FORMATS)}", cache_format.name)
    if config is not None and cache_format.dims is not None:
        cache_format.layout(config.kv_lora_rank, config.qk_rope_head_dim)  # raises for other dims


def check_kv_scale(
    cache_format: CacheFormat, kv_scale: Tensor | None, device: torch.device, argument: str = "kv_scale"
) -> None:
    """Check the scale of a layer's cache: a float32 tensor [] if `cache_format.layer_scale` is true, otherwise None.

    The check does not read the value; `check_scale_values` reads it.

    Raises:
        TypeError: the scale is neither a tensor nor None.
        ValueError: a scale is missing, or is given for a format without one; shape, dtype or device are wrong.
    """
    check_type(argument, kv_scale, (Tensor, type(None)), "a tensor or None")
    if not cache_format.layer_scale:
        check(kv_scale is None, argument, f"None for format {cache_format.name}", "a tensor")
        return
    check(kv_scale is not None, argument, f"a float32 tensor [] for format {cache_format.name}", None)
    check_tensor(argument, kv_scale, (), (torch.float32,), device)
