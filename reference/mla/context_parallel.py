"""Context parallelism of MLA, where D ranks divide the tokens of every sequence among themselves.

The rank-local tokens are the tokens that one rank keeps in its cache. TP is the number of tensor-parallel ranks, which
divide the N heads among themselves.
"""

from __future__ import annotations

import torch
from einops import rearrange
from jaxtyping import Float, Shaped
from torch import Tensor

from ..cache.formats import dequantize_entries
from ..cache.latent import gather_and_maybe_dequant_cache
from ..distributed.arguments import check_chunk_ownership
from ..distributed.groups import ContextParallel
from ..distributed.merge import MERGE_OVER_RANKS
from ..distributed.reorg import reorg_kvcache
from ..interfaces import (
    COMPUTE_FORMAT,
    CONVERTED,
    E4M3,
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
    check_rows,
    check_scale_values,
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
    kv_scale: Float[Tensor, ""] | None = None,
    *,
    workspace: Float[Tensor, "rows head_size"] | None = None,
) -> Float[Tensor, "S head_size"]:
    """Return the cache entries of one chunk from all ranks, in the order of the tokens.

    A chunk is a part of the cached context that a prefill gathers at once. With context parallelism a prefill calls
    this function instead of `gather_context`. Every rank gathers the cache entries of its rank-local tokens, and the
    ranks exchange these entries by an all-gather. `reorg_kvcache` then puts the entries into the order of the tokens.

    Args:
        kv_cache: cache of this rank.
        metadata: plan of the prefill.
        chunk: one chunk of the prefill's context.
        context_parallel: the process groups.
        cache_format: format of the cache.
        out_dtype: dtype of the result and of the exchanged entries; None means the dtype of the cache (see
            `gather_and_maybe_dequant_cache`).
        kv_scale: float32 scale of the layer's cache; None if the format has no such scale (`CacheFormat.layer_scale`).
        workspace: [rows, Lkv + R] in `out_dtype`, contiguous, for the entries that this rank sends and receives. It
            needs at least (D + 1) * `chunk.padded_tokens` rows. If it has at least `chunk.num_tokens` further rows, the
            result is written to its first rows. None allocates tensors.

    Returns:
        [`chunk.num_tokens`, Lkv + R] in `out_dtype`; a view of the first rows of `workspace` if it has room for the
        result.

    Raises:
        ValueError: shapes, dtypes or devices do not match; the chunk was planned for another rank; a block is outside
            the cache; `workspace` has too few rows. If the function raises a `ValueError`, it has exchanged nothing.
        GroupError: the exchange failed.
    """
    width, dtype = check_context(kv_cache, metadata, chunk, cache_format, out_dtype, kv_scale)
    check_chunk_ownership(chunk, context_parallel)
    group, padded = context_parallel.cp_group, chunk.padded_tokens
    exchanged = (group.size + 1) * padded
    if workspace is None:
        workspace = kv_cache.new_empty(exchanged, width, dtype=dtype)
    check_rows(workspace, width, exchanged, dtype, kv_cache.device)
    has_room = workspace.shape[0] >= chunk.num_tokens + exchanged
    exchange = workspace[chunk.num_tokens if has_room else 0 :]
    stored = cache_format.storage_dtype or dtype
    if cache_format.storage_dtype is not None:  # the ranks exchange the stored entries
        columns = kv_cache.shape[2]
        exchange = exchange.view(-1).view(stored)[: exchanged * columns].view(exchanged, columns)
    received, sent = exchange[: group.size * padded], exchange[group.size * padded : exchanged]
    starts, offsets = chunk.held
    local_tokens = int(offsets[-1]) if chunk.bounded else chunk.local_tokens
    sent[:local_tokens] = gather_and_maybe_dequant_cache(
        kv_cache, metadata.block_table, offsets, starts, local_tokens, cache_format, stored
    )
    sent[local_tokens:] = 0  # all ranks send the same shape
    received = received.view(group.size, padded, sent.shape[1])
    gathered = group.all_gather(sent.view(torch.uint8), out=received.view(torch.uint8)).view(stored)
    context = reorg_kvcache(gathered, chunk)
    if not cache_format.returns_stored(dtype):
        context = dequantize_entries(context, cache_format, dtype, kv_scale)
    return workspace[: chunk.num_tokens].copy_(context) if has_room else context


