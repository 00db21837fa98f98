"""Decode steps with fixed batch sizes, as CUDA graphs require. This package runs these steps without a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from ..interfaces import (
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    GraphBuffers,
    GraphMemory,
    GraphSupport,
    captured_batch,
    check_device,
    check_dtype,
    check_function,
    check_graph_batch,
    check_graph_formats,
    check_graph_plan,
    check_graph_query_len,
    check_graph_sizes,
    check_type,
    graph_support_of,
    most_captured_tokens,
    requests_with_tokens,
)

Step = Callable[[Tensor, Tensor, Any], Tensor]


class DecodeGraph:
    """A decode step that runs with a few fixed batch sizes; a smaller batch is padded to the next larger size.

    This class runs the step without a CUDA graph. The class of the same name in the package `fast` captures the step in
    a graph. The shapes of a graph are fixed, but the values of lengths, block tables and slots may differ in every run.

    A graph for B requests has B * query_len tokens. If the last requests of a batch have no tokens, they are left out.
    A run with fewer requests or tokens than the graph is then padded:

    - A padding row is an added request with length 0. It reads no key.
    - A padding token is a token behind the last request. It has slot -1 and sees no key, so it writes no cache entry
      and its attention output is 0. If `graph_support` is ONE_QUERY_LEN, the padding tokens belong to the padding rows.

    The builder makes the plan of every run (`build_for_cudagraph_capture`), and the step gets this plan. The class
    therefore works for any kind of attention.

    Args:
        step: function (hidden_states [T, H], positions [T], plan) -> [T, H], such as one layer over its cache or all
            layers of a model. The function must not change its arguments. If the cache of a layer has a scale
            (`KVScale`), the scale must be chosen before the first run: pass `kv_scale` to the layer, or run a prefill.
        builder: builder that plans the step (such as `MLAMetadataBuilder`). Under context parallelism every rank makes
            a `DecodeGraph` with its own builder. All ranks then run the same batches, each rank with its own slots.
        batch_sizes: numbers of requests to which batches are padded.
        max_blocks: largest number of columns of a block table.
        hidden_size: H.
        dtype: dtype of the hidden states.
        device: device of the step.
        query_len: largest number of query tokens of a request: 1 plus the number of drafted tokens.
        layers: the layers that the step runs. The constructor and every run raise if a layer has another cache format
            or another fp8 mode than the builder. A layer that is not in `layers` raises the error itself, when
            it gets the plan of its first step.

    Attributes:
        cache_format: the builder's format of caches; None if the builder has none.
        fp8_mode: the builder's fp8 mode (`mla_decode`); None if the builder has none.
        max_seq_len: largest number of tokens that a request may have in a run: the limit of `builder`, or the tokens
            that fit into `max_blocks` blocks, whichever is smaller.
        graph_support: ANY if the requests of a run may have different numbers of query tokens, up to `query_len`.
            ONE_QUERY_LEN if every request must have `query_len` query tokens, or if `query_len` is 1.

    Raises:
        TypeError: `builder` is not an `AttentionMetadataBuilder`, or another argument has a wrong type.
        ValueError: `batch_sizes` is empty, or has a size below 1 or above the builder's `max_num_seqs`; another number
            is below 1; the builder cannot plan a graph for `query_len`; a layer has another cache format or fp8 mode.
        UnsupportedConfiguration: no graph can serve the builder's layers, such as cross attention
            (`AttentionMetadataBuilder`).
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
        # the builder of another attention family may have no `cache_format` and no `fp8_mode`
        self.cache_format = getattr(builder, "cache_format", None)
        self.fp8_mode = getattr(builder, "fp8_mode", None)
        check_graph_formats(self)
        self.batch_sizes = tuple(sorted(set(batch_sizes)))
        self.max_blocks, self.hidden_size, self.query_len = max_blocks, hidden_size, query_len
        self.dtype, self.device = dtype, device
        self.max_seq_len = most_captured_tokens(builder, max_blocks)
        self.graph_support = graph_support_of(builder, query_len)
        check_graph_query_len(self)

    def _padding(self, size: int) -> GraphBuffers:
        """Return the buffers of a batch of `size` padding rows."""
        return GraphBuffers.of_padding(size, self.query_len, self.max_blocks, self.hidden_size, self.dtype, self.device)

    @property
    def memory(self) -> GraphMemory:
        """Return the bytes of the buffers of the largest batch size. `pool_bytes` is 0: no graph is captured."""
        return GraphMemory(self._padding(self.batch_sizes[-1]).size_in_bytes, 0)

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
            common: the batch. With the graph support ANY, every request has at most `query_len` query tokens. With
                ONE_QUERY_LEN, every request has `query_len` query tokens, except requests without query tokens at the
                end of the batch.

        Returns:
            [T, H], the output without the rows that were added as padding. The next run may overwrite this tensor.

        Raises:
            ValueError: the batch has more requests, longer requests or a wider block table than the graph allows; a
                query length does not fit `graph_support`; a tensor has a wrong shape, dtype or device; the format or
                the mode of the builder or of a layer has changed. If the method raises, it has not run the step.
        """
        check_graph_formats(self)
        check_graph_batch(self, hidden_states, positions, common)
        tokens, requests = common.num_actual_tokens, requests_with_tokens(common)
        if tokens == 0:
            return torch.empty_like(hidden_states)
        size = next(size for size in self.batch_sizes if size >= requests)
        padded = self._padding(size)
        padded.hidden_states[:tokens] = hidden_states
        padded.positions[:tokens] = positions
        padded.seq_lens[:requests] = common.seq_lens[:requests]
        padded.block_table[:requests, : common.block_table.shape[1]] = common.block_table[:requests]
        padded.slot_mapping[:tokens] = common.slot_mapping[:tokens]
        if self.graph_support is GraphSupport.ANY:
            padded.query_start_loc[:requests] = common.query_start_loc[:requests]
            padded.query_start_loc[requests:] = tokens
        plan = self.builder.build_for_cudagraph_capture(captured_batch(self, padded))
        check_graph_plan(self, plan)
        return self.step(padded.hidden_states, padded.positions, plan)[:tokens]
