"""What runs when: the plan of one step, in integers. Vectorised; bit-exact with the reference."""

from __future__ import annotations

import torch
from jaxtyping import Int32
from torch import Tensor

from reference.interfaces import (
    CommonAttentionMetadata,
    ContextChunk,
    DecodeMetadata,
    MLAMetadata,
    PrefillMetadata,
    check,
    check_prefill_lengths,
    check_tensor,
    chunked_prefill_workspace_size,
)

from .batch import split_decodes_and_prefills

__all__ = ["build_mla_metadata", "chunked_prefill_workspace_size", "plan_context_chunks"]


def plan_context_chunks(
    context_lens: Int32[Tensor, " B"], workspace_tokens: int, block_size: int, policy: str = "even"
) -> tuple[ContextChunk, ...]:
    """Cut the cached context of some requests into chunks that fit the workspace.

    Every context token lies in exactly one chunk, and every piece starts on a block boundary. Policy "even" (vLLM's):
    each request with context gets an equal share of the workspace, rounded down to whole blocks, in every chunk.

    Args:
        context_lens: [B], on the CPU; 0 = no context.
        workspace_tokens: most tokens in one chunk.
        block_size: tokens a block.
        policy: "even".

    Returns:
        The chunks, on the CPU; none where no request has context.

    Raises:
        ValueError: a workspace smaller than one block per request with context; a negative length; another policy.
    """
    check_tensor("context_lens", context_lens, ("B",), (torch.int32,), torch.device("cpu"))
    check(policy == "even", "policy", '"even"', repr(policy))
    check(block_size >= 1, "block_size", "at least 1", block_size)
    check(workspace_tokens >= block_size, "workspace_tokens", f"at least one block of {block_size}", workspace_tokens)
    if context_lens.numel() == 0:
        return ()
    shortest, longest = (int(length) for length in context_lens.aminmax())
    check(shortest >= 0, "context_lens", "values >= 0", shortest)
    if longest == 0:
        return ()
    with_context = int(context_lens.count_nonzero())
    share = workspace_tokens // with_context // block_size * block_size
    check(share > 0, "workspace_tokens", f"at least a block of {block_size} for each of {with_context} requests",
          workspace_tokens)  # fmt: skip
    share = min(share, -(-longest // block_size) * block_size)  # fits int32 whatever the workspace
    starts = torch.arange(0, longest, share, dtype=torch.int32, device="cpu")[:, None]  # [chunks, 1]
    pieces = (context_lens - starts).clamp_(0, share)  # [chunks, B]
    offsets = torch.nn.functional.pad(pieces.cumsum(1, dtype=torch.int32), (1, 0))
    starts = torch.where(pieces > 0, starts, 0)
    totals, longest_pieces = offsets[:, -1].tolist(), pieces.amax(1).tolist()
    return tuple(map(ContextChunk, starts.unbind(), offsets.unbind(), totals, longest_pieces))


def build_mla_metadata(
    common: CommonAttentionMetadata, block_size: int, workspace_tokens: int, decode_threshold: int = 1
) -> MLAMetadata:
    """Plan one step: the leading requests with short queries decode (absorbed), the rest prefill (expanded).

    Args:
        common: the batch.
        block_size: tokens a block.
        workspace_tokens: most context tokens that are expanded at once.
        decode_threshold: longest query that may decode.

    Returns:
        The plan, its tensors on the device of `common`.

    Raises:
        ValueError: `decode_threshold` below 1; a workspace that is too small; a padding row (S = 0 < Sq) that
            does not stand among the decodes.
    """
    decodes, _, decode_tokens, _ = split_decodes_and_prefills(common, decode_threshold)
    check_prefill_lengths(common, decodes)
    device = common.block_table.device
    query_lens = common.query_start_loc_cpu.diff()
    chunks = plan_context_chunks(common.num_computed_tokens_cpu[decodes:], workspace_tokens, block_size)

    starts, lengths = common.query_start_loc[: decodes + 1], common.seq_lens[:decodes]
    rows = torch.arange(decode_tokens, dtype=torch.int32, device=device)
    request = torch.searchsorted(starts[1:], rows, right=True)
    visible = (lengths - starts[1:])[request] + rows + 1  # S - Sq + i + 1
    visible.masked_fill_(lengths[request] == 0, 0)
    return MLAMetadata(
        slot_mapping=common.slot_mapping,
        num_actual_tokens=common.num_actual_tokens,
        num_decodes=decodes,
        num_decode_tokens=decode_tokens,
        decode=DecodeMetadata(
            block_table=common.block_table[:decodes],
            seq_lens=lengths,
            query_start_loc=starts,
            max_query_len=_longest(query_lens[:decodes]),
            visible_lens=visible,
        ),
        prefill=PrefillMetadata(
            block_table=common.block_table[decodes:],
            query_start_loc=common.query_start_loc[decodes:] - decode_tokens,
            max_query_len=_longest(query_lens[decodes:]),
            context_chunks=tuple(chunk.to(device) for chunk in chunks),
        ),
    )


def _longest(query_lens: Tensor) -> int:
    return int(query_lens.max()) if query_lens.numel() else 0
