"""The memory-profile run of a layer: it allocates what the largest step of as many tokens allocates."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from reference.distributed.groups import ContextParallel
from reference.interfaces import ContextWorkspace, MLAConfig, aligned, context_workspace_size, wide_dtype

from .weights import expand_kv


def reserve(
    workspace: ContextWorkspace,
    config: MLAConfig,
    workspace_tokens: int,
    context_parallel: ContextParallel | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Float[Tensor, " elements"]:
    """Return the memory of a workspace, large enough for every chunk of up to `workspace_tokens` tokens.

    Args:
        workspace: the workspace.
        config: config with the heads of this rank.
        workspace_tokens: largest number of tokens of a chunk.
        context_parallel: groups of the ranks that share sequences, or None.
        dtype: dtype of the layer.
        device: device of the layer.

    Raises:
        ValueError: the memory was given by the caller, and is too small or has another dtype or device.
    """
    size = None if context_parallel is None else context_parallel.size
    return workspace.reserve(context_workspace_size(config, workspace_tokens, size), dtype, device)


def touch_largest(
    q: Float[Tensor, "T N D"],
    kv_c_normed: Float[Tensor, "T Lkv"],
    w_uk: Float[Tensor, "Lkv N P"],
    w_uv: Float[Tensor, "Lkv N V"],
    config: MLAConfig,
    memory: Float[Tensor, " elements"],
    workspace_tokens: int,
    context_parallel: ContextParallel | None,
) -> None:
    """Allocate the buffers of a step of T tokens, so that a measurement of peak memory includes these buffers.

    First come the buffers of a step whose tokens all prefill with context, then the buffers of a step whose tokens all
    decode. Two kinds of buffers are left out, because only decodes of few tokens need them: partial outputs, and the
    states of a cascade.

    Args:
        q: [T, N, P + R].
        kv_c_normed: [T, Lkv].
        w_uk: [Lkv, N, P].
        w_uv: [Lkv, N, V].
        config: config with the heads of this rank.
        memory: memory of the workspace, from `reserve`.
        workspace_tokens: number of context tokens that are expanded, the largest number of a chunk.
        context_parallel: groups of the ranks that share sequences, or None.
    """
    elements = workspace_tokens * config.head_size
    context = memory[:elements].view(workspace_tokens, config.head_size).zero_()
    expand_kv(context[:, : config.kv_lora_rank], w_uk, w_uv, workspace=memory[aligned(elements) :])

    (tokens, heads, _), wide = q.shape, wide_dtype(q.dtype)

    def state() -> tuple[Tensor, Tensor]:
        return q.new_empty(tokens, heads, config.v_head_dim, dtype=wide), q.new_empty(heads, tokens, dtype=wide)

    keys = expand_kv(kv_c_normed, w_uk, w_uv)
    states = [state()]  # over the new tokens
    del keys
    states.append(state())  # over one chunk; the merge writes in place
    del states

    queries = q.new_empty(tokens, heads, config.kv_lora_rank)
    if context_parallel is None:
        held = [queries, q.new_empty(queries.shape), q.new_empty(heads, tokens, dtype=wide)]
    else:  # queries of this rank and of all ranks, the outputs of all heads, a sent and a received message
        gathered = heads * context_parallel.size
        held = [queries, q.new_empty(tokens, heads + gathered, config.head_size)]
        held += [q.new_empty(tokens, gathered, config.kv_lora_rank + 2) for _ in range(3)]
    del held
