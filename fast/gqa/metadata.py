"""The plan of a step of grouped-query attention, computed from the batch that an engine's scheduler chose.

A plan has the integers that the attention of one step needs: lengths, slots, visible keys, and a schedule if one saves
time. The host computes the split of the batch and reads no value from a GPU. Kernels compute the tensors of the plan
from the lengths on the device. `reference.gqa.metadata` explains decodes and prefills.

docs/glossary.md explains the terms and the letters of shapes.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from jaxtyping import Int32
from torch import Tensor

from reference.interfaces import (
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
from reference.interfaces.gqa import (
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

from ..backends import BackendChoice, bind
from ..backends.selection import for_part, name_for
from ..planning.batch import split_decodes_and_prefills
from ..planning.decode_schedule import plan_decode
from ..planning.local_attention import make_local_attention_virtual_batches
from ..planning.owned_keys import first_keys, local_counts
from ..planning.visible_lens import compute_visible_lens, scheduled_lens
from .schedule_programs import OP, ScheduledLayer, schedule_programs

PLANNING_OPS = ("compute_visible_lens", "plan_decode")


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
    *,
    backend: BackendChoice = None,
) -> GQAMetadata | EncoderMetadata:
    """Plan one step for the layers of one config.

    The first request with too many query tokens for a decode, and all requests behind it, are prefills.
    `reference.gqa.metadata.build_gqa_metadata` explains which requests decode, the plan of each attention type, and how
    a batch without lengths on the CPU is planned.

    Args:
        common: batch of the step; a `CrossAttentionBatch` for cross attention. With `ownership`, it has the lengths of
            whole sequences and the slots of this rank.
        block_size: tokens per block.
        config: config of the layers. Layers with another window, attention chunk or attention type refuse the plan.
        decode_threshold: largest number of query tokens of a decode (`reorder_batch_threshold`); 1 for layers that are
            no decoders.
        query_len_support: query lengths that the decode kernel supports.
        require_order: if True, a request that may decode behind a prefill is an error.
        ownership: the tokens that this context-parallel rank owns; None if one rank owns all tokens.
        num_programs: number of programs of the schedule; 0 makes no schedule. None takes the number that the backend
            which attends the cache declares for the device (`OpSupport.schedule_programs`), or 1 if this backend
            ignores schedules. A decode gets a schedule only if `choose_schedule` expects that the schedule saves time.
        schedule_costs: costs from which the schedule is computed; None means the defaults of `ScheduleCosts`.
        cache_format: format of the cache. It influences the schedule. Layers with another format refuse the plan.
        dtype: dtype of queries and keys. It influences the schedule. A plan is valid for any dtype.
        backend: backend of the ops `compute_visible_lens` and `plan_decode`: a name, a mapping from op to backend name,
            or None. A name applies to the ops that the backend declares. For every other op, the backend is chosen
            automatically (`fast.backends`). A name or a mapping may also name the backend of `gqa_paged_attention`, or
            of its part "gqa_decode", from which the number of programs follows.

    Returns:
        The plan, with its tensors on the device of `common`; an `EncoderMetadata` for layers without a cache.

    Raises:
        TypeError: an argument has another class; a batch for cross attention has no fields of the encoder.
        ValueError: one of these:

            - `decode_threshold` is below 1, or above 1 with `QueryLenSupport.SINGLE_ONLY` or for layers that are no
              decoders;
            - `common.num_actual_tokens` is not the last of the offsets (checked for offsets on the CPU);
            - `block_size` is not a multiple of 16, or not a divisor of the attention chunk;
            - the slots were made for another block size, or, for CPU tensors, a rank has more slots than new tokens;
            - the block table is narrower than the longest request;
            - an encoder's batch has context;
            - the batch may have prefills and has no lengths on the CPU, and it also lacks CPU offsets or upper bounds;
            - the config has attention chunks, and the lengths are not on the CPU;
            - `require_order` is True, and a decode comes after a prefill.
        UnsupportedConfiguration: ranks share sequences, and the config has ALiBi or attention chunks; the cache format
            is for the latent cache alone; `num_programs` is None, and the named backend cannot attend the cache.
    """
    check_gqa_build(
        config, block_size, decode_threshold, query_len_support, require_order, ownership, num_programs, cache_format,
        dtype,
    )  # fmt: skip
    costs = check_schedule_costs(schedule_costs, "schedule_costs")
    backend = bind(backend, (*PLANNING_OPS, OP))
    if not config.attention_type.cached:
        return _plan_encoder(common, config)
    planned = _plan(
        common, block_size, config, decode_threshold, query_len_support, require_order, ownership, cache_format, backend
    )
    if planned.metadata.num_decode_tokens == 0:
        return planned.metadata
    if num_programs is None:
        layer = ScheduledLayer(config, common.block_table.device, dtype, block_size, cache_format, ownership)
        named = name_for(OP, for_part(backend, "gqa_decode"))
        num_programs = schedule_programs(layer, planned.metadata.decode.max_query_len, named)
    return _with_schedule(planned, num_programs, costs, backend=backend)


class _Planned(NamedTuple):
    """A plan without a schedule, and what a schedule is computed from.

    Attributes:
        metadata: the plan.
        batch: the batch over whose keys the plan was made: virtual requests, or the keys of an encoder.
        exact: True if `batch` has the true lengths on the CPU, False if it has upper bounds.
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
    backend: BackendChoice,
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
    requests, tokens = batch.num_reqs, common.num_actual_tokens
    decodes, decode_tokens = requests, tokens
    if uniform or batch.max_query_len > decode_threshold:
        split = split_decodes_and_prefills(batch, decode_threshold, uniform)
        decodes, decode_tokens = split.num_decodes, split.num_decode_tokens
    one_each = tokens == requests and batch.max_query_len <= 1
    starts, visible = batch.query_start_loc, batch.seq_lens  # with one query token per request, the token sees all keys
    if is_cross and not one_each:
        visible = torch.repeat_interleave(visible, starts.diff(), output_size=tokens)
    elif not one_each:
        visible = compute_visible_lens(starts, visible, tokens, backend=backend)
    first = None
    if config.sliding_window is not None:  # a virtual request has one attention chunk, so its keys begin at 0
        first = first_keys(visible - 1, config.sliding_window, None, ownership)
    visible, lens = local_counts(visible, ownership), local_counts(batch.seq_lens, ownership)
    query_lens = None if one_each else batch.query_start_loc_cpu.diff()
    parts = []
    for begin, end, row, stop in ((0, decodes, 0, decode_tokens), (decodes, requests, decode_tokens, tokens)):
        longest, offsets = _longest(batch, begin, end), starts[begin : end + 1]
        longest_query_len = min(1, end - begin) if one_each else _maximum(query_lens[begin:end])
        parts.append(
            PagedAttentionMetadata(
                block_table=batch.block_table[begin:end],
                seq_lens=lens[begin:end],
                query_start_loc=offsets - row if row else offsets,
                max_query_len=longest_query_len,
                visible_lens=visible[row:stop],
                max_seq_len=longest if ownership is None else ownership.most(longest),
                block_size=block_size,
                mask=VISIBLE_LENS if is_cross else decode_mask(longest_query_len, ownership, first is not None),
                first_visible=None if first is None else first[row:stop],
            )
        )
    metadata = GQAMetadata(
        config=config,
        slot_mapping=batch.slot_mapping,
        num_actual_tokens=tokens,
        num_decodes=decodes,
        num_decode_tokens=decode_tokens,
        decode=parts[0],
        prefill=parts[1],
        cache_format=cache_format,
        ownership=ownership,
    )
    return _Planned(metadata, batch, exact)


