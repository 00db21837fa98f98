"""Results of the methods of a layer that have more than two parts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True, eq=False)
class ProjectedTokens:
    """Queries, latents and keys of the new tokens, as `MLAAttention.forward_attention` takes them.

    The object unpacks: `q, kv_c_normed, k_pe = projected`.

    Attributes:
        q: [T, N, P + R], queries with the rope part rotated.
        kv_c_normed: [T, Lkv], latents after the norm.
        k_pe: [T, R], rope parts of the keys, rotated.
    """

    q: Float[Tensor, "T N D"]
    kv_c_normed: Float[Tensor, "T Lkv"]
    k_pe: Float[Tensor, "T R"]

    def __iter__(self) -> Iterator[Tensor]:
        """Yield the fields in their order."""
        yield self.q
        yield self.kv_c_normed
        yield self.k_pe
