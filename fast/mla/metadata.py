"""The plan of a step, computed from the batch that an engine's scheduler chose.

A plan has the integers that the attention of one step needs: lengths, slots, chunks of context, and a schedule if one
saves time. `reference.mla.metadata` explains the two paths of a request.

The host computes a plan and reads no value from a GPU. If the engine knows the lengths only on the GPU, the host plans
with upper bounds, and kernels write the true lengths into the tensors of the plan.

docs/glossary.md explains the terms and the letters of shapes.
"""

from __future__ import annotations

import dataclasses
import itertools

import torch
from jaxtyping import Int32
from torch import Tensor

from reference.interfaces import (
    COMPUTE_FORMAT,
    CONVERTED,
    MOST_PARTS,
    ONE_RANK,
    CacheFormat,
    ChunkRows,
    CommonAttentionMetadata,
    ContextChunk,
    ContextParallelMetadata,
    DecodeMetadata,
    DecodeSchedule,
    MLAConfig,
    MLAMetadata,
    PathCosts,
    PrefillMetadata,
    PrefillPart,
    QueryLenSupport,
    ScheduleCosts,
    TokenOwnership,
    absorbed_decode_mask,
    bounded_batch,
    check,
    check_batch_block_size,
    check_chunking,
    check_config,
    check_costs,
    check_dtype,
    check_flag,
    check_int,
    check_interleave,
    check_mode_of_format,
    check_no_prefill_padding,
    check_ownership,
    check_rank_local_slots,
    check_schedule_costs,
    check_table_width,
    check_threshold,
    check_type,
    choose_schedule,
    context_unit,
    get_dcp_local_seq_lens,
    has_host_lens,
    longest_decode_lens,
    visible_lens_of_tokens,
)

from ..backends import BackendChoice, bind
from ..planning.batch import split_decodes_and_prefills
from ..planning.context_chunks import clamp_context_chunk, plan_chunk_runs, plan_context_chunks, rank_local_chunk
from ..planning.decode_schedule import plan_decode
from ..planning.visible_lens import compute_visible_lens
from .choose_path import choose_path, choose_paths
from .device_choices import DecodeLayer
from .staging import StagingBuffer, to_device

PLANNING_OPS = ("compute_visible_lens", "decode_programs", "schedule_costs", "plan_decode")


