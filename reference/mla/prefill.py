"""Prefill on the expanded path: expand latents to keys and values of every head, then compute ordinary attention.

The cached context is gathered and expanded in chunks of limited size, so that the memory does not grow with the length
of the context.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from einops import repeat
from jaxtyping import Float, Shaped
from torch import Tensor

from ..attention.merge import merge_attn_states
from ..attention.varlen import flash_attn_varlen
from ..cache.latent import gather_and_maybe_dequant_cache
from ..interfaces import (
    COMPUTE_FORMAT,
    AttentionState,
    CacheFormat,
    ChunkRun,
    ContextChunk,
    ContextWorkspace,
    PrefillMetadata,
    check_context,
    check_context_workspace,
    check_expanded,
    check_expanded_pair,
    check_flag,
    check_function,
    check_output_scale,
    check_prefill,
    check_rows,
    check_scale_values,
    reserve_for_chunks,
    to_e4m3,
    wide_dtype,
)
from .weights import expand_kv


def _concat_key(k_nope: Float[Tensor, "S N P"], k_pe: Float[Tensor, "S R"]) -> Float[Tensor, "S N P+R"]:
    """Return the key of every head: the part without rope of this head, then the rope part that all heads share."""
    return torch.cat((k_nope, repeat(k_pe, "tokens rope -> tokens heads rope", heads=k_nope.shape[1])), dim=-1)


def _expanded(
    expand: Callable[[Tensor], tuple[Tensor, Tensor]] | None, latents: Tensor, w_uk: Tensor, w_uv: Tensor,
    workspace: Tensor | None = None,
) -> tuple[Float[Tensor, "S N P"], Float[Tensor, "S N V"]]:  # fmt: skip
    """Return `expand(latents)`, or `expand_kv` of the latents and the weights if `expand` is None."""
    if expand is None:
        return expand_kv(latents, w_uk, w_uv, workspace=workspace)
    return check_expanded_pair(expand(latents), latents, w_uk, w_uv)


def run_prefill_new_tokens(
    q: Float[Tensor, "T N D"],
    k_nope: Float[Tensor, "T N P"],
    k_pe: Float[Tensor, "T R"],
    v: Float[Tensor, "T N V"],
    metadata: PrefillMetadata,
    softmax_scale: float,
    return_lse: bool = True,
) -> AttentionState | Float[Tensor, "T N V"]:
    """Compute the causal attention of each request's new tokens over the new tokens of the same request.

    Args:
        q: [T, N, P + R], queries with the rope part rotated.
        k_nope: [T, N, P], key parts without rope (`expand_kv`).
        k_pe: [T, R], rotated rope parts of the keys.
        v: [T, N, V], values.
        metadata: plan of the prefill.
        softmax_scale: factor of the scores, `MLAConfig.softmax_scale`.
        return_lse: whether the caller needs the log-sum-exp (LSE) of the scores, to merge the result with the attention
            over chunks of the context.

    Returns:
        With `return_lse`, an `AttentionState`: out [T, N, V] and lse [N, T], both in float32 (float64 if `q` is
        float64), so that a merge does not round twice.

        Without `return_lse`, a tensor: out [T, N, V] in the dtype of `q`.

    Raises:
        TypeError: `return_lse` is not a bool.
        ValueError: shapes, dtypes or devices do not match.
    """
    check_expanded(q, k_nope, k_pe, v, metadata)
    check_flag("return_lse", return_lse)
    offsets, longest = metadata.query_start_loc, metadata.max_query_len
    k = _concat_key(k_nope, k_pe)
    dtype = wide_dtype(q.dtype) if return_lse else q.dtype
    state = flash_attn_varlen(q, k, v, offsets, offsets, longest, longest, softmax_scale, causal=True, out_dtype=dtype)
    return state if return_lse else state.out


def run_prefill_context_chunk(
    q: Float[Tensor, "T N D"],
    k_nope: Float[Tensor, "S N P"],
    k_pe: Float[Tensor, "S R"],
    v: Float[Tensor, "S N V"],
    metadata: PrefillMetadata,
    chunk: ContextChunk,
    softmax_scale: float,
) -> AttentionState:
    """Compute the attention of the new tokens over one chunk of the context.

    There is no mask, because every new token attends the whole context of its request.

    Args:
        q: [T, N, P + R], queries with the rope part rotated.
        k_nope: [S, N, P], key parts of the chunk without rope (`expand_kv`).
        k_pe: [S, R], rope parts of the chunk's keys, from the cache.
        v: [S, N, V], values of the chunk.
        metadata: plan of the prefill.
        chunk: positions and lengths of the chunk.
        softmax_scale: factor of the scores, `MLAConfig.softmax_scale`.

    Returns:
        out [T, N, V] and lse [N, T], both in float32 (float64 if `q` is float64), to be merged with the state over the
        other keys.

    Raises:
        ValueError: shapes, dtypes or devices do not match.
    """
    check_expanded(q, k_nope, k_pe, v, metadata, chunk)
    k = _concat_key(k_nope, k_pe)
    if chunk.bounded:  # `num_tokens` is an upper bound; drop the rows behind the last request
        k, v = (x[: int(chunk.cu_seq_lens[-1])] for x in (k, v))
    return flash_attn_varlen(
        q, k, v, metadata.query_start_loc, chunk.cu_seq_lens, metadata.max_query_len, chunk.max_seq_len, softmax_scale,
        causal=False, out_dtype=wide_dtype(q.dtype),
    )  # fmt: skip


def gather_context(
    kv_cache: Shaped[Tensor, "num_blocks block_size columns"],
    metadata: PrefillMetadata,
    chunk: ContextChunk,
    cache_format: CacheFormat = COMPUTE_FORMAT,
    out_dtype: torch.dtype | None = None,
    kv_scale: Float[Tensor, ""] | None = None,
    *,
    workspace: Float[Tensor, "rows head_size"] | None = None,
) -> Float[Tensor, "S head_size"]:
    """Return the cache entries of one chunk of the context, one request after another.

    Args:
        kv_cache: the cache of the layer.
        metadata: plan of the prefill.
        chunk: one chunk of the prefill's context.
        cache_format: format of the cache.
        out_dtype: dtype of the result; None means the dtype of the cache (see `gather_and_maybe_dequant_cache`).
        kv_scale: float32 scale of the layer's cache; None if the format has no such scale (`CacheFormat.layer_scale`).
        workspace: [at least S, Lkv + R] in `out_dtype`, contiguous; the function writes the result to its first S rows.
            None allocates a tensor.

    Returns:
        [S, Lkv + R] in `out_dtype`, with S = `chunk.num_tokens`; a view of `workspace` if it is given. If S is an upper
        bound (`chunk.bounded`), the rows behind the last request are 0.

    Raises:
        ValueError: the plan was made for another block size; shapes, dtypes or devices do not match; `workspace` has
            too few rows.
    """
    width, dtype = check_context(kv_cache, metadata, chunk, cache_format, out_dtype, kv_scale)
    if workspace is not None:
        check_rows(workspace, width, chunk.num_tokens, dtype, kv_cache.device)
    tokens = int(chunk.cu_seq_lens[-1]) if chunk.bounded else chunk.num_tokens
    entries = gather_and_maybe_dequant_cache(
        kv_cache, metadata.block_table, chunk.cu_seq_lens, chunk.starts, tokens, cache_format, out_dtype, kv_scale
    )
    gathered = torch.cat((entries, entries.new_zeros(chunk.num_tokens - tokens, entries.shape[1])))
    return gathered if workspace is None else workspace[: chunk.num_tokens].copy_(gathered)


def _plan_of_run(plan: PrefillMetadata, place: int, run: ChunkRun) -> PrefillMetadata:
    """Return a plan with the requests of `run` alone. Its only chunk is the chunk at index `place` of `plan`."""
    first, end, chunk = run.first_request, run.end_request, plan.context_chunks[place]
    offsets = plan.query_start_loc[first : end + 1] - plan.query_start_loc[first]
    keys = chunk.cu_seq_lens[first : end + 1]
    own = ContextChunk(chunk.starts[first:end], keys, chunk.num_tokens, chunk.max_seq_len, chunk.bounded)
    return PrefillMetadata(plan.block_table[first:end], offsets, run.max_query_len, (own,), plan.block_size)


def _merge_rows(state: AttentionState, chunk_state: AttentionState, tokens: slice) -> AttentionState:
    """Return `state` with the state of a chunk merged into the rows `tokens`; the other rows stay the same."""
    merged = merge_attn_states(chunk_state, AttentionState(state.out[tokens], state.lse[:, tokens]))
    out, lse = state.out.clone(), state.lse.clone()
    out[tokens], lse[:, tokens] = merged.out, merged.lse
    return AttentionState(out, lse)


def forward_prefill(
    q: Float[Tensor, "T N D"],
    kv_c_normed: Float[Tensor, "T Lkv"],
    k_pe: Float[Tensor, "T R"],
    kv_cache: Shaped[Tensor, "num_blocks block_size columns"],
    metadata: PrefillMetadata,
    w_uk: Float[Tensor, "Lkv N P"],
    w_uv: Float[Tensor, "Lkv N V"],
    softmax_scale: float,
    gather: Callable[..., Tensor] = gather_context,
    cache_format: CacheFormat = COMPUTE_FORMAT,
    return_lse: bool = True,
    kv_scale: Float[Tensor, ""] | None = None,
    *,
    output_scale: Float[Tensor, ""] | None = None,
    output_block_scale: Tensor | None = None,
    expand: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None,
    workspace: ContextWorkspace | None = None,
) -> AttentionState | Shaped[Tensor, "T N V"]:
    """Compute the attention of new tokens over their cached context and over each other, on the expanded path.

    The steps are:

    1. Expand the latents of the new tokens to keys and values, and attend these keys with the causal mask. Requests
       without context are then done.
    2. For each chunk of the context, gather the cache entries, expand their latents, and attend the keys of the chunk
       without a mask. Merge the attention state (output and log-sum-exp) of the chunk with the state over all keys that
       were attended before this chunk. Only the query tokens of the chunk's run (`ChunkRun`) attend and merge.

    Args:
        q: [T, N, P + R], queries with the rope part rotated.
        kv_c_normed: [T, Lkv], normed latents of the new tokens.
        k_pe: [T, R], rotated rope parts of the new tokens' keys.
        kv_cache: the cache with the context. The new tokens come from the arguments and not from the cache.
        metadata: plan of the prefill: the requests and the chunks of their context.
        w_uk: [Lkv, N, P], key up-projection.
        w_uv: [Lkv, N, V], value up-projection.
        softmax_scale: factor of the scores, `MLAConfig.softmax_scale`: (P + R)^-1/2, times YaRN's factor.
        gather: function that returns the cache entries of a chunk, with the signature of `gather_context`. Under
            context parallelism this function is `dcp_gather_context` with a given `context_parallel`.
        cache_format: format of the cache.
        return_lse: whether the caller needs the log-sum-exp (LSE) of the result.
        kv_scale: float32 scale of the layer's cache; None if the format has no such scale (`CacheFormat.layer_scale`).
        output_scale: float32 scale of an output in e4m3 (8 bits); None for an output in the dtype of `q`. The output is
            divided by the scale in float32 (float64 if `q` is float64), and is rounded once.
        output_block_scale: must be None: an output with one scale for each group of elements is not supported.
        expand: function that expands latents [S, Lkv] into k_nope [S, N, P] and v [S, N, V], such as
            `expand_kv_by_module` with a given module. Only the shapes of `w_uk` and `w_uv` are then used. None means
            `expand_kv` with `w_uk` and `w_uv`.
        workspace: memory in which each chunk is gathered, and expanded if `expand` is None (the function `expand`
            allocates its results). None allocates memory for every chunk.

    Returns:
        With `return_lse`, an `AttentionState`: out [T, N, V] in the dtype of `q`, or in e4m3 if `output_scale` is
        given, and lse [N, T].

        Without `return_lse`, this output alone.

    Raises:
        TypeError: `return_lse` is not a bool, or `workspace` is not a `ContextWorkspace`.
        ValueError: shapes, dtypes or devices do not match; the memory that the caller gave to `workspace` is too small;
            a scale is not finite and positive.
        UnsupportedConfiguration: `output_block_scale` is given.
    """
    check_prefill(q, kv_c_normed, k_pe, kv_cache, metadata, w_uk, w_uv, cache_format, kv_scale)
    check_function("gather", gather)
    if expand is not None:
        check_function("expand", expand)
    check_flag("return_lse", return_lse)
    check_context_workspace("workspace", workspace)
    check_output_scale(output_scale, output_block_scale, q.device)
    check_scale_values("output_scale", output_scale)
    latent, chunks = kv_c_normed.shape[1], metadata.context_chunks
    expanded = None
    gather_options = {} if kv_scale is None else {"kv_scale": kv_scale}
    if workspace is not None and chunks:
        rows, expanded = reserve_for_chunks(workspace, chunks, kv_c_normed, k_pe, w_uk, w_uv)
        gather_options["workspace"] = rows
    parts = metadata.all_parts(q.shape[0])
    k_nope, v = _expanded(expand, kv_c_normed, w_uk, w_uv)
    results = []  # for each part (consecutive requests): its attention state, or its final output
    for part in parts:
        tokens = slice(part.first_token, part.end_token)
        needs_lse = return_lse or len(part.rows) > 0 or output_scale is not None
        results.append(
            run_prefill_new_tokens(
                q[tokens], k_nope[tokens], k_pe[tokens], v[tokens], part.plan, softmax_scale, needs_lse
            )
        )
    del k_nope, v
    for number, chunk in enumerate(chunks):
        context = gather(kv_cache, metadata, chunk, cache_format=cache_format, out_dtype=q.dtype, **gather_options)
        k_nope, v = _expanded(expand, context[:, :latent], w_uk, w_uv, expanded)
        for index, part in enumerate(parts):
            queries, plan = q[part.first_token : part.end_token], part.plan
            requests = plan.block_table.shape[0]
            runs = ChunkRun.of_chunks(plan.context_chunks, requests, len(queries), plan.max_query_len)
            for place, rows in enumerate(part.rows):
                if rows.chunk == number:
                    own = _plan_of_run(plan, place, runs[place])
                    tokens = slice(runs[place].first_token, runs[place].end_token)
                    keys = slice(rows.first, rows.end)
                    chunk_state = run_prefill_context_chunk(
                        queries[tokens], k_nope[keys], context[keys, latent:], v[keys], own, *own.context_chunks,
                        softmax_scale,
                    )  # fmt: skip
                    results[index] = _merge_rows(results[index], chunk_state, tokens)
        del k_nope, v, context  # free this chunk's keys and values before the next chunk is expanded
    outs = [result.out if isinstance(result, AttentionState) else result for result in results]
    if output_scale is None:
        out = torch.cat([out.to(q.dtype) for out in outs])
    else:
        out = to_e4m3(torch.cat(outs), output_scale)
    return AttentionState(out, torch.cat([state.lse for state in results], dim=1)) if return_lse else out
