"""Context parallelism of grouped-query attention, where D ranks divide the tokens of every sequence among themselves.

The rank-local tokens are the tokens that one rank keeps in its cache. TP is the number of tensor-parallel ranks, which
divide the N query heads among themselves. The caches of the D ranks have the same KV heads: those of the query heads of
all D ranks (`ContextParallel.kv_heads`).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from einops import rearrange
from jaxtyping import Float, Shaped
from torch import Tensor

from ..distributed.groups import ContextParallel
from ..distributed.merge import MERGE_OVER_RANKS
from ..interfaces import (
    COMPUTE_FORMAT,
    AttentionState,
    CacheFormat,
    DecodeSchedule,
    check_scale_values,
    check_tensor,
    check_type,
)
from ..interfaces.gqa import (
    GQAConfig,
    PagedAttentionMetadata,
    check_gqa_config,
    check_paged_attention,
    check_sinks,
    gathered_config,
)
from .attention import gqa_paged_attention


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
) -> AttentionState:
    """Compute attention over a paged cache whose keys are distributed over D ranks. Prefills and decodes use this call.

    Before the call, each rank has the queries of its N / TP heads. The steps are:

    1. All-gather the queries, so that each rank has the queries of N D / TP heads.
    2. Attend the rank-local keys with the queries of these heads (`gqa_paged_attention`). Rank 0 alone counts the
       attention sinks: of states that are merged, exactly one gets the sinks.
    3. Merge the attention states (output and log-sum-exp) of the D ranks. Each rank gets the merged states of the heads
       with which it began.

    Args:
        q: [T, N / TP, Dh], queries of this rank's heads.
        kv_cache: [2, num_blocks, block_size, Nkv D / TP, Dh], cache of this rank; it must already contain the new
            tokens that this rank owns.
        metadata: plan of the decodes or of the prefills. Its numbers count rank-local keys: query token t attends the
            keys [`first_visible[t]`, `visible_lens[t]`) that this rank has of the request.
        config: config of this rank, with its N / TP query heads and the KV heads of its cache
            (`ContextParallel.local_gqa_config`).
        context_parallel: the process groups, and the name of the merge.
        sinks: [N D / TP], attention sinks of the gathered heads, the same on all ranks
            (`ContextParallel.heads_of_group`); None for a config without attention sinks.
        schedule: schedule of step 2; it changes results by rounding alone.
        out_dtype: dtype of `out` and of the exchanged outputs; None means the dtype of `q`.
        cache_format: format of the cache.
        k_scale: float32 scale of the keys; None if the format has no such scale.
        v_scale: float32 scale of the values; None if the format has no such scale.
        q_scale: float32 scale with which queries are rounded to e4m3 first (`gqa_paged_attention`), the same on all
            ranks; None for queries in the dtype of `q`.

    Returns:
        out [T, N / TP, Dh] and lse [N / TP, T] of this rank's heads, over the keys of all ranks.

    Raises:
        TypeError: an argument has another class.
        ValueError: for the same reasons as `gqa_paged_attention`. If a shape, dtype, device or scale is wrong, nothing
            has been exchanged.
        UnsupportedConfiguration: D is above 1, and the config has ALiBi or attention chunks.
        GroupError: an exchange failed.
    """
    check_type("context_parallel", context_parallel, ContextParallel)
    check_gqa_config(config)
    check_tensor("q", q, ("T", config.num_heads, config.head_dim))
    group = context_parallel.cp_group
    check_sinks(sinks, gathered_config(config, group.size), q.device)
    check_paged_attention(
        q, kv_cache, metadata, replace(config, attention_sinks=False), None, schedule, out_dtype, cache_format, k_scale,
        v_scale, q_scale,
    )  # fmt: skip
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale), ("q_scale", q_scale)):
        check_scale_values(name, scale)
    has_sinks = group.rank == 0
    gathered = group.all_gather(rearrange(q, "tokens heads dim -> heads tokens dim"))
    state = gqa_paged_attention(
        rearrange(gathered, "ranks heads tokens dim -> tokens (ranks heads) dim"),
        kv_cache, metadata, gathered_config(config, group.size, has_sinks), sinks if has_sinks else None, schedule,
        out_dtype, cache_format, k_scale, v_scale, q_scale,
    )  # fmt: skip
    return MERGE_OVER_RANKS[context_parallel.merge](state, group)