def build_mla_metadata(
    common: CommonAttentionMetadata,
    block_size: int,
    workspace_tokens: int,
    decode_threshold: int = 1,
    config: MLAConfig | None = None,
    costs: PathCosts | None = None,
    query_len_support: QueryLenSupport = QueryLenSupport.VARLEN,
    require_order: bool = False,
    ownership: TokenOwnership | None = None,
    num_programs: int | None = None,
    schedule_costs: ScheduleCosts | None = None,
    cache_format: CacheFormat = COMPUTE_FORMAT,
    dtype: torch.dtype = torch.bfloat16,
    fp8_mode: str = CONVERTED,
    batch_invariant: bool = False,
    *,
    staging: StagingBuffer | None = None,
    backend: BackendChoice = None,
) -> MLAMetadata:
    """Plan one step: choose a path for each request, cut context into chunks, and decide on a schedule.

    The first request that must take the expanded path, and all requests behind this request, are prefills. All
    requests in front of this request are decodes. `reference.mla.metadata.build_mla_metadata` explains which requests
    may take the absorbed path, and how a batch without lengths on the CPU is planned.

    Args:
        common: batch of the step.
        block_size: tokens per block.
        workspace_tokens: largest number of context tokens that a prefill expands at once.
        decode_threshold: a request with at most this number of query tokens may take the absorbed path, whatever
            `choose_path` returns for it (`reorder_batch_threshold`).
        config: config of the layer, for `choose_path` and for the schedule. With None, `decode_threshold` alone decides
            the paths, and the plan has no schedule.
        costs: costs for `choose_path`; None means the defaults of `PathCosts`.
        query_len_support: query lengths that the decode kernel supports.
        require_order: if True, an absorbed request after an expanded request is an error.
        ownership: the tokens that this context-parallel rank owns; None if one rank owns all tokens. With
            `ownership`, `common` has the lengths of the whole sequences and the slots of this rank
            (`dcp_slot_mapping`). The lengths of the whole sequences decide the paths.
        num_programs: number of programs of the schedule; 0 makes no schedule. None takes the number of programs that
            the device runs at the same time (`decode_programs`), or 0 without a `config`. A decode gets a schedule only
            if `choose_schedule` expects that the schedule saves time.
        schedule_costs: costs from which the schedule is computed; None takes the costs of the device
            (`schedule_costs`).
        cache_format: format of the cache. It influences `choose_path` and the schedule. Layers with another format
            refuse the plan.
        dtype: dtype of queries and keys. It influences `choose_path` and the schedule. A plan is valid for any dtype.
        fp8_mode: fp8 mode of the decodes (`mla_decode`). It influences the schedule and the backend of the schedule.
            Layers with another fp8 mode refuse the plan.
        batch_invariant: if True, the other requests do not change a bit of a request's attention: `choose_path` is not
            used, contexts are cut by their own lengths, and the splits of a schedule depend on these lengths alone.
            Products with weights are PyTorch's, and may round by the number of rows. A request that could decode is a
            prefill behind a prefill, except with `require_order` and `query_len_support` VARLEN.
        staging: pinned memory through which plans are copied to a GPU; None means new pinned memory from PyTorch's
            allocator in each call.
        backend: backend of the ops `compute_visible_lens`, `decode_programs`, `schedule_costs` and `plan_decode`: a
            name, a mapping from op to backend name, or None. A name applies to the ops that the backend declares. For
            every other op, the backend is chosen automatically (`fast.backends`).

    Returns:
        The plan, with its tensors on the device of `common`; a `ContextParallelMetadata` if `ownership` is given.

    Raises:
        ValueError: one of these:

            - `decode_threshold` is below 1, or above 1 with `QueryLenSupport.SINGLE_ONLY`;
            - `num_programs` is above 0 and `config` is None;
            - `cache_format` does not support the dims of `config`;
            - the slots were made for another block size, or, for CPU tensors, a rank has more slots than new tokens;
            - the block table is narrower than the longest request;
            - `workspace_tokens` is below the smallest size of a chunk (`context_unit`);
            - a padding row (a request of length 0 with query tokens) is not among the decodes;
            - the batch may have prefills and has no lengths on the CPU, and it also lacks CPU offsets or upper bounds;
            - `require_order` is True, and an absorbed request comes after an expanded request.
    """
    backend = bind(backend, PLANNING_OPS)
    check_dtype("dtype", dtype)
    check_threshold(decode_threshold, query_len_support)
    if num_programs is not None:
        check_int("num_programs", num_programs, 0, "an int >= 0 or None")
    check_config(config, optional=True)
    check_mode_of_format(fp8_mode, cache_format, config)
    check(config is not None or not num_programs, "config", "an MLAConfig if num_programs is above 0", None)
    check_costs(costs)
    check_schedule_costs(schedule_costs, "schedule_costs")
    check_flag("require_order", require_order)
    check_flag("batch_invariant", batch_invariant)
    check_ownership(ownership)
    check_type("staging", staging, (StagingBuffer, type(None)), "a StagingBuffer or None")
    owned = ONE_RANK if ownership is None else ownership
    size, rank, interleave = owned.size, owned.rank, owned.interleave
    check_interleave(interleave, block_size)
    check_batch_block_size(common, block_size)
    check_table_width(common, block_size * size)
    host_lens, given = has_host_lens(common), common
    if ownership is not None and host_lens and common.slot_mapping.device.type == "cpu":
        check_rank_local_slots(common, ownership)
    common = bounded_batch(common, decode_threshold, query_len_support, block_size * size)
    requests, starts_cpu = common.num_reqs, common.query_start_loc_cpu
    check_chunking(workspace_tokens, context_unit(block_size, size, interleave))
    decodes, query_lens = requests, None
    path_config = None if batch_invariant else config  # None disables `choose_path`
    paths = {"config": path_config, "costs": costs, "cache_format": cache_format, "dtype": dtype}
    if query_len_support is QueryLenSupport.UNIFORM:
        decodes = split_decodes_and_prefills(common, decode_threshold, require_uniform=True).num_decodes
    elif common.max_query_len > decode_threshold:
        query_lens = starts_cpu.diff()
        decodes = _first_expanded(common, query_lens, decode_threshold, query_len_support, paths)
    if require_order and decodes < requests:
        query_lens = starts_cpu.diff() if query_lens is None else query_lens
        _check_order(common, query_lens, decodes, decode_threshold, query_len_support, paths)
    decode_tokens = common.num_actual_tokens if decodes == requests else int(starts_cpu[decodes])
    one_each = decode_tokens == decodes and (common.max_query_len <= 1 or decode_threshold == 1)
    if query_lens is None and not (one_each and decodes == requests):
        query_lens = starts_cpu.diff()
    if one_each and query_lens is not None and config is not None:  # `choose_path` may plan longer queries as decodes
        one_each = _longest(query_lens[:decodes]) <= 1

    # tensors of the plan that are not views of the batch, by name; one copy sends them all to the device
    made: dict[str, Tensor] = {}
    if not one_each and host_lens:
        made["visible_lens"] = visible_lens_of_tokens(
            starts_cpu[: decodes + 1], common.seq_lens_cpu[:decodes], decode_tokens, size, rank, interleave
        )
    if ownership is not None and host_lens:
        made["seq_lens"] = get_dcp_local_seq_lens(common.seq_lens_cpu[:decodes], size, rank, interleave)
    chunks: tuple[ContextChunk, ...] = ()
    parts: tuple[PrefillPart, ...] = ()
    if decodes < requests:
        check_no_prefill_padding(common, decodes)
        made["prefill_starts"] = starts_cpu[decodes:] - decode_tokens
        contexts = (common.seq_lens_cpu[decodes:] - query_lens[decodes:]).clamp_(min=0)
        chunks = plan_context_chunks(contexts, workspace_tokens, block_size, size, interleave, batch_invariant)
        chunks = plan_chunk_runs(chunks, made["prefill_starts"])
        if ownership is not None:
            chunks = tuple(rank_local_chunk(chunk, ownership) for chunk in chunks)
        made |= {f"chunk {number}: {name}": tensor for number, chunk in enumerate(chunks)
                 for name, tensor in chunk.tensors().items()}  # fmt: skip
        whole = PrefillMetadata(
            common.block_table[decodes:], made["prefill_starts"], 0, chunks, block_size, batch_invariant=batch_invariant
        )
        parts = _split_by_context(whole, contexts) if host_lens else ()  # parts need exact lengths
        made |= {f"part {number}: {name}": tensor for number, part in enumerate(parts)
                 for name, tensor in part.tensors().items()}  # fmt: skip
    sent = to_device(made, common.block_table.device, staging)
    seq_lens, block_table, query_start_loc = common.seq_lens, common.block_table, common.query_start_loc
    if decodes < requests:
        seq_lens, block_table = seq_lens[:decodes], block_table[:decodes]
        query_start_loc = query_start_loc[: decodes + 1]
    seq_lens = sent.get("seq_lens", seq_lens)
    visible_lens = sent.get("visible_lens", seq_lens)  # with one query token per request, the token sees all keys
    prefill_starts = sent.get("prefill_starts", common.query_start_loc[:1])
    if common.block_table.device.type != "cpu":
        chunks = tuple(
            dataclasses.replace(chunk, **{name: sent[f"chunk {number}: {name}"] for name in chunk.tensors()})
            for number, chunk in enumerate(chunks)
        )
        parts = tuple(
            part.with_tensors({name: sent[f"part {number}: {name}"] for name in part.tensors()})
            for number, part in enumerate(parts)
        )
    longest = common.max_seq_len
    if decodes < requests:
        longest = int(common.seq_lens_cpu[:decodes].max()) if decodes else 0
    if ownership is not None:
        longest = ownership.most(longest)
    longest_query = min(1, decode_tokens) if one_each else _longest(query_lens[:decodes])
    kind, which = (MLAMetadata, {}) if ownership is None else (ContextParallelMetadata, {"ownership": ownership})
    metadata = kind(
        **which,
        slot_mapping=common.slot_mapping,
        num_actual_tokens=common.num_actual_tokens,
        num_decodes=decodes,
        num_decode_tokens=decode_tokens,
        decode=DecodeMetadata(
            block_table=block_table,
            seq_lens=seq_lens,
            query_start_loc=query_start_loc,
            max_query_len=longest_query,
            visible_lens=visible_lens,
            max_seq_len=longest,
            block_size=block_size,
            mask=absorbed_decode_mask(longest_query, ownership),
            total_seq_lens=None if ownership is None else common.seq_lens[:decodes],
            ownership=ownership,
        ),
        prefill=PrefillMetadata(
            block_table=common.block_table[decodes:],
            query_start_loc=prefill_starts,
            max_query_len=_longest(query_lens[decodes:]) if decodes < requests else 0,
            context_chunks=chunks,
            block_size=block_size,
            parts=parts,
            batch_invariant=batch_invariant,
        ),
        workspace_tokens=workspace_tokens,
        cache_format=cache_format,
        fp8_mode=fp8_mode,
    )
    if not host_lens:
        metadata = _with_device_lens(metadata, given, ownership, one_each, backend)
    if config is None or decode_tokens == 0 or (num_programs == 0 and not batch_invariant):
        return metadata
    query_len = metadata.decode.max_query_len
    layer = DecodeLayer(config, common.block_table.device, dtype, block_size, cache_format, fp8_mode)
    num_programs, costs = layer.programs_and_costs(
        query_len, num_programs, schedule_costs, backend, batch_invariant=batch_invariant
    )
    lens = _rank_local_decode_lens(given, decodes, metadata.decode.max_seq_len, ownership)
    return _with_schedule(metadata, lens, num_programs, costs, batch_invariant, backend)


