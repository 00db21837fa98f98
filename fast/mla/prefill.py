"""Prefill on the expanded path: expand latents into keys and values of every head, then compute ordinary attention.

`reference.mla.prefill` explains why the cached context is expanded in chunks. The rope part of a key is the same for
all heads. The attention kernels read it from one tensor [S, R] without copies for each head.

docs/glossary.md explains the terms and the letters of shapes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from reference.interfaces import (
    COMPUTE_FORMAT,
    E4M3,
    AttentionState,
    CacheFormat,
    ChunkRun,
    ContextChunk,
    ContextWorkspace,
    PrefillMetadata,
    check_context,
    check_context_workspace,
    check_expanded,
    check_flag,
    check_function,
    check_out,
    check_output_scale,
    check_prefill,
    check_rows,
    check_scale_values,
    reserve_for_chunks,
    to_e4m3,
    wide_dtype,
)

from .. import backends
from ..attention.varlen import AttentionInputs, attend_again
from ..backends import BackendChoice
from ..backends.positive_scales import with_positive_scale
from ..backends.selection import check_same_backend
from ..cache.latent import gather_and_maybe_dequant_cache
from .backend_hooks import BackendHooks, hooks_of
from .state_rows import merge_run, rows_of, write_unmerged
from .whole_keys import expanded_keys, takes_whole_keys

_check_context = backends.CheckedOnce(check_context)
_check_expanded = backends.CheckedOnce(check_expanded)
_check_prefill = backends.CheckedOnce(check_prefill)
_check_rows = backends.CheckedOnce(check_rows)
_CALLS_INSIDE = backends.CallsInside()
_NEW_TOKENS_INSIDE, _CONTEXT_INSIDE = (backends.CallsInside(returns_one_op=True) for _ in range(2))
PREFILL_OPS = ("flash_attn_varlen", "gather_and_maybe_dequant_cache", "merge_attn_states")


def run_prefill_new_tokens(
    q: Float[Tensor, "T N D"],
    k_nope: Float[Tensor, "T N P"],
    k_pe: Float[Tensor, "T R"],
    v: Float[Tensor, "T N V"],
    metadata: PrefillMetadata,
    softmax_scale: float,
    return_lse: bool = True,
    *,
    out: Float[Tensor, "T N V"] | None = None,
    backend: BackendChoice = None,
) -> AttentionState | Float[Tensor, "T N V"]:
    """Compute causal attention of the new tokens of each request over the new tokens of the same request.

    Args:
        q: [T, N, P + R], rope part rotated.
        k_nope: [T, N, P], keys without their rope part.
        k_pe: [T, R], rotated rope part of the keys.
        v: [T, N, V].
        metadata: prefill part of the plan.
        softmax_scale: (P + R)^-1/2, times YaRN's factor.
        return_lse: True if the caller will merge attention over the context into the result.
        out: tensor [T, N, V] that receives the output, in the dtype of the output and with any strides; `out` must
            share no memory with the other tensors. None allocates a tensor.
        backend: name of a backend, mapping from op to backend name, or None for an automatic choice (`fast.backends`).

    Returns:
        With `return_lse`, an `AttentionState`: out [T, N, V] and lse [N, T], both in float32 (float64 if `q` is
        float64), so that a merge loses no precision.

        Without `return_lse`, a tensor: out [T, N, V] in the dtype of `q`.

    Raises:
        TypeError: `return_lse` is not a bool.
        ValueError: shapes, dtypes or devices do not match, or `out` overlaps another tensor.
        UnsupportedConfiguration: no backend that `backend` allows can serve the call.
    """
    kept, order = _NEW_TOKENS_INSIDE.find(q, k_nope, k_pe, v, metadata, softmax_scale, return_lse, out, backend)
    if kept is not None:
        offsets, longest = metadata.query_start_loc, metadata.max_query_len
        inputs = AttentionInputs(q, k_nope, k_pe, v, offsets, offsets)
        dtype = wide_dtype(q.dtype) if return_lse else q.dtype
        return attend_again(kept, inputs, longest, longest, softmax_scale, True, dtype, return_lse, out)
    with order:
        _check_expanded(q, k_nope, k_pe, v, metadata)
        check_flag("return_lse", return_lse)
        dtype = wide_dtype(q.dtype) if return_lse else q.dtype
        hooks = _hooks(metadata, backend)
        return _attend_new_tokens(q, k_nope, k_pe, v, metadata, softmax_scale, dtype, return_lse, out, hooks)


def _hooks(metadata: PrefillMetadata, backend: BackendChoice) -> BackendHooks:
    """Return the hooks of the backend that the plan names; if the plan names none, default hooks for `backend`."""
    check_same_backend("flash_attn_varlen", metadata.backend, backend, "metadata.backend", "the backend of the call")
    return BackendHooks(backend) if metadata.backend is None else hooks_of(metadata.backend)


def _attend_new_tokens(q, k, k_pe, v, metadata, softmax_scale, dtype, return_lse, out, hooks, out_is_checked=False):
    """Compute `run_prefill_new_tokens` with an output in `dtype`, and without checks of the plan.

    `k` has whole keys if `k_pe` is None.
    """
    offsets = metadata.query_start_loc
    inputs = AttentionInputs(q, k, k_pe, v, offsets, offsets)
    rest = dtype, return_lse, out, out_is_checked
    if not hooks.runs_attention:  # `attend` checks what the backend returns
        return hooks.run_prefill_new_tokens(inputs, metadata, softmax_scale, *rest)
    softmax_scale, (q,) = with_positive_scale(hooks.backend, softmax_scale, q)
    with backends.CallsOfOthers():
        result = hooks.run_prefill_new_tokens(inputs._replace(q=q), metadata, softmax_scale, *rest)
    return _checked(hooks, "run_prefill_new_tokens", result, inputs, dtype, return_lse, out)


def run_prefill_context_chunk(
    q: Float[Tensor, "T N D"],
    k_nope: Float[Tensor, "S N P"],
    k_pe: Float[Tensor, "S R"],
    v: Float[Tensor, "S N V"],
    metadata: PrefillMetadata,
    chunk: ContextChunk,
    softmax_scale: float,
    *,
    backend: BackendChoice = None,
) -> AttentionState:
    """Compute unmasked attention of the new tokens over one chunk of the cached context.

    `reference.mla.prefill.run_prefill_context_chunk` explains why there is no mask.

    Args:
        q: [T, N, P + R], rope part rotated.
        k_nope: [S, N, P], keys of the chunk without their rope part.
        k_pe: [S, R], rotated rope part of the keys of the chunk.
        v: [S, N, V], values of the chunk.
        metadata: prefill part of the plan.
        chunk: the chunk of the plan that has these S tokens.
        softmax_scale: (P + R)^-1/2, times YaRN's factor.
        backend: name of a backend, mapping from op to backend name, or None for an automatic choice (`fast.backends`).

    Returns:
        out [T, N, V] and lse [N, T], both in float32 (float64 if `q` is float64).
    """
    kept, order = _CONTEXT_INSIDE.find(q, k_nope, k_pe, v, metadata, chunk, softmax_scale, backend)
    if kept is not None:
        inputs = AttentionInputs(q, k_nope, k_pe, v, metadata.query_start_loc, chunk.cu_seq_lens)
        longest = metadata.max_query_len, chunk.max_seq_len
        return attend_again(
            kept, inputs, *longest, softmax_scale, False, wide_dtype(q.dtype), True, bounded=chunk.bounded
        )
    with order:
        _check_expanded(q, k_nope, k_pe, v, metadata, chunk)
        if chunk.run_query_start_loc is not None:  # all query tokens attend the chunk, as the caller gives them all
            chunk = dataclasses.replace(chunk, run=None, run_query_start_loc=None)
        return _attend_context(q, k_nope, k_pe, v, metadata, chunk, softmax_scale, _hooks(metadata, backend))


def _attend_context(q, k, k_pe, v, metadata, chunk, softmax_scale, hooks):
    """Compute `run_prefill_context_chunk` without checks of the plan; `q` has only the rows of the chunk's run.

    `k` has whole keys if `k_pe` is None.
    """
    offsets = metadata.query_start_loc if chunk.run_query_start_loc is None else chunk.run_query_start_loc
    inputs = AttentionInputs(q, k, k_pe, v, offsets, chunk.run_cu_seq_lens)
    if not hooks.runs_attention:
        return hooks.run_prefill_context_chunk(inputs, metadata, chunk, softmax_scale)
    softmax_scale, (q,) = with_positive_scale(hooks.backend, softmax_scale, q)
    with backends.CallsOfOthers():
        result = hooks.run_prefill_context_chunk(inputs._replace(q=q), metadata, chunk, softmax_scale)
    return _checked(hooks, "run_prefill_context_chunk", result, inputs, wide_dtype(q.dtype), True, None)


def _checked(hooks, method, result, inputs, dtype, return_lse, out):
    """Return the result of a hook after a check of its type, shape, dtype and device."""
    state = (result.out, result.lse) if isinstance(result, AttentionState) else result if return_lse else (result, None)
    shape = (*inputs.q.shape[:2], inputs.v.shape[2])
    backends.check_state(hooks.backend, method, state, shape, dtype, inputs.q.device, return_lse, (out, None))
    backends.confirm(*(each for each in state if each is not None))
    return result


def gather_context(
    kv_cache: Shaped[Tensor, "num_blocks block_size columns"],
    metadata: PrefillMetadata,
    chunk: ContextChunk,
    cache_format: CacheFormat = COMPUTE_FORMAT,
    out_dtype: torch.dtype | None = None,
    kv_scale: Float[Tensor, ""] | None = None,
    *,
    workspace: Float[Tensor, "rows head_size"] | None = None,
    backend: BackendChoice = None,
) -> Float[Tensor, "S head_size"]:
    """Return the cache entries of one chunk, in the order of the requests.

    Args:
        kv_cache: cache that is read.
        metadata: prefill part of the plan.
        chunk: the chunk to gather.
        cache_format: format of the cache.
        out_dtype: dtype of the result; None takes the dtype of the cache.
        kv_scale: float32 scale of the layer's cache; None if the format has no such scale (`CacheFormat.layer_scale`).
        workspace: contiguous tensor [at least S, Lkv + R] in `out_dtype`, whose first S rows receive the result; None
            allocates a tensor.
        backend: name of a backend, mapping from op to backend name, or None for an automatic choice (`fast.backends`).

    Returns:
        [S, Lkv + R] in `out_dtype`, or in the dtype of the cache if `out_dtype` is None; a view of `workspace` if it is
        given.

    Raises:
        ValueError: the plan was made for another block size; shapes, dtypes or devices do not match; `workspace` has
            too few rows.
        UnsupportedConfiguration: no backend that `backend` allows can serve the call.
    """
    width, dtype = _check_context(kv_cache, metadata, chunk, cache_format, out_dtype, kv_scale)
    if workspace is not None:
        _check_rows(workspace, width, chunk.num_tokens, dtype, kv_cache.device)
    return gather_and_maybe_dequant_cache(
        kv_cache, metadata.block_table, chunk.cu_seq_lens, chunk.starts, chunk.num_tokens, cache_format, out_dtype,
        kv_scale, out=None if workspace is None else workspace[: chunk.num_tokens], bounded=chunk.bounded,
        backend=backend,
    )  # fmt: skip


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
    out: Shaped[Tensor, "T N V"] | None = None,
    workspace: ContextWorkspace | None = None,
    backend: BackendChoice = None,
) -> AttentionState | Shaped[Tensor, "T N V"]:
    """Compute attention of new tokens over the cached context and the new tokens, on the expanded path.

    `reference.mla.prefill.forward_prefill` lists the steps of the computation.

    If `metadata.parts` separates the requests without context, their output is computed without a merge. For all other
    requests, the attention states over the new tokens and over each chunk are merged in float32.

    Args:
        q: [T, N, P + R], rope part rotated.
        kv_c_normed: [T, Lkv], normed latents of the new tokens.
        k_pe: [T, R], rotated keys of the new tokens.
        kv_cache: cache that contains the context; it need not contain the new tokens.
        metadata: prefill part of the plan: the requests and the chunks of context.
        w_uk: [Lkv, N, P].
        w_uv: [Lkv, N, V].
        softmax_scale: (P + R)^-1/2, times YaRN's factor.
        gather: function `(kv_cache, metadata, chunk, cache_format=, out_dtype=) -> [S, Lkv + R]` that returns the cache
            entries of a chunk. `out_dtype` is the dtype of `q`. If `workspace` or `kv_scale` is given, the function
            also gets this keyword argument. Under context parallelism, pass `dcp_gather_context` with its argument
            `context_parallel` bound (`functools.partial`).
        cache_format: format of the cache.
        return_lse: whether the caller needs the LSE of the result.
        kv_scale: float32 scale of the layer's cache; None if the format has no such scale (`CacheFormat.layer_scale`).
        output_scale: float32 scale of an output in e4m3 (8 bits); None for an output in the dtype of `q`. The float32
            output is rounded once: by the last merge of a request, or by PyTorch for requests without a merge.
        output_block_scale: must be None: an output with one scale for each group of elements is not supported.
        expand: function that expands latents [S, Lkv] into k_nope [S, N, P] and v [S, N, V], such as
            `expand_kv_by_module` with a given module. The function allocates the results, and only the shapes of
            `w_uk` and `w_uv` are then used. None means `expand_kv`, which is batch-invariant if the plan is.
        out: tensor [T, N, V] that receives the output, with any strides; `out` must share no memory with the other
            tensors. Its dtype is e4m3 if `output_scale` is given, otherwise the dtype of `q`. None allocates a tensor.
        workspace: memory in which each chunk is gathered and expanded; None allocates new memory for each chunk.
        backend: name of a backend, mapping from op to backend name, or None for an automatic choice (`fast.backends`).

    Returns:
        With `return_lse`, an `AttentionState`: out [T, N, V] in the dtype of `q`, or in e4m3 if `output_scale` is
        given, and lse [N, T].

        Without `return_lse`, this output alone.

    Raises:
        TypeError: `return_lse` is not a bool, or `workspace` is not a `ContextWorkspace`.
        ValueError: shapes, dtypes or devices do not match; `out` overlaps another tensor; `workspace` was made with a
            `memory` that is too small. For CPU tensors also: a scale is not finite and positive.
        UnsupportedConfiguration: `output_block_scale` is given, or no backend that `backend` allows can serve the call.
    """
    if expand is not None:
        check_function("expand", expand)
    if gather is not gather_context or expand is not None:  # these functions may call any op, so no check is skipped
        check_function("gather", gather)
        own_gather = None if gather is gather_context else gather
        return _forward_prefill(
            q, kv_c_normed, k_pe, kv_cache, metadata, w_uk, w_uv, softmax_scale, own_gather, cache_format, return_lse,
            kv_scale, output_scale, output_block_scale, expand, out, workspace, backend,
        )  # fmt: skip
    with _CALLS_INSIDE.given(
        q, kv_c_normed, k_pe, kv_cache, metadata, w_uk, w_uv, softmax_scale, cache_format, return_lse, kv_scale,
        output_scale, out, backend,
    ):  # fmt: skip
        return _forward_prefill(
            q, kv_c_normed, k_pe, kv_cache, metadata, w_uk, w_uv, softmax_scale, None, cache_format, return_lse,
            kv_scale, output_scale, output_block_scale, None, out, workspace, backend,
        )  # fmt: skip


def _forward_prefill(
    q, kv_c_normed, k_pe, kv_cache, metadata, w_uk, w_uv, softmax_scale, gather, cache_format, return_lse, kv_scale,
    output_scale, output_block_scale, expand, out, workspace, backend,
):  # fmt: skip
    """Compute `forward_prefill`; if `gather` is None, `gather_context` gathers the entries of a chunk."""
    if not backends.repeats():
        with backends.CallsOfOthers():
            _check_prefill(q, kv_c_normed, k_pe, kv_cache, metadata, w_uk, w_uv, cache_format, kv_scale)
        check_flag("return_lse", return_lse)
        check_output_scale(output_scale, None, q.device)
    if workspace is not None:  # neither the workspace nor the block scale is in the signature of a call
        check_context_workspace("workspace", workspace)
    if output_block_scale is not None:
        check_output_scale(None, output_block_scale, q.device)
    check_scale_values("output_scale", output_scale)
    shape, out_dtype = (*q.shape[:2], w_uv.shape[2]), q.dtype if output_scale is None else E4M3
    if out is None:
        out = q.new_empty(shape, dtype=out_dtype)
    else:
        check_out("out", out, shape, out_dtype, q.device, q, kv_c_normed, k_pe, kv_cache, w_uk, w_uv)
    backend = backends.bind(backend, PREFILL_OPS)
    hooks = _hooks(metadata, backend)
    latent, chunks = kv_c_normed.shape[1], metadata.context_chunks
    if not (chunks or metadata.parts) and output_scale is None:
        return _attend_without_context(
            q, kv_c_normed, k_pe, metadata, w_uk, w_uv, softmax_scale, return_lse, expand, out, hooks
        )
    if gather is None:
        gather = functools.partial(gather_context, backend=backend)
    if kv_scale is not None:
        gather = functools.partial(gather, kv_scale=kv_scale)
    expanded = None
    if workspace is not None and chunks:
        rows, expanded = reserve_for_chunks(workspace, chunks, kv_c_normed, k_pe, w_uk, w_uv)
        backends.confirm(rows, expanded)
        gather = functools.partial(gather, workspace=rows)
    whole = expand is None and takes_whole_keys(hooks.backend)
    made = expanded_keys(expand, whole, kv_c_normed, k_pe, w_uk, w_uv, None, metadata.batch_invariant)
    # a part: consecutive requests that all have context, or that all have none
    states = []  # for each part: an attention state, or only the final output
    parts = metadata.all_parts(q.shape[0])
    for part in parts:
        tokens = part.first_token, part.end_token
        dtype, final = wide_dtype(q.dtype), None
        if not part.rows and output_scale is None:
            dtype, final = q.dtype, rows_of(out, *tokens)
        new_tokens = [None if x is None else rows_of(x, *tokens) for x in (q, *made)]
        states.append(_attend_new_tokens(
            *new_tokens, part.plan, softmax_scale, dtype, return_lse or bool(part.rows), final, hooks,
            out_is_checked=True,
        ))  # fmt: skip
        if not part.rows and output_scale is not None:
            attended = states[-1].out if return_lse else states[-1]
            rows_of(out, *tokens).copy_(to_e4m3(attended, output_scale))
    del made, new_tokens
    runs = [
        ChunkRun.of_chunks(
            part.plan.context_chunks, part.plan.block_table.shape[0], part.end_token - part.first_token,
            part.plan.max_query_len,
        )
        for part in parts
    ]  # fmt: skip
    for number, chunk in enumerate(chunks):
        context = gather(kv_cache, metadata, chunk, cache_format=cache_format, out_dtype=q.dtype)
        entries = context[:, :latent], context[:, latent:]
        made = expanded_keys(expand, whole, *entries, w_uk, w_uv, expanded, metadata.batch_invariant)
        for index, part in enumerate(parts):
            for part_chunk, own, run in zip(part.plan.context_chunks, part.rows, runs[index], strict=True):
                if own.chunk == number and run.first_token < run.end_token:
                    queries = rows_of(q, part.first_token + run.first_token, part.first_token + run.end_token)
                    keys = [None if x is None else rows_of(x, own.first, own.end) for x in made]
                    chunk_state = _attend_context(queries, *keys, part.plan, part_chunk, softmax_scale, hooks)
                    target = rows_of(out, part.first_token, part.end_token)
                    merge_run(states[index], chunk_state, run, target, backend, output_scale)
                    del chunk_state, keys
        del made, entries, context  # free the memory of this chunk before the next chunk is expanded
    for index, part in enumerate(parts):
        if part.rows:
            write_unmerged(states[index], runs[index], rows_of(out, part.first_token, part.end_token), output_scale)
    if not return_lse:
        return out
    lses = [state.lse for state in states]
    return AttentionState(out, lses[0] if len(lses) == 1 else torch.cat(lses, dim=1))


def _attend_without_context(q, kv_c_normed, k_pe, metadata, w_uk, w_uv, softmax_scale, return_lse, expand, out, hooks):
    """Compute `_forward_prefill` for a plan without chunks and parts, and for an output in the dtype of `q`."""
    whole = expand is None and takes_whole_keys(hooks.backend)
    keys = expanded_keys(expand, whole, kv_c_normed, k_pe, w_uk, w_uv, None, metadata.batch_invariant)
    found = _attend_new_tokens(q, *keys, metadata, softmax_scale, q.dtype, return_lse, out, hooks, out_is_checked=True)
    return AttentionState(out, found.lse) if return_lse else out
