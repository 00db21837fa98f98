"""Plan decodes from the lengths on the device, for a CUDA graph that is replayed with other lengths.

A plan has the integers that attention needs, such as lengths and slots. A schedule is an optional part of a plan: it
assigns the keys of the requests to the programs of a kernel.
"""

from __future__ import annotations

import torch

from ..interfaces import (
    COMPUTE_FORMAT,
    CONVERTED,
    CacheFormat,
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
    absorbed_decode_mask,
    check_captured_lens,
    check_flag,
    check_int,
    check_mode_of_format,
    check_ownership,
    check_schedule_costs,
)
from ..planning.decode_schedule import plan_decode
from ..planning.visible_lens import compute_visible_lens


def plan_captured_decodes(
    common: CommonAttentionMetadata,
    block_size: int,
    num_programs: int,
    costs: ScheduleCosts | None = None,
    batch_invariant: bool = False,
    ownership: TokenOwnership | None = None,
    graph: GraphSupport = GraphSupport.ANY,
    cache_format: CacheFormat = COMPUTE_FORMAT,
    fp8_mode: str = CONVERTED,
) -> MLAMetadata:
    """Plan decodes from the lengths in the device tensors `common.seq_lens` and `common.query_start_loc`.

    If the twin in `fast` is called during the capture of a CUDA graph, the graph contains the planning. Every replay
    then plans for the lengths that the two tensors have at that time. (This function itself cannot be captured, because
    it copies the lengths to the CPU.) The lengths are unknown at capture, so the choice of a schedule cannot depend on
    them: the plan has a schedule if `num_programs` is above 0.

    A replay has as many requests as the batch of the capture. `graph` says which query lengths a replay may have:

    | `graph` | query lengths of a replay | tokens of the plan |
    |---|---|---|
    | ANY | from 0 to `common.max_query_len`, mixed | `common.num_actual_tokens`; a replay may have fewer |
    | ONE_QUERY_LEN | `common.max_query_len`, or 0 for requests at the end of the batch | B * `common.max_query_len` |

    Tokens behind the last request are padding and see no key:

    - With ANY, `decode.query_start_loc` is `common.query_start_loc`. Padding tokens belong to no request.
    - With ONE_QUERY_LEN, `decode.query_start_loc` is a new tensor that assigns `max_query_len` tokens to every request.
      Padding tokens belong to the requests that have no tokens in `common`.

    Args:
        common: the batch. For every replay, `max_query_len` must be an upper bound of the query lengths, and
            `max_seq_len` an upper bound of the keys of a request.
        block_size: tokens per block.
        num_programs: number of programs of the schedule; 0 means no schedule. The kernel then divides the keys of each
            request into splits itself.
        costs: costs from which the schedule is computed; None means the defaults of `ScheduleCosts`.
        batch_invariant: whether a request gets the same bits in every batch. Its splits then depend on its own length
            alone, also if `num_programs` is 0.
        ownership: the tokens that this context-parallel rank owns; None if one rank owns all tokens. `common` has the
            lengths of whole sequences and the slots of this rank.
        graph: ANY or ONE_QUERY_LEN, see the table.
        cache_format: format of the caches of the layers that use the plan.
        fp8_mode: mode of the decodes of these layers (`mla_decode`).

    Returns:
        The plan; a `ContextParallelMetadata` if `ownership` is given. The plan shares these tensors with `common`: the
        block table, the slots, the offsets (with ANY), and `seq_lens` (without `ownership`).

    Raises:
        ValueError: in one of the following cases:

            - the batch has no request or no token;
            - a query length does not fit `graph` or `max_query_len`;
            - there are fewer slots than tokens;
            - a number is below its smallest valid value.
    """
    tokens = check_captured_lens(common, graph)
    requests, query_len = common.num_reqs, common.max_query_len
    check_int("block_size", block_size)
    check_int("num_programs", num_programs, 0)
    costs = check_schedule_costs(costs)
    check_flag("batch_invariant", batch_invariant)
    check_ownership(ownership)
    check_mode_of_format(fp8_mode, cache_format)
    visible_lens = compute_visible_lens(common.query_start_loc, common.seq_lens, tokens, ownership)
    query_start_loc, seq_lens = common.query_start_loc, common.seq_lens
    if graph is GraphSupport.ONE_QUERY_LEN:
        query_start_loc = _on_device_of(common, [request * query_len for request in range(requests + 1)])
    longest, kind, which = common.max_seq_len, MLAMetadata, {}
    if ownership is not None:
        seq_lens = _on_device_of(common, [ownership.count(length) for length in seq_lens.tolist()])
        longest = ownership.most(longest)
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
            query_start_loc=query_start_loc,
            max_query_len=query_len,
            visible_lens=visible_lens,
            max_seq_len=longest,
            block_size=block_size,
            graph=graph,
            mask=absorbed_decode_mask(query_len, ownership),
            total_seq_lens=None if ownership is None else common.seq_lens.clone(),  # `write_captured` writes it
            ownership=ownership,
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
        cache_format=cache_format,
        fp8_mode=fp8_mode,
        schedule_choice=ScheduleChoice(num_programs, requests, 0, 0, planned=num_programs > 0),
    )


def _on_device_of(common: CommonAttentionMetadata, values: list[int]) -> torch.Tensor:
    """Return `values` as an int32 tensor on the device of the batch."""
    return torch.tensor(values, dtype=torch.int32, device=common.seq_lens.device)
