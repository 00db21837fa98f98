"""Argument checks for CUDA graphs of decodes.

A captured plan is a plan (the integers that attention needs) whose tensors a CUDA graph reads in every replay. The kind
of a graph (`GraphSupport`) says which query lengths the batches of its replays may have.
"Read no values" means that a check looks at shapes, dtypes and devices alone, so it does not wait for a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .attention_arguments import check_schedule
from .batch_arguments import (
    check_batch_block_size,
    check_batch_size,
    check_common,
    check_num_tokens,
    check_table_width,
)
from .bounds import has_host_lens, longest_decode_lens
from .builder import AttentionMetadataBuilder, captured_batch, most_captured_tokens
from .cache_format import CacheFormat
from .checks import check, check_int, check_tensor, check_type, is_positive_int
from .decode_schedule import DecodeSchedule
from .errors import UnsupportedConfiguration
from .gqa.metadata import GQAMetadata, PagedAttentionMetadata
from .graphs import GraphBuffers, captured_tensors, check_not_replaced
from .metadata import CommonAttentionMetadata, DecodeMetadata, MLAMetadata
from .ownership import ONE_RANK, get_dcp_local_seq_lens
from .support import GraphSupport, QueryLenSupport

CPU = torch.device("cpu")
FORMAT_AND_MODE = ("cache_format", "fp8_mode")  # attributes that must be equal in the builder, layers and plans


def requests_with_tokens(common: CommonAttentionMetadata) -> int:
    """Return the number of requests up to and including the last request that has a query token.

    If `query_start_loc_cpu` is None, the result is the number of all requests.
    """
    starts = common.query_start_loc_cpu
    if starts is None:
        return common.num_reqs
    return int((starts[:-1] < starts[-1]).sum())


def longest_query(common: CommonAttentionMetadata) -> int:
    """Return the length of the longest query; if `query_start_loc_cpu` is None, return its bound `max_query_len`."""
    if common.query_start_loc_cpu is None:
        return common.max_query_len if common.num_reqs else 0
    lens = common.query_start_loc_cpu.diff()
    return int(lens.max()) if lens.numel() else 0


def has_one_query_len(common: CommonAttentionMetadata, length: int) -> bool:
    """Return whether every request has `length` query tokens. Requests at the end of the batch may also have none.

    If `query_start_loc_cpu` is None, the position of a request without query tokens is unknown. The result is then True
    if all requests together have B * `length` query tokens.
    """
    if common.query_start_loc_cpu is None:
        return common.num_actual_tokens == common.num_reqs * length
    return bool((common.query_start_loc_cpu.diff()[: requests_with_tokens(common)] == length).all())


def graph_kind(common: CommonAttentionMetadata, threshold: int, support: GraphSupport) -> GraphSupport:
    """Return the kind of CUDA graph that serves a batch of decodes.

    Args:
        common: the batch.
        threshold: largest query length of a decode.
        support: the kind that the builder of the plan supports.

    Returns:
        NONE if no graph can serve the batch. ONE_QUERY_LEN if all requests have the same query length
        (`has_one_query_len`), and this length is 1 or `support` is ONE_QUERY_LEN. Otherwise ANY.
    """
    check_common(common, host_lens=False)
    longest = longest_query(common)
    if support is GraphSupport.NONE or not 1 <= longest <= threshold or common.num_actual_tokens == 0:
        return GraphSupport.NONE
    if common.query_start_loc_cpu is not None and int(common.query_start_loc_cpu.diff().min()) < 0:
        return GraphSupport.NONE
    if has_one_query_len(common, longest) and (longest == 1 or support is GraphSupport.ONE_QUERY_LEN):
        return GraphSupport.ONE_QUERY_LEN
    return support if support is GraphSupport.ANY else GraphSupport.NONE


def check_captured_lens(common: CommonAttentionMetadata, graph: GraphSupport) -> int:
    """Check a batch for a captured plan, and return the number of query tokens of this plan, padding included.

    Args:
        common: the batch; no query of any replay may be longer than `max_query_len`.
        graph: kind of the graph.

    Raises:
        TypeError: `common` is not a `CommonAttentionMetadata`, or `graph` is not a `GraphSupport`.
        ValueError: shapes, dtypes or devices do not match; the batch has no request or no query token; the query
            lengths do not fit `graph` and `max_query_len`; there are fewer slots than tokens.
    """
    check_common(common, host_lens=False)
    check_type("graph", graph, GraphSupport)
    check(graph is not GraphSupport.NONE, "graph", "ONE_QUERY_LEN or ANY", graph.name)
    requests, longest = common.num_reqs, common.max_query_len
    check(requests > 0 and longest > 0, "common", "at least one request with a query token",
          f"{requests} requests of at most {longest} tokens")  # fmt: skip
    tokens = common.num_actual_tokens
    if graph is GraphSupport.ONE_QUERY_LEN:
        if not has_one_query_len(common, longest):
            starts = common.query_start_loc_cpu
            found = (
                f"{tokens} tokens in {requests} requests" if starts is None else f"lengths {starts.diff().tolist()[:8]}"
            )
            check(False, "common", f"decodes of one query length, {longest}", found)
        tokens = requests * longest
    found = longest_query(common)
    check(found <= longest, "common.max_query_len", f"at least the longest query, {found}", longest)
    check(0 < tokens <= requests * longest, "common.num_actual_tokens",
          f"an int in [1, {requests * longest}] for {requests} requests of at most {longest} tokens",
          tokens)  # fmt: skip
    slots = common.slot_mapping.shape[0]
    check(slots >= tokens, "common.slot_mapping", f"at least {tokens} slots", slots)
    return tokens


def batch_of_capture(
    builder: AttentionMetadataBuilder, common: CommonAttentionMetadata, kind: GraphSupport, threshold: int
) -> CommonAttentionMetadata:
    """Return the batch of a capture, with `max_query_len` and `max_seq_len` as upper bounds for every replay.

    Args:
        builder: builder that plans the graph.
        common: the batch, in the buffers that the graph reads.
        kind: kind of the graph that serves the batch (`graph_kind`).
        threshold: largest query length of a decode.

    Raises:
        ValueError: no graph can serve the batch; the batch has more or longer requests than the builder allows; the
            slots were computed for another block size; the block table has too few columns.
    """
    one = "" if builder.graph_support is GraphSupport.ANY else "one query length "
    check(kind is not GraphSupport.NONE, "common", f"decodes of {one}up to {threshold} tokens",
          f"{common.num_actual_tokens} tokens in {common.num_reqs} requests of at most {common.max_query_len}",
          )  # fmt: skip
    check_batch_size(common, builder.max_num_seqs, builder.max_model_len)
    longest = most_captured_tokens(builder, common.block_table.shape[1])
    common = replace(common, max_query_len=longest_query(common), max_seq_len=longest)
    _check_blocks_of(builder, common)
    return common


def batch_of_update(
    builder: AttentionMetadataBuilder,
    captured: MLAMetadata | GQAMetadata,
    common: CommonAttentionMetadata,
    kind: type = MLAMetadata,
) -> CommonAttentionMetadata:
    """Return the batch of the next replay, with `max_query_len`, number of tokens and slots of the captured plan.

    Args:
        builder: builder that plans the graph.
        captured: the captured plan.
        common: the batch of the next replay.
        kind: type of the builder's plans.

    Raises:
        TypeError: `captured` is not the plan of a decode of type `kind`, or `common` is not a batch.
        ValueError: the batch has another number of requests, or more query tokens, than the captured plan; the batch
            has more or longer requests than the builder allows; a request has more keys on this rank than the captured
            plan allows; the slots were computed for another block size; the block table has too few columns.
    """
    check_update(captured, common, builder.block_size, kind)
    check_batch_size(common, builder.max_num_seqs, builder.max_model_len)
    owned = ONE_RANK if builder.ownership is None else builder.ownership
    if not has_host_lens(common):
        lens = longest_decode_lens(common.num_reqs, owned.most(common.max_seq_len))
    elif owned.size == 1:
        lens = common.seq_lens_cpu
    else:
        lens = get_dcp_local_seq_lens(common.seq_lens_cpu, owned.size, owned.rank, owned.interleave)
    bound, longest = captured.decode.max_seq_len, int(lens.max())
    check(longest <= bound, "common", f"at most {bound} keys a request, as captured", longest)
    common = replace(
        common,
        max_query_len=captured.decode.max_query_len,
        num_actual_tokens=captured.num_decode_tokens,
        slot_mapping=captured.slot_mapping,
    )
    _check_blocks_of(builder, common)
    return common


def _check_blocks_of(builder: AttentionMetadataBuilder, common: CommonAttentionMetadata) -> None:
    """Check that a batch has the block size of the builder, and a block table with enough columns."""
    owned = ONE_RANK if builder.ownership is None else builder.ownership
    check_batch_block_size(common, builder.block_size)
    check_table_width(common, builder.block_size * owned.size)


def check_update(
    captured: MLAMetadata | GQAMetadata, common: CommonAttentionMetadata, block_size: int, kind: type = MLAMetadata
) -> None:
    """Check that a captured plan has room for the decodes of another batch; read no values on the device.

    Args:
        captured: the captured plan.
        common: the batch.
        block_size: tokens per block; the captured plan must have the same block size.
        kind: type that the captured plan must have.
    """
    check_type("captured", captured, kind)
    check_type("captured.decode", captured.decode, PagedAttentionMetadata if kind is GQAMetadata else DecodeMetadata)
    check_int("captured.num_decodes", captured.num_decodes, 0)
    check_int("captured.decode.max_query_len", captured.decode.max_query_len, 0)
    check_int("captured.decode.max_seq_len", captured.decode.max_seq_len, 0)
    check_int("captured.decode.block_size", captured.decode.block_size)
    check(captured.decode.block_size == block_size, "captured.decode.block_size",
          f"{block_size}, as in the builder", captured.decode.block_size)  # fmt: skip
    check_type("captured.schedule", captured.schedule, (DecodeSchedule, type(None)), "a DecodeSchedule or None")
    check_type("captured.decode.graph", captured.decode.graph, GraphSupport)
    check_common(common, host_lens=False)
    check_num_tokens(common, exactly=False)
    requests, tokens, longest = captured.num_decodes, captured.num_decode_tokens, captured.decode.max_query_len
    starts = common.query_start_loc_cpu
    if captured.decode.graph is GraphSupport.ANY:
        fits = longest_query(common) <= longest and common.num_actual_tokens <= tokens
        fits = fits and (starts is None or bool((starts.diff() >= 0).all()))
        wanted = f"{requests} requests of at most {longest} tokens, {tokens} in all, as captured"
    else:
        fits = has_one_query_len(common, longest)
        fits = fits and common.num_actual_tokens <= tokens
        wanted = f"{requests} requests of {longest} tokens, as captured"
    got = f"{common.num_actual_tokens} tokens in {common.num_reqs} requests of at most {longest_query(common)}"
    check(fits and common.num_reqs == requests, "common", wanted, got)


def check_captured(captured: MLAMetadata | GQAMetadata, plan: MLAMetadata | GQAMetadata) -> None:
    """Check that the tensors of `plan` can be copied into the tensors of a captured plan; read no values."""
    check_type("captured.cache_format", captured.cache_format, CacheFormat)
    check(captured.cache_format == plan.cache_format, "captured.cache_format",
          f"{plan.cache_format.name}, the builder's format", captured.cache_format.name)  # fmt: skip
    pairs = [("decode.seq_lens", captured.decode.seq_lens, plan.decode.seq_lens),
             ("decode.visible_lens", captured.decode.visible_lens, plan.decode.visible_lens)]  # fmt: skip
    if isinstance(plan, GQAMetadata):
        check(captured.config == plan.config, "captured.config", "the builder's config", "another config")
        check(captured.prefill_schedule is None, "captured.prefill_schedule", "None", captured.prefill_schedule)
        check(captured.ownership == plan.ownership, "captured.ownership", f"{plan.ownership}, as in the builder",
              captured.ownership)  # fmt: skip
        if plan.decode.first_visible is not None:
            pairs += [("decode.first_visible", captured.decode.first_visible, plan.decode.first_visible)]
    else:
        check(captured.fp8_mode == plan.fp8_mode, "captured.fp8_mode", f"{plan.fp8_mode}, the builder's mode",
              captured.fp8_mode)  # fmt: skip
    check(captured.schedule is not None or plan.schedule is None, "captured.schedule",
          "a schedule as in the plan of the batch", None)  # fmt: skip
    if captured.schedule is not None:
        check_schedule(captured.schedule, captured.num_decodes, plan.decode.seq_lens.device, "captured.schedule")
        check(plan.schedule is not None, "captured.schedule", "None as in the plan of the batch", "a schedule")
        invariant = plan.schedule.batch_invariant
        check(captured.schedule.batch_invariant == invariant, "captured.schedule.batch_invariant",
              f"{invariant} as in the plan of the batch", captured.schedule.batch_invariant)  # fmt: skip
        check(captured.schedule.split_rule == plan.schedule.split_rule or not invariant, "captured.schedule.split_rule",
              f"{plan.schedule.split_rule} as in the plan of the batch", captured.schedule.split_rule)  # fmt: skip
        if captured.schedule.tile_ranges is not None:
            pairs += [("schedule.tile_ranges", captured.schedule.tile_ranges, plan.schedule.tile_ranges)]
    check(captured.decode.backend == plan.decode.backend, "captured.decode.backend",
          f"{plan.decode.backend}, the builder's decode backend", captured.decode.backend)  # fmt: skip
    check(captured.decode.mask == plan.decode.mask, "captured.decode.mask", f"{plan.decode.mask}, the batch's mask",
          captured.decode.mask)  # fmt: skip
    check(captured.decode.ownership == plan.decode.ownership, "captured.decode.ownership",
          f"{plan.decode.ownership}, as in the builder", captured.decode.ownership)  # fmt: skip
    totals = plan.decode.total_seq_lens
    if totals is None:
        check_type("captured.decode.total_seq_lens", captured.decode.total_seq_lens, type(None), "None")
    else:
        pairs += [("decode.total_seq_lens", captured.decode.total_seq_lens, totals)]
    held, made = captured.decode.prepared, plan.decode.prepared
    check_type("captured.decode.prepared", held, tuple, "a tuple of tensors")
    check(len(held) == len(made), "captured.decode.prepared", f"{len(made)} tensors", len(held))
    pairs += [(f"decode.prepared[{number}]", *both) for number, both in enumerate(zip(held, made, strict=True))]
    for name, held, made in pairs:
        check_tensor(f"captured.{name}", held, tuple(made.shape), (made.dtype,), made.device)
    check_type("captured.captured", captured.captured, (tuple, type(None)), "a tuple or None")
    check(captured.captured is not None, "captured", "a plan of build_for_cudagraph_capture", "the plan of one step")
    requests, device = captured.num_decodes, plan.decode.seq_lens.device
    check_tensor("captured.decode.block_table", captured.decode.block_table, (requests, "W"), (torch.int32,), device)
    check_tensor(
        "captured.decode.query_start_loc", captured.decode.query_start_loc, (requests + 1,), (torch.int32,), device
    )
    check_not_replaced(captured.captured, captured_tensors(captured))


def check_graph_support(graph_support: GraphSupport | None, query_len_support: QueryLenSupport) -> GraphSupport:
    """Return `graph_support`; if it is None, return ONE_QUERY_LEN for decode kernels with UNIFORM, or else ANY."""
    check_type("graph_support", graph_support, (GraphSupport, type(None)), "a GraphSupport or None")
    one_length = query_len_support is QueryLenSupport.UNIFORM
    if graph_support is None:
        return GraphSupport.ONE_QUERY_LEN if one_length else GraphSupport.ANY
    check(not one_length or graph_support is not GraphSupport.ANY, "graph_support",
          "NONE or ONE_QUERY_LEN with a decode kernel for UNIFORM query lengths", graph_support.name)  # fmt: skip
    return graph_support


def check_graph_sizes(
    builder: AttentionMetadataBuilder, batch_sizes: Sequence[int], max_blocks: int, hidden_size: int, query_len: int
) -> None:
    """Check the builder and the sizes of a `DecodeGraph`: batches, columns of block tables, hidden size, query length.

    Raises:
        TypeError: `builder` is not a builder.
        ValueError: a size is below 1, or above the builder's limit.
        UnsupportedConfiguration: the builder has an attribute `graph_refusals` with reasons why no graph can serve its
            layers.
    """
    check_type("builder", builder, AttentionMetadataBuilder)
    if reasons := getattr(builder, "graph_refusals", ()):
        raise UnsupportedConfiguration(reasons)
    check_type("batch_sizes", batch_sizes, Sequence, "at least one positive int")
    sizes = list(batch_sizes)
    check(bool(sizes) and all(is_positive_int(size) for size in sizes), "batch_sizes", "at least one positive int",
          sizes)  # fmt: skip
    most = builder.max_num_seqs
    check(max(sizes) <= most, "batch_sizes", f"at most {most}, the builder's max_num_seqs", max(sizes))
    for name, value in (("max_blocks", max_blocks), ("hidden_size", hidden_size), ("query_len", query_len)):
        check_int(name, value)
    block_size = builder.block_size
    check(
        max_blocks * block_size < 2**31, "max_blocks", f"fewer than 2^31 tokens in blocks of {block_size}", max_blocks
    )


def check_graph_query_len(graph: Any) -> None:
    """Check that the builder of a `DecodeGraph` can plan batches of the graph's query length for a CUDA graph."""
    padding = GraphBuffers.of_padding(1, graph.query_len, graph.max_blocks, graph.hidden_size, graph.dtype, CPU)
    served = graph.builder.can_run_in_cudagraph(captured_batch(graph, padding))
    check(served, "query_len", "a query length that the builder can plan for a CUDA graph", graph.query_len)


