"""What a metadata builder does for an engine, whatever attention family it plans for."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Int32
from torch import Tensor

from .metadata import CommonAttentionMetadata
from .ownership import TokenOwnership
from .support import GraphSupport


@runtime_checkable
class AttentionMetadataBuilder(Protocol):
    """Turns the batch of a scheduler into the plan of one step. An engine needs no more of a builder.

    The type of the plan belongs to the attention family; here it is `Any`.

    Attributes:
        block_size: tokens a block.
        max_model_len: longest sequence that it plans for.
        max_num_seqs: most requests in a batch.
        ownership: the tokens that a context-parallel rank owns; None where one rank owns all.
    """

    block_size: int
    max_model_len: int
    max_num_seqs: int
    ownership: TokenOwnership | None

    @property
    def graph_support(self) -> GraphSupport:
        """The batches for which `can_run_in_cudagraph` may be True."""
        ...

    def build(self, common_prefix_len: int, common: CommonAttentionMetadata, fast_build: bool = False) -> Any:
        """Return the plan of one step.

        Args:
            common_prefix_len: context that all decodes share, in tokens; 0 for none.
            common: the batch, ordered as `reorder_batch` says.
            fast_build: leave out what only speeds the kernels up.
        """
        ...

    def build_for_cudagraph_capture(self, common: CommonAttentionMetadata) -> Any:
        """Return the plan of a batch that is captured, from the batch's tensors on the device alone.

        Called while a graph is captured, the planning becomes part of the graph. Called before that, the plan's tensors
        are those that the graph goes on reading.
        """
        ...

    def update_captured(self, captured: Any, common: CommonAttentionMetadata) -> None:
        """Write the plan of another batch of the captured shape into the tensors of a captured plan."""
        ...

    def can_run_in_cudagraph(self, common: CommonAttentionMetadata) -> bool:
        """Return whether a batch may be captured and replayed."""
        ...

    def use_cascade_attention(
        self, common_prefix_len: int, query_lens: Int32[Tensor, " B"], seq_lens: Int32[Tensor, " B"]
    ) -> bool:
        """Return whether attending a shared prefix once for all requests is faster.

        Args:
            common_prefix_len: tokens of the prefix.
            query_lens: [B], new tokens of each request, on the CPU.
            seq_lens: [B], tokens of each request after the step, on the CPU.
        """
        ...

    def reorder_batch(
        self, query_lens: Int32[Tensor, " B"], context_lens: Int32[Tensor, " B"]
    ) -> tuple[tuple[int, int], ...]:
        """Return the fewest swaps of two requests that bring the decodes to the front.

        Args:
            query_lens: [B], new tokens of each request, on the CPU.
            context_lens: [B], cached tokens of each request, on the CPU.
        """
        ...


def most_captured_tokens(builder: AttentionMetadataBuilder, max_blocks: int) -> int:
    """Most tokens of a request for which a graph of this builder and such a block table can be replayed."""
    size = 1 if builder.ownership is None else builder.ownership.size
    return min(builder.max_model_len, max_blocks * builder.block_size * size)


def captured_batch(
    graph: Any, seq_lens: Tensor, query_start_loc: Tensor, block_table: Tensor, slot_mapping: Tensor
) -> CommonAttentionMetadata:
    """The batch that a decode graph gives its builder: the graph's tensors, and lengths that the host does not know.

    Args:
        graph: with `query_len`, `max_seq_len` and `builder`.
        seq_lens: [B] on the device.
        query_start_loc: [B + 1] on the device.
        block_table: [B, W] on the device.
        slot_mapping: [T] on the device.
    """
    requests, most = seq_lens.shape[0], graph.max_seq_len
    return CommonAttentionMetadata(
        seq_lens=seq_lens,
        query_start_loc=query_start_loc,
        seq_lens_cpu=torch.full((requests,), most, dtype=torch.int32, device="cpu"),  # a bound
        query_start_loc_cpu=graph.query_len * torch.arange(requests + 1, dtype=torch.int32, device="cpu"),
        block_table=block_table,
        slot_mapping=slot_mapping,
        max_query_len=graph.query_len,
        num_actual_tokens=requests * graph.query_len,
        max_seq_len=most,
        block_size=graph.builder.block_size,
    )
