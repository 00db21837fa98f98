"""A decode step for fixed batch sizes, as a captured graph runs it; here eager, so that it can be read and compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ..interfaces import (
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    captured_batch,
    check_device,
    check_dtype,
    check_function,
    check_graph_batch,
    check_graph_query_len,
    check_graph_sizes,
    most_captured_tokens,
)

Step = Callable[[Tensor, Tensor, Any], Tensor]


class DecodeGraph:
    """Runs a decode step, padded to the next of a few batch sizes, with any lengths, block tables and slots.

    Padding rows have seq_len 0, slot -1, block 0 and see nothing: they read no key, write no entry, and attention gives
    them 0. The builder plans each run anew, from the lengths of that run (`build_for_cudagraph_capture`); whatever
    attention family it plans for, the step gets its plan.

    Args:
        step: (hidden_states [T, H], positions [T], plan) -> [T, H]: a layer over its cache, or all of a model's. It
            leaves its arguments as they are.
        builder: plans the step (`MLAMetadataBuilder`). Where ranks share sequences, every rank makes the graph with its
            own builder and runs it over the same batches, each with its own slots.
        batch_sizes: requests that a batch is padded to.
        max_blocks: widest block table, in columns.
        hidden_size: H.
        dtype: of the hidden states.
        device: of the step.
        query_len: tokens of each request; with speculation one and the drafted ones.

    Attributes:
        max_seq_len: most tokens of a request in any run: what the builder and `max_blocks` allow.

    Raises:
        TypeError: something that is no builder.
        ValueError: no batch size, one below 1 or beyond the builder's; another number below 1; a query length that the
            builder's plans for graphs do not take.
    """

    def __init__(
        self,
        step: Step,
        builder: AttentionMetadataBuilder,
        batch_sizes: Sequence[int],
        max_blocks: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        query_len: int = 1,
    ):
        check_function("step", step)
        check_dtype("dtype", dtype)
        device = check_device("device", device)
        check_graph_sizes(builder, batch_sizes, max_blocks, hidden_size, query_len)
        self.step, self.builder = step, builder
        self.batch_sizes = tuple(sorted(set(batch_sizes)))
        self.max_blocks, self.hidden_size, self.query_len = max_blocks, hidden_size, query_len
        self.dtype, self.device = dtype, device
        self.max_seq_len = most_captured_tokens(builder, max_blocks)
        check_graph_query_len(self)

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
            ValueError: more requests, longer ones or a wider block table than were planned for; other query lengths;
                tensors that do not fit. Nothing has been run then.
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
        query_start_loc = q * torch.arange(size + 1, dtype=torch.int32, device=self.device)
        batch = captured_batch(self, seq_lens, query_start_loc, block_table, slot_mapping)
        return self.step(padded, padded_positions, self.builder.build_for_cudagraph_capture(batch))[:tokens]
