"""Grouped-query attention: over a paged key/value cache, and over packed keys and values without a cache.

Query head h attends with the key/value head h // (N / Nkv). The score of a query and a key is

1. the dot product times `GQAConfig.softmax_scale`;
2. then, with a soft cap c: c * tanh(score / c);
3. then, with ALiBi: the score minus slope * |position of the query - position of the key|.

The attention sink of a head is one more key of the softmax: its score is the sink itself, and its value is 0. The LSE
(logarithm of the sum of exp(score)) contains the sink. If several attention states of the same queries are merged,
exactly one of these states must therefore get the sinks.

The arithmetic rounds like `reference.attention.varlen`: scores, softmax and sums are computed in float32 (float64 if
the queries are in float64), and probabilities are rounded to the dtype of the queries.
"""

from __future__ import annotations

import torch
from einops import einsum, rearrange, repeat
from jaxtyping import Bool, Float, Int, Int32, Shaped
from torch import Tensor

from ..interfaces import (
    COMPUTE_FORMAT,
    AttentionState,
    CacheFormat,
    DecodeSchedule,
    check_scale_values,
    from_e4m3,
    to_e4m3,
    wide_dtype,
)
from ..interfaces.gqa import (
    AttentionType,
    GQAConfig,
    PagedAttentionMetadata,
    check_gqa_varlen,
    check_gqa_varlen_values,
    check_paged_attention,
    check_paged_values,
)


def _attend_one_request(
    q: Float[Tensor, "Sq N Dh"],
    k: Float[Tensor, "S Nkv Dh"],
    v: Float[Tensor, "S Nkv Dh"],
    visible: Bool[Tensor, "Sq S"],
    distances: Int[Tensor, "Sq S"],
    config: GQAConfig,
    sinks: Float[Tensor, " N"] | None,
) -> AttentionState:
    """Compute the attention of one request with two einsums and a mask. FLOPs: 4 Sq S N Dh.

    Args:
        q: [Sq, N, Dh], queries.
        k: [S, Nkv, Dh], keys.
        v: [S, Nkv, Dh], values.
        visible: [Sq, S]; element [i, j] is True if query i attends key j.
        distances: [Sq, S], difference of the positions of query and key, at least 0 where `visible` is True.
        config: scale, soft cap and slopes.
        sinks: [N], or None.

    Returns:
        The attention state, in float32 (float64 if `q` is float64).
    """
    wide, group = wide_dtype(q.dtype), config.group_size
    q_groups = rearrange(q.to(wide), "queries (kv group) dim -> queries kv group dim", group=group)
    scores = einsum(q_groups, k.to(wide), "queries kv group dim, keys kv dim -> kv group queries keys")
    scores = rearrange(scores, "kv group queries keys -> (kv group) queries keys") * config.softmax_scale
    if config.logits_soft_cap is not None:
        scores = config.logits_soft_cap * torch.tanh(scores / config.logits_soft_cap)
    if config.alibi_slopes is not None:
        slopes = torch.tensor(config.alibi_slopes, dtype=wide, device=q.device)
        scores = scores - einsum(slopes, distances.to(wide), "heads, queries keys -> heads queries keys")
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, repeat(sinks.to(wide), "heads -> heads queries 1", queries=q.shape[0])), dim=-1)
    lse = torch.logsumexp(scores, dim=-1)
    probabilities = torch.exp(scores - lse[..., None])[..., : k.shape[0]]  # the value of the sink is 0
    # in a row without keys and without a sink, exp(-inf - (-inf)) is NaN: set the probabilities to 0
    probabilities = probabilities.masked_fill(~visible | (lse == -torch.inf)[..., None], 0).to(q.dtype).to(wide)
    p_groups = rearrange(probabilities, "(kv group) queries keys -> kv group queries keys", group=group)
    out = einsum(p_groups, v.to(wide), "kv group queries keys, keys kv dim -> queries kv group dim")
    return AttentionState(rearrange(out, "queries kv group dim -> queries (kv group) dim"), lse)


def _cached_keys(
    half: Shaped[Tensor, "num_blocks block_size Nkv Dh"],
    table: list[int],
    keys: range,
    scale: Float[Tensor, ""] | None,
    dtype: torch.dtype,
) -> Float[Tensor, "S Nkv Dh"]:
    """Return some consecutive keys (or values) of a request from one half of a cache, page by page, in `dtype`."""
    block_size = half.shape[1]
    pages = [half.new_empty(0, *half.shape[2:])]
    for column, block in enumerate(table):
        start = column * block_size  # index of the page's first key
        if start < keys.stop and start + block_size > keys.start:
            pages.append(half[block, max(keys.start - start, 0) : keys.stop - start])
    stored = torch.cat(pages)
    return stored.to(dtype) if scale is None else from_e4m3(stored, scale, dtype)


