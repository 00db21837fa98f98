"""Formats of the paged latent cache: the dtype, columns and bytes of a cache entry.

The cache of a layer is a tensor [num_blocks, block_size, columns] with one cache entry for each token. For a token, the
entry has the latent (Lkv elements) and then the rotated part of the key, the rope part (R elements).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from .checks import FLOAT_DTYPES, check, check_int, check_type


@dataclass(frozen=True)
class CacheFormat:
    """Layout of one cache entry. Functions that write or read a cache take its dtype and its columns from the format.

    Attributes:
        name: name of the format, unique among formats.
        storage_dtype: dtype of the cache tensor; None means the dtype of the queries that attend over the cache.
        query_dtypes: dtypes of queries that may attend over caches of this format.
        dims: the only (Lkv, R) that the format supports; None if the format supports every (Lkv, R).
    """

    name: str
    storage_dtype: torch.dtype | None = None
    query_dtypes: tuple[torch.dtype, ...] = FLOAT_DTYPES
    dims: tuple[int, int] | None = None

    def __post_init__(self):
        check_type("name", self.name, str)
        check_type("storage_dtype", self.storage_dtype, (torch.dtype, type(None)), "a dtype or None")
        check_type("query_dtypes", self.query_dtypes, tuple, "a tuple of dtypes")
        for dtype in self.query_dtypes:
            check_type("query_dtypes", dtype, torch.dtype, "a tuple of dtypes")
        check_type("dims", self.dims, (tuple, type(None)), "(Lkv, R) or None")

    def dtype_for(self, query_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of a cache tensor over which queries of `query_dtype` attend.

        Raises:
            ValueError: queries of this dtype cannot attend over caches of this format.
        """
        if query_dtype not in self.query_dtypes:
            check(False, "dtype", f"one of {', '.join(map(str, self.query_dtypes))}", query_dtype)
        return query_dtype if self.storage_dtype is None else self.storage_dtype

    def columns(self, kv_lora_rank: int, qk_rope_head_dim: int) -> int:
        """Return Lkv + R, the number of columns of the cache tensor.

        Raises:
            ValueError: the format does not support this (Lkv, R).
        """
        check_int("kv_lora_rank", kv_lora_rank)
        check_int("qk_rope_head_dim", qk_rope_head_dim, 0)
        dims = (kv_lora_rank, qk_rope_head_dim)
        if self.dims is not None and self.dims != dims:
            check(False, "dims", f"(Lkv, R) = {self.dims} for format {self.name}", dims)
        return kv_lora_rank + qk_rope_head_dim

    def entry_bytes(self, kv_lora_rank: int, qk_rope_head_dim: int, query_dtype: torch.dtype) -> int:
        """Return the bytes of one cache entry, if queries of `query_dtype` attend over the cache.

        Raises:
            ValueError: the format does not support queries of this dtype, or this (Lkv, R).
        """
        return self.columns(kv_lora_rank, qk_rope_head_dim) * element_bytes(self.dtype_for(query_dtype))

    def gathered_dtype(self, cache_dtype: torch.dtype, out_dtype: torch.dtype | None = None) -> torch.dtype:
        """Return the dtype to which cache entries are converted when they are copied out of a cache (gathered).

        Args:
            cache_dtype: dtype of the cache tensor.
            out_dtype: dtype that the caller wants. None means the dtype of the cache tensor. If the format has a
                `storage_dtype`, the caller must give a dtype.

        Raises:
            ValueError: the dtype is not in `query_dtypes`; `out_dtype` is None and the format has a `storage_dtype`.
        """
        out_dtype = cache_dtype if out_dtype is None and self.storage_dtype is None else out_dtype
        if not isinstance(out_dtype, torch.dtype) or out_dtype not in self.query_dtypes:
            check(False, "out_dtype", f"one of {', '.join(map(str, self.query_dtypes))}", out_dtype)
        return out_dtype

    def gathered_width(self, columns: int) -> int:
        """Return Lkv + R, the elements of a gathered cache entry, for a cache with `columns` columns.

        Raises:
            ValueError: the format has `dims`, and a cache of these dims has another number of columns.
        """
        if self.dims is None:
            return columns
        wanted = self.columns(*self.dims)
        check(columns == wanted, "kv_cache", f"{wanted} columns for format {self.name}", columns)
        return sum(self.dims)


def element_bytes(dtype: torch.dtype) -> int:
    """Return the bytes of one element of a query, key or value. For a cache, use `CacheFormat.entry_bytes`."""
    return dtype.itemsize


COMPUTE_FORMAT = CacheFormat("compute_dtype")  # the cache has the dtype of the queries
CACHE_FORMATS: Mapping[str, CacheFormat] = {COMPUTE_FORMAT.name: COMPUTE_FORMAT}


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


def check_format(cache_format: CacheFormat) -> None:
    """Check that a cache format is one of `CACHE_FORMATS`, the formats that this package can read and write.

    Raises:
        TypeError: the argument is not a `CacheFormat`.
        ValueError: the format is not implemented.
    """
    check_type("cache_format", cache_format, CacheFormat)
    known = CACHE_FORMATS.get(cache_format.name)
    if known is not cache_format and known != cache_format:  # compare identities first, which is faster
        check(False, "cache_format", f"one of {', '.join(CACHE_FORMATS)}", cache_format.name)
