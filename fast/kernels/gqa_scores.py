"""Scores and masks of grouped-query attention, in PyTorch, for kernels that loop over tiles of keys.

A tile is consecutive keys. The query heads that share a KV head are a group. Scores have the axes
[.., Nkv, Sq, G, keys]: KV heads, query tokens, query heads of a group, and the keys of a tile.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class ScoreRule(NamedTuple):
    """How the score of a query and a key is computed from their dot product.

    Attributes:
        factor: factor of the dot product in a product of matrices. With a soft cap, this is scale / cap.
        soft_cap: c; a score s becomes c * tanh(s / c). None means no cap.
        slopes: [Nkv, 1, G, 1]: the score loses slope * distance (ALiBi). None means no ALiBi.
        sinks: [Nkv, 1, G], score of one more key with value 0. None means no sink.
    """

    factor: float
    soft_cap: float | None
    slopes: Tensor | None
    sinks: Tensor | None

    @classmethod
    def of(
        cls,
        scale: float,
        soft_cap: float | None,
        slopes: Tensor | None,
        sinks: Tensor | None,
        kv_heads: int,
        dtype: torch.dtype,
    ) -> ScoreRule:
        """Return the rule for scores of a dtype.

        Args:
            scale: factor of the dot product.
            soft_cap: soft cap, or None.
            slopes: [N], or None.
            sinks: [N], or None.
            kv_heads: Nkv.
            dtype: dtype of the scores.
        """
        slopes, sinks = (None if each is None else each.to(dtype).view(kv_heads, 1, -1) for each in (slopes, sinks))
        slopes = None if slopes is None else slopes[..., None]
        return cls(scale if soft_cap is None else scale / soft_cap, soft_cap, slopes, sinks)

    def finish(self, scores: Tensor, positions: Tensor, keys: Tensor) -> None:
        """Apply the soft cap and ALiBi to dot products that were multiplied by `factor`; overwrite them.

        Args:
            scores: [.., Nkv, Sq, G, keys].
            positions: [.., Sq, 1, 1], index of the key from which ALiBi measures distances.
            keys: [keys], index of each key.
        """
        if self.soft_cap is not None:
            scores.tanh_().mul_(self.soft_cap)
        if self.slopes is not None:
            scores.sub_((positions - keys).abs_() * self.slopes)

    def sinks_of(self, *shape: int) -> Tensor | None:
        """Return the sinks of all rows, expanded to the shape [.., Nkv, Sq, G]; None if there are no sinks."""
        return None if self.sinks is None else self.sinks.expand(*shape)


class VisibleRange(NamedTuple):
    """Keys that each query token of a request without a cache attends, and the token's own place among them.

    Attributes:
        first: first key.
        end: index after the last key.
        position: index of the key from which ALiBi measures distances.
    """

    first: Tensor
    end: Tensor
    position: Tensor


def visible_range(
    index: Tensor,
    query_len: Tensor | int,
    key_len: Tensor | int,
    attention_type: str,
    sliding_window: int | None,
    attention_chunk_size: int | None,
) -> VisibleRange:
    """Return the keys that query tokens attend if the keys of their request are packed, not cached.

    - decoder: the token and the tokens before it, in its window and its attention chunk. Queries and keys end together.
    - encoder, encoder_only: all tokens, or a window of as many tokens after the token as before it.
    - cross: all keys.

    Args:
        index: index of each query token in its request.
        query_len: number of query tokens of the request.
        key_len: number of keys of the request.
        attention_type: value of an `AttentionType`.
        sliding_window: number of keys of a window, the token included; None means no window.
        attention_chunk_size: positions of an attention chunk; None means no chunks.
    """
    causal, keys = attention_type == "decoder", torch.zeros_like(index) + key_len
    position = index + (key_len - query_len) if causal else index
    first, end = torch.zeros_like(index), keys
    if causal:
        end = torch.minimum(position + 1, keys).clamp(min=0)
    if attention_type != "cross" and sliding_window is not None:
        first = (position - (sliding_window - 1)).clamp(min=0)
        end = torch.minimum(end, position + sliding_window)
    if attention_chunk_size is not None:
        chunk = position.div(attention_chunk_size, rounding_mode="floor") * attention_chunk_size
        first = torch.maximum(first, chunk)
    return VisibleRange(torch.minimum(first, end.clamp(min=0)), end.clamp(min=0), position)


def slopes_on(device: torch.device, slopes: Sequence[float] | None) -> Tensor | None:
    """Return ALiBi slopes as a float64 tensor [N] on a device; None stays None."""
    return None if slopes is None else torch.tensor(list(slopes), dtype=torch.float64, device=device)


@functools.lru_cache(64)
def kept_slopes(device: torch.device, slopes: tuple[float, ...], dtype: torch.dtype = torch.float64) -> Tensor:
    """Return ALiBi slopes [N] on a device, and keep them: the copy to a GPU waits, so a capture must not repeat it."""
    with torch.inference_mode(False):  # an inference tensor could not be used in other modes
        return slopes_on(device, slopes).to(dtype)