def _split_by_context(prefill: PrefillMetadata, context_lens: Int32[Tensor, " B"]) -> tuple[PrefillPart, ...]:
    """Divide a prefill into parts: consecutive requests that all have context, or that all have no context.

    `reference.mla.metadata._split_by_context` explains the calls of the attention kernel for each part.

    Args:
        prefill: plan of the prefill, whose `query_start_loc` and chunks are on the CPU.
        context_lens: [B], cached tokens of each request, on the CPU.

    Returns:
        The parts, in the order of the requests. Their tensors are on the CPU, except the block tables. The tuple is
        empty if there would be only one part, or more than `MOST_PARTS` parts.
    """
    requests = prefill.block_table.shape[0]
    has_context = context_lens > 0
    bounds = [0, *(has_context.diff().nonzero().flatten() + 1).tolist(), requests]
    if not 1 < len(bounds) - 1 <= MOST_PARTS:
        return ()
    starts = prefill.query_start_loc
    first_has, tokens = bool(has_context[0]), starts[bounds].tolist()
    ends = [chunk.cu_seq_lens[bounds].tolist() for chunk in prefill.context_chunks]  # [chunks, parts + 1]
    parts = []
    for number, (first, end) in enumerate(itertools.pairwise(bounds)):
        chunks, rows = [], []
        if (number % 2 == 0) == first_has:
            for index, chunk in enumerate(prefill.context_chunks):
                low, high = ends[index][number : number + 2]
                if high > low:
                    offsets = chunk.cu_seq_lens[first : end + 1] - low
                    chunks.append(ContextChunk(chunk.starts[first:end], offsets, high - low, int(offsets.diff().max())))
                    rows.append(ChunkRows(index, low, high))
        own = starts[first : end + 1] - tokens[number]
        chunks = plan_chunk_runs(tuple(chunks), own)
        plan = PrefillMetadata(
            prefill.block_table[first:end], own, int(own.diff().max()), chunks, prefill.block_size,
            batch_invariant=prefill.batch_invariant,
        )  # fmt: skip
        parts.append(PrefillPart(tokens[number], tokens[number + 1], plan, tuple(rows)))
    return tuple(parts)