def check_graph_formats(graph: Any) -> None:
    """Check that builder and layers of a `DecodeGraph` have the `cache_format` and the `fp8_mode` of the graph."""
    for name in FORMAT_AND_MODE:
        held = getattr(graph, name)
        _check_same(f"builder.{name}", held, getattr(graph.builder, name, None), "as in the graph")
        for index, layer in enumerate(graph.layers):
            _check_same(f"layers[{index}].{name}", held, getattr(layer, name, None), "as in the builder")


def check_graph_plan(graph: Any, plan: Any) -> None:
    """Check that a plan has the `cache_format` and `fp8_mode` of a `DecodeGraph`, if the plan has these attributes."""
    for name in FORMAT_AND_MODE:
        held = getattr(graph, name)
        _check_same(f"plan.{name}", held, getattr(plan, name, held), "as in the graph")


def _check_same(argument: str, held: CacheFormat | str | None, found: object, where: str) -> None:
    """Check that the format or mode `found` is equal to `held`, the format or mode of a `DecodeGraph`."""
    if found is not held and found != held:
        wanted, got = (each.name if isinstance(each, CacheFormat) else each for each in (held, found))
        check(False, argument, f"{wanted}, {where}", got)


def check_graph_batch(graph: Any, hidden_states: Tensor, positions: Tensor, common: CommonAttentionMetadata) -> None:
    """Check that a batch fits into the buffers of a `DecodeGraph`; read no values on the device."""
    check_common(common, host_lens=False)
    check_num_tokens(common)
    largest, q = graph.batch_sizes[-1], graph.query_len
    requests, tokens = common.num_reqs, common.num_actual_tokens
    used = requests_with_tokens(common)
    check(used <= largest, "common", f"at most {largest} requests, the largest of batch_sizes", used)
    mixed = graph.graph_support is GraphSupport.ANY
    wanted = f"{'at most ' * mixed}{q} tokens of each request, as captured"
    if common.query_start_loc_cpu is None:
        longest = common.max_query_len
        check(longest <= q and (tokens <= used * q if mixed else tokens == used * q), "common", wanted,
              f"{tokens} tokens in {used} requests of at most {longest}")  # fmt: skip
    else:
        lens = common.query_start_loc_cpu.diff()
        wrong = ((lens < 0) | (lens > q) if mixed else lens[:used] != q).nonzero()
        if wrong.numel():
            request = int(wrong[0])
            check(False, "common", wanted, f"{int(lens[request])} at request {request}")
    block_size, ownership = graph.builder.block_size, graph.builder.ownership
    check_batch_block_size(common, block_size)
    width = common.block_table.shape[1]
    check(width <= graph.max_blocks, "common.block_table", f"at most {graph.max_blocks} columns, as captured", width)
    owned = ONE_RANK if ownership is None else ownership
    check_table_width(common, block_size * owned.size)
    most = graph.max_seq_len
    if not has_host_lens(common):
        check(common.max_seq_len <= most, "common.max_seq_len", f"at most {most}, as captured", common.max_seq_len)
    elif (longer := (common.seq_lens_cpu > most).nonzero()).numel():
        request = int(longer[0])
        check(False, "common", f"at most {most} tokens a request, as captured",
              f"{int(common.seq_lens_cpu[request])} at request {request}")  # fmt: skip
    check_tensor("hidden_states", hidden_states, (tokens, graph.hidden_size), (graph.dtype,), graph.device)
    check_tensor("positions", positions, (tokens,), (torch.int64,), graph.device)
    check_tensor("common.block_table", common.block_table, (requests, "W"), (torch.int32,), graph.device)
    check_tensor("common.seq_lens", common.seq_lens, (requests,), (torch.int32,), graph.device)
    check_tensor("common.slot_mapping", common.slot_mapping, ("slots",), (torch.int64,), graph.device)
    check(common.slot_mapping.shape[0] >= tokens, "common.slot_mapping", f"at least {tokens} slots",
          common.slot_mapping.shape[0])  # fmt: skip