def dcp_decode(
    ql_nope: Shaped[Tensor, "T N Lkv"],
    q_pe: Shaped[Tensor, "T N R"],
    kv_cache: Shaped[Tensor, "num_blocks block_size columns"],
    metadata: DecodeMetadata,
    softmax_scale: float,
    context_parallel: ContextParallel,
    schedule: DecodeSchedule | None = None,
    out_dtype: torch.dtype | None = None,
    cache_format: CacheFormat = COMPUTE_FORMAT,
    kv_scale: Float[Tensor, ""] | None = None,
    fp8_mode: str = CONVERTED,
    q_scale: Float[Tensor, "*heads"] | None = None,
) -> AttentionState:
    """Compute absorbed attention (over the cached latents) with keys that are distributed over D ranks.

    Before the call, each rank has the queries of N / TP heads. The steps are:

    1. All-gather the queries, so that each rank has the queries of N D / TP heads.
    2. Attend the rank-local keys with the queries of these heads (`mla_decode`).
    3. Merge the attention states (output and log-sum-exp) of the D ranks. Each rank gets the merged states of the heads
       with which it began.

    Args:
        ql_nope: [T, N / TP, Lkv], queries of this rank's heads, with W_UK absorbed.
        q_pe: [T, N / TP, R], rotated rope parts of the queries.
        kv_cache: cache of this rank; it must already contain the new tokens that this rank owns.
        metadata: plan of the decode. Its lengths count rank-local keys: query token t attends the first
            `visible_lens[t]` keys that this rank has of the request.
        softmax_scale: factor of the scores, `MLAConfig.softmax_scale`: (P + R)^-1/2, times YaRN's factor.
        context_parallel: the process groups, and the name of the merge.
        schedule: schedule of `mla_decode` in step 2; it changes results by rounding alone.
        out_dtype: dtype of `out` and of the exchanged outputs; None means the dtype of `ql_nope`,
            and is refused for queries in e4m3.
        cache_format: format of the cache.
        kv_scale: float32 scale of the layer's cache; None if the format has no such scale (`CacheFormat.layer_scale`).
        fp8_mode: one of `converted`, `fp8_query` and `fp8_product` (`mla_decode`). In the modes `fp8_query` and
            `fp8_product`, the ranks gather queries in e4m3.
        q_scale: float32 scale of queries in e4m3, the same on all ranks: [], or [D * N / TP] for one scale for each
            gathered head (`ContextParallel.heads_of_group`). None for `converted`.

    Returns:
        out [T, N / TP, Lkv] and lse [N / TP, T] of this rank's heads, over the keys of all ranks.

    Raises:
        ValueError: for the same reasons as `mla_decode`.
        GroupError: an exchange failed.
    """
    check_type("context_parallel", context_parallel, ContextParallel)
    check_decode(
        ql_nope, q_pe, kv_cache, metadata, cache_format, schedule, kv_scale, fp8_mode, q_scale, out_dtype,
        context_parallel.size,
    )  # fmt: skip
    check_scale_values("q_scale", q_scale)
    check_number("softmax_scale", softmax_scale)
    check_dtype("out_dtype", ql_nope.dtype if out_dtype is None else out_dtype)
    latent, group = ql_nope.shape[2], context_parallel.cp_group
    sent = torch.uint8 if ql_nope.dtype == E4M3 else ql_nope.dtype  # groups cannot exchange tensors in e4m3
    q = torch.cat((ql_nope.view(sent), q_pe.view(sent)), dim=-1)
    q = group.all_gather(rearrange(q, "tokens heads width -> heads tokens width"))
    q = rearrange(q, "ranks heads tokens width -> tokens (ranks heads) width").view(ql_nope.dtype)
    state = mla_decode(
        q[..., :latent], q[..., latent:], kv_cache, metadata, softmax_scale, schedule, out_dtype, cache_format,
        kv_scale, fp8_mode, q_scale,
    )  # fmt: skip
    return MERGE_OVER_RANKS[context_parallel.merge](state, group)
