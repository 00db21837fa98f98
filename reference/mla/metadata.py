"""Compute the plan of a step (one forward pass) from the batch of an engine's scheduler.

A request takes one of two paths. The absorbed path attends the cached latents themselves, and suits decodes: requests
with one or a few new tokens. The expanded path computes keys and values of every head first, and suits prefills.
"""

from __future__ import annotations

import dataclasses
import itertools

import torch
from jaxtyping import Int32
from torch import Tensor

from ..interfaces import (
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
    choose_schedule,
    has_host_lens,
    longest_decode_lens,
)
from ..planning.batch import split_decodes_and_prefills
from ..planning.context_chunks import clamp_context_chunk, plan_chunk_runs, plan_context_chunks, rank_local_chunk
from ..planning.decode_schedule import plan_decode
from ..planning.visible_lens import compute_visible_lens
from .choose_path import choose_paths


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
) -> MLAMetadata:
    """Plan one step: choose a path for each request, cut context into chunks, and decide on a schedule.

    A chunk is a part of the cached context that a prefill expands at once. A schedule is optional: it assigns the keys
    of the decodes to the programs of a kernel, so that the decode is faster.

    A request may take the absorbed path in these cases:

    | `query_len_support` | the request may take the absorbed path if |
    |---|---|
    | SINGLE_ONLY | it has at most `decode_threshold` (= 1) query tokens |
    | UNIFORM | it has as many query tokens as the first request with query tokens, and at most `decode_threshold` |
    | VARLEN | it has at most `decode_threshold` query tokens, or `choose_path` returns "absorbed" for it |

    The first request that may not take the absorbed path, and all requests after it, take the expanded path. To lose no
    time, an engine puts the requests of the absorbed path first (`reorder_batch_to_split_decodes_and_prefills`).

    If an engine does not know the lengths on the CPU, `common.seq_lens_cpu` is None. This function then plans the paths
    and the chunks from upper bounds of the lengths. The tensors of the plan get the true lengths from the device. The
    details are:

    - If `max_query_len` is at most `decode_threshold`, the function needs no lengths on the CPU. It uses
      `max_query_len`, `max_seq_len` and `num_actual_tokens`.
    - Otherwise the step may have prefills, and needs `query_start_loc_cpu` and `seq_lens_cpu_upper_bound`.
      `choose_path` gets upper bounds of the context lengths. `clamp_context_chunk` cuts the chunks to the true lengths,
      so the upper bounds change the result by rounding alone.
    - `choose_schedule` gets the lengths for which a schedule saves the most time: one request of `max_seq_len` keys,
      and one key in each other request. The numbers in `schedule_choice` describe these lengths.

    Args:
        common: the batch.
        block_size: tokens per block of the cache.
        workspace_tokens: largest number of context tokens of a chunk.
        decode_threshold: number of query tokens up to which a request may take the absorbed path without a call of
            `choose_path`. The function `reorder_batch_threshold` computes this number.
        config: config of the layer. With None, `choose_path` is not called, so `decode_threshold` alone determines the
            paths, and the plan has no schedule.
        costs: costs passed to `choose_path`.
        query_len_support: query lengths that the decode kernel supports.
        require_order: whether to raise if a request that may take the absorbed path comes after a request of the
            expanded path.
        ownership: the tokens that this context-parallel rank owns; None if one rank owns all tokens. `common` has the
            lengths of whole sequences and the slots of this rank (`dcp_slot_mapping`). The paths are the same as on one
            rank.
        num_programs: number of programs of a schedule; 0 means no schedule. None means the number that suits the device
            (in this package: 1) if `config` is given. `choose_schedule` decides from the lengths whether the decodes
            get a schedule, and the plan has this decision as `schedule_choice`.
        schedule_costs: costs from which the schedule is computed; None means the defaults of `ScheduleCosts`.
        cache_format: format of the cache, for `choose_path`. Layers with another format refuse the plan.
        dtype: dtype of queries and keys, for `choose_path`. The plan itself works for any dtype.
        fp8_mode: mode of decodes over a cache in e4m3 (`mla_decode`). Layers with another mode refuse the plan.
        batch_invariant: whether the other requests must not change a bit of a request's attention. `choose_path` is
            then not called, contexts are cut by their own lengths (`plan_context_chunks`), and the splits of a schedule
            depend on the length of a request alone. This does not hold for products with weights. A request that could
            decode is a prefill behind a prefill, except with `require_order` and `query_len_support` VARLEN.

    Returns:
        The plan, with tensors on the device of `common`; a `ContextParallelMetadata` if `ownership` is given.

    Raises:
        ValueError: in one of the following cases:

            - `decode_threshold` is below 1, or above 1 with SINGLE_ONLY;
            - `num_programs` is above 0 and `config` is None;
            - `cache_format` does not support the dims of `config`;
            - the slots were computed for another block size, or the block table has too few columns;
            - `workspace_tokens` is below `context_unit`, the smallest chunk;
            - there are more slots than new tokens that the rank owns (checked for slots on the CPU);
            - a padding row (a request without keys) has query tokens and is among the prefills;
            - `common.seq_lens_cpu` is None, the step may have prefills, and `query_start_loc_cpu` or
              `seq_lens_cpu_upper_bound` is missing;
            - `require_order` is True, and a request that may take the absorbed path comes after a request of the
              expanded path.
    """
    check_threshold(decode_threshold, query_len_support)
    if num_programs is not None:
        check_int("num_programs", num_programs, 0, "an int >= 0 or None")
    check_config(config, optional=True)
    check(config is not None or not num_programs, "config", "an MLAConfig if num_programs is above 0", None)
    check_costs(costs)
    check_schedule_costs(schedule_costs, "schedule_costs")
    check_mode_of_format(fp8_mode, cache_format, config)
    check_dtype("dtype", dtype)
    check_flag("require_order", require_order)
    check_flag("batch_invariant", batch_invariant)
    path_config = None if batch_invariant else config  # None disables `choose_path`
    check_ownership(ownership)
    owned = ONE_RANK if ownership is None else ownership
    check_interleave(owned.interleave, block_size)
    check_batch_block_size(common, block_size)
    check_table_width(common, block_size * owned.size)
    host_lens, given = has_host_lens(common), common
    if ownership is not None and host_lens and common.slot_mapping.device.type == "cpu":
        check_rank_local_slots(common, ownership)
    common = bounded_batch(common, decode_threshold, query_len_support, block_size * owned.size)
    starts, lengths = common.query_start_loc_cpu.tolist(), common.seq_lens_cpu.tolist()
    query_lens = [end - start for start, end in itertools.pairwise(starts)]
    contexts = common.num_computed_tokens_cpu

    if query_len_support is QueryLenSupport.UNIFORM:
        decodes = split_decodes_and_prefills(common, decode_threshold, require_uniform=True).num_decodes
        uniform = next((query_len for query_len in query_lens[:decodes] if query_len > 0), None)
        absorbed = [query_len == uniform for query_len in query_lens]
    else:
        absorbed = choose_paths(
            common.query_start_loc_cpu.diff(),
            contexts,
            decode_threshold,
            path_config,
            costs,
            query_len_support,
            cache_format,
            dtype,
        ).tolist()
        decodes = [*absorbed, False].index(False)
    late = [request for request in range(decodes, len(query_lens)) if absorbed[request] and query_lens[request] > 0]
    if require_order and late:
        check(False, "common", f"every absorbed request before the first expanded request, number {decodes}",
              f"the absorbed request {late[0]} behind it")  # fmt: skip
    check_no_prefill_padding(common, decodes)
    decode_tokens, device = starts[decodes], common.block_table.device
    chunks = plan_context_chunks(
        contexts[decodes:], workspace_tokens, block_size, owned.size, owned.interleave, batch_invariant
    )
    prefill_starts = [start - decode_tokens for start in starts[decodes:]]
    starts_on_cpu = torch.tensor(prefill_starts, dtype=torch.int32, device="cpu")
    chunks = plan_chunk_runs(chunks, starts_on_cpu)
    decode_lens = _rank_local_decode_lens(common, decodes, common.max_seq_len, ownership)
    longest = common.max_seq_len if decodes == len(lengths) else max(lengths[:decodes], default=0)
    cpu = {"dtype": torch.int32, "device": "cpu"}
    of_decodes = torch.tensor(starts[: decodes + 1], **cpu), torch.tensor(lengths[:decodes], **cpu)
    visible = compute_visible_lens(*of_decodes, decode_tokens, ownership)
    seq_lens, kind, which = common.seq_lens[:decodes], MLAMetadata, {}
    longest_query = max(query_lens[:decodes], default=0)
    if ownership is not None:
        seq_lens, longest = decode_lens.to(device), ownership.most(longest)
        chunks = tuple(rank_local_chunk(chunk, ownership) for chunk in chunks)
        kind, which = ContextParallelMetadata, {"ownership": ownership}
    whole = PrefillMetadata(
        common.block_table[decodes:], starts_on_cpu, 0, chunks, block_size, batch_invariant=batch_invariant
    )
    parts = _split_by_context(whole, contexts[decodes:]) if host_lens else ()
    metadata = kind(
        **which,
        slot_mapping=common.slot_mapping,
        num_actual_tokens=common.num_actual_tokens,
        num_decodes=decodes,
        num_decode_tokens=decode_tokens,
        decode=DecodeMetadata(
            block_table=common.block_table[:decodes],
            seq_lens=seq_lens,
            query_start_loc=common.query_start_loc[: decodes + 1],
            max_query_len=longest_query,
            visible_lens=visible.to(device),
            max_seq_len=longest,
            block_size=block_size,
            mask=absorbed_decode_mask(longest_query, ownership),
            total_seq_lens=None if ownership is None else common.seq_lens[:decodes],
            ownership=ownership,
        ),
        prefill=PrefillMetadata(
            block_table=common.block_table[decodes:],
            query_start_loc=starts_on_cpu.to(device),
            max_query_len=max(query_lens[decodes:], default=0),
            context_chunks=tuple(chunk.to(device) for chunk in chunks),
            block_size=block_size,
            parts=tuple(part.to(device) for part in parts),
            batch_invariant=batch_invariant,
        ),
        workspace_tokens=workspace_tokens,
        cache_format=cache_format,
        fp8_mode=fp8_mode,
    )
    if not host_lens:
        metadata = _with_device_lens(metadata, given, ownership)
        decode_lens = longest_decode_lens(decodes, metadata.decode.max_seq_len)
    if config is None or decode_tokens == 0:
        return metadata
    programs = 1 if num_programs is None else num_programs
    return _with_schedule(metadata, decode_lens, programs, schedule_costs, batch_invariant)


