"""Context parallelism of MLA: gather context from all ranks, and decode over keys that are distributed over ranks.

The tokens of each sequence are distributed over D ranks. `reference.mla.context_parallel` explains rank-local tokens
and TP. docs/glossary.md explains the terms and the other letters.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from reference.distributed.arguments import check_chunk_ownership
from reference.distributed.groups import ContextParallel
from reference.interfaces import (
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

from .. import backends
from ..backends import BackendChoice
from ..cache.formats import dequantize_entries
from ..cache.latent import gather_and_maybe_dequant_cache
from ..distributed.merge import MERGE_OVER_RANKS
from ..distributed.reorg import reorg_kvcache
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
    backend: BackendChoice = None,
) -> Float[Tensor, "S head_size"]:
    """Gather the cache entries of one chunk from all ranks, in the order of the tokens, for a prefill.

    See `reference.mla.context_parallel.dcp_gather_context` for the entries that each rank gathers and sends.
    If the format has a `storage_dtype`, the ranks exchange stored entries. Each rank then converts the entries that it
    received (`dequantize_entries`).

    Args:
        kv_cache: cache of this rank.
        metadata: prefill part of the plan.
        chunk: the chunk to gather.
        context_parallel: the groups of ranks.
        cache_format: format of the cache.
        out_dtype: dtype of the result; None takes the dtype of the cache.
        kv_scale: float32 scale of the layer's cache; None if the format has no such scale (`CacheFormat.layer_scale`).
        workspace: contiguous tensor [rows, Lkv + R] in `out_dtype` for the entries that this rank sends and receives.
            It needs at least (D + 1) * `chunk.padded_tokens` rows. If it has at least `chunk.num_tokens` rows more, its
            first rows receive the result. None allocates tensors.
        backend: name of a backend, mapping from op to backend name, or None for an automatic choice (`fast.backends`).

    Returns:
        [chunk.num_tokens, Lkv + R] in `out_dtype`; the first rows of `workspace` if it has room for the result.

    Raises:
        ValueError: shapes, dtypes or devices do not match; the chunk was made for another rank; `workspace` has too few
            rows; for CPU tensors, a block is outside the cache. Nothing has been sent to other ranks then.
        GroupError: the exchange failed.
        UnsupportedConfiguration: no backend that `backend` allows can serve the call.
    """
    width, dtype = check_context(kv_cache, metadata, chunk, cache_format, out_dtype, kv_scale)
    check_chunk_ownership(chunk, context_parallel)
    backend = backends.bind(backend, ("dequantize_entries", "gather_and_maybe_dequant_cache", "reorg_kvcache"))
    ranks, padded, stored = context_parallel.size, chunk.padded_tokens, cache_format.storage_dtype
    exchanged, columns = (ranks + 1) * padded, width if stored is None else kv_cache.shape[2]
    if workspace is None:
        kept, out = kv_cache.new_empty(exchanged, columns, dtype=stored or dtype), None
    else:
        check_rows(workspace, width, exchanged, dtype, kv_cache.device)
        has_room = workspace.shape[0] >= chunk.num_tokens + exchanged
        kept = workspace[chunk.num_tokens if has_room else 0 :]
        out = workspace[: chunk.num_tokens] if has_room else None
    if stored is not None and kept.dtype != stored:
        elements = kept.view(-1).view(stored)
        kept = elements[: elements.shape[0] // columns * columns].view(-1, columns)
    received, free = kept[: ranks * padded], kept[ranks * padded :]
    sent = free[:padded]
    starts, offsets = chunk.held
    gather_and_maybe_dequant_cache(  # the later rows of `sent` are padding, which no rank reads
        kv_cache, metadata.block_table, offsets, starts, chunk.local_tokens, cache_format, stored or dtype,
        out=sent[: chunk.local_tokens], bounded=chunk.bounded, backend=backend,
    )  # fmt: skip
    if stored is None:
        gathered = context_parallel.cp_group.all_gather(sent, out=received.view(ranks, padded, columns))
        return reorg_kvcache(gathered, chunk, out=out, backend=backend)
    as_bytes = received.view(torch.uint8).view(ranks, padded, -1)
    gathered = context_parallel.cp_group.all_gather(sent.view(torch.uint8), out=as_bytes).view(stored)
    # if `free` has enough rows, the ordered entries overwrite the sent entries
    ordered = free[: chunk.num_tokens] if free.shape[0] >= chunk.num_tokens else None
    entries = reorg_kvcache(gathered, chunk, out=ordered, backend=backend)
    if cache_format.returns_stored(dtype):
        return entries if out is None else out.copy_(entries)
    return dequantize_entries(entries, cache_format, dtype, kv_scale, out=out, backend=backend)


DCP_DECODE_OPS = ("mla_decode", "weight_attn_out", *backends.MESSAGES)


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
    *,
    backend: BackendChoice = None,
) -> AttentionState:
    """Compute attention on the absorbed path over keys that are distributed over D ranks.

    Each rank gathers the queries of the D ranks, attends its own keys, and merges its attention states with those of
    the other ranks. `reference.distributed.groups.ContextParallel` explains the exchanges.

    Args:
        ql_nope: [T, N / TP, Lkv], queries of this rank's heads, with W_UK absorbed. TP is the number of tensor-parallel
            ranks, which share the N heads.
        q_pe: [T, N / TP, R], rotated rope parts of the queries.
        kv_cache: cache of this rank, which already contains the new tokens of this rank.
        metadata: decode part of the plan. This rank owns some keys of the request of query token t, and the token
            attends the first `visible_lens[t]` of these keys.
        softmax_scale: (P + R)^-1/2, times YaRN's factor.
        context_parallel: the groups of ranks and the kind of merge.
        schedule: schedule of this rank's decode, which has the D * N / TP gathered heads.
        out_dtype: dtype of `out`, and of the outputs that the ranks exchange when they merge. None means the dtype of
            `ql_nope`, and is refused for queries in e4m3.
        cache_format: format of the cache.
        kv_scale: float32 scale of the layer's cache; None if the format has no such scale (`CacheFormat.layer_scale`).
        fp8_mode: one of `converted`, `fp8_query` and `fp8_product` (`mla_decode`). In the modes `fp8_query` and
            `fp8_product`, the ranks gather queries in e4m3.
        q_scale: float32 scale of queries in e4m3, the same on all ranks: [], or [D * N / TP] for one scale for each
            gathered head (`ContextParallel.heads_of_group`). None for `converted`.
        backend: name of a backend, mapping from op to backend name, or None for an automatic choice (`fast.backends`).

    Returns:
        out [T, N / TP, Lkv], lse [N / TP, T], over the keys of all ranks.

    Raises:
        ValueError: for the same reasons as `mla_decode`.
        GroupError: an exchange failed.
        UnsupportedConfiguration: no backend that `backend` allows can serve the call.
    """
    check_type("context_parallel", context_parallel, ContextParallel)
    check_decode(
        ql_nope, q_pe, kv_cache, metadata, cache_format, schedule, kv_scale, fp8_mode, q_scale, out_dtype,
        context_parallel.size,
    )  # fmt: skip
    check_scale_values("q_scale", q_scale)
    check_number("softmax_scale", softmax_scale)
    check_dtype("out_dtype", ql_nope.dtype if out_dtype is None else out_dtype)
    backend = backends.bind(backend, DCP_DECODE_OPS)
    latent, group = ql_nope.shape[2], context_parallel.cp_group
    # [heads, T, Lkv + R]: with heads as the first dimension, the all-gather gives the heads of all ranks in order
    parts = ql_nope.transpose(0, 1), q_pe.transpose(0, 1)
    if fp8_mode == CONVERTED:
        q = group.all_gather(torch.cat(parts, dim=-1))
    else:  # exchange bytes, because `Group` does not support e4m3
        q = group.all_gather(torch.cat([x.view(torch.uint8) for x in parts], dim=-1)).view(E4M3)
    q = q.flatten(0, 1).transpose(0, 1)
    state = mla_decode(
        q[..., :latent], q[..., latent:], kv_cache, metadata, softmax_scale, schedule, out_dtype, cache_format,
        kv_scale, fp8_mode, q_scale, backend=backend,
    )  # fmt: skip
    return MERGE_OVER_RANKS[context_parallel.merge](state, group, graph=metadata.graph, backend=backend)
