"""Argument checks of layers and functions that use several ranks.

With context parallelism, ranks divide the tokens of every sequence among themselves. With tensor parallelism, ranks
divide the heads among themselves.
"""

from __future__ import annotations

from ..interfaces import (
    AttentionState,
    ContextChunk,
    ContextParallelChunk,
    ContextParallelMetadata,
    MLAMetadata,
    check,
    check_flag,
    check_state,
    check_type,
)
from .groups import ContextParallel


def check_groups(context_parallel: ContextParallel | None) -> None:
    """Check that an argument is a `ContextParallel`, or None, which means one rank."""
    if context_parallel is not None:
        check_type("context_parallel", context_parallel, ContextParallel, "a ContextParallel or None")


def check_output_projection(o_proj: object, context_parallel: ContextParallel | None) -> None:
    """Check the bias of an output projection. A layer calls this check before it writes to the cache.

    - The projection must add its bias itself. Some modules return the bias next to the product instead
      (`skip_bias_add`).
    - If ranks divide the heads among themselves, the projection must have no bias: the outputs of all ranks are summed,
      so the sum would contain the bias several times.
    """
    check_groups(context_parallel)
    skipped = getattr(o_proj, "skip_bias_add", False) and getattr(o_proj, "bias", None) is not None
    check(not skipped, "o_proj", "a module that adds its own bias", "a module with skip_bias_add and a bias")
    summed = context_parallel is not None and context_parallel.tp_group.size > 1
    check(not summed or getattr(o_proj, "bias", None) is None, "o_proj",
          "no bias if ranks share the heads (each rank would add the bias)", "a bias")  # fmt: skip


def check_step_ownership(metadata: MLAMetadata, context_parallel: ContextParallel | None) -> None:
    """Check that the plan of a step was made for the tokens that this rank owns."""
    ownership = metadata.ownership if isinstance(metadata, ContextParallelMetadata) else None
    wanted = None if context_parallel is None else context_parallel.ownership
    if ownership != wanted:
        check(False, "metadata", f"a plan for {wanted or 'one rank (no context_parallel)'}",
              f"a plan for {ownership or 'one rank (no ownership)'}")  # fmt: skip
    if ownership is None:
        return
    check(metadata.cascade is None, "metadata.cascade", "None if ranks share sequences", "a cascade")
    for chunk in metadata.prefill.context_chunks:
        check_chunk_ownership(chunk, context_parallel, "metadata.prefill.context_chunks")


def check_chunk_ownership(chunk: ContextChunk, context_parallel: ContextParallel, argument: str = "chunk") -> None:
    """Check that a chunk was planned for the tokens that this rank owns."""
    check_type("context_parallel", context_parallel, ContextParallel)
    is_shared = isinstance(chunk, ContextParallelChunk)
    check(is_shared, argument, "a ContextParallelChunk, from `rank_local_chunk`", type(chunk).__name__)
    check(
        chunk.ownership == context_parallel.ownership,
        argument,
        f"a chunk for {context_parallel.ownership}",
        f"a chunk for {chunk.ownership}",
    )


def check_invariant_merge(context_parallel: ContextParallel | None, batch_invariant: bool) -> None:
    """Check that `batch_invariant` is not combined with the merge "ag_rs".

    `batch_invariant` promises the same bits in every batch. The merge "ag_rs" sums with a reduce-scatter. The
    communication library chooses the order of this sum, so the bits may differ.
    """
    check_groups(context_parallel)
    check_flag("batch_invariant", batch_invariant)
    breaks = batch_invariant and context_parallel is not None and context_parallel.merge != "a2a"
    check(not breaks, "batch_invariant", 'False, or groups with merge "a2a"', 'True with "ag_rs"')


def check_merge_over_group(state: AttentionState, group_size: int) -> None:
    """Check an attention state that is merged over ranks; its number of heads must be a multiple of `group_size`."""
    check_state("state", state)
    heads = state.out.shape[1]
    check(heads % group_size == 0, "state.out", f"a number of heads that {group_size} divides", heads)
