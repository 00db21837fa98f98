"""Decode steps with fixed batch sizes, as CUDA graphs require. The reference runs these steps without a graph."""

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
    """A decode step that runs with a few fixed batch sizes; a smaller batch is padded to the next larger size.

    A CUDA graph has fixed shapes, but the lengths, block tables and slots may differ in every run. This class runs the
    step without a graph; its twin in `fast` captures the step in a graph.

    A padding row has sequence length 0, slot -1 and block 0. Such a row reads no key and writes no cache entry, and its
    attention output is 0. The builder plans every run from the lengths of that run (`build_for_cudagraph_capture`) and
    the step gets this plan, so the class works for any attention family.

    Args:
        step: function (hidden_states [T, H], positions [T], plan) -> [T, H], such as one layer over its cache or all
            layers of a model. The function must not change its arguments.
        builder: builder that plans the step (such as `MLAMetadataBuilder`). Under context parallelism every rank makes
            a `DecodeGraph` with its own builder, and runs the graph with the same batches but its own slots.
        batch_sizes: numbers of requests to which batches are padded.
        max_blocks: largest number of columns of a block table.
        hidden_size: H.
        dtype: dtype of the hidden states.
        device: device of the step.
        query_len: query tokens of each request: 1, plus the drafted tokens if there are any.

    Attributes:
        max_seq_len: largest number of tokens that a request may have in a run; `builder` and `max_blocks` are its
            limits.

    Raises:
        TypeError: `builder` is not an `AttentionMetadataBuilder`, or another argument has a wrong type.
        ValueError: `batch_sizes` is empty, or has a size below 1 or above the builder's `max_num_seqs`; another number
            is below 1; the builder cannot plan a graph for `query_len`.
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
        """Run one step.

        Args:
            hidden_states: [T, H].
            positions: [T], position of each token in its request.
            common: the batch. Every request, padding rows (S = 0) included, has `query_len` query tokens.

        Returns:
            [T, H], the output without the rows that were added as padding. The next run may overwrite this tensor.

        Raises:
            ValueError: the batch has more requests, longer requests or a wider block table than the graph allows; a
                request has another query length; a tensor has a wrong shape, dtype or device. If the method raises, it
                has not run the step.
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
