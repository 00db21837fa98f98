"""The interface of metadata builders: the methods that an engine calls to plan a step (one forward pass)."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Int32
from torch import Tensor

from .graphs import GraphBuffers
from .metadata import CommonAttentionMetadata
from .ownership import ONE_RANK, TokenOwnership
from .support import GraphSupport


@runtime_checkable
class AttentionMetadataBuilder(Protocol):
    """Interface of a class that computes the plan of each step from the batch of an engine's scheduler.

    A plan has the integers that attention needs, such as lengths and slots. Each kind of attention has its own type of
    plan, so plans are annotated as `Any`. For MLA the class is `MLAMetadataBuilder`, and its plans are `MLAMetadata`.
    For grouped-query attention the class is `GQAMetadataBuilder`, and its plans are `GQAMetadata` or `EncoderMetadata`.

    A builder may have the attribute `graph_refusals`: the reasons why no CUDA graph can serve its layers. If there is a
    reason, `DecodeGraph` raises an error with all reasons.

    Attributes:
        block_size: tokens per block.
        max_model_len: largest number of tokens of a sequence.
        max_num_seqs: largest number of requests in a batch.
        ownership: the tokens that this context-parallel rank owns; None if one rank owns all tokens.
    """

    block_size: int
    max_model_len: int
    max_num_seqs: int
    ownership: TokenOwnership | None

    @property
    def graph_support(self) -> GraphSupport:
        """Return which query lengths the batches of one CUDA graph may have."""
        ...

    def build(self, common_prefix_len: int, common: CommonAttentionMetadata, fast_build: bool = False) -> Any:
        """Return the plan of one step.

        Args:
            common_prefix_len: number of context tokens that all decodes share; 0 for none.
            common: the batch, in the order that the swaps of `reorder_batch` give.
            fast_build: whether to plan faster, without the optional parts of a plan that make the kernels faster.
        """
        ...

    def build_for_cudagraph_capture(self, common: CommonAttentionMetadata) -> Any:
        """Return the plan of a batch for a CUDA graph, computed from the batch's tensors on the device alone.

        A replay has as many requests as `common`. Its longest query has at most `common.max_query_len` tokens, and all
        its queries together have at most `common.num_actual_tokens` tokens. The values of `common.query_start_loc` and
        `common.seq_lens` may differ in every replay. Tokens behind the last request are padding. The method raises if
        `can_run_in_cudagraph(common)` is False.

        If an engine calls this method during the capture, the graph contains the planning and repeats it in every
        replay. If an engine calls this method before the capture, the engine must keep the plan: the graph reads the
        tensors of the plan, and `update_captured` writes new values into them before a replay.
        """
        ...

    def update_captured(self, captured: Any, common: CommonAttentionMetadata) -> None:
        """Write the plan of another batch into the tensors of a captured plan, which a CUDA graph reads.

        Args:
            captured: plan that `build_for_cudagraph_capture` returned before the capture.
            common: the batch of the next replay.
        """
        ...

    def can_run_in_cudagraph(self, common: CommonAttentionMetadata) -> bool:
        """Return whether a CUDA graph can be captured for this batch and replayed."""
        ...

    def use_cascade_attention(
        self, common_prefix_len: int, query_lens: Int32[Tensor, " B"], seq_lens: Int32[Tensor, " B"]
    ) -> bool:
        """Return whether a cascade (one call attends the prefix that all decodes share) is estimated to be faster.

        Args:
            common_prefix_len: tokens of the prefix.
            query_lens: [B], new tokens of each request, on the CPU.
            seq_lens: [B], tokens of each request after the step, on the CPU.
        """
        ...

    def reorder_batch(
        self, query_lens: Int32[Tensor, " B"], context_lens: Int32[Tensor, " B"]
    ) -> tuple[tuple[int, int], ...]:
        """Return the fewest swaps of two requests that bring the decodes to the front of the batch.

        Args:
            query_lens: [B], new tokens of each request, on the CPU.
            context_lens: [B], cached tokens of each request, on the CPU.
        """
        ...


def most_captured_tokens(builder: AttentionMetadataBuilder, max_blocks: int) -> int:
    """Return the largest number of tokens that a request may have in a replay of a `DecodeGraph`.

    Args:
        builder: builder that plans the graph; a request has at most `builder.max_model_len` tokens.
        max_blocks: columns of the block table; a request has at most the tokens that fit into these columns.
    """
    owned = ONE_RANK if builder.ownership is None else builder.ownership
    return min(builder.max_model_len, max_blocks * builder.block_size * owned.size)


def graph_support_of(builder: AttentionMetadataBuilder, query_len: int) -> GraphSupport:
    """Return ANY if a `DecodeGraph` may mix different query lengths up to `query_len`, otherwise ONE_QUERY_LEN."""
    mixed = builder.graph_support is GraphSupport.ANY and query_len > 1
    return GraphSupport.ANY if mixed else GraphSupport.ONE_QUERY_LEN


def captured_batch(graph: Any, buffers: GraphBuffers) -> CommonAttentionMetadata:
    """Return the batch that a `DecodeGraph` passes to its builder.

    The lengths of the replays are unknown at capture. The CPU fields of the batch therefore have upper bounds: every
    request has `graph.max_seq_len` tokens, and `graph.query_len` of them are query tokens.

    Args:
        graph: decode graph with the attributes `query_len`, `max_seq_len` and `builder`.
        buffers: buffers on the device, whose values may differ in every replay.
    """
    requests, most = buffers.seq_lens.shape[0], graph.max_seq_len
    return CommonAttentionMetadata(
        seq_lens=buffers.seq_lens,
        query_start_loc=buffers.query_start_loc,
        seq_lens_cpu=torch.full((requests,), most, dtype=torch.int32, device="cpu"),  # upper bounds for every replay
        query_start_loc_cpu=graph.query_len * torch.arange(requests + 1, dtype=torch.int32, device="cpu"),
        block_table=buffers.block_table,
        slot_mapping=buffers.slot_mapping,
        max_query_len=graph.query_len,
        num_actual_tokens=requests * graph.query_len,
        max_seq_len=most,
        block_size=graph.builder.block_size,
    )
