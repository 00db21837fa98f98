"""The plan of a captured decode, from tensors of the device alone: a CUDA graph can hold the planning too."""

from __future__ import annotations

import torch

from ..interfaces import (
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
)
from ..planning.decode_schedule import plan_decode


def plan_captured_decodes(
    common: CommonAttentionMetadata,
    block_size: int,
    num_programs: int,
    costs: ScheduleCosts | None = None,
    batch_invariant: bool = False,
    ownership: TokenOwnership | None = None,
) -> MLAMetadata:
    """Plan decodes of one query length from the lengths in `common.seq_lens`; its CPU twins decide nothing.

    Called while a graph is captured, the planning becomes part of the graph: a replay plans for the lengths that are
    in `common.seq_lens` then. The plan therefore has a schedule whatever the lengths are.

    Args:
        common: the batch: equally many tokens of each request, padding rows (S = 0) among them. `max_seq_len` bounds
            the keys of every request in every replay.
        block_size: tokens a block.
        num_programs: programs that a schedule cuts the decode over; 0 leaves it to the kernel.
        costs: what the schedule reckons with; None for the neutral ones.
        batch_invariant: of the schedule, planned or not.
        ownership: of a rank under context parallelism: `common` has whole lengths and this rank's slots.

    Returns:
        The plan; a `ContextParallelMetadata` where an `ownership` is given. Block table, slots and offsets are the
        batch's own tensors. So are the lengths of a rank that owns every token, and its visible lengths where a request
        has one token.

    Raises:
        ValueError: no request; queries of several lengths; a number below its least value.
    """
    query_len = check_equal_query_lens(common)
    requests, tokens = common.num_reqs, common.num_actual_tokens
    check_int("block_size", block_size)
    check_int("num_programs", num_programs, 0)
    costs = check_schedule_costs(costs)
    check_flag("batch_invariant", batch_invariant)
    check_ownership(ownership)
    seq_lens, lengths = common.seq_lens, common.seq_lens.tolist()
    visible = [max(0, length - query_len + i + 1) for length in lengths for i in range(query_len)]
    longest, kind, which = common.max_seq_len, MLAMetadata, {}
    if ownership is not None:
        seq_lens = _on_device_of(common, [ownership.count(length) for length in lengths])
        visible = [ownership.count(keys) for keys in visible]
        longest = TokenOwnership(ownership.size, 0, ownership.interleave).count(longest)  # the first rank owns the most
        kind, which = ContextParallelMetadata, {"ownership": ownership}
    schedule = DecodeSchedule(batch_invariant=True, cut=costs.cut) if batch_invariant else None
    if num_programs > 0:
        schedule = plan_decode(seq_lens, num_programs, costs, batch_invariant)
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
            visible_lens=seq_lens if query_len == 1 else _on_device_of(common, visible),
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


def _on_device_of(common: CommonAttentionMetadata, values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=common.seq_lens.device)
