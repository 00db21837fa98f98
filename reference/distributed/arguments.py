"""What layers and ops ask of groups of ranks."""

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
    """Check that groups are a `ContextParallel`, or None where one rank serves."""
    if context_parallel is not None:
        check_type("context_parallel", context_parallel, ContextParallel, "a ContextParallel or None")


def check_output_projection(o_proj: object, context_parallel: ContextParallel | None) -> None:
    """Check that an output projection adds its own bias and can be summed over the ranks that share its heads.

    `linear_output` would refuse a bias that is returned, but only after the cache was written.
    """
    check_groups(context_parallel)
    skipped = getattr(o_proj, "skip_bias_add", False) and getattr(o_proj, "bias", None) is not None
    check(not skipped, "o_proj", "a module that adds its own bias", "one with skip_bias_add and a bias")
    summed = context_parallel is not None and context_parallel.tp_group.size > 1
    check(not summed or getattr(o_proj, "bias", None) is None, "o_proj",
          "no bias where heads are shared (each rank would add it)", "one with a bias")  # fmt: skip


def check_step_ownership(metadata: MLAMetadata, context_parallel: ContextParallel | None) -> None:
    """Check that a step was planned for the tokens that the rank of a layer owns."""
    ownership = metadata.ownership if isinstance(metadata, ContextParallelMetadata) else None
    wanted = None if context_parallel is None else context_parallel.ownership
    if ownership != wanted:
        check(False, "metadata", f"a plan for {wanted or 'one rank (no context_parallel)'}",
              f"one for {ownership or 'one rank (no ownership)'}")  # fmt: skip
    if ownership is None:
        return
    check(metadata.cascade is None, "metadata.cascade", "None where ranks share sequences", "a cascade")
    for chunk in metadata.prefill.context_chunks:
        check_chunk_ownership(chunk, context_parallel, "metadata.prefill.context_chunks")


def check_chunk_ownership(chunk: ContextChunk, context_parallel: ContextParallel, argument: str = "chunk") -> None:
    """Check that a chunk of context was planned for the tokens that a rank owns."""
    check_type("context_parallel", context_parallel, ContextParallel)
    is_shared = isinstance(chunk, ContextParallelChunk)
    check(is_shared, argument, "a ContextParallelChunk (`rank_local_chunk`)", type(chunk).__name__)
    check(
        chunk.ownership == context_parallel.ownership,
        argument,
        f"one for {context_parallel.ownership}",
        f"one for {chunk.ownership}",
    )


def check_invariant_merge(context_parallel: ContextParallel | None, batch_invariant: bool) -> None:
    """Check that a promise of the same bits does not rest on a reduce-scatter, whose order the engine may choose."""
    check_groups(context_parallel)
    check_flag("batch_invariant", batch_invariant)
    breaks = batch_invariant and context_parallel is not None and context_parallel.merge != "a2a"
    check(not breaks, "batch_invariant", 'False, or groups with merge "a2a"', 'True with "ag_rs"')


def check_merge_over_group(state: AttentionState, group_size: int) -> None:
    """Shapes, dtypes and devices of a rank's attention state whose heads go to their owner ranks; reads no values."""
    check_state("state", state)
    heads = state.out.shape[1]
    check(heads % group_size == 0, "state.out", f"heads in a multiple of {group_size} ranks", heads)
