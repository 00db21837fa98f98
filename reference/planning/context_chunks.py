"""Cut cached context into chunks that fit a workspace."""

from __future__ import annotations

import itertools

import torch
from jaxtyping import Int32
from torch import Tensor

from ..interfaces import (
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
    lens = context_lens.tolist()
    return tuple(_chunk(pieces, len(lens)) for pieces in _pack(lens, workspace_tokens, unit))


def _pack(lens: list[int], workspace_tokens: int, unit: int) -> list[dict[int, tuple[int, int]]]:
    """Chunks as {request: (start, length)}, filled one after another."""
    chunks: list[dict[int, tuple[int, int]]] = []
    room = 0  # units left in the last chunk
    for request, length in enumerate(lens):
        start = 0
        while start < length:
            if room == 0:
                chunks.append({})
                room = workspace_tokens // unit
            taken = min(length - start, room * unit)
            chunks[-1][request] = (start, taken)
            room -= -(-taken // unit)
            start += taken
    return chunks


def _chunk(pieces: dict[int, tuple[int, int]], num_requests: int) -> ContextChunk:
    starts = [pieces.get(request, (0, 0))[0] for request in range(num_requests)]
    offsets = [0]
    for request in range(num_requests):
        offsets.append(offsets[-1] + pieces.get(request, (0, 0))[1])
    return ContextChunk(
        starts=torch.tensor(starts, dtype=torch.int32, device="cpu"),
        cu_seq_lens=torch.tensor(offsets, dtype=torch.int32, device="cpu"),
        num_tokens=offsets[-1],
        max_seq_len=max(length for _, length in pieces.values()),
    )


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
    starts, lengths = chunk.starts.tolist(), chunk.cu_seq_lens.diff().tolist()
    for request, start in enumerate(starts):
        check(start % turn == 0, "chunk.starts", f"multiples of {turn}", f"{start} at request {request}")
    ranks = [TokenOwnership(ownership.size, rank, ownership.interleave) for rank in range(ownership.size)]
    local = [[0, *itertools.accumulate(map(rank.count, lengths))] for rank in ranks]
    device = chunk.starts.device
    return ContextParallelChunk(
        starts=chunk.starts,
        cu_seq_lens=chunk.cu_seq_lens,
        num_tokens=chunk.num_tokens,
        max_seq_len=chunk.max_seq_len,
        local_starts=torch.tensor([start // ownership.size for start in starts], dtype=torch.int32, device=device),
        local_cu_seq_lens=torch.tensor(local, dtype=torch.int32, device=device),
        local_tokens=local[ownership.rank][-1],
        padded_tokens=local[0][-1],
        ownership=ownership,
    )
