"""What a metadata builder does for an engine, whatever attention family it plans for."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from jaxtyping import Int32
from torch import Tensor

from .metadata import CommonAttentionMetadata
from .support import GraphSupport


@runtime_checkable
class AttentionMetadataBuilder(Protocol):
    """Turns the batch of a scheduler into the plan of one step. An engine needs no more of a builder.

    The type of the plan belongs to the attention family; here it is `Any`.
    """

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
        """Return the plan of a batch that is captured; its tensors are those that a graph goes on reading."""
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
