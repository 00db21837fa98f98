"""Results of the methods of a layer that have more than two parts."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor


class ProjectedTokens(NamedTuple):
    """Queries, latents and keys of the new tokens, as `MLAAttention.forward_attention` takes them.

    Attributes:
        q: [T, N, P + R], queries with the rope part rotated.
        kv_c_normed: [T, Lkv], latents after the norm.
        k_pe: [T, R], rope parts of the keys, rotated.
    """

    q: Float[Tensor, "T N D"]
    kv_c_normed: Float[Tensor, "T Lkv"]
    k_pe: Float[Tensor, "T R"]
