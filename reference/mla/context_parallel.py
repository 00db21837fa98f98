"""Context parallelism of MLA: gather context from all ranks, and decode over their rank-local tokens."""

from __future__ import annotations

import torch
from einops import rearrange
from jaxtyping import Float, Shaped
from torch import Tensor

from ..cache.latent import gather_and_maybe_dequant_cache
from ..distributed.arguments import check_chunk_ownership
from ..distributed.groups import ContextParallel
from ..distributed.merge import MERGE_OVER_RANKS
from ..distributed.reorg import reorg_kvcache
from ..interfaces import (
    COMPUTE_FORMAT,
    AttentionState,
    CacheFormat,
    ContextParallelChunk,
    DecodeMetadata,
    DecodeSchedule,
    PrefillMetadata,
    check_context,
    check_decode,
    check_dtype,
    check_number,
    check_type,
)
from .decode import mla_decode


def dcp_gather_context(
    kv_cache: Shaped[Tensor, "num_blocks block_size columns"],
    metadata: PrefillMetadata,
    chunk: ContextParallelChunk,
    context_parallel: ContextParallel,
    cache_format: CacheFormat = COMPUTE_FORMAT,
    out_dtype: torch.dtype | None = None,
) -> Float[Tensor, "S head_size"]:
    """The cache entries of one chunk from all ranks, in the order of the tokens: the gather of a prefill.

    Args:
        kv_cache: of this rank.
        metadata: the requests that prefill.
        chunk: the plan of the piece.
        context_parallel: the groups.
        cache_format: format of the cache.
        out_dtype: dtype of the result, on the wire too; None as in `gather_and_maybe_dequant_cache`.

    Returns:
        [num_tokens, Lkv + R] in `out_dtype`.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; a chunk that was planned for another rank;
            a block outside the cache. Nothing has been exchanged then.
        GroupError: the exchange failed.
    """
    width, dtype = check_context(kv_cache, metadata, chunk, cache_format, out_dtype)
    check_chunk_ownership(chunk, context_parallel)
    starts, offsets = chunk.held
    held = chunk.local_tokens
    handed_in = kv_cache.new_zeros(chunk.padded_tokens, width, dtype=dtype)
    handed_in[:held] = gather_and_maybe_dequant_cache(
        kv_cache, metadata.block_table, offsets, starts, held, cache_format, dtype
    )
    return reorg_kvcache(context_parallel.cp_group.all_gather(handed_in), chunk)


def dcp_decode(
    ql_nope: Float[Tensor, "T N Lkv"],
    q_pe: Float[Tensor, "T N R"],
    kv_cache: Shaped[Tensor, "num_blocks block_size columns"],
    metadata: DecodeMetadata,
    softmax_scale: float,
    context_parallel: ContextParallel,
    schedule: DecodeSchedule | None = None,
    out_dtype: torch.dtype | None = None,
    cache_format: CacheFormat = COMPUTE_FORMAT,
) -> AttentionState:
    """Absorbed attention over keys that lie on D ranks.

    Args:
        ql_nope: [T, N / TP, Lkv], this rank's heads, with W_UK absorbed.
        q_pe: [T, N / TP, R], rotated.
        kv_cache: of this rank; its new tokens are already in it.
        metadata: the requests, by the keys that lie here: row t sees the first `visible_lens[t]` of them.
        softmax_scale: (P + R)^-1/2, with YaRN's factor.
        context_parallel: the groups and the merge.
        schedule: of the decode of the gathered heads; it changes no value.
        out_dtype: dtype of `out`, on the wire too; that of `ql_nope` where None.
        cache_format: format of the cache.

    Returns:
        out [T, N / TP, Lkv], lse [N / TP, T], over the keys of all ranks.

    Raises:
        ValueError: as `mla_decode`.
        GroupError: an exchange failed.
    """
    check_decode(ql_nope, q_pe, kv_cache, metadata, cache_format, schedule)
    check_type("context_parallel", context_parallel, ContextParallel)
    check_number("softmax_scale", softmax_scale)
    check_dtype("out_dtype", ql_nope.dtype if out_dtype is None else out_dtype)
    latent, group = ql_nope.shape[2], context_parallel.cp_group
    q = rearrange(torch.cat((ql_nope, q_pe), dim=-1), "tokens heads width -> heads tokens width")
    q = rearrange(group.all_gather(q), "ranks heads tokens width -> tokens (ranks heads) width")
    state = mla_decode(
        q[..., :latent], q[..., latent:], kv_cache, metadata, softmax_scale, schedule, out_dtype, cache_format
    )
    return MERGE_OVER_RANKS[context_parallel.merge](state, group)