def _split_by_context(prefill: PrefillMetadata, context_lens: Int32[Tensor, " B"]) -> tuple[PrefillPart, ...]:
    """Divide the prefills of a step into parts of consecutive requests that all have context, or all have none.

    A part without context needs one call of the attention kernel, which writes the output. A part with context needs
    one call for the new tokens and one call for each chunk, and merges the attention states of these calls.

    Args:
        prefill: plan of the prefill, whose `query_start_loc` and chunks are on the CPU.
        context_lens: [B], cached tokens of each request, on the CPU.

    Returns:
        The parts, in the order of the requests. Their tensors are on the CPU, except the block tables. The result is
        empty if there would be only one part, or more than `MOST_PARTS` parts.
    """
    starts, contexts = prefill.query_start_loc.tolist(), context_lens.tolist()
    parts, first = [], 0
    for has_context, group in itertools.groupby(contexts, key=lambda context: context > 0):
        end = first + len(list(group))
        chunks, rows = [], []
        for number, chunk in enumerate(prefill.context_chunks):
            lens = chunk.cu_seq_lens.diff()[first:end].tolist()
            if has_context and sum(lens) > 0:
                before = int(chunk.cu_seq_lens[first])
                offsets = [sum(lens[:request]) for request in range(len(lens) + 1)]
                offsets = torch.tensor(offsets, dtype=torch.int32, device="cpu")
                chunks.append(ContextChunk(chunk.starts[first:end], offsets, sum(lens), max(lens)))
                rows.append(ChunkRows(number, before, before + sum(lens)))
        own = [start - starts[first] for start in starts[first : end + 1]]
        own_starts = torch.tensor(own, dtype=torch.int32, device="cpu")
        plan = PrefillMetadata(
            block_table=prefill.block_table[first:end],
            query_start_loc=own_starts,
            max_query_len=max(after - before for before, after in itertools.pairwise(own)),
            context_chunks=plan_chunk_runs(tuple(chunks), own_starts),
            block_size=prefill.block_size,
            batch_invariant=prefill.batch_invariant,
        )
        parts.append(PrefillPart(starts[first], starts[end], plan, tuple(rows)))
        first = end
    return tuple(parts) if 1 < len(parts) <= MOST_PARTS else ()


