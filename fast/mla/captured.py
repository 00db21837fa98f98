"""Plans of captured decodes, from device tensors only, so that a CUDA graph can contain the planning."""

from __future__ import annotations

import torch

from reference.interfaces import (
    CommonAttentionMetadata,
    ContextParallelMetadata,
    DecodeMetadata,
    DecodeSchedule,
    GraphSupport,
    MLAMetadata,
    PrefillMetadata,
    ScheduleChoice,
    ScheduleCosts,
    TokenOwnership,
    check_equal_query_lens,
    check_flag,
    check_int,
    check_ownership,
    check_schedule_costs,
    get_dcp_local_seq_lens,
)

from ..backends import BackendChoice
from ..planning.decode_schedule import plan_decode


def plan_captured_decodes(
    common: CommonAttentionMetadata,
    block_size: int,
    num_programs: int,
    costs: ScheduleCosts | None = None,
    batch_invariant: bool = False,
    ownership: TokenOwnership | None = None,
    *,
    backend: BackendChoice = None,
) -> MLAMetadata:
    """Plan decodes of one query length from the device tensor `common.seq_lens`, without the lengths on the CPU.

    See `reference.mla.captured.plan_captured_decodes` for the use inside a graph. The function copies nothing
    between host and device.

    Args:
        common: batch of the step. All requests, padding rows (S = 0) included, have the same number of query tokens.
            `max_seq_len` is an upper bound of the keys of every request in every replay.
        block_size: tokens per block.
        num_programs: number of programs of the schedule; 0 makes no schedule.
        costs: costs from which the schedule is computed; None takes the defaults of `ScheduleCosts`.
        batch_invariant: whether the splits of a request depend on its own length only, with or without a schedule.
        ownership: the tokens that this context-parallel rank owns; None if one rank owns all tokens. With `ownership`,
            `common` has the lengths of the whole sequences and the slots of this rank.
        backend: backend of `plan_decode`: a name, a mapping from op to backend name, or None to choose by capability
            (`fast.backends`).

    Returns:
        The plan; a `ContextParallelMetadata` if `ownership` is given.

    Raises:
        ValueError: there is no request; the queries have several lengths; `block_size` or `num_programs` is below
            its minimum.
    """
    query_len = check_equal_query_lens(common)
    requests, tokens = common.num_reqs, common.num_actual_tokens
    check_int("block_size", block_size)
    check_int("num_programs", num_programs, 0)
    costs = check_schedule_costs(costs)
    check_flag("batch_invariant", batch_invariant)
    check_ownership(ownership)
    seq_lens, longest, kind, which = common.seq_lens, common.max_seq_len, MLAMetadata, {}
    visible_lens = seq_lens  # with one query token per request, the token sees all keys
    if query_len > 1:
        before = torch.arange(1 - query_len, 1, dtype=torch.int32, device=seq_lens.device)
        visible_lens = (seq_lens[:, None] + before).clamp_(min=0).flatten()
    if ownership is not None:
        size, rank, interleave = ownership.size, ownership.rank, ownership.interleave
        seq_lens = get_dcp_local_seq_lens(seq_lens, size, rank, interleave)
        visible_lens = seq_lens if query_len == 1 else get_dcp_local_seq_lens(visible_lens, size, rank, interleave)
        longest = TokenOwnership(size, 0, interleave).count(longest)  # rank 0 owns the most tokens
        kind, which = ContextParallelMetadata, {"ownership": ownership}
    schedule = DecodeSchedule(batch_invariant=True, split_rule=costs.split_rule) if batch_invariant else None
    if num_programs > 0:
        schedule = plan_decode(
            seq_lens, num_programs, costs, batch_invariant, graph=GraphSupport.ONE_QUERY_LEN, backend=backend
        )
    return kind(
        **which,
        slot_mapping=common.slot_mapping,
        num_actual_tokens=tokens,
        num_decodes=requests,
        num_decode_tokens=tokens,
        decode=DecodeMetadata(
            block_table=common.block_table,
            seq_lens=seq_lens,
            query_start_loc=common.query_start_loc,
            max_query_len=query_len,
            visible_lens=visible_lens,
            max_seq_len=longest,
            block_size=block_size,
            graph=GraphSupport.ONE_QUERY_LEN,
        ),
        prefill=PrefillMetadata(
            block_table=common.block_table[:0],
            query_start_loc=common.query_start_loc[:1],
            max_query_len=0,
            context_chunks=(),
            block_size=block_size,
        ),
        workspace_tokens=0,  # no context is expanded
        schedule=schedule,
        schedule_choice=ScheduleChoice(num_programs, requests, 0, 0, planned=num_programs > 0),
    )
