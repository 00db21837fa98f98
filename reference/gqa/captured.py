"""Plan decodes from the lengths on the device, for a CUDA graph that is replayed with other lengths.

A plan has the integers that attention needs, such as lengths and slots. A schedule is an optional part of a plan: it
assigns the keys of the requests to the programs of a kernel.
"""

from __future__ import annotations

import torch

from ..interfaces import (
    COMPUTE_FORMAT,
    CacheFormat,
    CommonAttentionMetadata,
    DecodeSchedule,
    GraphSupport,
    ScheduleChoice,
    ScheduleCosts,
    TokenOwnership,
    check_captured_lens,
    check_flag,
    check_int,
    check_schedule_costs,
    decode_mask,
)
from ..interfaces.gqa import (
    GQAConfig,
    GQAMetadata,
    PagedAttentionMetadata,
    check_gqa_planning,
    check_graph_config,
)
from ..planning.decode_schedule import plan_decode
from ..planning.visible_lens import compute_first_visible, compute_visible_lens, scheduled_lens


def plan_captured_gqa_decodes(
    common: CommonAttentionMetadata,
    block_size: int,
    config: GQAConfig,
    num_programs: int,
    costs: ScheduleCosts | None = None,
    batch_invariant: bool = False,
    ownership: TokenOwnership | None = None,
    graph: GraphSupport = GraphSupport.ANY,
    cache_format: CacheFormat = COMPUTE_FORMAT,
) -> GQAMetadata:
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

    Layers with attention chunks get the ordinary requests too, and no virtual requests: the number of virtual requests
    would depend on the lengths, and a captured plan has a fixed number of requests. `first_visible` then has the begin
    of each token's attention chunk, or of its window if the window begins later. The attended keys are the same as in
    the plan of one step (`build_gqa_metadata`). The results may differ by rounding, because the tiles of keys differ.

    Args:
        common: the batch. For every replay, `max_query_len` must be an upper bound of the query lengths, and
            `max_seq_len` an upper bound of the keys of a request.
        block_size: tokens per block.
        config: config of the layers, which must be decoders.
        num_programs: number of programs of the schedule; 0 means no schedule. The kernel then divides the keys of each
            request into splits itself.
        costs: costs from which the schedule is computed; None means the defaults of `ScheduleCosts`.
        batch_invariant: whether a request gets the same bits in every batch. Its splits then depend on its own lengths
            alone, also if `num_programs` is 0.
        ownership: the tokens that this context-parallel rank owns; None if one rank owns all tokens. `common` has the
            lengths of whole sequences and the slots of this rank.
        graph: ANY or ONE_QUERY_LEN, see the table.
        cache_format: format of the caches of the layers that use the plan.

    Returns:
        The plan. It shares these tensors with `common`: the block table, the slots, the offsets (with ANY), and
        `seq_lens` (without `ownership`).

    Raises:
        TypeError: an argument has another class.
        ValueError: in one of the following cases:

            - the batch has no request or no token;
            - a query length does not fit `graph` or `max_query_len`;
            - there are fewer slots than tokens;
            - a number is below its smallest valid value.
        UnsupportedConfiguration: the layers are no decoders; ranks share sequences, and the layers have ALiBi or
            attention chunks; the cache format is for the latent cache alone.
    """
    check_gqa_planning(config, block_size, ownership, cache_format)
    check_graph_config(config)
    tokens = check_captured_lens(common, graph)
    requests, query_len = common.num_reqs, common.max_query_len
    check_int("num_programs", num_programs, 0)
    costs = check_schedule_costs(costs)
    check_flag("batch_invariant", batch_invariant)
    starts, lens, window = common.query_start_loc, common.seq_lens, config.sliding_window
    chunk = config.attention_chunk_size
    visible_lens, first_visible = compute_visible_lens(starts, lens, tokens, ownership), None
    if window is not None or chunk is not None:
        first_visible = compute_first_visible(starts, lens, tokens, window, ownership, chunk)
    query_start_loc, seq_lens, longest = starts, lens, common.max_seq_len
    if graph is GraphSupport.ONE_QUERY_LEN:
        query_start_loc = _on_device_of(common, [request * query_len for request in range(requests + 1)])
    if ownership is not None:
        seq_lens = _on_device_of(common, [ownership.count(length) for length in lens.tolist()])
        longest = ownership.most(longest)
    schedule = DecodeSchedule(batch_invariant=True, split_rule=costs.split_rule) if batch_invariant else None
    if num_programs > 0:
        counted = scheduled_lens(starts, lens, window, ownership, chunk)
        schedule = plan_decode(counted, num_programs, costs, batch_invariant)
    return GQAMetadata(
        config=config,
        slot_mapping=common.slot_mapping,
        num_actual_tokens=tokens,
        num_decodes=requests,
        num_decode_tokens=tokens,
        decode=PagedAttentionMetadata(
            block_table=common.block_table,
            seq_lens=seq_lens,
            query_start_loc=query_start_loc,
            max_query_len=query_len,
            visible_lens=visible_lens,
            max_seq_len=longest,
            block_size=block_size,
            graph=graph,
            mask=decode_mask(query_len, ownership, config.sliding_window is not None),
            first_visible=first_visible,
        ),
        prefill=PagedAttentionMetadata(
            block_table=common.block_table[:0],
            seq_lens=seq_lens[:0],
            query_start_loc=starts[:1],
            max_query_len=0,
            visible_lens=visible_lens[:0],
            max_seq_len=0,
            block_size=block_size,
            first_visible=None if first_visible is None else first_visible[:0],
        ),
        schedule=schedule,
        cache_format=cache_format,
        ownership=ownership,
        schedule_choice=ScheduleChoice(num_programs, requests, 0, 0, planned=num_programs > 0),
    )


def _on_device_of(common: CommonAttentionMetadata, values: list[int]) -> torch.Tensor:
    """Return `values` as an int32 tensor on the device of the batch."""
    return torch.tensor(values, dtype=torch.int32, device=common.seq_lens.device)