def _with_device_lens(
    metadata: MLAMetadata, common: CommonAttentionMetadata, ownership: TokenOwnership | None
) -> MLAMetadata:
    """Replace the upper bounds in the tensors of a plan by the true lengths, which are on the device."""
    decodes, device = metadata.num_decodes, common.block_table.device
    starts, lens = common.query_start_loc[: decodes + 1], common.seq_lens[:decodes]
    visible_lens = compute_visible_lens(starts, lens, metadata.num_decode_tokens, ownership)
    if ownership is not None:
        lens = torch.tensor([ownership.count(length) for length in lens.tolist()], dtype=torch.int32, device=device)
    contexts = common.num_computed_tokens[decodes:]
    chunks = tuple(clamp_context_chunk(chunk, contexts) for chunk in metadata.prefill.context_chunks)
    return dataclasses.replace(
        metadata,
        decode=dataclasses.replace(metadata.decode, seq_lens=lens, visible_lens=visible_lens),
        prefill=dataclasses.replace(metadata.prefill, context_chunks=chunks),
    )


def _rank_local_decode_lens(
    common: CommonAttentionMetadata, num_decodes: int, max_seq_len: int, ownership: TokenOwnership | None
) -> Int32[Tensor, " decodes"]:
    """Return the number of keys that this rank has of each decode, as a tensor on the CPU.

    If the lengths are not on the CPU, return lengths of at most `max_seq_len` for which a schedule saves the most time
    (`longest_decode_lens`).
    """
    if not has_host_lens(common):
        return longest_decode_lens(num_decodes, max_seq_len)
    lens = common.seq_lens_cpu[:num_decodes]
    if ownership is None:
        return lens
    return torch.tensor([ownership.count(length) for length in lens.tolist()], dtype=torch.int32, device="cpu")


def _with_schedule(
    metadata: MLAMetadata,
    decode_lens: Int32[Tensor, " decodes"],
    num_programs: int,
    costs: ScheduleCosts | None,
    batch_invariant: bool = False,
) -> MLAMetadata:
    """Return the plan with the decision of `choose_schedule`, and with a schedule if the decision is for a schedule."""
    costs = check_schedule_costs(costs)
    choice = choose_schedule(decode_lens, num_programs, costs, batch_invariant)
    schedule = DecodeSchedule(batch_invariant=True, split_rule=costs.split_rule) if batch_invariant else None
    if choice.planned:
        schedule = plan_decode(metadata.decode.seq_lens, num_programs, costs, batch_invariant)
    return dataclasses.replace(metadata, schedule=schedule, schedule_choice=choice)
