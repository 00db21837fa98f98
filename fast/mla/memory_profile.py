"""The memory-profile run of a layer: it allocates what the largest step of as many tokens allocates."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from reference.distributed.groups import ContextParallel
from reference.interfaces import MLAConfig, wide_dtype

from .weights import expand_into


def touch_largest(
    q: Float[Tensor, "T N D"],
    kv_c_normed: Float[Tensor, "T Lkv"],
    w_uk: Float[Tensor, "Lkv N P"],
    w_uv: Float[Tensor, "Lkv N V"],
    config: MLAConfig,
    context: Float[Tensor, "S head_size"],
    expanded: Float[Tensor, " elements"],
    context_parallel: ContextParallel | None,
) -> None:
    """Allocate the buffers of a step of T tokens, so that a measurement of peak memory includes these buffers.

    First come the buffers of a step whose tokens all prefill with context, then the buffers of a step whose tokens all
    decode. Two kinds of buffers are left out: the partial outputs of a decode, and the states of a cascade.

    Args:
        q: [T, N, P + R].
        kv_c_normed: [T, Lkv].
        w_uk: [Lkv, N, P].
        w_uv: [Lkv, N, V].
        config: config with the heads of this rank.
        context: [S, Lkv + R], memory for the context tokens of the largest chunk (`reserve_largest`).
        expanded: memory for the expanded keys and values of these tokens.
        context_parallel: groups of the ranks that share sequences, or None.
    """
    expand_into(context.zero_()[:, : config.kv_lora_rank], w_uk, w_uv, expanded)

    (tokens, heads, _), wide = q.shape, wide_dtype(q.dtype)

    def state() -> tuple[Tensor, Tensor]:
        return q.new_empty(tokens, heads, config.v_head_dim, dtype=wide), q.new_empty(heads, tokens, dtype=wide)

    keys = expand_into(kv_c_normed, w_uk, w_uv, None)
    states = [state()]  # over the new tokens
    del keys
    states.append(state())  # over one chunk; the merge writes in place
    del states

    rotated = q.new_empty(tokens, heads, config.qk_rope_head_dim)
    queries = q.new_empty(tokens, heads, config.kv_lora_rank)
    if context_parallel is None:
        held = [queries, q.new_empty(queries.shape), q.new_empty(heads, tokens, dtype=wide)]
    else:  # queries of this rank and of all ranks, the outputs of all heads, a sent and a received message
        gathered = heads * context_parallel.size
        held = [queries, q.new_empty(tokens, heads + gathered, config.head_size)]
        held += [q.new_empty(tokens, gathered, config.kv_lora_rank + 2) for _ in range(3)]
    del rotated, held
