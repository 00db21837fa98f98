"""How an entry of a paged latent cache is stored: its dtype, its columns and its bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from .checks import FLOAT_DTYPES, check, check_int, check_type


@dataclass(frozen=True)
class CacheFormat:
    """The layout of one cache entry, the latent and the rope key of one token.

    Ops check a cache by its format and by nothing else: columns and storage dtype come from here, and so do the bytes
    of an entry and the dtype and width of what is gathered.

    Attributes:
        name: what `cache_format=` asks for.
        storage_dtype: dtype of the cache tensor; None for that of the queries.
        query_dtypes: dtypes of queries that may attend over it.
        dims: the only (Lkv, R) that the format exists for, or None for any.
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
        """Return the dtype of a cache that queries of a dtype attend over.

        Raises:
            ValueError: queries of that dtype cannot attend over this format.
        """
        if query_dtype not in self.query_dtypes:
            check(False, "dtype", f"one of {', '.join(map(str, self.query_dtypes))}", query_dtype)
        return query_dtype if self.storage_dtype is None else self.storage_dtype

    def columns(self, kv_lora_rank: int, qk_rope_head_dim: int) -> int:
        """Return the columns of an entry: elements of the storage dtype, Lkv of the latent and R of the rope key.

        Raises:
            ValueError: dims that the format does not exist for.
        """
        check_int("kv_lora_rank", kv_lora_rank)
        check_int("qk_rope_head_dim", qk_rope_head_dim, 0)
        dims = (kv_lora_rank, qk_rope_head_dim)
        if self.dims is not None and self.dims != dims:
            check(False, "dims", f"(Lkv, R) = {self.dims} for format {self.name}", dims)
        return kv_lora_rank + qk_rope_head_dim

    def entry_bytes(self, kv_lora_rank: int, qk_rope_head_dim: int, query_dtype: torch.dtype) -> int:
        """Return the bytes of an entry in a cache that queries of a dtype attend over.

        Raises:
            ValueError: queries of that dtype, or dims, that the format does not exist for.
        """
        return self.columns(kv_lora_rank, qk_rope_head_dim) * element_bytes(self.dtype_for(query_dtype))

    def gathered_dtype(self, cache_dtype: torch.dtype, out_dtype: torch.dtype | None = None) -> torch.dtype:
        """Return the dtype in which entries leave a cache when they are gathered.

        Args:
            cache_dtype: dtype of the cache.
            out_dtype: dtype that the caller asks for. None gives that of the cache, which only a format that stores
                values as they are computed can serve.

        Raises:
            ValueError: a dtype that no query over this format has; None where the format has a storage dtype.
        """
        out_dtype = cache_dtype if out_dtype is None and self.storage_dtype is None else out_dtype
        if not isinstance(out_dtype, torch.dtype) or out_dtype not in self.query_dtypes:
            check(False, "out_dtype", f"one of {', '.join(map(str, self.query_dtypes))}", out_dtype)
        return out_dtype

    def gathered_width(self, columns: int) -> int:
        """Return Lkv + R, the elements of an entry that is gathered from a cache with so many columns.

        Raises:
            ValueError: other columns than the only dims of the format have.
        """
        if self.dims is None:
            return columns
        wanted = self.columns(*self.dims)
        check(columns == wanted, "kv_cache", f"{wanted} columns for format {self.name}", columns)
        return sum(self.dims)


def element_bytes(dtype: torch.dtype) -> int:
    """Return the bytes of one element: of queries, outputs, states, expanded keys and values."""
    return dtype.itemsize


COMPUTE_FORMAT = CacheFormat("compute_dtype")  # values as they are computed: the dtype of the queries, latent then rope
CACHE_FORMATS: Mapping[str, CacheFormat] = {COMPUTE_FORMAT.name: COMPUTE_FORMAT}


def storage_dtypes() -> tuple[torch.dtype, ...]:
    """Return every dtype that a cache tensor may have, over all formats."""
    stored = [each.storage_dtype for each in CACHE_FORMATS.values() if each.storage_dtype is not None]
    return tuple(dict.fromkeys((*FLOAT_DTYPES, *stored)))


def check_storage_dtype(argument: str, dtype: torch.dtype) -> None:
    """Check that a cache tensor may have a dtype: that some format stores it.

    Raises:
        ValueError: another dtype, or no dtype.
    """
    allowed = storage_dtypes()
    check(dtype in allowed, argument, f"one of {', '.join(map(str, allowed))}", dtype)


def check_format(cache_format: CacheFormat) -> None:
    """Check that a cache format is one of `CACHE_FORMATS`: those that the reference reads and writes.

    Raises:
        TypeError: not a `CacheFormat`.
        ValueError: a format that is not implemented.
    """
    check_type("cache_format", cache_format, CacheFormat)
    known = CACHE_FORMATS.get(cache_format.name)
    if known is not cache_format and known != cache_format:  # identity first: every call of an op checks its format
        check(False, "cache_format", f"one of {', '.join(CACHE_FORMATS)}", cache_format.name)