def _virtual_requests(
    batch: CommonAttentionMetadata, attention_chunk_size: int, block_size: int
) -> CommonAttentionMetadata:
    """Return the virtual requests of chunked local attention, also for a block table without columns."""
    if batch.block_table.shape[1] > 0:
        return make_local_attention_virtual_batches(batch, attention_chunk_size, block_size)
    # give the table columns, and take them away from the result
    table = batch.block_table.new_zeros(batch.num_reqs, -(-batch.max_seq_len // block_size))
    batch = dataclasses.replace(batch, block_table=table)
    virtual = make_local_attention_virtual_batches(batch, attention_chunk_size, block_size)
    return dataclasses.replace(virtual, block_table=virtual.block_table[:, :0])


def _longest(batch: CommonAttentionMetadata, begin: int, end: int) -> int:
    """Return an upper bound of the lengths of requests [begin, end); the bound of the batch if these are all."""
    return batch.max_seq_len if end - begin == batch.num_reqs else _maximum(batch.seq_lens_cpu[begin:end])


def _maximum(numbers: Int32[Tensor, " X"]) -> int:
    """Return the largest of some numbers on the CPU, or 0 if there are none."""
    return int(numbers.max()) if numbers.numel() else 0


def _check_order(batch: CommonAttentionMetadata, decode_threshold: int, uniform: bool) -> None:
    """Raise if a request that may decode comes after a prefill."""
    decodes = split_decodes_and_prefills(batch, decode_threshold, uniform).num_decodes
    query_lens = batch.query_start_loc_cpu.diff()
    behind = query_lens[decodes:]
    late = behind == _maximum(query_lens[:decodes]) if uniform else behind <= decode_threshold
    late = (late & (behind > 0)).nonzero()
    if late.numel():
        check(False, "common", f"every decode before the first prefill, number {decodes}",
              f"the decode {decodes + int(late[0])} behind it")  # fmt: skip


def _with_schedule(
    planned: _Planned,
    num_programs: int,
    costs: ScheduleCosts,
    batch_invariant: bool = False,
    backend: BackendChoice = None,
) -> GQAMetadata:
    """Return the plan with a `schedule_choice`, and with a schedule if it saves time or `batch_invariant` is True."""
    metadata, batch = planned.metadata, planned.batch
    decodes, window, ownership = metadata.num_decodes, metadata.config.sliding_window, metadata.ownership
    if num_programs == 0:
        counted = batch.seq_lens_cpu[:0]  # `choose_schedule` does not read the lengths
    elif planned.exact:
        starts, lens = batch.query_start_loc_cpu[: decodes + 1], batch.seq_lens_cpu[:decodes]
        counted = scheduled_lens(starts, lens, window, ownership)
    else:
        longest = _longest(batch, 0, decodes)
        most = longest_scheduled_len(longest, metadata.decode.max_query_len, window, ownership)
        counted = longest_decode_lens(decodes, most)
    choice = choose_schedule(counted, num_programs, costs, batch_invariant)
    schedule = DecodeSchedule(batch_invariant=True, split_rule=costs.split_rule) if batch_invariant else None
    if choice.planned:
        counted = scheduled_lens(batch.query_start_loc[: decodes + 1], batch.seq_lens[:decodes], window, ownership)
        schedule = plan_decode(counted, num_programs, costs, batch_invariant, backend=backend)
    return dataclasses.replace(metadata, schedule=schedule, schedule_choice=choice)
