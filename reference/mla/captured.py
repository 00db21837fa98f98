"""Plan decodes from tensors on the device alone, so that a CUDA graph can contain the planning."""

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
    """Plan decodes with equal query lengths from the lengths in the device tensor `common.seq_lens`.

    The lengths in `common.seq_lens_cpu` are not used. If this function is called during the capture of a CUDA graph,
    the graph contains the planning. Every replay then plans for the lengths that are in `common.seq_lens` at that time.
    The lengths are unknown at capture, so `choose_schedule` cannot decide on a schedule. The plan has a schedule
    whenever `num_programs` is above 0.

    Args:
        common: the batch. All requests have the same number of query tokens, padding rows (S = 0) included.
            `max_seq_len` must be an upper bound of the keys of every request in every replay.
        block_size: tokens per block.
        num_programs: number of programs of the schedule; 0 means no schedule, so the kernel divides the requests into
            splits itself.
        costs: costs from which the schedule is computed; None means the defaults of `ScheduleCosts`.
        batch_invariant: whether the splits of a request depend on its own length alone, also if `num_programs` is 0.
        ownership: the tokens that this context-parallel rank owns; None if one rank owns all tokens. `common` has the
            lengths of whole sequences and the slots of this rank.

    Returns:
        The plan; a `ContextParallelMetadata` if `ownership` is given. The block table, slots and offsets of the plan
        are the tensors of `common`, not copies. Without `ownership`, `decode.seq_lens` is also `common.seq_lens`
        itself, and so is `decode.visible_lens` if each request has one query token.

    Raises:
        ValueError: the batch has no request, or its query lengths differ; a number is below its smallest valid value.
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
        longest = TokenOwnership(ownership.size, 0, ownership.interleave).count(longest)  # rank 0 owns the most tokens
        kind, which = ContextParallelMetadata, {"ownership": ownership}
    schedule = DecodeSchedule(batch_invariant=True, split_rule=costs.split_rule) if batch_invariant else None
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
    """Return ints as an int32 tensor on the device of a batch."""
    return torch.tensor(values, dtype=torch.int32, device=common.seq_lens.device)