def _with_device_lens(
    metadata: MLAMetadata,
    common: CommonAttentionMetadata,
    ownership: TokenOwnership | None,
    one_each: bool,
    backend: BackendChoice,
) -> MLAMetadata:
    """Return `metadata`, a plan computed from upper bounds, with the true lengths from the device in its tensors.

    If each decode has one query token (`one_each`), this token sees all keys. Without `ownership`, the tensors of the
    decode then already have the true lengths, and only the chunks of context change.
    """
    decodes, decode, chunks = metadata.num_decodes, metadata.decode, metadata.prefill.context_chunks
    if not one_each or ownership is not None:
        starts, lens = decode.query_start_loc, common.seq_lens[:decodes]
        visible = compute_visible_lens(starts, lens, metadata.num_decode_tokens, ownership, backend=backend)
        if ownership is not None:
            lens = get_dcp_local_seq_lens(lens, ownership.size, ownership.rank, ownership.interleave)
        metadata = dataclasses.replace(
            metadata, decode=dataclasses.replace(decode, seq_lens=lens, visible_lens=visible)
        )
    if chunks:
        contexts = common.num_computed_tokens[decodes:]
        clamped = tuple(clamp_context_chunk(chunk, contexts) for chunk in chunks)
        prefill = dataclasses.replace(metadata.prefill, context_chunks=clamped)
        metadata = dataclasses.replace(metadata, prefill=prefill)
    return metadata


