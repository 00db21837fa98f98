"""A decode step for fixed batch sizes: a CUDA graph each, replayed with any lengths, block tables and slots."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from reference.distributed.arguments import check_groups, check_invariant_merge
from reference.distributed.groups import ContextParallel
from reference.interfaces import (
    CommonAttentionMetadata,
    ContextParallelMetadata,
    DecodeMetadata,
    DecodeSchedule,
    MLAConfig,
    MLAMetadata,
    PrefillMetadata,
    ScheduleChoice,
    TokenOwnership,
    check,
    check_config,
    check_device,
    check_dtype,
    check_function,
    check_graph_batch,
    check_graph_sizes,
    check_int,
    check_interleave,
    get_dcp_local_seq_lens,
)

from ..backends import BackendChoice, bind
from ..planning.decode_schedule import plan_decode
from .decode import decode_programs

Step = Callable[[Tensor, Tensor, MLAMetadata], Tensor]


WARM_UP_RUNS = 2  # before capture: kernels are compiled, libraries allocate what they keep


class DecodeGraph:
    """Runs a decode step, padded to the next of a few batch sizes, with any lengths, block tables and slots.

    Padding rows have seq_len 0, slot -1, block 0 and see nothing: they read no key, write no entry, and attention gives
    them 0. The schedule of the decode is planned anew in each run, from the lengths of that run.

    On a CUDA device each batch size is captured once, here, into a graph; all share their memory and the buffers that a
    run copies its batch into; the step runs a few times for that, over nothing but padding. Nothing is allocated later,
    so a batch that is larger than any captured is an error. On a CPU there are no graphs, and the step runs over the
    same buffers.

    Args:
        step: (hidden_states [T, H], positions [T], metadata) -> [T, H]: a layer over its cache, or all of a model's. It
            leaves its arguments as they are.
        config: the layers'.
        batch_sizes: requests that a batch is padded to.
        block_size: tokens a block.
        max_blocks: widest block table, in columns.
        dtype: of the hidden states.
        device: of the step.
        query_len: tokens of each request; with speculation one and the drafted ones.
        num_programs: that the decode is cut over, 0 leaves it to the kernel; None for as many as suit the device
            (`decode_programs`).
        batch_invariant: of `plan_decode`, or of a schedule that plans nothing.
        context_parallel: the groups, where ranks share sequences: every rank makes the graph and runs it over the same
            batches, each with its own slots.
        backend: of `decode_programs` and `plan_decode`: a name, which binds those of the two that this backend
            declares, a mapping from op to name, or None for the choice by capability (`fast.backends`).

    Raises:
        ValueError: no batch size, or a number below 1; an interleave that does not divide the block, heads that TP does
            not divide, `batch_invariant` with "ag_rs".
    """

    def __init__(
        self,
        step: Step,
        config: MLAConfig,
        batch_sizes: Sequence[int],
        block_size: int,
        max_blocks: int,
        dtype: torch.dtype,
        device: torch.device | str,
        query_len: int = 1,
        num_programs: int | None = None,
        batch_invariant: bool = False,
        context_parallel: ContextParallel | None = None,
        *,
        backend: BackendChoice = None,
    ):
        check_groups(context_parallel)
        backend = bind(backend, ("decode_programs", "plan_decode"))
        self.ownership = TokenOwnership(1, 0) if context_parallel is None else context_parallel.ownership
        self.context_parallel = context_parallel
        check_invariant_merge(context_parallel, batch_invariant)
        check_function("step", step)
        check_config(config)
        check_dtype("dtype", dtype)
        device = check_device("device", device)
        heads = config.num_heads if context_parallel is None else context_parallel.gathered_heads(config.num_heads)
        self._decode_heads = heads
        if num_programs is None:
            num_programs = decode_programs(
                dataclasses.replace(config, num_heads=heads), device=device, dtype=dtype, block_size=block_size,
                query_len=query_len, backend=backend,
            )  # fmt: skip
        check_graph_sizes(batch_sizes, block_size, max_blocks, query_len, num_programs)
        check_interleave(self.ownership.interleave, block_size)
        self.step, self.config, self.backend = step, config, backend
        self.batch_sizes = tuple(sorted(set(batch_sizes)))
        self.block_size, self.max_blocks, self.query_len = block_size, max_blocks, query_len
        self.dtype, self.device = dtype, torch.empty(0, device=device).device
        self.num_programs, self.batch_invariant = num_programs, batch_invariant
        requests, tokens = self.batch_sizes[-1], self.batch_sizes[-1] * query_len
        with torch.inference_mode(False):  # buffers that any mode may write
            kind = {"device": self.device}
            self._hidden_states = torch.zeros(tokens, config.hidden_size, dtype=dtype, **kind)
            self._positions = torch.zeros(tokens, dtype=torch.int64, **kind)
            self._seq_lens = torch.zeros(requests, dtype=torch.int32, **kind)
            self._block_table = torch.zeros(requests, max_blocks, dtype=torch.int32, **kind)
            self._slot_mapping = torch.full((tokens,), -1, dtype=torch.int64, **kind)
            self._query_start_loc = query_len * torch.arange(requests + 1, dtype=torch.int32, **kind)
            self._new_tokens = torch.arange(1 - query_len, 1, dtype=torch.int32, **kind)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                self._capture()

    @torch.no_grad()
    def _capture(self) -> None:
        """One graph for each batch size, the largest first: the smaller ones fit into its memory."""
        stream, pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        for size in self.batch_sizes[::-1]:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARM_UP_RUNS):
                    self._run_padded(size)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                output = self._run_padded(size)
            self._graphs[size] = graph, output

    def _run_padded(self, size: int) -> Tensor:
        """Plan and step over the first `size` requests of the buffers; this is what a graph holds."""
        tokens, seq_lens, block_table = size * self.query_len, self._seq_lens[:size], self._block_table[:size]
        visible_lens = seq_lens  # of one token: the whole request
        if self.query_len > 1:
            visible_lens = (seq_lens[:, None] + self._new_tokens).clamp_(min=0).flatten()
        kind, which = MLAMetadata, {}
        if self.context_parallel is not None:
            kind, which, ownership = ContextParallelMetadata, {"ownership": self.ownership}, self.ownership
            local_lens = get_dcp_local_seq_lens(seq_lens, ownership.size, ownership.rank, ownership.interleave)
            if self.query_len > 1:
                visible_lens = get_dcp_local_seq_lens(
                    visible_lens, ownership.size, ownership.rank, ownership.interleave
                )
            else:
                visible_lens = local_lens
            seq_lens = local_lens
        schedule = None
        if self.num_programs > 0:
            schedule = plan_decode(
                seq_lens, self.num_programs, self._decode_heads, batch_invariant=self.batch_invariant,
                backend=self.backend,
            )  # fmt: skip
        elif self.batch_invariant:
            schedule = DecodeSchedule(batch_invariant=True)
        metadata = kind(
            **which,
            slot_mapping=self._slot_mapping[:tokens],
            num_actual_tokens=tokens,
            num_decodes=size,
            num_decode_tokens=tokens,
            decode=DecodeMetadata(
                block_table=block_table,
                seq_lens=seq_lens,
                query_start_loc=self._query_start_loc[: size + 1],
                max_query_len=self.query_len,
                visible_lens=visible_lens,
                max_seq_len=self.max_blocks * self.block_size,  # of every replay
                block_size=self.block_size,
            ),
            prefill=PrefillMetadata(
                block_table=block_table[:0],
                query_start_loc=self._query_start_loc[:1],
                max_query_len=0,
                context_chunks=(),
                block_size=self.block_size,
            ),
            workspace_tokens=0,
            schedule=schedule,
            schedule_choice=ScheduleChoice(self.num_programs, size, 0, 0, planned=self.num_programs > 0),
        )
        return self.step(self._hidden_states[:tokens], self._positions[:tokens], metadata)

    @torch.no_grad()
    def run(
        self,
        hidden_states: Float[Tensor, "T H"],
        positions: Int64[Tensor, " T"],
        common: CommonAttentionMetadata,
    ) -> Float[Tensor, "T H"]:
        """One step.

        Args:
            hidden_states: [T, H].
            positions: [T].
            common: the batch: `query_len` tokens of each request, or a padding row (S = 0).

        Returns:
            [T, H], the rows of the batch without those that it was padded with; valid until the next run.

        Raises:
            ValueError: more requests or a wider block table than were planned for; other query lengths; tensors that do
                not fit. Nothing has been run then.
        """
        check_graph_batch(self, hidden_states, positions, common)
        tokens, requests = common.num_actual_tokens, common.num_reqs
        if requests == 0:
            return torch.empty_like(hidden_states)
        size = next(size for size in self.batch_sizes if size >= requests)
        padded = size * self.query_len
        self._hidden_states[:tokens].copy_(hidden_states)
        self._positions[:tokens].copy_(positions)
        self._seq_lens[:requests].copy_(common.seq_lens)
        self._block_table[:requests, : common.block_table.shape[1]].copy_(common.block_table)
        self._slot_mapping[:tokens].copy_(common.slot_mapping[:tokens])
        if size > requests:  # what an earlier run left there must not be served again
            self._hidden_states[tokens:padded].zero_()
            self._positions[tokens:padded].zero_()
            self._seq_lens[requests:size].zero_()
            self._block_table[requests:size].zero_()
            self._slot_mapping[tokens:padded].fill_(-1)
        return self.replay(size)[:tokens]

    @torch.no_grad()
    def replay(self, size: int) -> Tensor:
        """One step over what the buffers hold.

        Args:
            size: one of `batch_sizes`.

        Returns:
            [size x query_len, H]; valid until the next run.

        Raises:
            ValueError: another size.
        """
        check_int("size", size)
        check(size in self.batch_sizes, "size", f"one of {self.batch_sizes}", size)
        if not self._graphs:
            return self._run_padded(size)
        graph, output = self._graphs[size]
        graph.replay()
        return output
