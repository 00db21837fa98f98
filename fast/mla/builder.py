"""The builder, which makes the plan of each step of an engine.

`reference.mla.builder` explains steps, plans, both kinds of requests, schedules and cascades. docs/glossary.md explains
the other terms and the letters of shapes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Int32
from torch import Tensor

from reference.distributed.arguments import check_invariant_merge
from reference.distributed.groups import ContextParallel
from reference.interfaces import (
    COMPUTE_FORMAT,
    CONVERTED,
    MOST_WORKSPACE_TOKENS,
    ONE_RANK,
    VISIBLE_LENS,
    CacheFormat,
    CascadeCosts,
    CommonAttentionMetadata,
    ContextWorkspace,
    GraphSupport,
    MLAConfig,
    MLAMetadata,
    PathCosts,
    PrefillMetadata,
    QueryLenSupport,
    ScheduleCosts,
    batch_of_capture,
    batch_of_update,
    captured_tensors,
    check,
    check_batch_size,
    check_captured,
    check_cascade_costs,
    check_chunking,
    check_common_prefix,
    check_config,
    check_costs,
    check_device,
    check_dtype,
    check_flag,
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

from ..backends import BackendChoice, bind_with_environment
from ..kernels.schedule_costs import cascade_costs_of
from ..planning.batch import reorder_batch_to_split_decodes_and_prefills
from ..planning.shared_prefix import split_shared_prefix
from .backend_hooks import BuilderStates, hooks_of
from .captured import plan_captured_decodes
from .cascade import use_cascade_attention
from .choose_path import choose_paths
from .decode_choice import check_decode_backend, decode_limits, device_to_check
from .device_choices import DecodeLayer, ProgramsAndCosts, programs_of_one_request
from .metadata import PLANNING_OPS, _rank_local_decode_lens, _with_schedule, build_mla_metadata
from .prefill_choice import check_invariant_prefills, choose_prefill_backend, with_backend
from .staging import StagingBuffer


class MLAMetadataBuilder:
    """Make the plan of each step; the class has the methods that vLLM calls on its metadata builders.

    A plan has the integers that the attention of one step needs: lengths, slots, chunks of context, and a schedule if
    one saves time. `reference.interfaces.AttentionMetadataBuilder` explains the methods.

    Args:
        config: config of the layers; all layers must have the same config (`infer_global_hyperparameters` checks this).
        block_size: tokens per block.
        max_model_len: largest number of tokens of a request.
        max_num_seqs: largest number of requests in a batch.
        query_len_support: query lengths that the decode kernel supports; None takes those of the decode backend
            (`fast.mla.decode_choice`), and VARLEN for the backends of this package.
        num_speculative_tokens: number of drafted tokens of a request in one step.
        costs: costs with which `choose_path` compares the two paths; None means the defaults of `PathCosts`.
        num_programs: number of programs of a schedule. `build` makes a schedule only if `choose_schedule` expects that
            the schedule saves time. The value is one of these:

            - None: the number of programs that the device runs at the same time (`decode_programs`). A graph of one
              request has at most as many as its longest length needs (`programs_of_one_request`);
            - 0: no decode gets a schedule;
            - a positive int: this number. A decode with a query longer than `reorder_batch_threshold` gets no schedule;
            - a function: it takes the length of the longest query in the decode and returns the number.

        batch_invariant: if True, the other requests and the number of programs do not change a bit of the attention of
            a request. `choose_path` is then not used: requests with queries longer than `reorder_batch_threshold` take
            the expanded path, and contexts are cut by their own lengths. The backend of the prefills must be
            batch-invariant too, and the requests of a step do not influence which backend is chosen.
        workspace_tokens: largest number of context tokens that a prefill expands at once. None takes the result of
            `chunked_prefill_workspace_size`, but at most `MOST_WORKSPACE_TOKENS`, the default of a layer.
        context_parallel: groups of the ranks that share sequences, or None. With groups, the batches have the lengths
            of whole sequences and the slots of this rank, and no plan has a cascade.
        schedule_costs: costs from which schedules are computed; None takes the costs of the device (`schedule_costs`).
        cache_format: format of the cache. It influences `choose_path`, the choice of a cascade, and the schedule.
            Layers with another format refuse the plans.
        dtype: dtype of queries and keys. It influences the same choices as `cache_format`, and the backend of the
            prefills, which a plan names. A layer of another dtype refuses the plan if this backend does not support it.
        graph_support: batches for which a captured CUDA graph can be replayed (`GraphSupport`). None takes
            ONE_QUERY_LEN if `query_len_support` is UNIFORM, and ANY otherwise, as far as the decode backend allows. If
            all requests of a graph have one query token, the plan of the graph has the kind ONE_QUERY_LEN, which more
            backends support.
        fp8_mode: fp8 mode of the decodes (`mla_decode`). It influences the schedule and the backend of the schedule.
            Layers with another fp8 mode refuse the plans.
        cascade_costs: costs from which the time of a cascade is estimated; None takes the costs of the
            device (`cascade_costs_of`); if `device` is None too, PyTorch's default device counts.
        layer_names: names of the layers, which the hooks of a backend get (`fast.mla.backend_hooks`).
        device: device of the layers, on which the decode backend is chosen and checked; None checks only what does not
            depend on the device. The first plan with decodes checks the rest. On a machine with a GPU, None chooses no
            decode backend of another project automatically.
        backend_options: mapping from the name of a backend to its options, such as
            `{"flashinfer": {"workspace": 2**28}}`; None for no options. The hooks of the backend say which options it
            has (`BackendHooks.options`).
        backend: backend of the ops of planning (`compute_visible_lens`, `decode_programs`, `schedule_costs` and
            `plan_decode`), of `mla_decode`, and of the attention of prefills (`flash_attn_varlen`): a name, a mapping
            from op to backend name, or None. A name applies to the ops that the backend declares. The environment may
            bind further ops (`fast.backends.environment`). For every other op, the backend is chosen automatically
            (`fast.backends`). Each plan with prefills names their backend. A builder keeps its decode backend; each
            plan with decodes names this backend, unless the backend is one of this package.

    Attributes:
        workspace: `ContextWorkspace` of all plans with context; the layers that get these plans share it.

    Raises:
        ValueError: in one of these cases:

            - a number is below its minimum;
            - the number of tensor-parallel ranks does not divide the number of heads;
            - `batch_invariant` is True and the ranks merge with "ag_rs";
            - `graph_support` is ANY and `query_len_support` is UNIFORM;
            - `backend_options` has an unknown backend or option, or an invalid value;
            - `cache_format` does not support the dims of `config`;
            - `fp8_mode` is unknown or does not suit `cache_format`.

        UnsupportedConfiguration: the named decode backend cannot serve the layers, `query_len_support` or
            `graph_support` promises more than this backend, or `batch_invariant` is True and a named backend is not
            batch-invariant.
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
        *,
        layer_names: tuple[str, ...] = (),
        device: torch.device | str | None = None,
        backend_options: Mapping[str, Mapping[str, Any]] | None = None,
        backend: BackendChoice = None,
    ):
        check_invariant_merge(context_parallel, batch_invariant)
        check_config(config)
        check_costs(costs)
        check_schedule_costs(schedule_costs, "schedule_costs")
        check_cascade_costs(cascade_costs, "cascade_costs")
        device = None if device is None else check_device("device", device)
        self.cascade_costs = cascade_costs_of(device) if cascade_costs is None else cascade_costs
        self.ownership = None if context_parallel is None else context_parallel.ownership
        owned = ONE_RANK if self.ownership is None else self.ownership
        check_interleave(owned.interleave, block_size)
        smallest = chunked_prefill_workspace_size(max_model_len, max_num_seqs, block_size, owned.size, owned.interleave)
        unit = context_unit(block_size, owned.size, owned.interleave)
        self._decode_heads = (
            config.num_heads if context_parallel is None else context_parallel.gathered_heads(config.num_heads)
        )
        if num_programs is not None and not callable(num_programs):
            check_int("num_programs", num_programs, 0, "an int >= 0, a function or None")
        self.config, self.block_size, self.costs = config, block_size, costs
        self.max_model_len, self.max_num_seqs = max_model_len, max_num_seqs
        self.num_programs, self.batch_invariant = num_programs, batch_invariant
        self.schedule_costs = schedule_costs
        check_dtype("dtype", dtype)
        check_mode_of_format(fp8_mode, cache_format, config)
        self.dtype, self.cache_format, self.fp8_mode = dtype, cache_format, fp8_mode
        self.backend = bind_with_environment(backend, (*PLANNING_OPS, "mla_decode", "flash_attn_varlen"))
        check_invariant_prefills(self.backend, batch_invariant)
        self._path_config = None if batch_invariant else config  # passed to `choose_path`; None disables the choice
        if workspace_tokens is None:  # a multiple of `unit`, and at most the default of a layer
            workspace_tokens = min(smallest, max(1, MOST_WORKSPACE_TOKENS // unit) * unit)
        self.workspace_tokens = workspace_tokens
        check_chunking(self.workspace_tokens, unit)
        self._decode_config = dataclasses.replace(config, num_heads=self._decode_heads)
        self._limits = decode_limits(
            self._decode_layer(device_to_check(device, self.backend)), self.backend, query_len_support,
            graph_support, num_speculative_tokens, self.ownership, batch_invariant,
        )  # fmt: skip
        self.query_len_support = self._limits.query_len_support
        self.reorder_batch_threshold = reorder_batch_threshold(self.query_len_support, num_speculative_tokens)
        self._staging, self.workspace = StagingBuffer(), ContextWorkspace()
        self.layer_names = layer_names
        self._backend_states = BuilderStates(cache_format, layer_names, backend_options)

    def build(self, common_prefix_len: int, common: CommonAttentionMetadata, fast_build: bool = False) -> MLAMetadata:
        """Return the plan of one step.

        Args:
            common_prefix_len: number of context tokens that all decodes share. The plan attends these tokens once for
                all decodes (a cascade) if a cascade is faster (`use_cascade_attention`).
            common: batch of the step, in the order that the swaps of `reorder_batch` give. If the batch has no lengths
                on the CPU, the plan has no cascade, and `choose_schedule` decides from upper bounds of the lengths.
            fast_build: if True, save time on the host: make no cascade and, unless the builder is batch-invariant, no
                schedule.

        Raises:
            ValueError: in one of these cases:

                - `build_mla_metadata` raises ValueError;
                - `common_prefix_len` is longer than a context;
                - a request on the absorbed path comes after a request on the expanded path;
                - the batch has more than `max_num_seqs` requests, or a request has more than `max_model_len` tokens.

            UnsupportedConfiguration: no backend that `backend` allows can serve the prefills of the step.
        """
        check_int("common_prefix_len", common_prefix_len, 0)
        check_flag("fast_build", fast_build)
        check_batch_size(common, self.max_num_seqs, self.max_model_len)
        if not has_host_lens(common):  # the engine's `max_seq_len` may be above `max_model_len`
            common = dataclasses.replace(common, max_seq_len=min(common.max_seq_len, self.max_model_len))
        metadata = build_mla_metadata(
            common, self.block_size, self.workspace_tokens, self.reorder_batch_threshold, self._path_config,
            self.costs, self.query_len_support, require_order=True, ownership=self.ownership, num_programs=0,
            cache_format=self.cache_format, dtype=self.dtype, fp8_mode=self.fp8_mode,
            batch_invariant=self.batch_invariant, staging=self._staging,
        )  # fmt: skip
        if metadata.prefill.context_chunks:
            metadata = dataclasses.replace(metadata, workspace=self.workspace)
        if metadata.num_prefills:
            metadata = self._with_prefill_backend(metadata)
        if metadata.num_decode_tokens > 0 and (self.batch_invariant or not fast_build):
            metadata = self._with_hints(metadata, common_prefix_len, common)
        return self._finalized(self._with_decode_backend(metadata), common.block_table.device)

    def _with_decode_backend(self, metadata: MLAMetadata) -> MLAMetadata:
        """Return the plan with the name of the backend of its decodes, unless a backend of this package serves them."""
        if self._limits.backend is None or metadata.num_decode_tokens == 0:
            return metadata
        decode = dataclasses.replace(metadata.decode, backend=self._limits.backend)
        metadata = dataclasses.replace(metadata, decode=decode)
        check_decode_backend(metadata, self._decode_config, self.dtype, self.block_size, self.cache_format,
                             self.fp8_mode, self.backend)  # fmt: skip
        return metadata

    def _finalized(self, metadata: MLAMetadata, device: torch.device) -> MLAMetadata:
        """Return the plan after the method `finalize_metadata` of the backends that the plan names, decodes first."""
        decode_backend = metadata.decode.backend if metadata.num_decode_tokens else None
        done = set()
        for part, name, config in (
            ("decode", decode_backend, self._decode_config),
            ("prefill", metadata.prefill.backend, self.config),
        ):
            if name is None or (name, config) in done:
                continue
            done.add((name, config))
            hooks = hooks_of(name)
            metadata = hooks.finalize_metadata(metadata, self._backend_states.of(hooks, device, config))
            check_type(f"the plan of the backend {name}", metadata, MLAMetadata)
            found = getattr(metadata, part).backend
            check(found == name, f"the plan of the backend {name}: {part}.backend", name, found)
        return metadata

    def _with_prefill_backend(self, metadata: MLAMetadata) -> MLAMetadata:
        """Return the plan with the backend that serves the attention of its prefills, chosen from the step's shapes."""
        prefill = metadata.prefill
        name = choose_prefill_backend(prefill, self.config, self.dtype, self.backend, self.batch_invariant)
        hooks = hooks_of(name)
        prefill = with_backend(prefill, name)
        state = self._backend_states.of(hooks, prefill.block_table.device, self.config)
        prefill = hooks.post_process_prefill_metadata(prefill, state, prefill.query_start_loc)
        check_type(f"the prefill of the backend {name}", prefill, PrefillMetadata)
        check(prefill.backend == name, f"the prefill of the backend {name}: backend", name, prefill.backend)
        return dataclasses.replace(metadata, prefill=prefill)

    def _decode_layer(self, device: torch.device) -> DecodeLayer:
        """Return the properties of the layers that determine the kernel of a decode."""
        return DecodeLayer(self._decode_config, device, self.dtype, self.block_size, self.cache_format, self.fp8_mode)

    def _with_hints(
        self, metadata: MLAMetadata, common_prefix_len: int, common: CommonAttentionMetadata
    ) -> MLAMetadata:
        """Return the plan with a cascade, or with a schedule, or unchanged."""
        if common_prefix_len > 0 and not self.batch_invariant and self.ownership is None and has_host_lens(common):
            check_common_prefix(common, common_prefix_len, metadata.num_decodes)
            lengths = common.seq_lens_cpu[: metadata.num_decodes]
            query_lens = common.query_start_loc_cpu[: metadata.num_decodes + 1].diff()
            if self.use_cascade_attention(common_prefix_len, query_lens, lengths):
                row = int((lengths > 0).int().argmax())
                cascade = split_shared_prefix(metadata.decode, common_prefix_len, self.block_size, row)
                return dataclasses.replace(metadata, cascade=cascade)
        programs, costs = self._programs_and_costs(metadata.decode.max_query_len, common.block_table.device)
        lens = _rank_local_decode_lens(common, metadata.num_decodes, metadata.decode.max_seq_len, self.ownership)
        return _with_schedule(metadata, lens, programs, costs, self.batch_invariant, self._limits.ops)

    def _programs_and_costs(self, query_len: int, device: torch.device) -> ProgramsAndCosts:
        """Return the number of programs of a schedule (0: no schedule), and the costs for `plan_decode`."""
        programs = self.num_programs
        if callable(programs):
            programs = programs(query_len)
            check_int("num_programs", programs, 0, "a function that gives at least 0")
        elif programs is not None and query_len > self.reorder_batch_threshold:
            programs = 0
        return self._decode_layer(device).programs_and_costs(
            query_len, programs, self.schedule_costs, self._limits.ops, batch_invariant=self.batch_invariant
        )

    def build_for_cudagraph_capture(self, common: CommonAttentionMetadata) -> MLAMetadata:
        """Return a plan for a CUDA graph that is captured once and replayed for other batches.

        A batch of a replay has the same number of requests as `common`. It has at most as many query tokens as
        `common`, and no query is longer than the longest query of `common`. A request may have up to `max_model_len`
        tokens.

        The caller calls this function during the capture or before the capture.
        `reference.mla.builder.MLAMetadataBuilder.build_for_cudagraph_capture` explains these two ways.

        Args:
            common: batch of the capture. Its tensors are the buffers that the caller overwrites before each replay.

        Raises:
            ValueError: `can_run_in_cudagraph` is False for the batch, the batch has more than `max_num_seqs` requests,
                or a request has more than `max_model_len` tokens.
        """
        kind = self._graph_kind(common)
        common = batch_of_capture(self, common, kind, self.reorder_batch_threshold)
        most_keys = common.max_seq_len if self.ownership is None else self.ownership.most(common.max_seq_len)
        plan = self._plan_captured(common, kind, most_keys)
        return dataclasses.replace(plan, captured=captured_tensors(plan))

    def _plan_captured(self, common: CommonAttentionMetadata, graph: GraphSupport, most_keys: int) -> MLAMetadata:
        """Return the plan of a captured batch; on this rank, no request of a replay has more than `most_keys` keys."""
        programs, costs = self._programs_and_costs(common.max_query_len, common.block_table.device)
        if self.num_programs is None and common.num_reqs == 1 and not self.batch_invariant:
            programs = programs_of_one_request(programs, most_keys, costs)
        metadata = plan_captured_decodes(
            common, self.block_size, programs, costs, self.batch_invariant, self.ownership, graph, self.cache_format,
            self.fp8_mode, backend=self._limits.ops,
        )  # fmt: skip
        return self._finalized(self._with_decode_backend(metadata), common.block_table.device)

    def update_captured(self, captured: MLAMetadata, common: CommonAttentionMetadata) -> None:
        """Write the plan of the next replay's batch into the tensors of the captured plan, which the graph reads.

        `reference.mla.builder.MLAMetadataBuilder.update_captured` lists the tensors that the caller writes itself.

        Args:
            captured: plan that `build_for_cudagraph_capture` returned before the capture.
            common: the batch of the next replay.

        Raises:
            ValueError: the batch is too large for the captured plan, or a tensor of the captured plan was replaced.
                Nothing has been written then.
        """
        common = batch_of_update(self, captured, common)
        plan = self._plan_captured(common, captured.decode.graph, captured.decode.max_seq_len)
        check_captured(captured, plan)
        write_captured(captured, plan)

    def can_run_in_cudagraph(self, common: CommonAttentionMetadata) -> bool:
        """Return whether a CUDA graph can be captured for a batch.

        The batch must have decodes only, with query lengths that `graph_support` allows.
        See `reference.mla.builder.MLAMetadataBuilder.can_run_in_cudagraph` for these query lengths.
        """
        return self._graph_kind(common) is not GraphSupport.NONE

    def _graph_kind(self, common: CommonAttentionMetadata) -> GraphSupport:
        """Return the kind of CUDA graph for a batch; NONE if the batch cannot be captured."""
        return graph_kind(common, self.reorder_batch_threshold, self._limits.graph_support)

    @property
    def graph_support(self) -> GraphSupport:
        """Return the batches for which a captured graph can be replayed."""
        return self._limits.graph_support

    def use_cascade_attention(
        self, common_prefix_len: int, query_lens: Int32[Tensor, " B"], seq_lens: Int32[Tensor, " B"]
    ) -> bool:
        """Return whether `build` plans a cascade for decodes that share a prefix.

        A batch-invariant builder, a builder with context parallelism, and a builder whose decode backend has only a
        causal mask never plan a cascade.
        `reference.mla.builder.MLAMetadataBuilder.use_cascade_attention` explains the reason and the other cases.

        Args:
            common_prefix_len: number of tokens of the prefix.
            query_lens: [B], new tokens of each decode, on the CPU.
            seq_lens: [B], tokens of each decode after this step, on the CPU.

        Raises:
            ValueError: for the same reasons as `fast.use_cascade_attention`.
        """
        if self.batch_invariant or self.ownership is not None or VISIBLE_LENS not in self._limits.masks:
            return False
        return use_cascade_attention(
            common_prefix_len, query_lens, seq_lens, self.config, self.cache_format, self.dtype, self.cascade_costs
        )

    def reorder_batch(
        self, query_lens: Int32[Tensor, " B"], context_lens: Int32[Tensor, " B"]
    ) -> tuple[tuple[int, int], ...]:
        """Return the fewest swaps of two requests after which the requests on the absorbed path come first.

        Args:
            query_lens: [B], new tokens of each request, on the CPU.
            context_lens: [B], context tokens of each request, on the CPU; upper bounds if the engine does not know the
                lengths.

        Raises:
            ValueError: shapes, dtypes or devices do not match, or a length is negative.
        """
        absorbed = choose_paths(
            query_lens, context_lens, self.reorder_batch_threshold, self._path_config, self.costs,
            self.query_len_support, self.cache_format, self.dtype,
        )  # fmt: skip
        if self.query_len_support is QueryLenSupport.UNIFORM:
            lens = query_lens[absorbed & (query_lens > 0)]
            counts = torch.bincount(lens, minlength=1)
            most = counts.shape[0] - 1 - int(counts.flip(0).argmax())  # the most frequent length; in a tie, the longest
            absorbed &= (query_lens == most) | (query_lens == 0)
        return reorder_batch_to_split_decodes_and_prefills(absorbed)
