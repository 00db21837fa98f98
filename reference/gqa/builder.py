"""The metadata builder of grouped-query attention, which computes the plan of each step of an engine.

- A step is one forward pass over a batch of requests. Its plan (`GQAMetadata`) has the integers that attention needs,
  such as lengths and cache slots. All layers of one config use the same plan. A model whose layers alternate, for
  example between a window and all keys, has one builder and one plan a step for each config (`group_layers`).
- A decode is a request with one or a few new tokens. A prefill has more new tokens.
- A schedule assigns the keys of decodes to the programs of a kernel. It is optional, and makes some decodes faster.
- A cascade attends the common prefix of all decodes in one call, and the other keys in a second call. It is optional
  too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from jaxtyping import Int32
from torch import Tensor

from ..distributed.arguments import check_invariant_merge
from ..distributed.groups import ContextParallel
from ..interfaces import (
    COMPUTE_FORMAT,
    UNDIVIDED,
    CacheFormat,
    CascadeCosts,
    CommonAttentionMetadata,
    GraphSupport,
    QueryLenSupport,
    ScheduleCosts,
    batch_of_capture,
    batch_of_update,
    captured_tensors,
    check_batch_size,
    check_captured,
    check_cascade_costs,
    check_common_prefix,
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
from ..interfaces.gqa import (
    EncoderMetadata,
    GQAConfig,
    GQAMetadata,
    check_decoders_only,
    check_gqa_planning,
    check_graph_config,
    graph_refusals,
    supports_cascade,
)
from ..planning.batch import reorder_batch_to_split_decodes_and_prefills
from ..planning.shared_prefix import split_shared_prefix
from .captured import plan_captured_gqa_decodes
from .choose_cascade import use_gqa_cascade_attention
from .metadata import _plan, _plan_encoder, _Planned, _with_schedule


class GQAMetadataBuilder:
    """Plan the steps of an engine. The methods are those of vLLM's builders (`AttentionMetadataBuilder`).

    Args:
        config: config of the layers; all layers of a builder must agree (`group_layers`).
        block_size: tokens per block of the cache, a multiple of 16 and a divisor of the attention chunk.
        max_model_len: largest number of tokens of a sequence.
        max_num_seqs: largest number of requests in a batch.
        query_len_support: query lengths that the decode kernel supports; None means VARLEN.
        num_speculative_tokens: number of tokens that a draft model proposes for a request in one step; 0 for layers
            that are no decoders.
        num_programs: number of programs of a schedule. `choose_schedule` decides in each step whether the decodes get a
            schedule. The plan has this decision as `schedule_choice`. Legal values:

            - None: the number that suits the device (in this package: 1);
            - 0: no step gets a schedule;
            - an int above 0: this number;
            - a function: it takes the length of the longest decode query and returns the number.
        batch_invariant: whether a request gets the same bits over the cache in every batch and with every number of
            programs, if it is a decode in every batch, or a prefill in every batch. Prefills then have `UNDIVIDED` as
            their schedule.
        context_parallel: the process groups of context parallelism, whose ranks share every sequence; None for one
            rank. With groups, `config` has all heads of the layer, a batch has the lengths of whole sequences and the
            slots of this rank, and no step has a cascade.
        schedule_costs: costs from which schedules are computed; None means the defaults of `ScheduleCosts`.
        cache_format: format of the cache. The estimate of a cascade depends on it, and layers with another format
            refuse the plans.
        dtype: dtype of queries and keys. Only the estimate of a cascade depends on it.
        graph_support: query lengths that the batches of one CUDA graph may have (`GraphSupport`). None means
            ONE_QUERY_LEN if `query_len_support` is UNIFORM, and ANY otherwise. A batch with one token of each request
            gets a plan for ONE_QUERY_LEN in both cases, because more kernels support this kind of graph.
        cascade_costs: costs from which the time of a cascade is estimated; None means the defaults of `CascadeCosts`.

    Attributes:
        num_processors: number of processors in the estimate of a cascade (`use_gqa_cascade_attention`): 1.
        graph_refusals: reasons why no CUDA graph can serve the layers; empty if a graph can serve them. The property
            `graph_support` is NONE if there is a reason.

    Raises:
        ValueError: a number is below its smallest valid value; the number of heads is not a multiple of the number of
            tensor-parallel ranks (TP); `batch_invariant` is combined with the merge "ag_rs" of `context_parallel`;
            `graph_support` is ANY and `query_len_support` is UNIFORM; the attention chunk is not a multiple of
            `block_size`; `num_speculative_tokens` is above 0 for layers that are no decoders.
        UnsupportedConfiguration: ranks share sequences, and the config has ALiBi or attention chunks, or heads that
            these ranks cannot share (`ContextParallel.local_gqa_config`); the cache format is for the latent cache
            alone.
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
    ):
        check_invariant_merge(context_parallel, batch_invariant)
        self.ownership = None if context_parallel is None else context_parallel.ownership
        check_gqa_planning(config, block_size, self.ownership, cache_format)
        check_int("max_model_len", max_model_len)
        check_int("max_num_seqs", max_num_seqs)
        check_schedule_costs(schedule_costs, "schedule_costs")
        self.cascade_costs = check_cascade_costs(cascade_costs, "cascade_costs")
        check_dtype("dtype", dtype)
        cache_format.dtype_for(dtype)  # raises if the format does not support the dtype
        check_type("query_len_support", query_len_support, (QueryLenSupport, type(None)), "a QueryLenSupport or None")
        query_len_support = QueryLenSupport.VARLEN if query_len_support is None else query_len_support
        graph_support = check_graph_support(graph_support, query_len_support)
        if context_parallel is not None:
            context_parallel.local_gqa_config(config)  # raises if the ranks cannot share the heads
        if num_programs is not None and not callable(num_programs):
            check_int("num_programs", num_programs, 0, "an int >= 0, a function or None")
        self.config, self.block_size = config, block_size
        self.max_model_len, self.max_num_seqs = max_model_len, max_num_seqs
        self.query_len_support = query_len_support
        self.num_programs, self.batch_invariant = num_programs, batch_invariant
        self.schedule_costs, self.cache_format, self.dtype = schedule_costs, cache_format, dtype
        self.num_processors = 1
        self.graph_refusals = graph_refusals(config)
        self._graph_support = GraphSupport.NONE if self.graph_refusals else graph_support
        self.reorder_batch_threshold = reorder_batch_threshold(query_len_support, num_speculative_tokens)
        check_decoders_only(config, "num_speculative_tokens", num_speculative_tokens, 0)

    def build(
        self, common_prefix_len: int, common: CommonAttentionMetadata, fast_build: bool = False
    ) -> GQAMetadata | EncoderMetadata:
        """Return the plan of one step; for an encoder an `EncoderMetadata`.

        Args:
            common_prefix_len: number of context tokens that all decodes share; 0 for none, and 0 for layers that are no
                decoders. The plan has a cascade if `use_cascade_attention` estimates that a cascade is faster.
            common: the batch, a `CrossAttentionBatch` for cross attention. The swaps of `reorder_batch` give the order
                with the most decodes, but every order gives a correct plan. If `common.seq_lens_cpu` is None, the plan
                is computed from upper bounds of the lengths (see `build_gqa_metadata`). Such a plan has no cascade.
            fast_build: whether to leave out the cascade and the schedule, to save planning time. A batch-invariant
                builder keeps the schedule, because the bits of the result depend on the schedule.

        Raises:
            TypeError: the config is for cross attention, and the batch has no fields of the encoder.
            ValueError: for the same reasons as `build_gqa_metadata`; a decode has less context than
                `common_prefix_len`, or `common_prefix_len` is above 0 for layers that are no decoders; the batch has
                more or longer requests than the builder allows.
        """
        check_int("common_prefix_len", common_prefix_len, 0)
        check_decoders_only(self.config, "common_prefix_len", common_prefix_len, 0)
        check_flag("fast_build", fast_build)
        check_batch_size(common, self.max_num_seqs, self.max_model_len)
        if not self.config.attention_type.cached:
            return _plan_encoder(common, self.config)
        if not has_host_lens(common):  # an engine may give an upper bound above `max_model_len`
            common = dataclasses.replace(common, max_seq_len=min(common.max_seq_len, self.max_model_len))
        planned = _plan(
            common, self.block_size, self.config, self.reorder_batch_threshold, self.query_len_support, False,
            self.ownership, self.cache_format,
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
            query_lens = common.query_start_loc_cpu.diff()[: metadata.num_decodes]
            if self.use_cascade_attention(common_prefix_len, query_lens, lengths):
                row = next(request for request, length in enumerate(lengths.tolist()) if length > 0)
                cascade = split_shared_prefix(metadata.decode, common_prefix_len, self.block_size, row)
                return dataclasses.replace(metadata, cascade=cascade)
        programs = self._programs_for(metadata.decode.max_query_len)
        return _with_schedule(planned, programs, check_schedule_costs(self.schedule_costs), self.batch_invariant)

    def _may_cascade(self) -> bool:
        """Return whether any step may have a cascade."""
        return supports_cascade(self.config) and not self.batch_invariant and self.ownership is None

    def _programs_for(self, query_len: int) -> int:
        """Return the number of programs of a schedule if the longest query has `query_len` tokens; 0 = no schedule."""
        if self.num_programs is None:
            return 1
        if callable(self.num_programs):
            programs = self.num_programs(query_len)
            check_int("num_programs", programs, 0, "a function that gives at least 0")
            return programs
        return self.num_programs

    def build_for_cudagraph_capture(self, common: CommonAttentionMetadata) -> GQAMetadata:
        """Return the plan of a batch for a CUDA graph. The graph can be replayed with other lengths.

        Each replay must meet these limits:

        - The number of requests is the same as in this batch.
        - A request has at most as many query tokens as the longest query of this batch.
        - All requests together have at most `num_actual_tokens` query tokens. Later tokens are padding.
        - A request has at most `max_model_len` tokens, and no more than the columns of the block table can hold.

        The plan is computed from the lengths on the device (`plan_captured_gqa_decodes`), so the batch needs no lengths
        on the CPU. With attention chunks the plan has ordinary requests in place of virtual requests. There are two
        ways to use this method:

        - Call this method during the capture, as `DecodeGraph` of `fast` does. The graph then contains the planning,
          and every replay computes a plan for its own lengths. (Only the method of `fast` can be captured: the method
          of this package copies the lengths to the CPU.)
        - Call this method before the capture, and keep the plan. The graph reads the tensors of this plan, and the
          caller calls `update_captured` before each replay.

        Args:
            common: the batch. The graph reads its tensors, and the caller writes new values into them before each
                replay.

        Raises:
            ValueError: `can_run_in_cudagraph` is False for the batch; the batch has more or longer requests than the
                builder allows.
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
            graph, self.cache_format,
        )  # fmt: skip

    def update_captured(self, captured: GQAMetadata, common: CommonAttentionMetadata) -> None:
        """Write the plan of the next replay's batch into the tensors that a captured graph reads.

        This method is for plans that were made before the capture. It writes four things: the schedule, the keys that
        each query token sees (`visible_lens`, and `first_visible` if there is a window or attention chunks) and, under
        context parallelism, the number of keys on this rank. The caller writes the other tensors: lengths, offsets,
        block table and slots (-1 for padding tokens).

        The batch must have as many requests as the captured batch. An engine with fewer requests appends requests with
        0 tokens.

        Args:
            captured: plan that `build_for_cudagraph_capture` returned before the capture.
            common: the batch of the next replay.

        Raises:
            ValueError: the captured plan cannot hold the batch; a request is longer than the captured plan allows; a
                tensor of the captured plan was replaced by another tensor. If the method raises, it has written
                nothing.
        """
        batch = batch_of_update(self, captured, common, GQAMetadata)
        plan = self._plan_captured(batch, captured.decode.graph)
        check_captured(captured, plan)
        write_captured(captured, plan)

    def can_run_in_cudagraph(self, common: CommonAttentionMetadata) -> bool:
        """Return whether a CUDA graph can be captured for a batch and replayed.

        The longest query must have from 1 to `reorder_batch_threshold` tokens. With the graph support ANY, query
        lengths may be mixed, and any request may have no query token. With ONE_QUERY_LEN all requests must have the
        same query length, but requests at the end of the batch may have no query token. The result is False for layers
        that no graph can serve (`graph_refusals`).
        """
        return self._graph_kind(common) is not GraphSupport.NONE

    def _graph_kind(self, common: CommonAttentionMetadata) -> GraphSupport:
        """Return the kind of graph that serves a batch; NONE if no graph can serve it."""
        return graph_kind(common, self.reorder_batch_threshold, self._graph_support)

    @property
    def graph_support(self) -> GraphSupport:
        """Return which query lengths the batches of one CUDA graph may have; NONE if no graph can serve the layers."""
        return self._graph_support

    def use_cascade_attention(
        self, common_prefix_len: int, query_lens: Int32[Tensor, " B"], seq_lens: Int32[Tensor, " B"]
    ) -> bool:
        """Return whether `build` plans a cascade for a shared prefix.

        The result is False under context parallelism, and for layers with ALiBi, a window or attention chunks. It is
        also False for a batch-invariant builder, because with a cascade the bits of a request would depend on the other
        requests. Otherwise the function `use_gqa_cascade_attention` decides.

        Args:
            common_prefix_len: tokens of the prefix.
            query_lens: [B], new tokens of each decode, on the CPU.
            seq_lens: [B], tokens of each decode after the step, on the CPU.

        Raises:
            ValueError: for the same reasons as the function `use_gqa_cascade_attention`.
        """
        if not self._may_cascade():
            return False
        return use_gqa_cascade_attention(
            common_prefix_len,
            query_lens,
            seq_lens,
            self.config,
            self.cache_format,
            self.dtype,
            self.num_processors,
            self.cascade_costs,
        )

    def reorder_batch(
        self, query_lens: Int32[Tensor, " B"], context_lens: Int32[Tensor, " B"]
    ) -> tuple[tuple[int, int], ...]:
        """Return the fewest swaps of two requests that bring the decodes to the front.

        Args:
            query_lens: [B], new tokens of each request, on the CPU.
            context_lens: [B], cached tokens of each request, on the CPU; upper bounds if the engine does not know them.
                They do not change the result.

        Returns:
            Pairs of indices (i, j), i < j, to be swapped one after another.

        Raises:
            ValueError: a tensor has a wrong shape, dtype or device; a length is negative.
        """
        cpu = torch.device("cpu")
        check_tensor("query_lens", query_lens, ("B",), (torch.int32,), cpu)
        check_tensor("context_lens", context_lens, (query_lens.shape[0],), (torch.int32,), cpu)
        check_not_negative("query_lens", query_lens)
        check_not_negative("context_lens", context_lens)
        decodes = query_lens <= self.reorder_batch_threshold
        if self.query_len_support is QueryLenSupport.UNIFORM:
            lens = [query_len for query_len in query_lens[decodes].tolist() if query_len > 0]
            most = max(lens, key=lambda query_len: (lens.count(query_len), query_len), default=0)
            decodes &= (query_lens == most) | (query_lens == 0)
        return reorder_batch_to_split_decodes_and_prefills(decodes)
