"""What runs when: the plan of one step, in integers. Plain loops that can be followed by hand."""

from __future__ import annotations

import itertools

import torch
from jaxtyping import Int32
from torch import Tensor

from .batch import split_decodes_and_prefills
from .interfaces import (
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
    lens = context_lens.tolist()
    check(min(lens, default=0) >= 0, "context_lens", "values >= 0", min(lens, default=0))
    with_context = sum(length > 0 for length in lens)
    if with_context == 0:
        return ()
    share = workspace_tokens // with_context // block_size * block_size
    check(share > 0, "workspace_tokens", f"at least a block of {block_size} for each of {with_context} requests",
          workspace_tokens)  # fmt: skip
    chunks = []
    for start in range(0, max(lens), share):
        pieces = [max(0, min(length - start, share)) for length in lens]
        offsets = [sum(pieces[:request]) for request in range(len(pieces) + 1)]
        starts = [start if piece else 0 for piece in pieces]
        chunks.append(
            ContextChunk(
                starts=torch.tensor(starts, dtype=torch.int32, device="cpu"),
                cu_seq_lens=torch.tensor(offsets, dtype=torch.int32, device="cpu"),
                num_tokens=offsets[-1],
                max_seq_len=max(pieces),
            )
        )
    return tuple(chunks)


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
    starts, lengths = common.query_start_loc_cpu.tolist(), common.seq_lens_cpu.tolist()
    query_lens = [end - start for start, end in itertools.pairwise(starts)]

    visible = []
    for query_len, length in zip(query_lens[:decodes], lengths[:decodes], strict=True):
        visible += [length - query_len + i + 1 if length > 0 else 0 for i in range(query_len)]

    context = common.num_computed_tokens_cpu[decodes:]
    chunks = plan_context_chunks(context, workspace_tokens, block_size)
    prefill_starts = [start - decode_tokens for start in starts[decodes:]]
    return MLAMetadata(
        slot_mapping=common.slot_mapping,
        num_actual_tokens=common.num_actual_tokens,
        num_decodes=decodes,
        num_decode_tokens=decode_tokens,
        decode=DecodeMetadata(
            block_table=common.block_table[:decodes],
            seq_lens=common.seq_lens[:decodes],
            query_start_loc=common.query_start_loc[: decodes + 1],
            max_query_len=max(query_lens[:decodes], default=0),
            visible_lens=torch.tensor(visible, dtype=torch.int32, device=device),
        ),
        prefill=PrefillMetadata(
            block_table=common.block_table[decodes:],
            query_start_loc=torch.tensor(prefill_starts, dtype=torch.int32, device=device),
            max_query_len=max(query_lens[decodes:], default=0),
            context_chunks=tuple(chunk.to(device) for chunk in chunks),
        ),
    )
