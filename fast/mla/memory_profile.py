"""The workspace of a step, and the memory-profile run.

The workspace is the memory in which a prefill gathers and expands one chunk of context. The memory-profile run is a
call of a layer without a plan: it allocates the buffers of the largest step with the same number of tokens, so that an
engine can measure the peak memory before it allocates the cache. docs/glossary.md explains the letters of shapes.
"""

from __future__ import annotations

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor, nn

from reference.distributed.groups import ContextParallel
from reference.interfaces import (
    ContextParallelChunk,
    ContextWorkspace,
    MLAConfig,
    MLAMetadata,
    reserve_largest,
    wide_dtype,
)

from .. import backends
from .head_products import INVARIANT_ROWS
from .weights import expand_into


def reserve_for_step(
    layer: nn.Module, metadata: MLAMetadata | None, q: Tensor
) -> tuple[ContextWorkspace | None, tuple[Tensor, Tensor] | None]:
    """Return the workspace of a step, and the two tensors of this workspace for the largest chunk (`reserve_largest`).

    The workspace and the pair of tensors are None if the step has no context.

    Args:
        layer: the `MLAAttention`.
        metadata: plan of the step; None for the memory-profile run.
        q: queries, in the dtype and on the device of the layer.
    """
    tokens, workspace, context_parallel = layer.workspace_tokens, layer.workspace, layer.context_parallel
    if metadata is not None:
        chunks = metadata.prefill.context_chunks
        if not chunks:
            return None, None
        exchanged = [chunk.padded_tokens * context_parallel.size for chunk in chunks
                     if isinstance(chunk, ContextParallelChunk)]  # fmt: skip
        longest = max(*exchanged, *(chunk.num_tokens for chunk in chunks), 0)
        tokens = max(min(metadata.workspace_tokens, tokens), longest)
    if workspace is None:
        workspace = ContextWorkspace() if metadata is None else metadata.workspace
    size = None if context_parallel is None else context_parallel.size
    largest = reserve_largest(workspace, layer.local_config, tokens, size, q.dtype, q.device)
    backends.confirm(*largest)
    return workspace, largest


def touch_largest(
    q: Float[Tensor, "T N D"],
    kv_c_normed: Float[Tensor, "T Lkv"],
    w_uk: Float[Tensor, "Lkv N P"],
    w_uv: Float[Tensor, "Lkv N V"],
    config: MLAConfig,
    context: Float[Tensor, "S head_size"],
    expanded: Float[Tensor, " elements"],
    context_parallel: ContextParallel | None,
    expand: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None,
) -> None:
    """Allocate and free the buffers of a step of T tokens, so that a measurement of peak memory includes them.

    The function first allocates the buffers of T prefill tokens with context, and then the buffers of T decode tokens.
    It leaves out the partial outputs of a decode, and the attention states of a cascade.

    Args:
        q: [T, N, P + R], queries.
        kv_c_normed: [T, Lkv], latents of the new tokens.
        w_uk: [Lkv, N, P].
        w_uv: [Lkv, N, V].
        config: config with the heads of this rank.
        context: [S, Lkv + R], memory for the context tokens of the largest chunk (`reserve_largest`).
        expanded: memory for the keys and values of these S tokens.
        context_parallel: groups of the ranks that share sequences, or None.
        expand: function that allocates expanded keys and values; None to expand with `w_uk` and `w_uv`.
    """
    chunk = context.zero_()[:, : config.kv_lora_rank]
    if expand is None:
        expand_into(chunk, w_uk, w_uv, expanded)
    (tokens, heads, _), wide = q.shape, wide_dtype(q.dtype)

    def state() -> tuple[Tensor, Tensor]:
        return q.new_empty(tokens, heads, config.v_head_dim, dtype=wide), q.new_empty(heads, tokens, dtype=wide)

    keys = expand_into(kv_c_normed, w_uk, w_uv, None) if expand is None else expand(kv_c_normed)
    states = [state()]  # attention over the new tokens
    del keys
    if expand is None:  # a batch-invariant step fills up the last block of rows
        expand_into(chunk[:1], w_uk, w_uv, expanded, INVARIANT_ROWS)
    keys = None if expand is None else expand(chunk)
    states.append(state())  # attention over one chunk; the merge overwrites the first state
    del states, keys

    rotated = q.new_empty(tokens, heads, config.qk_rope_head_dim)
    queries = q.new_empty(tokens, heads, config.kv_lora_rank)
    if context_parallel is None:
        held = [queries, q.new_empty(queries.shape), q.new_empty(heads, tokens, dtype=wide)]
    else:  # queries of this rank and of all ranks; then the output of all heads, a sent and a received message
        gathered = heads * context_parallel.size
        held = [queries, q.new_empty(tokens, heads + gathered, config.head_size)]
        held += [q.new_empty(tokens, gathered, config.kv_lora_rank + 2) for _ in range(3)]
    del rotated, held
