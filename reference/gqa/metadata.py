"""Compute the plan of a step (one forward pass) of grouped-query attention from the batch of an engine's scheduler.

A decode is a request with one or a few new tokens, a prefill is a request with more new tokens. One function attends
both (`gqa_paged_attention`). A plan keeps them apart, because only decodes have a schedule or a cascade.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from jaxtyping import Int32
from torch import Tensor

from ..interfaces import (
    COMPUTE_FORMAT,
    VISIBLE_LENS,
    CacheFormat,
    CommonAttentionMetadata,
    DecodeSchedule,
    QueryLenSupport,
    ScheduleCosts,
    TokenOwnership,
    check,
    check_host_lens,
    check_schedule_costs,
    choose_schedule,
    decode_mask,
    has_host_lens,
    longest_decode_lens,
    longest_query,
)
from ..interfaces.gqa import (
    AttentionType,
    EncoderMetadata,
    GQAConfig,
    GQAMetadata,
    PagedAttentionMetadata,
    batch_of_gqa_plan,
    check_encoder_batch,
    check_gqa_build,
    longest_scheduled_len,
)
from ..planning.batch import split_decodes_and_prefills
from ..planning.decode_schedule import plan_decode
from ..planning.local_attention import make_local_attention_virtual_batches
from ..planning.visible_lens import compute_first_visible, compute_visible_lens, scheduled_lens


def build_gqa_metadata(
    common: CommonAttentionMetadata,
    block_size: int,
    config: GQAConfig,
    decode_threshold: int = 1,
    query_len_support: QueryLenSupport = QueryLenSupport.VARLEN,
    require_order: bool = False,
    ownership: TokenOwnership | None = None,
    num_programs: int | None = None,
    schedule_costs: ScheduleCosts | None = None,
    cache_format: CacheFormat = COMPUTE_FORMAT,
    dtype: torch.dtype = torch.bfloat16,
) -> GQAMetadata | EncoderMetadata:
    """Plan one step for the layers of one config. A model whose layers differ needs one plan for each config.

    The first requests of the batch that have few query tokens decode:

    | `query_len_support` | a request may decode if |
    |---|---|
    | SINGLE_ONLY | it has at most `decode_threshold` (= 1) query tokens |
    | UNIFORM | it has as many query tokens as the first request with query tokens, and at most `decode_threshold` |
    | VARLEN | it has at most `decode_threshold` query tokens |

    The first request that may not decode, and all requests after it, are prefills. Any order of the requests gives a
    correct plan, also prefills in front of decodes and padding rows at the end. To lose no time, an engine puts the
    decodes first (`reorder_batch_to_split_decodes_and_prefills`).

    The attention type of the config determines the plan:

    - DECODER: query token i of a request with S keys and Sq query tokens attends the keys up to its own, S - Sq + i. A
      window cuts the keys at the other end (`compute_first_visible`).
    - DECODER with attention chunks: the plan is that of the virtual requests (`make_local_attention_virtual_batches`).
      All counts of requests in the plan then count virtual requests. The tokens and their slots are the same. A
      captured plan has no virtual requests (`plan_captured_gqa_decodes`).
    - CROSS: a query token attends all keys of the encoder's output. The batch must be a `CrossAttentionBatch`. Several
      query tokens of a request are a prefill, so `decode_threshold` must be 1.
    - ENCODER and ENCODER_ONLY: the plan is an `EncoderMetadata`, and every token must be a query token. A request with
      context is an error where the CPU has its length or the upper bound of its length. Otherwise the layers attend the
      query tokens alone.

    If an engine does not know the lengths on the CPU, `common.seq_lens_cpu` is None. A step of decodes alone then needs
    no lengths on the CPU. A step that may have prefills needs `query_start_loc_cpu` and `seq_lens_cpu_upper_bound`. The
    tensors of the plan have the lengths from the device in any case. Attention chunks need the lengths on the CPU.

    The keys that a decode reads count for its schedule (`scheduled_lens`): with a window these are the keys from the
    begin of the window on. `choose_schedule` decides whether there is a schedule. Without lengths on the CPU it gets
    the lengths for which a schedule saves the most time: the most keys that a request can read, and one key in each
    other request.

    A block table without columns is legal if no request has context. The layers then attend their own keys and values.

    Args:
        common: the batch. Under context parallelism, it has the lengths of whole sequences and the slots of this rank.
        block_size: tokens per block of the cache.
        config: config of the layers. Layers with another window, attention chunk or attention type refuse the plan.
        decode_threshold: largest number of query tokens of a decode (`reorder_batch_threshold`); 1 for layers that are
            no decoders.
        query_len_support: query lengths that the decode kernel supports.
        require_order: whether to raise if a request that may decode comes after a prefill.
        ownership: the tokens that this context-parallel rank owns; None if one rank owns all tokens.
        num_programs: number of programs of a schedule; 0 means no schedule. None means the number that suits the device
            (in this package: 1).
        schedule_costs: costs from which the schedule is computed; None means the defaults of `ScheduleCosts`.
        cache_format: format of the cache. Layers with another format refuse the plan.
        dtype: dtype of queries and keys, on which the number that suits the device can depend (in this package it does
            not). A plan is valid for any dtype.

    Returns:
        The plan, with tensors on the device of `common`.

    Raises:
        TypeError: an argument has another class; the config is for cross attention, and the batch has no fields of the
            encoder.
        ValueError: in one of the following cases:

            - `decode_threshold` is below 1, or above 1 with SINGLE_ONLY or for layers that are no decoders;
            - `common.num_actual_tokens` is not the last of the offsets (checked for offsets on the CPU);
            - `block_size` is not a multiple of 16, or not a divisor of the attention chunk;
            - the slots were computed for another block size, or the block table has too few columns;
            - for slots on the CPU: the slots count more tokens than this rank owns;
            - an encoder's batch has context;
            - the batch may have prefills and has no lengths on the CPU, and it also lacks CPU offsets or upper bounds;
            - the config has attention chunks, and the lengths are not on the CPU;
            - `require_order` is violated.
        UnsupportedConfiguration: ranks share sequences, and the config has ALiBi or attention chunks; the cache format
            is for the latent cache alone.
    """
    check_gqa_build(
        config, block_size, decode_threshold, query_len_support, require_order, ownership, num_programs, cache_format,
        dtype,
    )  # fmt: skip
    costs = check_schedule_costs(schedule_costs, "schedule_costs")
    if not config.attention_type.cached:
        return _plan_encoder(common, config)
    planned = _plan(
        common, block_size, config, decode_threshold, query_len_support, require_order, ownership, cache_format
    )
    if planned.metadata.num_decode_tokens == 0:
        return planned.metadata
    return _with_schedule(planned, 1 if num_programs is None else num_programs, costs)


class _Planned(NamedTuple):
    """A plan without a schedule, and what a schedule is computed from.

    Attributes:
        metadata: the plan.
        batch: the batch over whose keys the plan was made: virtual requests, or the keys of an encoder.
        exact: whether `batch` has the true lengths on the CPU; otherwise it has upper bounds.
    """

    metadata: GQAMetadata
    batch: CommonAttentionMetadata
    exact: bool


def _plan_encoder(common: CommonAttentionMetadata, config: GQAConfig) -> EncoderMetadata:
    """Return the plan of layers without a cache, whose query tokens are all tokens of a request."""
    check_encoder_batch(common)
    return EncoderMetadata(config, common.query_start_loc, longest_query(common), common.num_actual_tokens)


def _plan(
    common: CommonAttentionMetadata,
    block_size: int,
    config: GQAConfig,
    decode_threshold: int,
    query_len_support: QueryLenSupport,
    require_order: bool,
    ownership: TokenOwnership | None,
    cache_format: CacheFormat,
) -> _Planned:
    """Return the plan of layers with a cache, without a schedule."""
    batch = batch_of_gqa_plan(common, block_size, config, decode_threshold, query_len_support, ownership)
    is_cross, uniform = config.attention_type is AttentionType.CROSS, query_len_support is QueryLenSupport.UNIFORM
    exact = is_cross or has_host_lens(common)
    if require_order:
        _check_order(batch, decode_threshold, uniform)
    if config.attention_chunk_size is not None:
        check_host_lens(common)
        batch = _virtual_requests(batch, config.attention_chunk_size, block_size)
    split = split_decodes_and_prefills(batch, decode_threshold, uniform)
    tokens, decode_tokens = common.num_actual_tokens, split.num_decode_tokens
    starts, first = batch.query_start_loc, None
    if is_cross:
        visible = _lens_of_requests(batch, tokens, ownership)
    else:
        visible = compute_visible_lens(starts, batch.seq_lens, tokens, ownership)
        if config.sliding_window is not None:
            first = compute_first_visible(starts, batch.seq_lens, tokens, config.sliding_window, ownership)
    decodes, prefills = (
        _part(batch, requests, rows, block_size, ownership, is_cross, visible, first)
        for requests, rows in (
            (range(split.num_decodes), slice(0, decode_tokens)),
            (range(split.num_decodes, batch.num_reqs), slice(decode_tokens, tokens)),
        )
    )
    metadata = GQAMetadata(
        config=config,
        slot_mapping=batch.slot_mapping,
        num_actual_tokens=tokens,
        num_decodes=split.num_decodes,
        num_decode_tokens=decode_tokens,
        decode=decodes,
        prefill=prefills,
        cache_format=cache_format,
        ownership=ownership,
    )
    return _Planned(metadata, batch, exact)


def _part(
    batch: CommonAttentionMetadata,
    requests: range,
    rows: slice,
    block_size: int,
    ownership: TokenOwnership | None,
    is_cross: bool,
    visible_lens: Int32[Tensor, " T"],
    first_visible: Int32[Tensor, " T"] | None,
) -> PagedAttentionMetadata:
    """Return the plan of consecutive requests, whose query tokens are `rows`, with offsets that start at 0."""
    here = slice(requests.start, requests.stop)
    lens, longest = batch.seq_lens[here], _longest(batch, requests)
    if ownership is not None:
        longest = ownership.most(longest)
        local = [ownership.count(length) for length in lens.tolist()]
        lens = torch.tensor(local, dtype=torch.int32, device=lens.device)
    starts = batch.query_start_loc_cpu.tolist()
    longest_query_len = max((starts[request + 1] - starts[request] for request in requests), default=0)
    return PagedAttentionMetadata(
        block_table=batch.block_table[here],
        seq_lens=lens,
        query_start_loc=batch.query_start_loc[requests.start : requests.stop + 1] - rows.start,
        max_query_len=longest_query_len,
        visible_lens=visible_lens[rows],
        max_seq_len=longest,
        block_size=block_size,
        mask=VISIBLE_LENS if is_cross else decode_mask(longest_query_len, ownership, first_visible is not None),
        first_visible=None if first_visible is None else first_visible[rows],
    )


def _virtual_requests(
    batch: CommonAttentionMetadata, attention_chunk_size: int, block_size: int
) -> CommonAttentionMetadata:
    """Return the virtual requests of chunked local attention, also for a block table without columns."""
    if batch.block_table.shape[1] > 0:
        return make_local_attention_virtual_batches(batch, attention_chunk_size, block_size)
    columns = -(-batch.max_seq_len // block_size)
    table = batch.block_table.new_zeros(batch.num_reqs, columns)
    virtual = make_local_attention_virtual_batches(
        dataclasses.replace(batch, block_table=table), attention_chunk_size, block_size
    )
    return dataclasses.replace(virtual, block_table=virtual.block_table[:, :0])


def _lens_of_requests(
    batch: CommonAttentionMetadata, num_tokens: int, ownership: TokenOwnership | None
) -> Int32[Tensor, " T"]:
    """Return for each query token the number of keys of its request on this rank; 0 for padding tokens."""
    starts, visible = batch.query_start_loc.tolist(), []
    for request, length in enumerate(batch.seq_lens.tolist()):
        keys = length if ownership is None else ownership.count(length)
        visible += [keys] * (starts[request + 1] - starts[request])
    visible += [0] * (num_tokens - len(visible))
    return torch.tensor(visible, dtype=torch.int32, device=batch.seq_lens.device)


def _longest(batch: CommonAttentionMetadata, requests: range) -> int:
    """Return an upper bound of the lengths of some requests: the one of the batch if these are all its requests."""
    if len(requests) == batch.num_reqs:
        return batch.max_seq_len
    lengths = batch.seq_lens_cpu.tolist()
    return max((lengths[request] for request in requests), default=0)


def _check_order(batch: CommonAttentionMetadata, decode_threshold: int, uniform: bool) -> None:
    """Raise if a request that may decode comes after a prefill."""
    decodes = split_decodes_and_prefills(batch, decode_threshold, uniform).num_decodes
    query_lens = batch.query_start_loc_cpu.diff().tolist()
    wanted = next((query_len for query_len in query_lens[:decodes] if query_len > 0), 0)
    for request in range(decodes, batch.num_reqs):
        query_len = query_lens[request]
        late = query_len == wanted if uniform else query_len <= decode_threshold
        if query_len > 0 and late:
            check(False, "common", f"every decode before the first prefill, number {decodes}",
                  f"the decode {request} behind it")  # fmt: skip


def _with_schedule(
    planned: _Planned, num_programs: int, costs: ScheduleCosts, batch_invariant: bool = False
) -> GQAMetadata:
    """Return the plan with the decision of `choose_schedule`, and with a schedule if the decision is for a schedule."""
    metadata, batch = planned.metadata, planned.batch
    decodes, window, ownership = metadata.num_decodes, metadata.config.sliding_window, metadata.ownership
    if planned.exact:
        starts, lens = batch.query_start_loc_cpu[: decodes + 1], batch.seq_lens_cpu[:decodes]
        counted = scheduled_lens(starts, lens, window, ownership)
    else:
        longest = _longest(batch, range(decodes))
        most = longest_scheduled_len(longest, metadata.decode.max_query_len, window, ownership)
        counted = longest_decode_lens(decodes, most)
    choice = choose_schedule(counted, num_programs, costs, batch_invariant)
    schedule = DecodeSchedule(batch_invariant=True, split_rule=costs.split_rule) if batch_invariant else None
    if choice.planned:
        counted = scheduled_lens(batch.query_start_loc[: decodes + 1], batch.seq_lens[:decodes], window, ownership)
        schedule = plan_decode(counted, num_programs, costs, batch_invariant)
    return dataclasses.replace(metadata, schedule=schedule, schedule_choice=choice)
