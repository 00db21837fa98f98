"""Plans of captured decodes: computed on the device alone, so that a CUDA graph can contain the computation.

`reference.mla.captured` explains plans and schedules. docs/glossary.md explains other terms, such as padding row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from reference.interfaces import (
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
    get_dcp_local_seq_lens,
)

from ..backends import BackendChoice
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
    *,
    backend: BackendChoice = None,
) -> MLAMetadata:
    """Plan the decodes from device tensors: the lengths `common.seq_lens` and the offsets `common.query_start_loc`.

    The function copies nothing between host and device. `reference.mla.captured.plan_captured_decodes` explains the use
    inside a CUDA graph, and the batches that each kind of graph allows.

    Args:
        common: batch of the step. In every replay, no query may be longer than `max_query_len`, and no request may be
            longer than `max_seq_len`.
        block_size: tokens per block.
        num_programs: number of programs of the schedule; 0 makes no schedule.
        costs: costs from which the schedule is computed; None means the defaults of `ScheduleCosts`.
        batch_invariant: if True, the splits of a request depend on the length of this request only, with or without a
            schedule.
        ownership: the tokens that this context-parallel rank owns; None if one rank owns all tokens. With `ownership`,
            `common` has the lengths of the whole sequences and the slots of this rank.
        graph: kind of the graph: ANY for mixed query lengths, ONE_QUERY_LEN for one query length.
        cache_format: format of the caches of the layers that use the plan.
        fp8_mode: fp8 mode of the decodes of these layers (`mla_decode`).
        backend: backend of `plan_decode` and `compute_visible_lens`: a name, a mapping from op to backend name, or None
            for an automatic choice (`fast.backends`).

    Returns:
        The plan; a `ContextParallelMetadata` if `ownership` is given.

    Raises:
        ValueError: in one of these cases:

            - there is no request or no token;
            - a query length does not fit `graph` or `max_query_len`;
            - there are fewer slots than tokens;
            - `block_size` or `num_programs` is below its minimum.
        UnsupportedConfiguration: `backend` allows no backend that supports this kind of graph.
    """
    tokens = check_captured_lens(common, graph)
    requests, query_len = common.num_reqs, common.max_query_len
    check_int("block_size", block_size)
    check_int("num_programs", num_programs, 0)
    costs = check_schedule_costs(costs)
    check_flag("batch_invariant", batch_invariant)
    check_ownership(ownership)
    check_mode_of_format(fp8_mode, cache_format)
    seq_lens, longest, kind, which = common.seq_lens, common.max_seq_len, MLAMetadata, {}
    visible_lens = compute_visible_lens(
        common.query_start_loc, seq_lens, tokens, ownership, graph=graph, backend=backend
    )
    query_start_loc = common.query_start_loc
    if graph is GraphSupport.ONE_QUERY_LEN:  # each request has `query_len` tokens, also a request of length 0
        query_start_loc = _equal_query_starts(requests, query_len, seq_lens.device)
    if ownership is not None:
        seq_lens = get_dcp_local_seq_lens(seq_lens, ownership.size, ownership.rank, ownership.interleave)
        longest = ownership.most(longest)
        kind, which = ContextParallelMetadata, {"ownership": ownership}
    schedule = DecodeSchedule(batch_invariant=True, split_rule=costs.split_rule) if batch_invariant else None
    if num_programs > 0:
        schedule = plan_decode(seq_lens, num_programs, costs, batch_invariant, graph=graph, backend=backend)
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


# Tensors of `_equal_query_starts`. No tensor is ever removed or replaced: a graph may read its memory, also after the
# plan of the graph is gone.
_QUERY_STARTS: dict[tuple, Tensor] = {}


def _equal_query_starts(requests: int, query_len: int, device: torch.device) -> Tensor:
    """Return the first query token of each request, if each request has `query_len` tokens; nothing may write to it.

    A tensor that was made outside of a capture serves all later plans of the same stream. A graph that is captured on
    this stream, after a first run, then does not compute the tensor in every replay.
    """
    capturing, stream = False, None
    if device.type == "cuda":
        with torch.cuda.device(device):
            capturing, stream = torch.cuda.is_current_stream_capturing(), torch.cuda.current_stream().cuda_stream
    key = requests, query_len, device, stream
    starts = _QUERY_STARTS.get(key)
    if starts is None:
        with torch.inference_mode(False):  # code outside inference mode uses the tensor too
            starts = torch.arange(0, requests * query_len + 1, query_len, dtype=torch.int32, device=device)
        if not capturing:  # the memory of a tensor that is made in a capture belongs to the graph
            return _QUERY_STARTS.setdefault(key, starts)  # another thread may have been first
    return starts