def gqa_paged_attention(
    q: Float[Tensor, "T N Dh"],
    kv_cache: Shaped[Tensor, "2 num_blocks block_size Nkv Dh"],
    metadata: PagedAttentionMetadata,
    config: GQAConfig,
    sinks: Float[Tensor, " N"] | None = None,
    schedule: DecodeSchedule | None = None,
    out_dtype: torch.dtype | None = None,
    cache_format: CacheFormat = COMPUTE_FORMAT,
    k_scale: Float[Tensor, ""] | None = None,
    v_scale: Float[Tensor, ""] | None = None,
    q_scale: Float[Tensor, ""] | None = None,
) -> AttentionState:
    """Attend the cached keys and values of each request with its query tokens. Prefills and decodes use this function.

    Query token t attends the keys [`first_visible[t]`, `visible_lens[t]`) of its request. The cache must already
    contain the keys and values of the new tokens (`reshape_and_cache`). In ALiBi, the position of a query token in a
    decoder is `visible_lens[t]` - 1, and the position of a key is its index in the request.

    The function reads only the blocks that some query token can see. The other entries of the block table, such as the
    entries of freed blocks before a window, may have any value.

    Args:
        q: [T, N, Dh], queries; their rope part, if any, is rotated.
        kv_cache: [2, num_blocks, block_size, Nkv, Dh], the cache of the layer, with any strides.
        metadata: the plan: the requests, and the keys that each query token attends.
        config: config of the layer.
        sinks: [N], the attention sinks of a config with `attention_sinks`; None for other configs. To get a state
            without the sinks, for a merge, pass a config without `attention_sinks`.
        schedule: schedule of the decode (`plan_decode`). This function validates the schedule and does not use it. A
            kernel uses it; the results then change by rounding alone.
        out_dtype: dtype of `out`; None means the dtype of `q`. Use float32 if the state will be merged.
        cache_format: format of the cache.
        k_scale: float32 scale of the keys; None if the format has no such scale (`CacheFormat.layer_scale`).
        v_scale: float32 scale of the values; None like `k_scale`.
        q_scale: float32 scale of queries: the queries are first rounded to e4m3 with this scale. None means queries in
            the dtype of `q`. It is legal only for the format `fp8_e4m3`.

    Returns:
        out [T, N, Dh] and lse [N, T]. A query token that attends no key has out = 0, and lse = the sinks (-inf without
        sinks). A padding token (a query token behind the last request) has out = 0 and lse = -inf.

    Raises:
        ValueError: in one of the following cases:

            - shapes, dtypes or devices do not match, or the plan was made for another block size;
            - the config needs a field that the plan does not have, or the sinks do not suit the config;
            - `metadata.query_start_loc` decreases, or a number of `metadata.seq_lens` is above `metadata.max_seq_len`;
            - the visible keys of a query token are not keys of its request;
            - a block that a query token can see is outside the cache;
            - a scale is missing, or is not finite and positive.
        UnsupportedConfiguration: the format is for the latent cache alone, such as `fp8_ds_mla`.
    """
    scales = k_scale, v_scale, q_scale
    check_paged_attention(q, kv_cache, metadata, config, sinks, schedule, out_dtype, cache_format, *scales)
    for name, scale in zip(("k_scale", "v_scale", "q_scale"), scales, strict=True):
        check_scale_values(name, scale)
    check_paged_values(metadata, kv_cache.shape[1], kv_cache.shape[2])
    out = torch.zeros_like(q, dtype=out_dtype)  # padding tokens keep out = 0 and lse = -inf
    lse = torch.full((q.shape[1], q.shape[0]), -torch.inf, dtype=wide_dtype(out.dtype), device=q.device)
    if q_scale is not None:
        q = from_e4m3(to_e4m3(q, q_scale), q_scale, q.dtype)
    ends = metadata.visible_lens
    firsts = torch.zeros_like(ends) if metadata.first_visible is None else metadata.first_visible
    offsets, tables = metadata.query_start_loc.tolist(), metadata.block_table.tolist()
    for request, table in enumerate(tables):
        rows = slice(offsets[request], offsets[request + 1])
        seeing = firsts[rows] < ends[rows]  # query tokens that attend at least one key
        seen = range(min(firsts[rows][seeing].tolist(), default=0), max(ends[rows][seeing].tolist(), default=0))
        k = _cached_keys(kv_cache[0], table, seen, k_scale, q.dtype)
        v = _cached_keys(kv_cache[1], table, seen, v_scale, q.dtype)
        keys = torch.arange(seen.start, seen.stop, device=q.device)
        visible = (keys >= firsts[rows, None]) & (keys < ends[rows, None])
        state = _attend_one_request(q[rows], k, v, visible, (ends[rows, None] - 1 - keys).abs(), config, sinks)
        out[rows], lse[:, rows] = state.out.to(out.dtype), state.lse
    return AttentionState(out, lse)


