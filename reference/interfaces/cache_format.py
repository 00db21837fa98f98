"""Formats of the paged latent cache: the dtype, columns and bytes of a cache entry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from .checks import FLOAT_DTYPES, check, check_int, check_type


@dataclass(frozen=True)
class CacheFormat:
    """Layout of one cache entry: the latent and the rotated key part of one token.

    Ops take every property of a cache from the format of the cache: the columns and the dtype of the tensor, the bytes
    of an entry, and the dtype and width of gathered entries.

    Attributes:
        name: name of the format, unique among formats.
        storage_dtype: dtype of the cache tensor; None means the dtype of the queries.
        query_dtypes: dtypes of queries that may attend over caches of this format.
        dims: the only (Lkv, R) that the format supports; None if the format supports all dims.
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
        """Return the number of columns of a cache entry, in elements of the storage dtype: Lkv + R.

        Raises:
            ValueError: the format does not support these dims.
        """
        check_int("kv_lora_rank", kv_lora_rank)
        check_int("qk_rope_head_dim", qk_rope_head_dim, 0)
        dims = (kv_lora_rank, qk_rope_head_dim)
        if self.dims is not None and self.dims != dims:
            check(False, "dims", f"(Lkv, R) = {self.dims} for format {self.name}", dims)
        return kv_lora_rank + qk_rope_head_dim

    def entry_bytes(self, kv_lora_rank: int, qk_rope_head_dim: int, query_dtype: torch.dtype) -> int:
        """Return the bytes of one entry of a cache over which queries of `query_dtype` attend.

        Raises:
            ValueError: the format does not support queries of this dtype, or these dims.
        """
        return self.columns(kv_lora_rank, qk_rope_head_dim) * element_bytes(self.dtype_for(query_dtype))

    def gathered_dtype(self, cache_dtype: torch.dtype, out_dtype: torch.dtype | None = None) -> torch.dtype:
        """Return the dtype of entries that are gathered from a cache.

        Args:
            cache_dtype: dtype of the cache tensor.
            out_dtype: dtype that the caller wants. None means the dtype of the cache tensor, and is legal only if the
                format has no storage dtype of its own.

        Raises:
            ValueError: the dtype is not in `query_dtypes`, or `out_dtype` is None and the format has a storage dtype.
        """
        out_dtype = cache_dtype if out_dtype is None and self.storage_dtype is None else out_dtype
        if not isinstance(out_dtype, torch.dtype) or out_dtype not in self.query_dtypes:
            check(False, "out_dtype", f"one of {', '.join(map(str, self.query_dtypes))}", out_dtype)
        return out_dtype

    def gathered_width(self, columns: int) -> int:
        """Return Lkv + R, the elements of an entry that is gathered from a cache with `columns` columns.

        Raises:
            ValueError: the format supports one (Lkv, R) only, and its entries have another number of columns.
        """
        if self.dims is None:
            return columns
        wanted = self.columns(*self.dims)
        check(columns == wanted, "kv_cache", f"{wanted} columns for format {self.name}", columns)
        return sum(self.dims)


def element_bytes(dtype: torch.dtype) -> int:
    """Return the bytes of one element of a tensor other than the cache, such as a query or an expanded key."""
    return dtype.itemsize


COMPUTE_FORMAT = CacheFormat("compute_dtype")  # the latent, then the rope key, in the dtype of the queries
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
    """Check that a cache format is one of `CACHE_FORMATS`, the formats that the reference reads and writes.

    Raises:
        TypeError: the argument is not a `CacheFormat`.
        ValueError: the format is not implemented.
    """
    check_type("cache_format", cache_format, CacheFormat)
    known = CACHE_FORMATS.get(cache_format.name)
    if known is not cache_format and known != cache_format:  # identity first, because every op makes this check
        check(False, "cache_format", f"one of {', '.join(CACHE_FORMATS)}", cache_format.name)
