"""The metadata builder of MLA, which computes the plan of each step of an engine.

- A step is one forward pass over a batch of requests. Its plan (`MLAMetadata`) has the integers that attention needs,
  such as lengths and cache slots. All layers use the same plan.
- A decode is a request with one or a few new tokens; it takes the absorbed path (attention over the cached latents). A
  prefill has more new tokens; it takes the expanded path (attention over keys and values of every head).
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
    CONVERTED,
    MOST_WORKSPACE_TOKENS,
    ONE_RANK,
    CacheFormat,
    CascadeCosts,
    CommonAttentionMetadata,
    ContextWorkspace,
    GraphSupport,
    MLAConfig,
    MLAMetadata,
    PathCosts,
    QueryLenSupport,
    ScheduleCosts,
    batch_of_capture,
    batch_of_update,
    captured_tensors,
    check_batch_size,
    check_captured,
    check_cascade_costs,
    check_chunking,
    check_common_prefix,
    check_config,
    check_costs,
    check_dtype,
    check_flag,
    check_graph_support,
    check_int,
    check_interleave,
    check_mode_of_format,
    check_schedule_costs,
    check_type,
    chunked_prefill_workspace_size,
    context_unit,
    graph_kind,
    has_host_lens,
    reorder_batch_threshold,
    write_captured,
)
from ..planning.batch import reorder_batch_to_split_decodes_and_prefills
from ..planning.shared_prefix import split_shared_prefix
from .captured import plan_captured_decodes
from .cascade import use_cascade_attention
from .choose_path import choose_paths
from .metadata import _rank_local_decode_lens, _with_schedule, build_mla_metadata


class MLAMetadataBuilder:
    """Plan the steps of an engine. The methods are those of vLLM's builders (`AttentionMetadataBuilder`).

    Args:
        config: config of the layers; all layers must have the same dims and softmax scale
            (`infer_global_hyperparameters` checks this condition).
        block_size: tokens per block of the cache.
        max_model_len: largest number of tokens of a sequence.
        max_num_seqs: largest number of requests in a batch.
        query_len_support: query lengths that the decode kernel supports; None means VARLEN.
        num_speculative_tokens: number of tokens that a draft model proposes for a request in one step.
        costs: costs from which `choose_path` estimates whether the absorbed or the expanded path is faster.
        num_programs: number of programs of a schedule. `choose_schedule` decides in each step whether the decodes get a
            schedule. The plan has this decision as `schedule_choice`. Legal values:

            - None: the number that suits the device (in this package: 1);
            - 0: no step gets a schedule;
            - an int above 0: this number. If a decode has more than `reorder_batch_threshold` query tokens, the step
              gets no schedule;
            - a function: it takes the length of the longest decode query and returns the number.
        batch_invariant: whether decodes and prefills give a request the same bits in every batch, and decodes also with
            every number of programs. If True, `choose_path` is not used: every request with more than
            `reorder_batch_threshold` new tokens takes the expanded path, and its context is cut by its own length
            (`plan_context_chunks`).
        workspace_tokens: number of context tokens that a prefill expands at once. None means
            `chunked_prefill_workspace_size`, but at most `MOST_WORKSPACE_TOKENS`, the default maximum of a layer.
        context_parallel: the process groups of context parallelism, whose ranks share every sequence; None for one
            rank. With groups, a batch has the lengths of whole sequences and the slots of this rank, and no step has a
            cascade.
        schedule_costs: costs from which schedules are computed; None means the defaults of `ScheduleCosts`.
        cache_format: format of the cache. The estimates of paths and cascades depend on it, and layers with another
            format refuse the plans.
        dtype: dtype of queries and keys. Only the estimates of paths and cascades depend on it.
        graph_support: query lengths that the batches of one CUDA graph may have (`GraphSupport`). None means
            ONE_QUERY_LEN if `query_len_support` is UNIFORM, and ANY otherwise. A batch with one token of each request
            gets a plan for ONE_QUERY_LEN in both cases, because more kernels support this kind of graph.
        fp8_mode: mode of decodes over a cache in e4m3 (`mla_decode`). Layers with another mode refuse the plans.
        cascade_costs: costs from which the time of a cascade is estimated; None means the defaults of `CascadeCosts`.

    Attributes:
        workspace: memory for one chunk of context (`ContextWorkspace`). All plans with context refer to this memory, so
            all layers share it.

    Raises:
        ValueError: a number is below its smallest valid value; the number of heads is not a multiple of the number of
            tensor-parallel ranks (TP); `batch_invariant` is combined with the merge "ag_rs" of `context_parallel`;
            `graph_support` is ANY and `query_len_support` is UNIFORM; `cache_format` does not support the dims of
            `config`; `fp8_mode` is unknown or does not suit `cache_format`.
    """

    def __init__(
        self,
        config: MLAConfig,
        block_size: int,
        max_model_len: int,
        max_num_seqs: int,
        query_len_support: QueryLenSupport | None = None,
        num_speculative_tokens: int = 0,
        costs: PathCosts | None = None,
        num_programs: int | Callable[[int], int] | None = None,
        batch_invariant: bool = False,
        workspace_tokens: int | None = None,
        context_parallel: ContextParallel | None = None,
        schedule_costs: ScheduleCosts | None = None,
        cache_format: CacheFormat = COMPUTE_FORMAT,
        dtype: torch.dtype = torch.bfloat16,
        graph_support: GraphSupport | None = None,
        fp8_mode: str = CONVERTED,
        cascade_costs: CascadeCosts | None = None,
    ):
        check_invariant_merge(context_parallel, batch_invariant)
        check_config(config)
        check_costs(costs)
        check_schedule_costs(schedule_costs, "schedule_costs")
        self.cascade_costs = check_cascade_costs(cascade_costs, "cascade_costs")
        check_mode_of_format(fp8_mode, cache_format, config)
        check_dtype("dtype", dtype)
        check_type("query_len_support", query_len_support, (QueryLenSupport, type(None)), "a QueryLenSupport or None")
        query_len_support = QueryLenSupport.VARLEN if query_len_support is None else query_len_support
        self._graph_support = check_graph_support(graph_support, query_len_support)
        self.ownership = None if context_parallel is None else context_parallel.ownership
        owned = ONE_RANK if self.ownership is None else self.ownership
        check_interleave(owned.interleave, block_size)
        smallest = chunked_prefill_workspace_size(max_model_len, max_num_seqs, block_size, owned.size, owned.interleave)
        unit = context_unit(block_size, owned.size, owned.interleave)
        if context_parallel is not None:
            context_parallel.gathered_heads(config.num_heads)  # raises if the number of heads is not a multiple of TP
        if num_programs is not None and not callable(num_programs):
            check_int("num_programs", num_programs, 0, "an int >= 0, a function or None")
        self.config, self.block_size, self.costs = config, block_size, costs
        self.max_model_len, self.max_num_seqs = max_model_len, max_num_seqs
        self.query_len_support = query_len_support
        self.num_programs, self.batch_invariant = num_programs, batch_invariant
        self.schedule_costs, self.cache_format, self.dtype = schedule_costs, cache_format, dtype
        self.fp8_mode = fp8_mode
        self._path_config = None if batch_invariant else config  # None disables `choose_path`
        if workspace_tokens is None:  # at most the default `workspace_tokens` of a layer
            workspace_tokens = min(smallest, max(1, MOST_WORKSPACE_TOKENS // unit) * unit)
        self.workspace_tokens = workspace_tokens
        check_chunking(self.workspace_tokens, unit)
        self.reorder_batch_threshold = reorder_batch_threshold(query_len_support, num_speculative_tokens)
        self.workspace = ContextWorkspace()

    def build(self, common_prefix_len: int, common: CommonAttentionMetadata, fast_build: bool = False) -> MLAMetadata:
        """Return the plan of one step.

        Args:
            common_prefix_len: number of context tokens that all decodes share; 0 for none. The plan has a cascade if
                `use_cascade_attention` estimates that a cascade is faster.
            common: the batch, in the order that the swaps of `reorder_batch` give. If `common.seq_lens_cpu` is None,
                the plan is computed from upper bounds of the lengths (see `build_mla_metadata`). Such a plan has no
                cascade. It gets a schedule if any batch within these bounds would get one.
            fast_build: whether to leave out the cascade and the schedule, to save planning time. A batch-invariant
                builder keeps the schedule, because the bits of the result depend on the schedule.

        Raises:
            ValueError: for the same reasons as `build_mla_metadata`; a decode has less context than
                `common_prefix_len`; a request of the absorbed path comes after a request of the expanded path; the
                batch has more or longer requests than the builder allows.
        """
        check_int("common_prefix_len", common_prefix_len, 0)
        check_flag("fast_build", fast_build)
        check_batch_size(common, self.max_num_seqs, self.max_model_len)
        if not has_host_lens(common):  # an engine may give an upper bound above `max_model_len`
            common = dataclasses.replace(common, max_seq_len=min(common.max_seq_len, self.max_model_len))
        metadata = build_mla_metadata(
            common, self.block_size, self.workspace_tokens, self.reorder_batch_threshold, self._path_config,
            self.costs, self.query_len_support, require_order=True, ownership=self.ownership, num_programs=0,
            cache_format=self.cache_format, dtype=self.dtype, fp8_mode=self.fp8_mode,
            batch_invariant=self.batch_invariant,
        )  # fmt: skip
        if metadata.prefill.context_chunks:
            metadata = dataclasses.replace(metadata, workspace=self.workspace)
        if metadata.num_decode_tokens == 0 or (fast_build and not self.batch_invariant):
            return metadata
        return self._with_hints(metadata, common_prefix_len, common)

    def _with_hints(
        self, metadata: MLAMetadata, common_prefix_len: int, common: CommonAttentionMetadata
    ) -> MLAMetadata:
        """Return the plan with a cascade or a schedule, if one of the two is estimated to make the decode faster."""
        if common_prefix_len > 0 and not self.batch_invariant and self.ownership is None and has_host_lens(common):
            check_common_prefix(common, common_prefix_len, metadata.num_decodes)
            lengths = common.seq_lens_cpu[: metadata.num_decodes]
            query_lens = common.query_start_loc_cpu.diff()[: metadata.num_decodes]
            if self.use_cascade_attention(common_prefix_len, query_lens, lengths):
                row = next(request for request, length in enumerate(lengths.tolist()) if length > 0)
                cascade = split_shared_prefix(metadata.decode, common_prefix_len, self.block_size, row)
                return dataclasses.replace(metadata, cascade=cascade)
        programs = self._programs_for(metadata.decode.max_query_len)
        lens = _rank_local_decode_lens(common, metadata.num_decodes, metadata.decode.max_seq_len, self.ownership)
        return _with_schedule(metadata, lens, programs, self.schedule_costs, self.batch_invariant)

    def _programs_for(self, query_len: int) -> int:
        """Return the number of programs of a schedule if the longest query has `query_len` tokens; 0 = no schedule."""
        if self.num_programs is None:
            return 1
        if callable(self.num_programs):
            programs = self.num_programs(query_len)
            check_int("num_programs", programs, 0, "a function that gives at least 0")
            return programs
        return self.num_programs if query_len <= self.reorder_batch_threshold else 0

    def build_for_cudagraph_capture(self, common: CommonAttentionMetadata) -> MLAMetadata:
        """Return the plan of a batch for a CUDA graph. The graph can be replayed with other lengths.

        Each replay must meet these limits:

        - The number of requests is the same as in this batch.
        - A request has at most as many query tokens as the longest query of this batch.
        - All requests together have at most `num_actual_tokens` query tokens. Later tokens are padding.
        - A request has at most `max_model_len` tokens, and no more than the columns of the block table can hold.

        The plan is computed from the lengths on the device (`plan_captured_decodes`). There are two ways to use this
        method:

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
        """
        kind = self._graph_kind(common)
        plan = self._plan_captured(batch_of_capture(self, common, kind, self.reorder_batch_threshold), kind)
        return dataclasses.replace(plan, captured=captured_tensors(plan))

    def _plan_captured(self, common: CommonAttentionMetadata, graph: GraphSupport) -> MLAMetadata:
        """Return the plan of a batch whose `max_seq_len` is an upper bound of the lengths in every replay."""
        programs = self._programs_for(common.max_query_len)
        return plan_captured_decodes(
            common,
            self.block_size,
            programs,
            self.schedule_costs,
            self.batch_invariant,
            self.ownership,
            graph,
            self.cache_format,
            self.fp8_mode,
        )

    def update_captured(self, captured: MLAMetadata, common: CommonAttentionMetadata) -> None:
        """Write the plan of the next replay's batch into the tensors that a captured graph reads.

        This method is for plans that were made before the capture. It writes three things: the schedule, the number of
        keys that each query token sees (`visible_lens`) and, under context parallelism, the number of keys of each
        request on this rank and on all ranks (`total_seq_lens`). The caller writes the other tensors: lengths, offsets,
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
        plan = self._plan_captured(batch_of_update(self, captured, common), captured.decode.graph)
        check_captured(captured, plan)
        write_captured(captured, plan)

    def can_run_in_cudagraph(self, common: CommonAttentionMetadata) -> bool:
        """Return whether a CUDA graph can be captured for a batch and replayed.

        The longest query must have from 1 to `reorder_batch_threshold` tokens. With the graph support ANY, query
        lengths may be mixed, and any request may have no query token. With ONE_QUERY_LEN all requests must have the
        same query length, but requests at the end of the batch may have no query token.
        """
        return self._graph_kind(common) is not GraphSupport.NONE

    def _graph_kind(self, common: CommonAttentionMetadata) -> GraphSupport:
        """Return the kind of graph that serves a batch; NONE if no graph can serve it."""
        return graph_kind(common, self.reorder_batch_threshold, self._graph_support)

    @property
    def graph_support(self) -> GraphSupport:
        """Return which query lengths the batches of one CUDA graph may have: `graph_support` of the constructor."""
        return self._graph_support

    def use_cascade_attention(
        self, common_prefix_len: int, query_lens: Int32[Tensor, " B"], seq_lens: Int32[Tensor, " B"]
    ) -> bool:
        """Return whether `build` plans a cascade for a shared prefix.

        The result is False under context parallelism. It is also False for a batch-invariant builder, because with a
        cascade the bits of a request would depend on the other requests. Otherwise the function
        `use_cascade_attention` decides.

        Args:
            common_prefix_len: tokens of the prefix.
            query_lens: [B], new tokens of each decode, on the CPU.
            seq_lens: [B], tokens of each decode after the step, on the CPU.

        Raises:
            ValueError: for the same reasons as the function `use_cascade_attention`.
        """
        if self.batch_invariant or self.ownership is not None:
            return False
        return use_cascade_attention(
            common_prefix_len, query_lens, seq_lens, self.config, self.cache_format, self.dtype, self.cascade_costs
        )

    def reorder_batch(
        self, query_lens: Int32[Tensor, " B"], context_lens: Int32[Tensor, " B"]
    ) -> tuple[tuple[int, int], ...]:
        """Return the fewest swaps of two requests that bring the requests of the absorbed path to the front.

        Args:
            query_lens: [B], new tokens of each request, on the CPU.
            context_lens: [B], cached tokens of each request, on the CPU; upper bounds if the engine does not know them.

        Returns:
            Pairs of indices (i, j), i < j, to be swapped one after another.

        Raises:
            ValueError: a tensor has a wrong shape, dtype or device; a length is negative.
        """
        absorbed = choose_paths(
            query_lens, context_lens, self.reorder_batch_threshold, self._path_config, self.costs,
            self.query_len_support, self.cache_format, self.dtype,
        )  # fmt: skip
        if self.query_len_support is QueryLenSupport.UNIFORM:
            lens = [query_len for query_len in query_lens[absorbed].tolist() if query_len > 0]
            most = max(lens, key=lambda query_len: (lens.count(query_len), query_len), default=0)
            absorbed &= (query_lens == most) | (query_lens == 0)
        return reorder_batch_to_split_decodes_and_prefills(absorbed)
