"""Cut cached context into chunks that fit a workspace."""

from __future__ import annotations

import torch
from jaxtyping import Int32
from torch import Tensor

from reference.interfaces import (
    ContextChunk,
    ContextParallelChunk,
    TokenOwnership,
    check,
    check_chunk,
    check_chunking,
    check_not_negative,
    check_tensor,
    check_type,
    context_unit,
    get_dcp_local_seq_lens,
)


def plan_context_chunks(
    context_lens: Int32[Tensor, " B"],
    workspace_tokens: int,
    block_size: int,
    context_parallel_size: int = 1,
    interleave: int = 1,
) -> tuple[ContextChunk, ...]:
    """Cut the cached context of some requests into chunks that fit the workspace.

    Every context token lies in exactly one chunk. Chunks are filled one after another in the order of the requests, so
    that only the first request of a chunk continues from the chunk before, and there are ceil(units of all contexts /
    units of the workspace) chunks. A request starts in a chunk on a unit (`context_unit`: a block, and under context
    parallelism whole turns of the ranks) and takes whole units of the workspace.

    Args:
        context_lens: [B], on the CPU; 0 = no context.
        workspace_tokens: most tokens in one chunk.
        block_size: tokens a block.
        context_parallel_size: D, ranks that share each context.
        interleave: I, tokens that lie on one rank in a row.

    Returns:
        The chunks, on the CPU; none where no request has context.

    Raises:
        ValueError: a workspace smaller than one unit; a negative length.
    """
    check_tensor("context_lens", context_lens, ("B",), (torch.int32,), torch.device("cpu"))
    unit = context_unit(block_size, context_parallel_size, interleave)
    check_chunking(workspace_tokens, unit)
    check_not_negative("context_lens", context_lens)
    if context_lens.numel() == 0:
        return ()
    longest = int(context_lens.max())
    if longest == 0:
        return ()
    units = ((context_lens.long() + (unit - 1)) // unit).cumsum(0)
    if int(units[-1]) * unit <= workspace_tokens:  # one chunk holds it all: most steps
        offsets = torch.zeros(context_lens.shape[0] + 1, dtype=torch.int32, device="cpu")
        torch.cumsum(context_lens, 0, dtype=torch.int32, out=offsets[1:])
        return (ContextChunk(torch.zeros_like(context_lens), offsets, int(offsets[-1]), longest),)
    starts, pieces = _pack(context_lens, units, workspace_tokens // unit, unit)
    offsets = torch.nn.functional.pad(pieces.cumsum(1, dtype=torch.int32), (1, 0))
    totals, longest_pieces = offsets[:, -1].tolist(), pieces.amax(1).tolist()
    return tuple(map(ContextChunk, starts.unbind(), offsets.unbind(), totals, longest_pieces))


def _pack(context_lens: Tensor, ends: Tensor, room: int, unit: int) -> tuple[Tensor, Tensor]:
    """Starts and lengths [chunks, B] of the pieces: contexts end to end in units, cut every `room` of them."""
    lens = context_lens.long()
    starts = torch.nn.functional.pad(ends, (1, 0))[:-1]
    cuts = torch.arange(0, int(ends[-1]), room, device="cpu")[:, None]  # [chunks, 1]
    first = (cuts - starts).clamp_(min=0).mul_(unit)  # [chunks, B], tokens of each request before the chunk
    end = torch.minimum((cuts + room - starts).clamp_(min=0).mul_(unit), lens)
    pieces = (end - first).clamp_(min=0)
    return (first * (pieces > 0)).to(torch.int32), pieces.to(torch.int32)


def rank_local_chunk(chunk: ContextChunk, ownership: TokenOwnership) -> ContextParallelChunk:
    """Where the tokens of a piece of context lie on the ranks that share it.

    Args:
        chunk: of `plan_context_chunks` for as many ranks, so that its pieces begin with the first rank's turn.
        ownership: of this rank.

    Returns:
        The piece with each rank's part of it, on the same device.

    Raises:
        ValueError: a piece that begins within a turn of the ranks.
    """
    check_type("ownership", ownership, TokenOwnership)
    check_type("chunk", chunk, ContextChunk)
    check_tensor("chunk.starts", chunk.starts, ("B",), (torch.int32,))
    check_chunk(chunk, chunk.starts.shape[0], chunk.starts.device)
    turn = ownership.size * ownership.interleave
    within = (chunk.starts % turn).nonzero() if chunk.starts.device.type == "cpu" else chunk.starts[:0]
    if within.numel():
        request = int(within[0])
        check(False, "chunk.starts", f"multiples of {turn}", f"{int(chunk.starts[request])} at request {request}")
    lengths = get_dcp_local_seq_lens(chunk.cu_seq_lens.diff(), ownership.size, None, ownership.interleave)
    offsets = torch.zeros(ownership.size, lengths.shape[0] + 1, dtype=torch.int32, device=lengths.device)
    torch.cumsum(lengths.T, 1, dtype=torch.int32, out=offsets[:, 1:])
    return ContextParallelChunk(
        starts=chunk.starts,
        cu_seq_lens=chunk.cu_seq_lens,
        num_tokens=chunk.num_tokens,
        max_seq_len=chunk.max_seq_len,
        local_starts=chunk.starts.div(ownership.size, rounding_mode="floor"),
        local_cu_seq_lens=offsets,
        local_tokens=int(offsets[ownership.rank, -1]),
        padded_tokens=int(offsets[0, -1]),
        ownership=ownership,
    )
