"""Run decode steps with a few fixed batch sizes, with one CUDA graph for each batch size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

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
    check_graph_formats,
    check_graph_plan,
    check_graph_query_len,
    check_graph_sizes,
    check_int,
    check_not_replaced,
    check_type,
    graph_support_of,
    most_captured_tokens,
    requests_with_tokens,
)

Step = Callable[[Tensor, Tensor, Any], Tensor]


WARM_UP_RUNS = 2  # runs before each capture, which compile Triton kernels and let libraries allocate memory


class DecodeGraph:
    """A decode step for a few fixed batch sizes; a batch of another size is padded to the next larger size.

    See `reference.planning.graphs.DecodeGraph` for the padding. Query lengths, sequence lengths, block tables and slots
    may differ from run to run. On a CUDA device, the constructor captures one graph for each batch size:

    - Each graph computes the plan of the step, so a run gets a plan for the lengths of its own batch.
    - A run copies its batch into buffers, which all graphs read. All graphs also share one pool of memory for temporary
      tensors. The property `memory` has the bytes of the buffers and of the pool.
    - Before each capture, the step runs `WARM_UP_RUNS` times on a batch of padding.
    - A batch that is larger than the largest size is an error, because `run` captures no further graph.

    On a CPU, the class captures no graph, and calls the step with the same buffers.

    Args:
        step: function (hidden_states [T, H], positions [T], plan) -> [T, H]: one layer, or all layers of a model. The
            function must not change its arguments. If the cache of a layer has a scale (`KVScale`), the scale must be
            chosen before the constructor captures the graphs: pass the scale to the layer, or run a prefill first.
            Otherwise the scale becomes 1.0, with a warning.
        builder: builder of the plan, such as `MLAMetadataBuilder`. With context parallelism, every rank constructs a
            `DecodeGraph` with its own builder. All ranks run the same batches, and each rank passes its own slots.
        batch_sizes: numbers of requests to which batches are padded.
        max_blocks: largest number of columns of a block table.
        hidden_size: H, width of the hidden states.
        dtype: dtype of the hidden states.
        device: device of the step.
        query_len: largest number of query tokens of a request: 1, plus the drafted tokens if there are any.
        layers: the layers that the step runs. If a layer has another cache format or another fp8 mode than the builder,
            the constructor raises before it captures a graph. If a format or a mode changes later, `run` and `replay`
            raise. If a layer that does not fit the builder is missing from `layers`, the layer itself raises later:
            in the runs before the capture or, on a CPU, in its first run.

    Attributes:
        cache_format: the builder's cache format; None if the builder has no cache format.
        fp8_mode: the builder's fp8 mode (`mla_decode`); None if the builder has no fp8 mode.
        max_seq_len: largest number of tokens that a request may have in a run.
        graph_support: ANY if a run may mix query lengths up to `query_len`. ONE_QUERY_LEN if every request of a run
            must have `query_len` tokens.
        buffers: tensors that the graphs read, for the largest batch size. A caller may write values in place, but must
            not replace the tensors.

    Raises:
        TypeError: `builder` is not a builder.
        ValueError: `batch_sizes` is empty, or has a size below 1 or above the builder's maximum; another number is
            below 1; the builder cannot make a plan for `query_len` inside a graph; a layer has another cache format or
            fp8 mode than the builder.
        UnsupportedConfiguration: no graph can serve the builder's layers, such as cross attention; on a CUDA device, no
            backend can serve an op of the step inside a graph.
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
        layers: Sequence[nn.Module] = (),
    ):
        check_function("step", step)
        check_dtype("dtype", dtype)
        device = check_device("device", device)
        check_type("layers", layers, Sequence, "a sequence of layers")
        check_graph_sizes(builder, batch_sizes, max_blocks, hidden_size, query_len)
        self.step, self.builder, self.layers = step, builder, tuple(layers)
        # a builder of another attention family may have no cache format and no fp8 mode
        self.cache_format = getattr(builder, "cache_format", None)
        self.fp8_mode = getattr(builder, "fp8_mode", None)
        check_graph_formats(self)
        self.batch_sizes = tuple(sorted(set(batch_sizes)))
        self.max_blocks, self.hidden_size, self.query_len = max_blocks, hidden_size, query_len
        self.dtype, self.device = dtype, torch.empty(0, device=device).device
        self.max_seq_len = most_captured_tokens(builder, max_blocks)
        self.graph_support = graph_support_of(builder, query_len)
        check_graph_query_len(self)
        with torch.inference_mode(False):  # code outside inference mode must be able to write the buffers
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
        """Capture one graph for each batch size, the largest first: all later graphs then fit into the same memory."""
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
        """Compute the plan and run the step for the first `size` requests of the buffers; graphs capture this call."""
        tokens, buffers = size * self.query_len, self.buffers
        used = GraphBuffers(
            buffers.hidden_states[:tokens], buffers.positions[:tokens], buffers.seq_lens[:size],
            buffers.query_start_loc[: size + 1], buffers.block_table[:size], buffers.slot_mapping[:tokens],
        )  # fmt: skip
        plan = self.builder.build_for_cudagraph_capture(captured_batch(self, used))
        check_graph_plan(self, plan)
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
            common: batch of the step. Every request has at most `query_len` query tokens. If `graph_support` is
                ONE_QUERY_LEN, every request has `query_len` query tokens, except requests without tokens at the end.

        Returns:
            [T, H]. The values are valid until the next run.

        Raises:
            ValueError: the batch has more requests, longer requests or a wider block table than the graphs allow; a
                query length does not fit; shapes, dtypes or devices do not match; a buffer was replaced; the format or
                the mode of the builder or of a layer has changed. The step has not run when the error is raised, and
                later runs are possible.
        """
        check_graph_formats(self)
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
        if tokens < padded:  # overwrite tokens of an earlier run with padding
            buffers.hidden_states[tokens:padded].zero_()
            buffers.positions[tokens:padded].zero_()
            buffers.slot_mapping[tokens:padded].fill_(-1)
        if requests < size:  # overwrite requests of an earlier run with padding rows
            buffers.seq_lens[requests:size].zero_()
            buffers.block_table[requests:size].zero_()
        return self.replay(size)[:tokens]

    @torch.no_grad()
    def replay(self, size: int) -> Tensor:
        """Run one step on the values that the buffers contain.

        Args:
            size: one of `batch_sizes`.

        Returns:
            [size x query_len, H]. The values are valid until the next run.

        Raises:
            ValueError: `size` is not one of `batch_sizes`, a buffer was replaced, or the format or the mode of the
                builder or of a layer has changed.
        """
        check_int("size", size)
        check(size in self.batch_sizes, "size", f"one of {self.batch_sizes}", size)
        check_graph_formats(self)
        check_not_replaced(self._captured, self.buffers.named())
        if not self._graphs:
            return self._run_padded(size)
        graph, output = self._graphs[size]
        graph.replay()
        return output
