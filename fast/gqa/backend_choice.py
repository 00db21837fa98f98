"""Choose the backends of a step's ops, and check that they can serve the step, before the step writes anything.

Each op chooses its backend itself in each call. A layer calls several ops one after another: it writes the cache, and
then attends the cache. If only the second op were refused, the cache would have changed. The functions of this module
therefore choose the backends of all ops of a call from shapes, dtypes and plans, and read no values. They remember each
choice, because the calls of later steps differ in lengths alone (`CheckedOnce`).

docs/glossary.md explains the terms and the letters of shapes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from reference.interfaces import (
    VISIBLE_LENS,
    CacheFormat,
    CascadeMetadata,
    DecodeMetadata,
    DecodeSchedule,
    GraphSupport,
    QueryLenSupport,
    TokenOwnership,
    UnsupportedConfiguration,
    check,
    wide_dtype,
)
from reference.interfaces.gqa import (
    EncoderMetadata,
    GQAConfig,
    GQAMetadata,
    check_gqa_cascade,
    check_gqa_step,
    check_query_scale,
    check_sinks,
    gathered_config,
    has_cache,
)

from .. import backends
from ..backends import BackendChoice, KernelRequest
from ..backends.selection import check_same_backend, for_part, named, reasons_against

MERGES = {"ag_rs": "weight_attn_out", "a2a": "pack_attn_state"}  # op of a merge over ranks: the op that is chosen first
_OF_CALL, _OF_LAYER = "the backend of the call", "the backend of the layer"


class Attention(NamedTuple):
    """What the calls of attention in one step have in common.

    Attributes:
        device: device of the tensors.
        dtype: dtype of the queries.
        config: config of the layer; the config of a rank under context parallelism.
        out_dtype: dtype of the output.
        cache_format: format of the cache.
        q_in_e4m3: whether the queries are rounded to e4m3 first.
        backend: a name, a mapping from op to name, or None.
    """

    device: torch.device
    dtype: torch.dtype
    config: GQAConfig
    out_dtype: torch.dtype
    cache_format: CacheFormat
    q_in_e4m3: bool
    backend: BackendChoice


def choose_paged_backend(
    call: Attention,
    plan: DecodeMetadata,
    schedule: DecodeSchedule | None = None,
    argument: str = "metadata.backend",
    whose: str = _OF_CALL,
) -> str:
    """Return the name of the backend that serves a call of `gqa_paged_attention`.

    Args:
        call: properties of the call.
        plan: plan of the requests; the part of a cascade may be a `DecodeMetadata`.
        schedule: schedule of the call, or None.
        argument: name of the field `plan.backend` in errors.
        whose: whose backend `call.backend` is, for errors.

    Raises:
        ValueError: no backend has the name in the plan, or `call.backend` names another backend than the plan.
        UnsupportedConfiguration: no backend that is allowed can serve the call.
    """
    query_lens = backends.query_lens_of(plan.visible_lens.shape[0], plan.seq_lens.shape[0], plan.max_query_len)
    if plan.graph is GraphSupport.ANY:  # a replay may have other query lengths, which only the device knows
        query_lens = QueryLenSupport.VARLEN
    batch_invariant = schedule is not None and schedule.batch_invariant
    first_visible = getattr(plan, "first_visible", None) is not None
    return _choose_paged(
        call, plan.block_size, query_lens, first_visible, batch_invariant, plan.graph, plan.mask, plan.backend,
        argument, whose,
    )  # fmt: skip


@backends.CheckedOnce
def _choose_paged(
    call, block_size, query_lens, first_visible, batch_invariant, graph, mask, planned, argument, whose
) -> str:  # fmt: skip
    check_same_backend("gqa_paged_attention", planned, call.backend, argument, whose)
    wanted = call.backend if planned is None else named(planned, argument).name
    request = backends.paged_attention_request(
        call.config, call.device, call.dtype, block_size, query_lens, call.cache_format, out_dtype=call.out_dtype,
        first_visible=first_visible, q_in_e4m3=call.q_in_e4m3, batch_invariant=batch_invariant, graph=graph, mask=mask,
        backend=wanted,
    )  # fmt: skip
    if planned is None:
        return backends.select(request, wanted).name
    reasons = reasons_against(named(planned), request, is_named=True)
    if reasons:
        raise UnsupportedConfiguration([f"{argument}: {reason}" for reason in reasons])
    return planned


def choose_cascade_backends(
    call: Attention, cascade: CascadeMetadata, argument: str = "cascade", whose: str = _OF_CALL
) -> tuple[str, str]:
    """Return the names of the backends that attend the prefix and the suffixes of a cascade; also check the merge.

    Args:
        call: properties of the cascade; `call.out_dtype` is the dtype of its output.
        cascade: plans over the prefix and over the suffixes.
        argument: name of the cascade in errors.
        whose: whose backend `call.backend` is, for errors.

    Raises:
        ValueError: as in `choose_paged_backend`.
        UnsupportedConfiguration: no backend that is allowed can serve one of the calls.
    """
    call = call._replace(out_dtype=wide_dtype(call.out_dtype))
    without_sinks = call._replace(config=replace(call.config, attention_sinks=False))
    prefix = choose_paged_backend(without_sinks, cascade.prefix, None, f"{argument}.prefix.backend", whose)
    suffix = choose_paged_backend(call, cascade.suffix, None, f"{argument}.suffix.backend", whose)
    _choose_for_state("merge_attn_states", call)
    return prefix, suffix


def choose_rank_backend(
    call: Attention,
    plan: DecodeMetadata,
    schedule: DecodeSchedule | None,
    num_ranks: int,
    merge: str,
    argument: str = "metadata.backend",
    whose: str = _OF_CALL,
) -> str:
    """Return the name of the backend that attends the keys of one of D ranks; also check the merge over the ranks.

    Rank 0 alone counts the attention sinks. The other ranks check the same call, so that all ranks raise together and
    no rank waits for another rank.

    Args:
        call: properties of the call; `call.config` is the config of the rank (`ContextParallel.local_gqa_config`).
        plan: plan of the requests.
        schedule: schedule of the call, or None.
        num_ranks: D.
        merge: name of the merge over the ranks.
        argument: name of the field `plan.backend` in errors.
        whose: whose backend `call.backend` is, for errors.

    Raises:
        ValueError: as in `choose_paged_backend`.
        UnsupportedConfiguration: no backend that is allowed can serve one of the calls.
    """
    call = call._replace(config=gathered_config(call.config, num_ranks))
    chosen = choose_paged_backend(call, plan, schedule, argument, whose)
    _choose_for_state(MERGES[merge], call, plan.graph)
    return chosen


@backends.CheckedOnce
def _choose_for_state(op: str, call: Attention, graph: GraphSupport = GraphSupport.NONE) -> str:
    """Return the name of the backend of an op on attention states whose outputs have the dtype `call.out_dtype`."""
    widths = (("head_dim", call.config.head_dim),)
    return backends.select(KernelRequest(op, call.device, call.out_dtype, widths, graph=graph), call.backend).name


@backends.CheckedOnce
def _choose_for_write(call: Attention, block_size: int, graph: GraphSupport) -> str:
    """Return the name of the backend that writes keys and values to the cache."""
    request = backends.key_value_write_request(
        call.device, call.dtype, call.config.head_dim, block_size, call.cache_format, graph, call.backend
    )
    return backends.select(request, call.backend).name


@backends.CheckedOnce
def _choose_for_packed(call: Attention) -> str:
    """Return the name of the backend that attends packed keys and values, without a cache."""
    request = backends.varlen_attention_request(call.config, call.device, call.dtype, call.out_dtype)
    return backends.select(request, call.backend).name


def check_cache_strides(backend: str, kv_cache: Tensor) -> None:
    """Raise UnsupportedConfiguration if a backend cannot read a cache with such strides."""
    declared = backends.support_of(backend, "gqa_paged_attention").cache_reasons
    if declared is not None and not torch.compiler.is_compiling():  # a traced tensor has no address
        reasons = (backends.imported(declared) if isinstance(declared, str) else declared)(kv_cache)
        if reasons:
            raise UnsupportedConfiguration(reasons)


class StepBackends(NamedTuple):
    """What a layer must check in the values of each step, because of the backends that serve the step.

    Attributes:
        ignoring: pairs (op, backend) of the ops over the cache whose kernel ignores the scales of the cache.
        causal: names of the parts of the plan whose kernel has a causal mask alone.
    """

    ignoring: tuple[tuple[str, str], ...] = ()
    causal: tuple[str, ...] = ()


def choose_step_backends(
    call: Attention,
    metadata: GQAMetadata | EncoderMetadata | None,
    k: Tensor | None,
    kv_cache: Tensor | None,
    ranks: tuple[int, str] | None,
) -> StepBackends:
    """Choose the backend of each op that a step of a layer calls, and raise if an op cannot be served; read no values.

    Args:
        call: properties of the attention of the step.
        metadata: plan of the step, which has passed `check_gqa_step`.
        k: keys of the step, or None.
        kv_cache: the cache, or None.
        ranks: number D of ranks that share every sequence, and the name of their merge; None for one rank.

    Raises:
        ValueError: the plan names an unknown backend, or another backend than the layer.
        UnsupportedConfiguration: no backend that the layer and the plan allow can serve an op.
    """
    if metadata is None:
        return StepBackends()
    if isinstance(metadata, EncoderMetadata) or not has_cache(kv_cache, metadata):
        if k is not None:
            _choose_for_packed(call)
        return StepBackends()
    chosen = []  # name of the part of the plan, op, and name of the backend
    if k is not None:
        name = _choose_for_write(call, kv_cache.shape[2], metadata.decode.graph)
        chosen.append(("", "reshape_and_cache", name))

    decodes, prefills = (call._replace(backend=for_part(call.backend, part)) for part in ("gqa_decode", "gqa_prefill"))

    def choose(name: str, call: Attention, plan: DecodeMetadata, schedule: DecodeSchedule | None) -> None:
        given, names = (call, plan, schedule), (f"metadata.{name}.backend", _OF_LAYER)
        found = choose_paged_backend(*given, *names) if ranks is None else choose_rank_backend(*given, *ranks, *names)
        check_cache_strides(found, kv_cache)
        chosen.append((name, "gqa_paged_attention", found))

    split, end = metadata.num_decode_tokens, metadata.num_actual_tokens
    if split > 0 and metadata.cascade is not None:
        found = choose_cascade_backends(decodes, metadata.cascade, "metadata.cascade", _OF_LAYER)
        for name, backend in zip(("cascade.prefix", "cascade.suffix"), found, strict=True):
            check_cache_strides(backend, kv_cache)
            chosen.append((name, "gqa_paged_attention", backend))
    elif split > 0:
        choose("decode", decodes, metadata.decode, metadata.schedule)
    if end > split:
        choose("prefill", prefills, metadata.prefill, metadata.prefill_schedule)
    scaled = call.cache_format.layer_scale
    ignoring = [
        (op, name) for _, op, name in chosen if scaled and "scales" not in backends.support_of(name, op).features
    ]
    causal = [
        part for part, op, name in chosen if part and VISIBLE_LENS not in backends.support_of(name, op).masks
    ]  # fmt: skip
    return StepBackends(tuple(dict.fromkeys(ignoring)), tuple(causal))


def check_layer_step(
    metadata: GQAMetadata | EncoderMetadata | None,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    kv_cache: Tensor | None,
    config: GQAConfig,
    whole_config: GQAConfig,
    cache_format: CacheFormat,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    q_scale: Tensor | None,
    sinks: Tensor | None,
    ownership: TokenOwnership | None,
    ranks: tuple[int, str] | None,
    in_e4m3: bool,
    backend: BackendChoice,
) -> StepBackends:
    """Check the arguments of a layer, and choose the backends of all ops that the step calls; read no values.

    Args:
        metadata: plan of the step, or None.
        q: queries of this rank's heads.
        k: keys, or None.
        v: values, or None.
        kv_cache: the cache, or None.
        config: config with the heads of this rank.
        whole_config: config with all heads.
        cache_format: format of the cache.
        k_scale: scale of the keys, or None.
        v_scale: scale of the values, or None.
        q_scale: scale of the queries, or None.
        sinks: attention sinks of all heads, or None.
        ownership: the tokens that this rank owns, or None.
        ranks: number D of ranks that share every sequence, and the name of their merge; None for one rank.
        in_e4m3: whether the output of the layer is in e4m3, rounded from a wide dtype.
        backend: the backend of the layer: a mapping that `bind` returned, or None.
    """
    check_gqa_step(metadata, q, k, v, kv_cache, config, cache_format, k_scale, v_scale, ownership)
    check_sinks(sinks, whole_config, q.device)
    check_query_scale(cache_format, q_scale, q.device)
    if isinstance(metadata, GQAMetadata) and not has_cache(kv_cache, metadata):
        shared = ranks is not None and ranks[0] > 1
        check(not shared, "kv_cache", "a cache, because ranks share the tokens of every sequence", "no cache")
    elif isinstance(metadata, GQAMetadata) and metadata.cascade is not None:
        queries, stored = q[: metadata.num_decode_tokens], (cache_format, k_scale, v_scale, q_scale)
        check_gqa_cascade(queries, kv_cache, metadata.cascade, config, sinks, None, *stored)
    out_dtype = wide_dtype(q.dtype) if in_e4m3 else q.dtype
    call = Attention(q.device, q.dtype, config, out_dtype, cache_format, q_scale is not None, backend)
    return choose_step_backends(call, metadata, k, kv_cache, ranks)
