"""Plans of captured decodes: computed on the device alone, so that a CUDA graph can contain the computation.

`reference.gqa.captured` explains plans and schedules. docs/glossary.md explains other terms, such as padding row.
"""

from __future__ import annotations

import torch

from reference.interfaces import (
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
from reference.interfaces.gqa import (
    GQAConfig,
    GQAMetadata,
    PagedAttentionMetadata,
    check_gqa_planning,
    check_graph_config,
)

from ..backends import BackendChoice
from ..planning.decode_schedule import plan_decode
from ..planning.owned_keys import first_keys, local_counts
from ..planning.visible_lens import compute_visible_lens, scheduled_lens


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
    *,
    backend: BackendChoice = None,
) -> GQAMetadata:
    """Plan the decodes from device tensors: the lengths `common.seq_lens` and the offsets `common.query_start_loc`.

    The function copies nothing between host and device. `reference.gqa.captured.plan_captured_gqa_decodes` explains the
    use inside a CUDA graph, the batches that each kind of graph allows, and attention chunks.

    Args:
        common: batch of the step. In every replay, no query may be longer than `max_query_len`, and no request may be
            longer than `max_seq_len`.
        block_size: tokens per block.
        config: config of the layers, which must be decoders.
        num_programs: number of programs of the schedule; 0 makes no schedule.
        costs: costs from which the schedule is computed; None means the defaults of `ScheduleCosts`.
        batch_invariant: if True, the splits of a request depend on the lengths of this request only, with or without a
            schedule.
        ownership: the tokens that this context-parallel rank owns; None if one rank owns all tokens. With `ownership`,
            `common` has the lengths of the whole sequences and the slots of this rank.
        graph: kind of the graph: ANY for mixed query lengths, ONE_QUERY_LEN for one query length.
        cache_format: format of the caches of the layers that use the plan.
        backend: backend of `plan_decode` and `compute_visible_lens`: a name, a mapping from op to backend name, or None
            for an automatic choice (`fast.backends`).

    Returns:
        The plan.

    Raises:
        TypeError: an argument has another class.
        ValueError: in one of these cases:

            - there is no request or no token;
            - a query length does not fit `graph` or `max_query_len`;
            - there are fewer slots than tokens;
            - `block_size` or `num_programs` is below its minimum.
        UnsupportedConfiguration: the layers are no decoders; ranks share sequences, and the layers have ALiBi or
            attention chunks; the cache format is for the latent cache alone; `backend` allows no backend that supports
            this kind of graph.
    """
    check_gqa_planning(config, block_size, ownership, cache_format)
    check_graph_config(config)
    tokens = check_captured_lens(common, graph)
    requests, query_len = common.num_reqs, common.max_query_len
    check_int("num_programs", num_programs, 0)
    costs = check_schedule_costs(costs)
    check_flag("batch_invariant", batch_invariant)
    starts, lens, window, chunk = (
        common.query_start_loc, common.seq_lens, config.sliding_window, config.attention_chunk_size,
    )  # fmt: skip
    # the keys of whole sequences; each rank counts its own keys among them
    visible_lens = compute_visible_lens(starts, lens, tokens, graph=graph, backend=backend)
    first_visible = first_keys(visible_lens - 1, window, chunk, ownership)
    visible_lens, seq_lens = local_counts(visible_lens, ownership), local_counts(lens, ownership)
    longest = common.max_seq_len if ownership is None else ownership.most(common.max_seq_len)
    query_start_loc = starts
    if graph is GraphSupport.ONE_QUERY_LEN:  # each request has `query_len` tokens, also a request of length 0
        last = requests * query_len
        query_start_loc = torch.arange(0, last + 1, query_len, dtype=torch.int32, device=lens.device)
    schedule = DecodeSchedule(batch_invariant=True, split_rule=costs.split_rule) if batch_invariant else None
    if num_programs > 0:
        counted = scheduled_lens(starts, lens, window, ownership, chunk)
        schedule = plan_decode(counted, num_programs, costs, batch_invariant, graph=graph, backend=backend)
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
