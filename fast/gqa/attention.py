"""Grouped-query attention: over a paged key/value cache, and over packed keys and values without a cache.

`reference.gqa.attention` explains scores, attention sinks, and the rounding by which tests judge a kernel.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int32, Shaped
from torch import Tensor

from reference.interfaces import (
    COMPUTE_FORMAT,
    NEUTRAL_SPLIT_RULE,
    VISIBLE_LENS,
    AttentionState,
    CacheFormat,
    DecodeSchedule,
    GraphSupport,
    check_causal_mask,
    check_eager_offsets,
    check_offsets,
    check_out,
    check_scale_values,
    format_named,
    invariant_split_rule,
    wide_dtype,
)
from reference.interfaces.gqa import (
    GQAConfig,
    PagedAttentionMetadata,
    check_gqa_varlen,
    check_gqa_varlen_values,
    check_paged_attention,
    check_paged_values,
)

from .. import backends
from ..backends import BackendChoice
from .backend_choice import Attention, choose_paged_backend
from .checked_plans import is_checked


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
    *,
    out: Float[Tensor, "T N Dh"] | None = None,
    backend: BackendChoice = None,
) -> AttentionState:
    """Attend the cached keys and values of each request with its query tokens. Prefills and decodes use this function.

    See `reference.gqa.attention.gqa_paged_attention` for the mask, for ALiBi and for blocks that were freed.

    Args:
        q: [T, N, Dh], queries, rotated if they have rope.
        kv_cache: cache with any strides, which already contains the new tokens.
        metadata: plan of the requests; query token t attends the keys [`first_visible[t]`, `visible_lens[t]`) of its
            request. If the plan names a backend (`DecodeMetadata.backend`), this backend serves the call.
        config: config of the layer.
        sinks: [N], attention sinks of a config with `attention_sinks`; None for other configs.
        schedule: schedule (`plan_decode`), which assigns keys to the programs of the kernel. A schedule changes results
            by rounding alone. The backends "cpu" and "torch" ignore `schedule`.
        out_dtype: dtype of `out`; None means the dtype of `q`.
        cache_format: format of the cache.
        k_scale: float32 scale of the keys; None if the format has no such scale.
        v_scale: float32 scale of the values; None if the format has no such scale.
        q_scale: float32 scale with which the queries are rounded to e4m3 first; None for queries in the dtype of `q`.
        out: tensor [T, N, Dh] in `out_dtype`, with any strides, that receives the output; `out` must share no memory
            with the other tensors. None allocates a tensor.
        backend: name of a backend, mapping from op to backend name, or None for an automatic choice (`fast.backends`).

    Returns:
        An `AttentionState`: out [T, N, Dh] and lse [N, T]. A query token that attends no key has out = 0, and lse = the
        sinks (-inf without sinks). A padding token (a query token behind the last request) has out = 0 and lse = -inf.

    Raises:
        ValueError: in one of these cases:

            - shapes, dtypes or devices do not match, or the plan was made for another block size;
            - the config needs a field that the plan does not have, or the sinks do not suit the config;
            - the tensors are on the CPU, and an offset, a length, a visible key or a block of the plan is invalid;
            - a scale is missing or superfluous. For CPU tensors also: a scale is not finite and positive;
            - `backend` names another backend than the plan.

        UnsupportedConfiguration: the format is for the latent cache alone, such as `fp8_ds_mla`; no backend that
            `backend` allows can serve the call; the named backend ignores scales, and a scale is not 1.
    """
    calls = _PAGED if out is None else _PAGED_INTO
    scales = k_scale, v_scale, q_scale
    signature = calls.signature(
        q, kv_cache, metadata, config, sinks, schedule, out_dtype, cache_format, *scales, out, backend
    )
    chosen = calls.backend_of(signature)
    if chosen is None:
        check_paged_attention(q, kv_cache, metadata, config, sinks, schedule, out_dtype, cache_format, *scales)
        wanted = q.dtype if out_dtype is None else out_dtype
        call = Attention(q.device, q.dtype, config, wanted, cache_format, q_scale is not None, backend)
        chosen = choose_paged_backend(call, metadata, schedule)
    out_dtype = q.dtype if out_dtype is None else out_dtype
    tile_ranges, split_offsets, batch_invariant, split_rule = None, None, False, NEUTRAL_SPLIT_RULE
    if schedule is not None:
        tile_ranges, split_offsets = schedule.tile_ranges, schedule.split_offsets
        batch_invariant, split_rule = schedule.batch_invariant, schedule.split_rule
    if metadata.graph is not GraphSupport.ANY:
        check_eager_offsets("metadata.query_start_loc", metadata.query_start_loc, q.shape[0])
    plan = (
        metadata.block_table, metadata.seq_lens, metadata.query_start_loc, metadata.visible_lens,
        metadata.first_visible,
    )  # fmt: skip
    slopes = None if config.alibi_slopes is None else list(config.alibi_slopes)
    arguments = (
        q, kv_cache, *plan, metadata.max_query_len, metadata.max_seq_len, _most_visible(metadata, config),
        config.softmax_scale, config.logits_soft_cap, slopes, sinks, out_dtype, tile_ranges, split_offsets,
        batch_invariant, list(split_rule.numbers), cache_format.name, *scales, list(metadata.prepared),
    )  # fmt: skip
    if out is None:
        return AttentionState(*_PAGED.run(signature, chosen, *arguments))
    # Check `out` in every call: a signature (shapes, dtypes, devices) does not show whether two tensors share memory.
    given = [each for each in (q, kv_cache, *plan, sinks, *scales) if each is not None]
    check_out("out", out, tuple(q.shape), out_dtype, q.device, *given)
    return AttentionState(out, _PAGED_INTO.run(signature, chosen, *arguments, out))


def _most_visible(metadata: PagedAttentionMetadata, config: GQAConfig) -> int:
    """Return an upper bound of the keys that one query token attends; a window or an attention chunk lowers it."""
    if metadata.first_visible is None:
        return metadata.max_seq_len
    bounds = metadata.max_seq_len, config.sliding_window, config.attention_chunk_size
    return min(bound for bound in bounds if bound is not None)


def _launch_paged(
    q, kv_cache, block_table, seq_lens, query_start_loc, visible_lens, first_visible, max_query_len, max_seq_len,
    max_visible_len, softmax_scale, soft_cap, alibi_slopes, sinks, out_dtype, tile_ranges, split_offsets,
    batch_invariant, split_rule, cache_format, k_scale, v_scale, q_scale, prepared, backend, *out,
):  # fmt: skip
    if q.device.type == "cpu":
        plan = PagedAttentionMetadata(
            block_table, seq_lens, query_start_loc, max_query_len, visible_lens, max_seq_len, kv_cache.shape[2],
            # allows padding tokens; `gqa_paged_attention` has rejected them if they are not allowed
            GraphSupport.ANY, first_visible=first_visible,
        )  # fmt: skip
        if not is_checked(plan, kv_cache):
            check_paged_values(plan, kv_cache.shape[1], kv_cache.shape[2])
        if VISIBLE_LENS not in backends.support_of(backend, "gqa_paged_attention").masks:
            check_causal_mask(plan)
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale), ("q_scale", q_scale)):
            check_scale_values(name, scale)
    backends.check_ignored_scales(backend, "gqa_paged_attention", k_scale=k_scale, v_scale=v_scale)
    more = {"prepared": tuple(prepared)} if prepared else {}
    state = backends.kernel(backend, "gqa_paged_attention")(
        q, kv_cache, block_table, seq_lens, query_start_loc, visible_lens, first_visible, max_query_len, max_seq_len,
        max_visible_len, softmax_scale, soft_cap, alibi_slopes, sinks, out_dtype, tile_ranges, split_offsets,
        batch_invariant, invariant_split_rule(*split_rule), format_named(cache_format), k_scale, v_scale, q_scale,
        *out, **more,
    )  # fmt: skip
    return _checked(backend, "gqa_paged_attention", state, q, out_dtype, *out)


def _checked(backend, op, state, q, out_dtype, *out):
    """Return the state of a kernel, after a check if the kernel belongs to another project."""
    written = (*out, None) if out else (None, None)
    backends.check_state(backend, op, state, tuple(q.shape), out_dtype, q.device, written=written)
    return state


def _launch_paged_into(*arguments):
    *inputs, out, backend = arguments
    return _launch_paged(*inputs, backend, out)[1]


def _new_state(q, out_dtype):
    """Return new tensors with the shapes and dtypes of an attention state."""
    return q.new_empty(q.shape, dtype=out_dtype), _new_lse(q, out_dtype)


def _new_lse(q, out_dtype):
    return q.new_empty(q.shape[1], q.shape[0], dtype=wide_dtype(out_dtype))


_PAGED_SCHEMA = (
    "Tensor q, Tensor kv_cache, Tensor block_table, Tensor seq_lens, Tensor query_start_loc, Tensor visible_lens,"
    " Tensor? first_visible, SymInt max_query_len, SymInt max_seq_len, SymInt max_visible_len, float softmax_scale,"
    " float? soft_cap, float[]? alibi_slopes, Tensor? sinks, ScalarType out_dtype, Tensor? tile_ranges,"
    " Tensor? split_offsets,"
    " bool batch_invariant, SymInt[] split_rule, str cache_format, Tensor? k_scale, Tensor? v_scale, Tensor? q_scale,"
    " Tensor[] prepared"
)
_gqa_paged_attention = torch.library.custom_op(
    "mla_twins::gqa_paged_attention",
    _launch_paged,
    mutates_args=(),
    schema=f"({_PAGED_SCHEMA}, str backend) -> (Tensor, Tensor)",
)
_PAGED = backends.CheckedCalls(torch.ops.mla_twins.gqa_paged_attention, _launch_paged)


@_gqa_paged_attention.register_fake
def _(
    q, kv_cache, block_table, seq_lens, query_start_loc, visible_lens, first_visible, max_query_len, max_seq_len,
    max_visible_len, softmax_scale, soft_cap, alibi_slopes, sinks, out_dtype, tile_ranges, split_offsets,
    batch_invariant, split_rule, cache_format, k_scale, v_scale, q_scale, prepared, backend,
):  # fmt: skip
    return _new_state(q, out_dtype)


_gqa_paged_attention_out = torch.library.custom_op(
    "mla_twins::gqa_paged_attention_out",
    _launch_paged_into,
    mutates_args=("out",),
    schema=f"({_PAGED_SCHEMA}, Tensor(a!) out, str backend) -> Tensor",
)
_PAGED_INTO = backends.CheckedCalls(torch.ops.mla_twins.gqa_paged_attention_out, _launch_paged_into, mutates=(24,))


@_gqa_paged_attention_out.register_fake
def _(
    q, kv_cache, block_table, seq_lens, query_start_loc, visible_lens, first_visible, max_query_len, max_seq_len,
    max_visible_len, softmax_scale, soft_cap, alibi_slopes, sinks, out_dtype, tile_ranges, split_offsets,
    batch_invariant, split_rule, cache_format, k_scale, v_scale, q_scale, prepared, out, backend,
):  # fmt: skip
    return _new_lse(q, out_dtype)


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
    *,
    out: Float[Tensor, "T N Dh"] | None = None,
    backend: BackendChoice = None,
) -> AttentionState:
    """Attend packed keys and values without a cache; the queries of each request attend the keys of the same request.

    The attention type of the config determines the mask. `reference.gqa.attention.gqa_varlen_attention` describes it.

    Args:
        q: [T, N, Dh], queries of all requests, one request after another.
        k: [S, Nkv, Dh], keys of all requests.
        v: [S, Nkv, Dh], values of all requests.
        cu_seqlens_q: [B + 1], prefix sum of the query lengths; a length may be 0.
        cu_seqlens_k: [B + 1], prefix sum of the key lengths; a length may be 0.
        max_seqlen_q: upper bound of the query lengths. On a GPU, query tokens behind it are padding.
        max_seqlen_k: upper bound of the key lengths. On a GPU, keys behind it are not attended.
        config: config of the layer.
        sinks: [N], attention sinks of a config with `attention_sinks`; None for other configs.
        out_dtype: dtype of `out`; None means the dtype of `q`.
        out: tensor [T, N, Dh] in `out_dtype`, with any strides, that receives the output; `out` must share no memory
            with the other tensors. None allocates a tensor.
        backend: name of a backend, mapping from op to backend name, or None for an automatic choice (`fast.backends`).

    Returns:
        An `AttentionState`: out [T, N, Dh] and lse [N, T]. A query that attends no key has out = 0, and lse = the sinks
        (-inf without sinks).

    Raises:
        ValueError: shapes, dtypes or devices do not match; the sinks do not suit the config. For CPU tensors also:
            offsets decrease, or do not end at the number of tokens; in an encoder, queries and keys have different
            lengths.
        UnsupportedConfiguration: no backend that `backend` allows can serve the call.
    """
    calls = _VARLEN if out is None else _VARLEN_INTO
    given = q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, config, sinks, out_dtype
    signature = calls.signature(*given, out, backend)
    chosen = calls.backend_of(signature)
    if chosen is None:
        check_gqa_varlen(*given)
        request = backends.varlen_attention_request(config, q.device, q.dtype, out_dtype)
        chosen = backends.select(request, backend).name
    if q.device.type == "cpu" and not torch.compiler.is_compiling():
        check_gqa_varlen_values(cu_seqlens_q, cu_seqlens_k, q.shape[0], k.shape[0], config)
    out_dtype = q.dtype if out_dtype is None else out_dtype
    slopes = None if config.alibi_slopes is None else list(config.alibi_slopes)
    arguments = (
        *given[:7], config.softmax_scale, config.attention_type.value, config.sliding_window,
        config.attention_chunk_size, config.logits_soft_cap, slopes, sinks, out_dtype,
    )  # fmt: skip
    if out is None:
        return AttentionState(*_VARLEN.run(signature, chosen, *arguments))
    inputs = [each for each in (*given[:5], sinks) if each is not None]
    check_out("out", out, tuple(q.shape), out_dtype, q.device, *inputs)
    return AttentionState(out, _VARLEN_INTO.run(signature, chosen, *arguments, out))


def _launch_varlen(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, attention_type, sliding_window,
    attention_chunk_size, soft_cap, alibi_slopes, sinks, out_dtype, backend, *out,
):  # fmt: skip
    if q.device.type == "cpu":
        check_offsets("cu_seqlens_q", cu_seqlens_q, q.shape[0])
        check_offsets("cu_seqlens_k", cu_seqlens_k, k.shape[0])
    state = backends.kernel(backend, "gqa_varlen_attention")(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, attention_type, sliding_window,
        attention_chunk_size, soft_cap, alibi_slopes, sinks, out_dtype, *out,
    )  # fmt: skip
    return _checked(backend, "gqa_varlen_attention", state, q, out_dtype, *out)


def _launch_varlen_into(*arguments):
    *inputs, out, backend = arguments
    return _launch_varlen(*inputs, backend, out)[1]


_VARLEN_SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k,"
    " float softmax_scale, str attention_type, SymInt? sliding_window, SymInt? attention_chunk_size, float? soft_cap,"
    " float[]? alibi_slopes, Tensor? sinks, ScalarType out_dtype"
)
_gqa_varlen_attention = torch.library.custom_op(
    "mla_twins::gqa_varlen_attention",
    _launch_varlen,
    mutates_args=(),
    schema=f"({_VARLEN_SCHEMA}, str backend) -> (Tensor, Tensor)",
)
_VARLEN = backends.CheckedCalls(torch.ops.mla_twins.gqa_varlen_attention, _launch_varlen)


@_gqa_varlen_attention.register_fake
def _(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, attention_type, sliding_window,
    attention_chunk_size, soft_cap, alibi_slopes, sinks, out_dtype, backend,
):  # fmt: skip
    return _new_state(q, out_dtype)


_gqa_varlen_attention_out = torch.library.custom_op(
    "mla_twins::gqa_varlen_attention_out",
    _launch_varlen_into,
    mutates_args=("out",),
    schema=f"({_VARLEN_SCHEMA}, Tensor(a!) out, str backend) -> Tensor",
)
_VARLEN_INTO = backends.CheckedCalls(torch.ops.mla_twins.gqa_varlen_attention_out, _launch_varlen_into, mutates=(15,))


@_gqa_varlen_attention_out.register_fake
def _(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, attention_type, sliding_window,
    attention_chunk_size, soft_cap, alibi_slopes, sinks, out_dtype, out, backend,
):  # fmt: skip
    return _new_lse(q, out_dtype)
