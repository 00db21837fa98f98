"""A decode step for fixed batch sizes, as a captured graph runs it; here eager, so that it can be read and compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ..distributed.arguments import check_groups, check_invariant_merge
from ..distributed.groups import ContextParallel
from ..interfaces import (
    CommonAttentionMetadata,
    ContextParallelMetadata,
    DecodeMetadata,
    DecodeSchedule,
    MLAConfig,
    MLAMetadata,
    PrefillMetadata,
    ScheduleChoice,
    TokenOwnership,
    check_config,
    check_device,
    check_dtype,
    check_function,
    check_graph_batch,
    check_graph_sizes,
    check_interleave,
)
from ..planning.decode_schedule import plan_decode

Step = Callable[[Tensor, Tensor, MLAMetadata], Tensor]


class DecodeGraph:
    """Runs a decode step, padded to the next of a few batch sizes, with any lengths, block tables and slots.

    Padding rows have seq_len 0, slot -1, block 0 and see nothing: they read no key, write no entry, and attention gives
    them 0. The schedule of the decode is planned anew in each run, from the lengths of that run.

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
        num_programs: that the decode is cut over, 0 leaves it to the kernel; None for as many as suit the device (1).
        batch_invariant: of `plan_decode`, or of a schedule that plans nothing.
        context_parallel: the groups, where ranks share sequences: every rank makes the graph and runs it over the same
            batches, each with its own slots.

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
    ):
        check_groups(context_parallel)
        self.ownership = TokenOwnership(1, 0) if context_parallel is None else context_parallel.ownership
        check_invariant_merge(context_parallel, batch_invariant)
        check_function("step", step)
        check_config(config)
        check_dtype("dtype", dtype)
        device = check_device("device", device)
        heads = config.num_heads if context_parallel is None else context_parallel.gathered_heads(config.num_heads)
        self._decode_heads = heads
        num_programs = 1 if num_programs is None else num_programs
        check_graph_sizes(batch_sizes, block_size, max_blocks, query_len, num_programs)
        check_interleave(self.ownership.interleave, block_size)
        self.step, self.config, self.context_parallel = step, config, context_parallel
        self.batch_sizes = tuple(sorted(set(batch_sizes)))
        self.block_size, self.max_blocks, self.query_len = block_size, max_blocks, query_len
        self.dtype, self.device = dtype, torch.device(device)
        self.num_programs, self.batch_invariant = num_programs, batch_invariant

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
        tokens, requests, q = common.num_actual_tokens, common.num_reqs, self.query_len
        if requests == 0:
            return torch.empty_like(hidden_states)
        size = next(size for size in self.batch_sizes if size >= requests)

        padded = hidden_states.new_zeros(size * q, hidden_states.shape[1])
        padded[:tokens] = hidden_states
        padded_positions = positions.new_zeros(size * q)
        padded_positions[:tokens] = positions
        seq_lens = common.seq_lens.new_zeros(size)
        seq_lens[:requests] = common.seq_lens
        block_table = common.block_table.new_zeros(size, self.max_blocks)
        block_table[:requests, : common.block_table.shape[1]] = common.block_table
        slot_mapping = common.slot_mapping.new_full((size * q,), -1)
        slot_mapping[:tokens] = common.slot_mapping[:tokens]
        visible = [max(0, length - q + i + 1) for length in seq_lens.tolist() for i in range(q)]
        kind, which = MLAMetadata, {}
        if self.context_parallel is not None:
            kind, which = ContextParallelMetadata, {"ownership": self.ownership}
            seq_lens = torch.tensor(list(map(self.ownership.count, seq_lens.tolist())), dtype=torch.int32)
            seq_lens, visible = seq_lens.to(self.device), list(map(self.ownership.count, visible))

        schedule = None
        if self.num_programs > 0:
            schedule = plan_decode(
                seq_lens, self.num_programs, self._decode_heads, batch_invariant=self.batch_invariant
            )
        elif self.batch_invariant:
            schedule = DecodeSchedule(batch_invariant=True)
        metadata = kind(
            **which,
            slot_mapping=slot_mapping,
            num_actual_tokens=size * q,
            num_decodes=size,
            num_decode_tokens=size * q,
            decode=DecodeMetadata(
                block_table=block_table,
                seq_lens=seq_lens,
                query_start_loc=q * torch.arange(size + 1, dtype=torch.int32, device=self.device),
                max_query_len=q,
                visible_lens=torch.tensor(visible, dtype=torch.int32, device=self.device),
                max_seq_len=self.max_blocks * self.block_size,
                block_size=self.block_size,
            ),
            prefill=PrefillMetadata(
                block_table=block_table[:0],
                query_start_loc=torch.zeros(1, dtype=torch.int32, device=self.device),
                max_query_len=0,
                context_chunks=(),
                block_size=self.block_size,
            ),
            workspace_tokens=0,
            schedule=schedule,
            schedule_choice=ScheduleChoice(self.num_programs, size, 0, 0, planned=self.num_programs > 0),
        )
        return self.step(padded, padded_positions, metadata)[:tokens]
