"""Decode steps for a few fixed batch sizes, with one CUDA graph for each batch size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from reference.interfaces import (
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    GraphBuffers,
    GraphMemory,
    GraphSupport,
    captured_batch,
    check,
    check_device,
    check_dtype,
    check_function,
    check_graph_batch,
    check_graph_query_len,
    check_graph_sizes,
    check_int,
    check_not_replaced,
    graph_support_of,
    most_captured_tokens,
    requests_with_tokens,
)

Step = Callable[[Tensor, Tensor, Any], Tensor]


WARM_UP_RUNS = 2  # runs before each capture compile Triton kernels and allocate workspaces of libraries


class DecodeGraph:
    """A decode step for a few fixed batch sizes, and for any query lengths, lengths, block tables and slots.

    A run pads its batch to the smallest size that is large enough.

    See `reference.planning.graphs.DecodeGraph` for padding rows and padding tokens. On a CUDA device the constructor
    captures one graph per batch size:

    - Each graph contains the planning of the step, so every run is planned from the lengths of its own batch.
    - All graphs share one memory pool, and the buffers into which a run copies its batch. The temporary tensors of the
      step are in the pool, so all batch sizes use the same memory. `memory` reports the bytes of both.
    - Before each capture, the step runs `WARM_UP_RUNS` times over padding rows.
    - Graphs and buffers are made in the constructor only, so a batch larger than every captured size is an error.

    On a CPU, the class captures no graph and calls the step over the same buffers.

    Args:
        step: function (hidden_states [T, H], positions [T], plan) -> [T, H]: one layer over its cache, or all layers of
            a model. The function must not change its arguments.
        builder: builder that plans the step (`MLAMetadataBuilder`). If ranks share sequences, every rank
            constructs a `DecodeGraph` with its own builder, and all ranks run the same batches. A rank passes its own
            slots.
        batch_sizes: sizes to which batches are padded, in requests.
        max_blocks: columns of the widest block table.
        hidden_size: H.
        dtype: dtype of the hidden states.
        device: device of the step.
        query_len: largest number of query tokens of a request; with speculation, 1 + the number of drafted tokens.

    Attributes:
        max_seq_len: upper bound of the tokens of a request in any run, from the builder and `max_blocks`.
        graph_support: ANY if a run may mix query lengths up to `query_len`, ONE_QUERY_LEN otherwise.
        buffers: tensors that the graphs read (`GraphBuffers`), for the largest batch size. Write values in place.

    Raises:
        TypeError: `builder` is not a builder.
        ValueError: `batch_sizes` is empty or has a size below 1 or above the builder's maximum; another number is below
            1; the builder cannot plan captured batches of this query length.
        UnsupportedConfiguration: on a CUDA device, an op of the step has no backend that such a graph can contain.
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
        self.dtype, self.device = dtype, torch.empty(0, device=device).device
        self.max_seq_len = most_captured_tokens(builder, max_blocks)
        self.graph_support = graph_support_of(builder, query_len)
        check_graph_query_len(self)
        with torch.inference_mode(False):  # code in inference mode and code outside it write to these buffers
            self.buffers = GraphBuffers.of_padding(
                self.batch_sizes[-1], query_len, max_blocks, hidden_size, dtype, self.device
            )
        self._captured = self.buffers.named()
        self._buffer_bytes, self._pool_bytes = self.buffers.size_in_bytes, 0
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                self._capture()

    @property
    def memory(self) -> GraphMemory:
        """Return the bytes of the buffers, and of the memory pool that all graphs share."""
        return GraphMemory(self._buffer_bytes, self._pool_bytes)

    @torch.no_grad()
    def _capture(self) -> None:
        """Capture the graph of the largest batch size first; all other graphs then fit into the same memory."""
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
        self._pool_bytes = sum(
            segment["total_size"] for segment in torch.cuda.memory_snapshot() if segment["segment_pool_id"] == pool
        )

    def _run_padded(self, size: int) -> Tensor:
        """Plan and run the step over the first `size` requests of the buffers; a graph captures exactly this call."""
        tokens, buffers = size * self.query_len, self.buffers
        used = GraphBuffers(
            buffers.hidden_states[:tokens], buffers.positions[:tokens], buffers.seq_lens[:size],
            buffers.query_start_loc[: size + 1], buffers.block_table[:size], buffers.slot_mapping[:tokens],
        )  # fmt: skip
        plan = self.builder.build_for_cudagraph_capture(captured_batch(self, used))
        return self.step(used.hidden_states, used.positions, plan)

    @torch.no_grad()
    def run(
        self,
        hidden_states: Float[Tensor, "T H"],
        positions: Int64[Tensor, " T"],
        common: CommonAttentionMetadata,
    ) -> Float[Tensor, "T H"]:
        """Run one step over a batch.

        Args:
            hidden_states: [T, H].
            positions: [T].
            common: batch of the step. Every request has at most `query_len` query tokens, padding rows (S = 0)
                included; with ONE_QUERY_LEN, `query_len` tokens, or none for requests at the end of the batch.

        Returns:
            [T, H]. The values are valid until the next run.

        Raises:
            ValueError: the batch has more requests, longer requests or a wider block table than the graphs allow; a
                query length does not fit; shapes, dtypes or devices do not match; a buffer was replaced. The error is
                raised before the step runs, and the graphs can still be run.
        """
        check_graph_batch(self, hidden_states, positions, common)
        check_not_replaced(self._captured, self.buffers.named())
        tokens, requests = common.num_actual_tokens, requests_with_tokens(common)
        if tokens == 0:
            return torch.empty_like(hidden_states)
        size = next(size for size in self.batch_sizes if size >= requests)
        padded, buffers = size * self.query_len, self.buffers
        buffers.hidden_states[:tokens].copy_(hidden_states)
        buffers.positions[:tokens].copy_(positions)
        buffers.seq_lens[:requests].copy_(common.seq_lens[:requests])
        buffers.block_table[:requests, : common.block_table.shape[1]].copy_(common.block_table[:requests])
        buffers.slot_mapping[:tokens].copy_(common.slot_mapping[:tokens])
        if self.graph_support is GraphSupport.ANY:
            buffers.query_start_loc[:requests].copy_(common.query_start_loc[:requests])
            buffers.query_start_loc[requests : size + 1].fill_(tokens)
        if tokens < padded:  # tokens of an earlier run become padding
            buffers.hidden_states[tokens:padded].zero_()
            buffers.positions[tokens:padded].zero_()
            buffers.slot_mapping[tokens:padded].fill_(-1)
        if requests < size:  # requests of an earlier run become padding rows
            buffers.seq_lens[requests:size].zero_()
            buffers.block_table[requests:size].zero_()
        return self.replay(size)[:tokens]

    @torch.no_grad()
    def replay(self, size: int) -> Tensor:
        """Run one step over the values that the buffers contain.

        Args:
            size: one of `batch_sizes`.

        Returns:
            [size x query_len, H]. The values are valid until the next run.

        Raises:
            ValueError: `size` is not one of `batch_sizes`, or a buffer was replaced.
        """
        check_int("size", size)
        check(size in self.batch_sizes, "size", f"one of {self.batch_sizes}", size)
        check_not_replaced(self._captured, self.buffers.named())
        if not self._graphs:
            return self._run_padded(size)
        graph, output = self._graphs[size]
        graph.replay()
        return output
