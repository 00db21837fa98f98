"""Arguments that the launchers of grouped-query attention pass to their kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from reference.interfaces import CacheFormat

from ...descriptors import box_descriptor
from ...gqa_scores import kept_slopes
from .records import Constants, ScoreFactors, Scores, Sources, Strides


class PagedBatch(NamedTuple):
    """Tensors that describe the requests of a batch; each field is one parameter of a kernel.

    Attributes:
        block_table: [B, W].
        seq_lens: [B].
        query_start_loc: [B + 1].
        visible_lens: [T].
        first_visible: [T], or None.
    """

    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    visible_lens: Tensor
    first_visible: Tensor | None


class PagedCall(NamedTuple):
    """Tensors, scores and strides of a call that attends a paged cache.

    Attributes:
        sources: queries, keys and values; keys and values as bytes if the cache is in e4m3.
        batch: tensors that describe the requests.
        out: [T, N, Dh].
        lse: [N, T].
        scores: how scores are computed; each field is one parameter of a kernel.
        strides: strides of queries, keys, values and output.
    """

    sources: Sources
    batch: PagedBatch
    out: Tensor
    lse: Tensor
    scores: Scores
    strides: Strides

    @classmethod
    def of(
        cls,
        q: Tensor,
        kv_cache: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        query_start_loc: Tensor,
        visible_lens: Tensor,
        first_visible: Tensor | None,
        out: Tensor,
        lse: Tensor,
        scores: Scores,
        cache_format: CacheFormat,
    ) -> PagedCall:
        """Return the record for the tensors of a call; see the attributes, and `kv_cache` [2, num_blocks, ..]."""
        k_cache, v_cache = (kv_cache.view(torch.uint8) if cache_format.scaled else kv_cache).unbind(0)
        strides = Strides(*q.stride(), *k_cache.stride(), *v_cache.stride(), *out.stride())
        batch = PagedBatch(
            block_table, seq_lens.contiguous(), query_start_loc.contiguous(), visible_lens.contiguous(),
            None if first_visible is None else first_visible.contiguous(),
        )  # fmt: skip
        return cls(Sources(q, k_cache, v_cache), batch, out, lse, scores, strides)


def box_descriptors(
    k: Tensor, v: Tensor, constants: Constants
) -> tuple[TensorDescriptor, TensorDescriptor] | tuple[None, None]:
    """Return the descriptors with which TMA loads tiles of keys and values; (None, None) if pointers load them.

    Args:
        k: keys of a cache [num_blocks, block_size, Nkv, Dh], or packed keys [K, Nkv, Dh].
        v: values, like `k`.
        constants: constants of the launch. BULK_COPY is True if the kernel can load tiles of this size with TMA.
    """
    if not constants.BULK_COPY:
        return None, None
    box = (*(1,) * (k.dim() - 3), constants.TILE, 1, constants.COLUMNS)
    made = [box_descriptor(x.data_ptr(), x.dtype, tuple(x.shape), x.stride(), box) for x in (k, v)]
    return (None, None) if None in made else tuple(made)


def scores_of(
    q: Tensor,
    softmax_scale: float,
    soft_cap: float | None,
    alibi_slopes: Sequence[float] | None,
    sinks: Tensor | None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    q_scale: Tensor | None = None,
) -> Scores:
    """Return the `Scores` of a call with queries `q`."""
    factor = softmax_scale / (math.log(2) if soft_cap is None else soft_cap)
    slopes = None if alibi_slopes is None else kept_slopes(q.device, tuple(alibi_slopes), torch.float32)
    sinks = None if sinks is None else sinks.contiguous()
    cap = 0.0 if soft_cap is None else soft_cap / math.log(2)
    return Scores(ScoreFactors(factor, cap), slopes, sinks, k_scale, v_scale, q_scale)