def _visible_keys(
    query_len: int, key_len: int, config: GQAConfig, device: torch.device
) -> tuple[Bool[Tensor, "Sq S"], Int[Tensor, "Sq S"]]:
    """Return the mask of attention without a cache, and the distances of queries and keys for ALiBi.

    | attention type | position of query i | attended keys |
    |---|---|---|
    | decoder | S - Sq + i | keys up to the position, in the window and in the attention chunk of the position |
    | encoder, encoder-only | i | all keys whose distance is below the window |
    | cross | none | all keys |
    """
    keys = torch.arange(key_len, device=device)
    queries = torch.arange(query_len, device=device)[:, None]
    if config.attention_type is AttentionType.DECODER:
        queries = queries + key_len - query_len
    distances = (queries - keys).abs()
    visible = torch.ones_like(distances, dtype=torch.bool)
    if config.attention_type is AttentionType.DECODER:
        visible = keys <= queries
    if config.sliding_window is not None:
        visible = visible & (distances < config.sliding_window)
    if config.attention_chunk_size is not None:
        visible = visible & (keys // config.attention_chunk_size == queries // config.attention_chunk_size)
    return visible, distances


def gqa_varlen_attention(
    q: Float[Tensor, "T N Dh"],
    k: Float[Tensor, "S Nkv Dh"],
    v: Float[Tensor, "S Nkv Dh"],
    cu_seqlens_q: Int32[Tensor, " offsets"],
    cu_seqlens_k: Int32[Tensor, " offsets"],
    max_seqlen_q: int,
    max_seqlen_k: int,
    config: GQAConfig,
    sinks: Float[Tensor, " N"] | None = None,
    out_dtype: torch.dtype | None = None,
) -> AttentionState:
    """Attend packed keys and values without a cache; the queries of each request attend the keys of the same request.

    The attention type of the config determines the mask. Let a request have Sq queries and S keys, and let W be the
    window.

    - In a decoder, query i has the position p = S - Sq + i. It attends the keys up to p, itself included: the last W of
      these keys if there is a window, and only the keys of its attention chunk with chunked local attention.
    - In an encoder, queries and keys are the same tokens. Query i attends all keys, or with a window the keys j whose
      distance |i - j| is below W.
    - In cross attention, every query attends all keys of its request.

    Args:
        q: [T, N, Dh], queries of all requests, one request after another.
        k: [S, Nkv, Dh], keys of all requests; here S is the number of keys of all requests together.
        v: [S, Nkv, Dh], values of all requests.
        cu_seqlens_q: [B + 1], prefix sum of the query lengths; 0 is a legal length.
        cu_seqlens_k: [B + 1], prefix sum of the key lengths; 0 is a legal length.
        max_seqlen_q: upper bound of the query lengths. A kernel needs this bound to size its grid; the result does not
            depend on it.
        max_seqlen_k: upper bound of the key lengths; the result does not depend on it.
        config: config of the layer.
        sinks: [N], the attention sinks of a config with `attention_sinks`; None for other configs.
        out_dtype: dtype of `out`; None means the dtype of `q`.

    Returns:
        out [T, N, Dh] and lse [N, T]. A query that attends no key has out = 0, and lse = the sinks (-inf without
        sinks).

    Raises:
        ValueError: shapes, dtypes or devices do not match; offsets decrease, or do not end at the number of tokens; in
            an encoder, queries and keys have different lengths; the sinks do not suit the config.
    """
    bounds = max_seqlen_q, max_seqlen_k
    check_gqa_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, *bounds, config, sinks, out_dtype)
    check_gqa_varlen_values(cu_seqlens_q, cu_seqlens_k, q.shape[0], k.shape[0], config)
    out = torch.empty_like(q, dtype=out_dtype)
    lse = torch.empty(q.shape[1], q.shape[0], dtype=wide_dtype(out.dtype), device=q.device)
    q_offsets, k_offsets = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for request in range(len(q_offsets) - 1):
        rows = slice(q_offsets[request], q_offsets[request + 1])
        keys = slice(k_offsets[request], k_offsets[request + 1])
        mask = _visible_keys(rows.stop - rows.start, keys.stop - keys.start, config, q.device)
        state = _attend_one_request(q[rows], k[keys], v[keys], *mask, config, sinks)
        out[rows], lse[:, rows] = state.out.to(out.dtype), state.lse
    return AttentionState(out, lse)