def _rank_local_decode_lens(
    common: CommonAttentionMetadata, num_decodes: int, max_seq_len: int, ownership: TokenOwnership | None
) -> Int32[Tensor, " decodes"]:
    """Return how many keys of each decode this rank owns, in a tensor on the CPU.

    `reference.mla.metadata._rank_local_decode_lens` explains the result if the lengths are not on the CPU.
    """
    if not has_host_lens(common):
        return longest_decode_lens(num_decodes, max_seq_len)
    lens = common.seq_lens_cpu[:num_decodes]
    return (
        lens
        if ownership is None
        else get_dcp_local_seq_lens(lens, ownership.size, ownership.rank, ownership.interleave)
    )


def _with_schedule(
    metadata: MLAMetadata,
    decode_lens: Int32[Tensor, " decodes"],
    num_programs: int,
    costs: ScheduleCosts,
    batch_invariant: bool = False,
    backend: BackendChoice = None,
) -> MLAMetadata:
    """Return the plan with a `schedule_choice`, and with a schedule if it saves time or `batch_invariant` is True."""
    choice = choose_schedule(decode_lens, num_programs, costs, batch_invariant)
    schedule = DecodeSchedule(batch_invariant=True, split_rule=costs.split_rule) if batch_invariant else None
    if choice.planned:
        schedule = plan_decode(metadata.decode.seq_lens, num_programs, costs, batch_invariant, backend=backend)
    return dataclasses.replace(metadata, schedule=schedule, schedule_choice=choice)


def _first_expanded(common, query_lens, decode_threshold, query_len_support, paths) -> int:
    """Return the index of the first request on the expanded path, or the number of requests if there is none."""
    longer = (query_lens > decode_threshold).nonzero().flatten()
    if longer.numel() == 0:
        return common.num_reqs
    first = int(longer[0])
    if paths["config"] is None or query_len_support is not QueryLenSupport.VARLEN:
        return first
    query_len = int(query_lens[first])
    if choose_path(query_len, max(0, int(common.seq_lens_cpu[first]) - query_len), **paths) == "expanded":
        return first  # the usual case: no other request matters
    contexts = common.num_computed_tokens_cpu[longer]
    expanded = longer[~choose_paths(query_lens[longer], contexts, decode_threshold, **paths)]
    return int(expanded[0]) if expanded.numel() else common.num_reqs


def _check_order(common, query_lens, decodes, decode_threshold, query_len_support, paths) -> None:
    """Raise if a request that may take the absorbed path comes after the first expanded request."""
    ahead, behind = query_lens[:decodes], query_lens[decodes:]
    if query_len_support is QueryLenSupport.UNIFORM:
        absorbed = behind == (ahead.max() if ahead.numel() else 0)
    else:
        contexts = (common.seq_lens_cpu[decodes:] - behind).clamp_(min=0)
        absorbed = choose_paths(behind, contexts, decode_threshold, query_len_support=query_len_support, **paths)
    absorbed &= behind > 0  # a request without new tokens takes neither path
    if bool(absorbed.any()):
        late = decodes + int(absorbed.int().argmax())
        check(False, "common", f"every absorbed request before the first expanded request, number {decodes}",
              f"the absorbed request {late} behind it")  # fmt: skip


def _longest(query_lens: Tensor) -> int:
    return int(query_lens.max()) if query_lens.numel() else 0
