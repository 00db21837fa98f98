"""How an entry of a paged latent cache is stored: dtype, columns, where its parts lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from .checks import FLOAT_DTYPES, check, check_int, check_type


@dataclass(frozen=True)
class CacheFormat:
    """The layout of one cache entry, the latent and the rope key of one token.

    Ops take widths and offsets from the format and assume nothing of their own: no op reads `Lkv + R` columns because
    the dims say so, or expects the dtype of the queries.

    Attributes:
        name: what `cache_format=` asks for.
        storage_dtype: dtype of the cache tensor; None for that of the queries.
        query_dtypes: dtypes of queries that may attend over it.
        alignment: bytes on whose multiples an entry of the cache begins.
        poison: byte that fills unowned entries in tests; a float of these bytes is NaN in every dtype of the format.
        dims: the only (Lkv, R) that the format exists for, or None for any.
    """

    name: str
    storage_dtype: torch.dtype | None = None
    query_dtypes: tuple[torch.dtype, ...] = FLOAT_DTYPES
    alignment: int = 1
    poison: int = 0xFF
    dims: tuple[int, int] | None = None

    def __post_init__(self):
        check_type("name", self.name, str)
        check_type("storage_dtype", self.storage_dtype, (torch.dtype, type(None)), "a dtype or None")
        check_type("query_dtypes", self.query_dtypes, tuple, "a tuple of dtypes")
        for dtype in self.query_dtypes:
            check_type("query_dtypes", dtype, torch.dtype, "a tuple of dtypes")
        check_int("alignment", self.alignment)
        check_int("poison", self.poison, 0)
        check(self.poison < 256, "poison", "a byte", self.poison)
        check_type("dims", self.dims, (tuple, type(None)), "(Lkv, R) or None")

    def dtype_for(self, query_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of a cache that queries of a dtype attend over.

        Raises:
            ValueError: queries of that dtype cannot attend over this format.
        """
        check(query_dtype in self.query_dtypes, "dtype", f"one of {', '.join(map(str, self.query_dtypes))}",
              query_dtype)  # fmt: skip
        return query_dtype if self.storage_dtype is None else self.storage_dtype

    def columns(self, kv_lora_rank: int, qk_rope_head_dim: int) -> int:
        """Return the columns of an entry: elements of the storage dtype, Lkv of the latent and R of the rope key.

        Raises:
            ValueError: dims that the format does not exist for.
        """
        check_int("kv_lora_rank", kv_lora_rank)
        check_int("qk_rope_head_dim", qk_rope_head_dim, 0)
        dims = (kv_lora_rank, qk_rope_head_dim)
        check(self.dims in (None, dims), "dims", f"(Lkv, R) = {self.dims} for format {self.name}", dims)
        return kv_lora_rank + qk_rope_head_dim

    def latent(self, kv_lora_rank: int, qk_rope_head_dim: int) -> slice:
        """Return the columns of the latent in an entry."""
        return slice(0, kv_lora_rank)

    def rope(self, kv_lora_rank: int, qk_rope_head_dim: int) -> slice:
        """Return the columns of the rope key in an entry."""
        return slice(kv_lora_rank, self.columns(kv_lora_rank, qk_rope_head_dim))

    def entry_bytes(self, kv_lora_rank: int, qk_rope_head_dim: int, query_dtype: torch.dtype) -> int:
        """Return the bytes of one entry."""
        return self.columns(kv_lora_rank, qk_rope_head_dim) * self.dtype_for(query_dtype).itemsize


COMPUTE_FORMAT = CacheFormat("compute_dtype")  # values as they are computed: the dtype of the queries, latent then rope
CACHE_FORMATS: Mapping[str, CacheFormat] = {COMPUTE_FORMAT.name: COMPUTE_FORMAT}
