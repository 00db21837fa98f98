"""Context parallelism of grouped-query attention: attend keys that are distributed over D ranks.

`reference.gqa.context_parallel` explains rank-local tokens, TP and the KV heads of a rank's cache. docs/glossary.md
explains the terms and the other letters.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from reference.distributed.groups import ContextParallel
from reference.interfaces import (
    COMPUTE_FORMAT,
    AttentionState,
    CacheFormat,
    DecodeSchedule,
    check_out,
    check_scale_values,
    check_tensor,
    check_type,
)
from reference.interfaces.gqa import (
    GQAConfig,
    PagedAttentionMetadata,
    check_gqa_config,
    check_paged_attention,
    check_sinks,
    gathered_config,
)

from .. import backends
from ..backends import BackendChoice
from ..distributed.merge import MERGE_OVER_RANKS
from .attention import gqa_paged_attention
from .backend_choice import Attention, choose_rank_backend

GQA_DCP_OPS = ("gqa_paged_attention", "weight_attn_out", *backends.MESSAGES)


def gqa_dcp_attention(
    q: Float[Tensor, "T N Dh"],
    kv_cache: Shaped[Tensor, "2 num_blocks block_size Nkv Dh"],
    metadata: PagedAttentionMetadata,
    config: GQAConfig,
    context_parallel: ContextParallel,
    sinks: Float[Tensor, " heads"] | None = None,
    schedule: DecodeSchedule | None = None,
    out_dtype: torch.dtype | None = None,
    cache_format: CacheFormat = COMPUTE_FORMAT,
    k_scale: Float[Tensor, ""] | None = None,
    v_scale: Float[Tensor, ""] | None = None,
    q_scale: Float[Tensor, ""] | None = None,
    *,
    out: Float[Tensor, "T N Dh"] | None = None,
    backend: BackendChoice = None,
) -> AttentionState:
    """Compute attention over a paged cache whose keys are distributed over D ranks. Prefills and decodes use this call.

    Each rank gathers the queries of the D ranks, attends its own keys, and merges its attention states with those of
    the other ranks. `reference.gqa.context_parallel.gqa_dcp_attention` explains these steps, and which rank counts the
    attention sinks.

    Args:
        q: [T, N / TP, Dh], queries of this rank's heads.
        kv_cache: [2, num_blocks, block_size, Nkv D / TP, Dh], cache of this rank, which already contains the new tokens
            of this rank.
        metadata: plan of the decodes or of the prefills, whose numbers count keys of this rank.
        config: config of this rank, with its N / TP query heads and the KV heads of its cache
            (`ContextParallel.local_gqa_config`).
        context_parallel: the groups of ranks and the kind of merge.
        sinks: [N D / TP], attention sinks of the gathered heads, the same on all ranks
            (`ContextParallel.heads_of_group`); None for a config without attention sinks.
        schedule: schedule of this rank's attention with the gathered heads.
        out_dtype: dtype of `out`, and of the outputs that the ranks exchange when they merge; None means the dtype of
            `q`.
        cache_format: format of the cache.
        k_scale: float32 scale of the keys; None if the format has no such scale.
        v_scale: float32 scale of the values; None if the format has no such scale.
        q_scale: float32 scale with which queries are rounded to e4m3 first, the same on all ranks; None for queries in
            the dtype of `q`.
        out: tensor [T, N / TP, Dh] in `out_dtype`, with any strides, that receives the output; `out` must share no
            memory with the other tensors. None allocates a tensor.
        backend: name of a backend, mapping from op to backend name, or None for an automatic choice (`fast.backends`).

    Returns:
        out [T, N / TP, Dh], lse [N / TP, T], over the keys of all ranks.

    Raises:
        TypeError: an argument has another class.
        ValueError: for the same reasons as `gqa_paged_attention`. If a shape, dtype, device, scale or name of a backend
            is wrong, nothing has been exchanged.
        UnsupportedConfiguration: D is above 1, and the config has ALiBi or attention chunks; no backend that `backend`
            allows can serve the call. Nothing has been exchanged then.
        GroupError: an exchange failed.
    """
    check_type("context_parallel", context_parallel, ContextParallel)
    group, stored = context_parallel.cp_group, (cache_format, k_scale, v_scale, q_scale)
    backend = backends.bind(backend, GQA_DCP_OPS)
    ranks = group.size, context_parallel.merge
    _check_call(q, kv_cache, metadata, config, sinks, schedule, out_dtype, *stored, ranks, backend)
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale), ("q_scale", q_scale)):
        check_scale_values(name, scale)
    if out is not None:
        plan = metadata.block_table, metadata.seq_lens, metadata.query_start_loc, metadata.visible_lens
        inputs = [each for each in (q, kv_cache, sinks, *stored[1:], *plan, metadata.first_visible) if each is not None]
        check_out("out", out, tuple(q.shape), q.dtype if out_dtype is None else out_dtype, q.device, *inputs)
    # [heads, T, Dh]: with heads as the first dimension, the all-gather gives the heads of all ranks in order
    gathered = group.all_gather(q.transpose(0, 1)).flatten(0, 1).transpose(0, 1)
    has_sinks = group.rank == 0
    state = gqa_paged_attention(
        gathered, kv_cache, metadata, gathered_config(config, group.size, has_sinks), sinks if has_sinks else None,
        schedule, out_dtype, *stored, backend=backend,
    )  # fmt: skip
    merged = MERGE_OVER_RANKS[context_parallel.merge](state, group, graph=metadata.graph, backend=backend)
    return merged if out is None else AttentionState(out.copy_(merged.out), merged.lse)


@backends.CheckedOnce
def _check_call(
    q: Tensor,
    kv_cache: Tensor,
    metadata: PagedAttentionMetadata,
    config: GQAConfig,
    sinks: Tensor | None,
    schedule: DecodeSchedule | None,
    out_dtype: torch.dtype | None,
    cache_format: CacheFormat,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    q_scale: Tensor | None,
    ranks: tuple[int, str],
    backend: BackendChoice,
) -> None:
    """Check the arguments of `gqa_dcp_attention`, and that backends can serve its calls; read no values.

    `ranks` has the number D of ranks and the name of their merge.
    """
    check_gqa_config(config)
    check_tensor("q", q, ("T", config.num_heads, config.head_dim))
    check_sinks(sinks, gathered_config(config, ranks[0]), q.device)
    check_paged_attention(
        q, kv_cache, metadata, replace(config, attention_sinks=False), None, schedule, out_dtype, cache_format, k_scale,
        v_scale, q_scale,
    )  # fmt: skip
    wanted = q.dtype if out_dtype is None else out_dtype
    call = Attention(q.device, q.dtype, config, wanted, cache_format, q_scale is not None, backend)
    choose_rank_backend(call, metadata, schedule, *ranks)
