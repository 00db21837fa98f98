"""The builder of grouped-query attention, which makes the plan of each step of an engine.

`reference.gqa.builder` explains steps, plans, schedules and cascades. docs/glossary.md explains the other terms and the
letters of shapes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from jaxtyping import Int32
from torch import Tensor

from reference.distributed.arguments import check_invariant_merge
from reference.distributed.groups import ContextParallel
from reference.interfaces import (
    COMPUTE_FORMAT,
    UNDIVIDED,
    VISIBLE_LENS,
    CacheFormat,
    CascadeCosts,
    CommonAttentionMetadata,
    GraphSupport,
    QueryLenSupport,
    ScheduleCosts,
    UnsupportedConfiguration,
    batch_of_capture,
    batch_of_update,
    captured_tensors,
    check_batch_size,
    check_captured,
    check_cascade_costs,
    check_common_prefix,
    check_device,
    check_dtype,
    check_flag,
    check_graph_support,
    check_int,
    check_not_negative,
    check_schedule_costs,
    check_tensor,
    check_type,
    graph_kind,
    has_host_lens,
    reorder_batch_threshold,
    write_captured,
)
from reference.interfaces.gqa import (
    EncoderMetadata,
    GQAConfig,
    GQAMetadata,
    check_decoders_only,
    check_gqa_planning,
    check_graph_config,
    graph_refusals,
    supports_cascade,
)

from ..backends import BackendChoice, bind_with_environment, support_of
from ..backends.selection import for_part, name_for
from ..kernels.device import device_facts
from ..kernels.schedule_costs import cascade_costs_of
from ..planning.batch import reorder_batch_to_split_decodes_and_prefills
from ..planning.shared_prefix import split_shared_prefix
from .captured import plan_captured_gqa_decodes
from .choose_cascade import use_gqa_cascade_attention
from .metadata import PLANNING_OPS, _plan, _plan_encoder, _Planned, _with_schedule
from .schedule_programs import OP, ScheduledLayer, schedule_programs


class GQAMetadataBuilder:
    """Make the plan of each step; the class has the methods that vLLM calls on its metadata builders.

    A plan has the integers that the attention of one step needs: lengths, slots, visible keys, and a schedule if one
    saves time. `reference.interfaces.AttentionMetadataBuilder` explains the methods.

    Args:
        config: config of the layers; all layers of a builder must agree (`group_layers`).
        block_size: tokens per block, a multiple of 16 and a divisor of the attention chunk.
        max_model_len: largest number of tokens of a request.
        max_num_seqs: largest number of requests in a batch.
        query_len_support: query lengths that the decode kernel supports; None means VARLEN.
        num_speculative_tokens: number of drafted tokens of a request in one step; 0 for layers that are no decoders.
        num_programs: number of programs of a schedule. `build` makes a schedule only if `choose_schedule` expects that
            the schedule saves time. The value is one of these:

            - None: the number that the backend which attends the cache declares for the device
              (`OpSupport.schedule_programs`); 1 if this backend ignores schedules;
            - 0: no decode gets a schedule;
            - a positive int: this number;
            - a function: it takes the length of the longest query in the decode and returns the number.

        batch_invariant: if True, the output of a request over the cache does not depend on the other requests or on
            the number of programs, bit for bit, if the request is a decode in every batch, or a prefill in every batch.
            Prefills then have `UNDIVIDED` as their schedule.
        context_parallel: groups of the ranks that share sequences, or None. With groups, `config` has all heads of the
            layer, the batches have the lengths of whole sequences and the slots of this rank, and no plan has a
            cascade.
        schedule_costs: costs from which schedules are computed; None means the defaults of `ScheduleCosts`.
        cache_format: format of the cache. It influences the choice of a cascade. Layers with another format refuse the
            plans.
        dtype: dtype of queries and keys. It influences the choice of a cascade.
        graph_support: batches for which a captured CUDA graph can be replayed (`GraphSupport`). None takes
            ONE_QUERY_LEN if `query_len_support` is UNIFORM, and ANY otherwise. If all requests of a graph have one
            query token, the plan of the graph has the kind ONE_QUERY_LEN, which more backends support.
        cascade_costs: costs from which the time of a cascade is estimated; None takes the costs of
            `device` (`cascade_costs_of`).
        num_processors: number of processors in the estimate of a cascade (`use_gqa_cascade_attention`). None means the
            multiprocessors of `device` if it is a GPU, and 1 otherwise.
        device: device of the batches; None means PyTorch's default device (`torch.get_default_device`) at the time of
            the call. Only `num_processors` and `cascade_costs` depend on it. `build` and `use_cascade_attention` use
            the same numbers, also for a batch on another device.
        backend: backend of the ops `compute_visible_lens` and `plan_decode`: a name, a mapping from op to backend name,
            or None. A name or a mapping may also name the backend of `gqa_paged_attention`, or of its part
            "gqa_decode", from which the number of programs follows. The environment may name it too
            (`fast.backends.environment`).

    Attributes:
        device: device whose processors count in the estimate of a cascade.
        graph_refusals: reasons why no CUDA graph can serve the layers; empty if a graph can serve them.

    Raises:
        ValueError: in one of these cases:

            - a number is below its minimum;
            - the number of tensor-parallel ranks does not divide the number of heads;
            - `batch_invariant` is True and the ranks merge with "ag_rs";
            - `graph_support` is ANY and `query_len_support` is UNIFORM;
            - the attention chunk is not a multiple of `block_size`;
            - `num_speculative_tokens` is above 0 for layers that are no decoders.

        UnsupportedConfiguration: ranks share sequences, and the config has ALiBi or attention chunks, or heads that
            these ranks cannot share (`ContextParallel.local_gqa_config`); the cache format is for the latent cache
            alone; the named decode backend does not support the graphs of `graph_support`; `batch_invariant` is True,
            and the named backend of decodes or prefills is not batch-invariant.
    """

    def __init__(
        self,
        config: GQAConfig,
        block_size: int,
        max_model_len: int,
        max_num_seqs: int,
        query_len_support: QueryLenSupport | None = None,
        num_speculative_tokens: int = 0,
        num_programs: int | Callable[[int], int] | None = None,
        batch_invariant: bool = False,
        context_parallel: ContextParallel | None = None,
        schedule_costs: ScheduleCosts | None = None,
        cache_format: CacheFormat = COMPUTE_FORMAT,
        dtype: torch.dtype = torch.bfloat16,
        graph_support: GraphSupport | None = None,
        cascade_costs: CascadeCosts | None = None,
        *,
        num_processors: int | None = None,
        device: torch.device | str | None = None,
        backend: BackendChoice = None,
    ):
        check_invariant_merge(context_parallel, batch_invariant)
        self.ownership = None if context_parallel is None else context_parallel.ownership
        check_gqa_planning(config, block_size, self.ownership, cache_format)
        check_int("max_model_len", max_model_len)
        check_int("max_num_seqs", max_num_seqs)
        check_schedule_costs(schedule_costs, "schedule_costs")
        check_cascade_costs(cascade_costs, "cascade_costs")
        check_dtype("dtype", dtype)
        cache_format.dtype_for(dtype)  # raises if the format does not support the dtype
        check_type("query_len_support", query_len_support, (QueryLenSupport, type(None)), "a QueryLenSupport or None")
        query_len_support = QueryLenSupport.VARLEN if query_len_support is None else query_len_support
        # raises if the ranks cannot share the heads
        local = config if context_parallel is None else context_parallel.local_gqa_config(config)
        if num_programs is not None and not callable(num_programs):
            check_int("num_programs", num_programs, 0, "an int >= 0, a function or None")
        self.config, self.block_size = config, block_size
        self.max_model_len, self.max_num_seqs = max_model_len, max_num_seqs
        self.query_len_support = query_len_support
        self.num_programs, self.batch_invariant = num_programs, batch_invariant
        self.schedule_costs, self.cache_format, self.dtype = schedule_costs, cache_format, dtype
        if num_processors is not None:
            check_int("num_processors", num_processors, 1, "a positive int or None")
        self.num_processors = num_processors
        self.device = torch.get_default_device() if device is None else check_device("device", device)
        self.cascade_costs = cascade_costs_of(self.device) if cascade_costs is None else cascade_costs
        self.backend = bind_with_environment(backend, (*PLANNING_OPS, OP))
        self._decode_backend, prefill_backend = (
            name_for(OP, for_part(self.backend, part)) for part in ("gqa_decode", "gqa_prefill")
        )
        self._decode_support = None if self._decode_backend is None else support_of(self._decode_backend, OP)
        reasons = _not_invariant(self._decode_backend, prefill_backend) if batch_invariant else []
        graph_support = self._supported_graphs(
            check_graph_support(graph_support, query_len_support), graph_support, reasons
        )
        self.graph_refusals = graph_refusals(config)
        self._graph_support = GraphSupport.NONE if self.graph_refusals else graph_support
        self._layer = ScheduledLayer(local, self.device, dtype, block_size, cache_format, self.ownership)
        self.reorder_batch_threshold = reorder_batch_threshold(query_len_support, num_speculative_tokens)
        check_decoders_only(config, "num_speculative_tokens", num_speculative_tokens, 0)

    def _supported_graphs(self, wanted: GraphSupport, given: GraphSupport | None, reasons: list[str]) -> GraphSupport:
        """Return which graphs the builder serves with the named decode backend.

        Args:
            wanted: graphs that the query lengths of the builder allow.
            given: argument of the constructor; None lets the backend limit the graphs.
            reasons: why the named backends cannot serve the builder, other than graphs.

        Raises:
            UnsupportedConfiguration: there are reasons, or the named decode backend does not support the graphs.
        """
        support, name = self._decode_support, self._decode_backend
        covers = support is None or support.graph.covers(wanted)
        if not covers and given is not None:
            reason = f"{name}: has graph support '{support.graph.value}', got graph_support '{wanted.value}'"
            reasons = [*reasons, reason]
        if reasons:
            raise UnsupportedConfiguration(reasons)
        return wanted if covers else support.graph

    def build(
        self, common_prefix_len: int, common: CommonAttentionMetadata, fast_build: bool = False
    ) -> GQAMetadata | EncoderMetadata:
        """Return the plan of one step; an `EncoderMetadata` for layers without a cache.

        Args:
            common_prefix_len: number of context tokens that all decodes share; 0 for layers that are no decoders. The
                plan attends these tokens once for all decodes (a cascade) if a cascade is faster
                (`use_cascade_attention`).
            common: batch of the step, a `CrossAttentionBatch` for cross attention; its requests may have any order. If
                the batch has no lengths on the CPU, the plan has no cascade, and `choose_schedule` decides from upper
                bounds of the lengths.
            fast_build: if True, save time on the host: make no cascade and, unless the builder is batch-invariant, no
                schedule.

        Raises:
            TypeError: a batch for cross attention has no fields of the encoder.
            ValueError: in one of these cases:

                - `build_gqa_metadata` raises ValueError;
                - `common_prefix_len` is longer than a context, or above 0 for layers that are no decoders;
                - the batch has more than `max_num_seqs` requests, or a request has more than `max_model_len` tokens.
        """
        check_int("common_prefix_len", common_prefix_len, 0)
        check_decoders_only(self.config, "common_prefix_len", common_prefix_len, 0)
        check_flag("fast_build", fast_build)
        check_batch_size(common, self.max_num_seqs, self.max_model_len)
        if not self.config.attention_type.cached:
            return _plan_encoder(common, self.config)
        if not has_host_lens(common):  # the engine's `max_seq_len` may be above `max_model_len`
            common = dataclasses.replace(common, max_seq_len=min(common.max_seq_len, self.max_model_len))
        planned = _plan(
            common, self.block_size, self.config, self.reorder_batch_threshold, self.query_len_support, False,
            self.ownership, self.cache_format, self.backend,
        )  # fmt: skip
        if self.batch_invariant and planned.metadata.num_prefills > 0:
            undivided = dataclasses.replace(planned.metadata, prefill_schedule=UNDIVIDED)
            planned = planned._replace(metadata=undivided)
        if planned.metadata.num_decode_tokens == 0 or (fast_build and not self.batch_invariant):
            return planned.metadata
        return self._with_hints(planned, common_prefix_len, common)

    def _with_hints(self, planned: _Planned, common_prefix_len: int, common: CommonAttentionMetadata) -> GQAMetadata:
        """Return the plan with a cascade or a schedule, if one of the two is estimated to make the decode faster."""
        metadata = planned.metadata
        if common_prefix_len > 0 and self._may_cascade() and has_host_lens(common):
            check_common_prefix(common, common_prefix_len, metadata.num_decodes)
            lengths = common.seq_lens_cpu[: metadata.num_decodes]
            query_lens = common.query_start_loc_cpu[: metadata.num_decodes + 1].diff()
            if self._cascade_pays(common_prefix_len, query_lens, lengths):
                row = int((lengths > 0).int().argmax())
                cascade = split_shared_prefix(metadata.decode, common_prefix_len, self.block_size, row)
                return dataclasses.replace(metadata, cascade=cascade)
        programs = self._programs_for(metadata.decode.max_query_len)
        costs = check_schedule_costs(self.schedule_costs)
        return _with_schedule(planned, programs, costs, self.batch_invariant, self.backend)

    def _may_cascade(self) -> bool:
        """Return whether any step may have a cascade."""
        support = self._decode_support
        any_mask = support is None or VISIBLE_LENS in support.masks  # the decodes attend their prefix without a mask
        return supports_cascade(self.config) and not self.batch_invariant and self.ownership is None and any_mask

    def _programs_for(self, query_len: int) -> int:
        """Return the number of programs of a schedule; 0 makes no schedule."""
        if self.num_programs is None:
            return schedule_programs(self._layer, query_len, self._decode_backend)
        if callable(self.num_programs):
            programs = self.num_programs(query_len)
            check_int("num_programs", programs, 0, "a function that gives at least 0")
            return programs
        return self.num_programs

    def build_for_cudagraph_capture(self, common: CommonAttentionMetadata) -> GQAMetadata:
        """Return a plan for a CUDA graph that is captured once and replayed for other batches.

        A batch of a replay has the same number of requests as `common`. It has at most as many query tokens as
        `common`, and no query is longer than the longest query of `common`. A request may have up to `max_model_len`
        tokens.

        The caller calls this function during the capture or before the capture.
        `reference.gqa.builder.GQAMetadataBuilder.build_for_cudagraph_capture` explains these two ways.

        Args:
            common: batch of the capture. Its tensors are the buffers that the caller overwrites before each replay.

        Raises:
            ValueError: `can_run_in_cudagraph` is False for the batch, the batch has more than `max_num_seqs` requests,
                or a request has more than `max_model_len` tokens.
            UnsupportedConfiguration: no graph can serve the layers (`graph_refusals`).
        """
        check_graph_config(self.config)
        kind = self._graph_kind(common)
        plan = self._plan_captured(batch_of_capture(self, common, kind, self.reorder_batch_threshold), kind)
        return dataclasses.replace(plan, captured=captured_tensors(plan))

    def _plan_captured(self, common: CommonAttentionMetadata, graph: GraphSupport) -> GQAMetadata:
        """Return the plan of a batch whose `max_seq_len` is an upper bound of the lengths in every replay."""
        programs = self._programs_for(common.max_query_len)
        return plan_captured_gqa_decodes(
            common, self.block_size, self.config, programs, self.schedule_costs, self.batch_invariant, self.ownership,
            graph, self.cache_format, backend=self.backend,
        )  # fmt: skip

    def update_captured(self, captured: GQAMetadata, common: CommonAttentionMetadata) -> None:
        """Write the plan of the next replay's batch into the tensors of the captured plan, which the graph reads.

        `reference.gqa.builder.GQAMetadataBuilder.update_captured` lists the tensors that the caller writes itself.

        Args:
            captured: plan that `build_for_cudagraph_capture` returned before the capture.
            common: the batch of the next replay.

        Raises:
            ValueError: the batch is too large for the captured plan, or a tensor of the captured plan was replaced.
                Nothing has been written then.
        """
        batch = batch_of_update(self, captured, common, GQAMetadata)
        plan = self._plan_captured(batch, captured.decode.graph)
        check_captured(captured, plan)
        write_captured(captured, plan)

    def can_run_in_cudagraph(self, common: CommonAttentionMetadata) -> bool:
        """Return whether a CUDA graph can be captured for a batch.

        The batch must have decodes only, with query lengths that `graph_support` allows.
        See `reference.gqa.builder.GQAMetadataBuilder.can_run_in_cudagraph` for these query lengths.
        """
        return self._graph_kind(common) is not GraphSupport.NONE

    def _graph_kind(self, common: CommonAttentionMetadata) -> GraphSupport:
        """Return the kind of graph that serves a batch; NONE if no graph can serve it."""
        return graph_kind(common, self.reorder_batch_threshold, self._graph_support)

    @property
    def graph_support(self) -> GraphSupport:
        """Return the batches for which a captured graph can be replayed."""
        return self._graph_support

    def use_cascade_attention(
        self, common_prefix_len: int, query_lens: Int32[Tensor, " B"], seq_lens: Int32[Tensor, " B"]
    ) -> bool:
        """Return whether `build` plans a cascade for decodes that share a prefix.

        A batch-invariant builder, and a builder with context parallelism, never plan a cascade.
        `reference.gqa.builder.GQAMetadataBuilder.use_cascade_attention` explains the reason and the other cases.

        Args:
            common_prefix_len: number of tokens of the prefix.
            query_lens: [B], new tokens of each decode, on the CPU.
            seq_lens: [B], tokens of each decode after this step, on the CPU.

        Raises:
            ValueError: for the same reasons as `fast.use_gqa_cascade_attention`.
        """
        return self._may_cascade() and self._cascade_pays(common_prefix_len, query_lens, seq_lens)

    def _cascade_pays(
        self, common_prefix_len: int, query_lens: Int32[Tensor, " B"], seq_lens: Int32[Tensor, " B"]
    ) -> bool:
        """Return whether a cascade is faster on the device of the builder."""
        processors = self.num_processors
        if processors is None:
            processors = device_facts(self.device).processors if self.device.type == "cuda" else 1
        return use_gqa_cascade_attention(
            common_prefix_len,
            query_lens,
            seq_lens,
            self.config,
            self.cache_format,
            self.dtype,
            processors,
            self.cascade_costs,
        )

    def reorder_batch(
        self, query_lens: Int32[Tensor, " B"], context_lens: Int32[Tensor, " B"]
    ) -> tuple[tuple[int, int], ...]:
        """Return the fewest swaps of two requests after which the decodes come first.

        Args:
            query_lens: [B], new tokens of each request, on the CPU.
            context_lens: [B], context tokens of each request, on the CPU; they do not change the result.

        Raises:
            ValueError: shapes, dtypes or devices do not match, or a length is negative.
        """
        cpu = torch.device("cpu")
        check_tensor("query_lens", query_lens, ("B",), (torch.int32,), cpu)
        check_tensor("context_lens", context_lens, (query_lens.shape[0],), (torch.int32,), cpu)
        check_not_negative("query_lens", query_lens)
        check_not_negative("context_lens", context_lens)
        decodes = query_lens <= self.reorder_batch_threshold
        if self.query_len_support is QueryLenSupport.UNIFORM:
            counts = torch.bincount(query_lens[decodes & (query_lens > 0)], minlength=1)
            most = counts.shape[0] - 1 - int(counts.flip(0).argmax())  # the most frequent length; in a tie, the longest
            decodes &= (query_lens == most) | (query_lens == 0)
        return reorder_batch_to_split_decodes_and_prefills(decodes)


def _not_invariant(*names: str | None) -> list[str]:
    """Return which of the named backends cannot attend the cache batch-invariantly, as reasons."""
    named = dict.fromkeys(name for name in names if name is not None)
    return [f"{name}: is not batch-invariant" for name in named if not support_of(name, OP).batch_invariant]
