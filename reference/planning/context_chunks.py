"""Cut cached context into chunks. A prefill expands one chunk at a time in memory of fixed size (workspace)."""

from __future__ import annotations

import dataclasses
import itertools

import torch
from jaxtyping import Int32
from torch import Tensor

from ..interfaces import (
    ChunkRun,
    ContextChunk,
    ContextParallelChunk,
    TokenOwnership,
    check,
    check_chunk,
    check_chunking,
    check_flag,
    check_not_negative,
    check_offsets,
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
    batch_invariant: bool = False,
) -> tuple[ContextChunk, ...]:
    """Cut the cached context of some requests into chunks that fit into the workspace.

    Every context token is in exactly one chunk. Chunks are filled one after another in the order of the requests. If a
    context does not fit into the rest of a chunk, it continues in the next chunk.

    Contexts are cut at multiples of a unit (`context_unit`): one block, or lcm(block_size, D * I) tokens under context
    parallelism. Each context counts in whole units, rounded up. Therefore there are ceil(units of all contexts / units
    of the workspace) chunks.

    With `batch_invariant`, a context is cut only where it fills a whole workspace by itself. The cuts of a request then
    depend on its own length alone, not on the requests before it. A chunk may stay partly empty: if the next tokens of
    a context do not fit into the rest of the chunk, they begin a new chunk. So there are up to twice as many chunks.

    Args:
        context_lens: [B], context tokens of each request, on the CPU; 0 = no context.
        workspace_tokens: largest number of tokens of one chunk.
        block_size: tokens per block.
        context_parallel_size: D, ranks that share each sequence.
        interleave: I; each of these ranks in turn owns I consecutive tokens.
        batch_invariant: whether the other requests must not change where the context of a request is cut.

    Returns:
        The chunks, with tensors on the CPU; empty if no request has context.

    Raises:
        ValueError: `workspace_tokens` is below one unit; a length is negative.
    """
    check_tensor("context_lens", context_lens, ("B",), (torch.int32,), torch.device("cpu"))
    unit = context_unit(block_size, context_parallel_size, interleave)
    check_chunking(workspace_tokens, unit)
    check_not_negative("context_lens", context_lens)
    check_flag("batch_invariant", batch_invariant)
    lens = context_lens.tolist()
    return tuple(_chunk(ranges, len(lens)) for ranges in _pack(lens, workspace_tokens, unit, batch_invariant))


def _pack(lens: list[int], workspace_tokens: int, unit: int, batch_invariant: bool) -> list[dict[int, tuple[int, int]]]:
    """Return for each chunk the token ranges of its requests, as {request: (first token, number of tokens)}."""
    chunks: list[dict[int, tuple[int, int]]] = []
    units = workspace_tokens // unit
    free_units = 0  # free units of the last chunk
    for request, length in enumerate(lens):
        start = 0
        while start < length:
            wanted = min(length - start, units * unit)
            if free_units == 0 or (batch_invariant and wanted > free_units * unit):
                chunks.append({})
                free_units = units
            taken = min(wanted, free_units * unit)
            chunks[-1][request] = (start, taken)
            free_units -= -(-taken // unit)
            start += taken
    return chunks


def _chunk(ranges: dict[int, tuple[int, int]], num_requests: int) -> ContextChunk:
    """Return the chunk with these token ranges; a request that is not in `ranges` has no token in the chunk."""
    starts = [ranges.get(request, (0, 0))[0] for request in range(num_requests)]
    offsets = [0]
    for request in range(num_requests):
        offsets.append(offsets[-1] + ranges.get(request, (0, 0))[1])
    return ContextChunk(
        starts=torch.tensor(starts, dtype=torch.int32, device="cpu"),
        cu_seq_lens=torch.tensor(offsets, dtype=torch.int32, device="cpu"),
        num_tokens=offsets[-1],
        max_seq_len=max(length for _, length in ranges.values()),
    )


def plan_chunk_runs(
    chunks: tuple[ContextChunk, ...], query_start_loc: Int32[Tensor, " offsets"]
) -> tuple[ContextChunk, ...]:
    """Return the chunks of a prefill with their runs: the requests whose query tokens attend a chunk (`ChunkRun`).

    The run of a chunk is the smallest range of consecutive requests that has every request with tokens in the chunk. A
    prefill attends the chunk, and merges, only for the query tokens of these requests. The query tokens of the first
    requests of the run attend no later chunk, if no later run contains these requests. Their output is then final.

    Args:
        chunks: all chunks of the prefill, in the order in which they are attended, with tensors on the CPU
            (`plan_context_chunks`).
        query_start_loc: [B + 1], prefix sum of the query lengths of the requests, on the CPU; it starts at 0.

    Returns:
        The chunks with `run` and `run_query_start_loc`, on the CPU.

    Raises:
        ValueError: shapes, dtypes or devices do not match; the offsets do not start at 0, or decrease.
    """
    _check_runs(chunks, query_start_loc)
    starts = query_start_loc.tolist()
    requests = len(starts) - 1
    ranges = []
    for chunk in chunks:
        attending = [request for request, length in enumerate(chunk.cu_seq_lens.diff().tolist()) if length > 0]
        ranges.append((attending[0], attending[-1] + 1) if attending else (0, 0))
    planned = []
    for number, (chunk, (first, end)) in enumerate(zip(chunks, ranges, strict=True)):
        later = min((begin for begin, stop in ranges[number + 1 :] if begin < stop), default=requests)
        finished = next((request for request in range(first, end) if request >= later), end)
        query_lens = [starts[request + 1] - starts[request] for request in range(first, end)]
        run = ChunkRun(first, end, starts[first], starts[end], starts[finished], max(query_lens, default=0))
        offsets = None
        if end - first < requests:
            offsets = [0, *itertools.accumulate(query_lens)]
            offsets = torch.tensor(offsets, dtype=torch.int32, device="cpu")
        planned.append(dataclasses.replace(chunk, run=run, run_query_start_loc=offsets))
    return tuple(planned)


def _check_runs(chunks: tuple[ContextChunk, ...], query_start_loc: Tensor) -> None:
    """Check the arguments of `plan_chunk_runs`."""
    check_type("chunks", chunks, (tuple, list), "a tuple of chunks")
    cpu = torch.device("cpu")
    check_tensor("query_start_loc", query_start_loc, ("B + 1",), (torch.int32,), cpu)
    check_offsets("query_start_loc", query_start_loc)
    for chunk in chunks:
        check_chunk(chunk, query_start_loc.shape[0] - 1, cpu, "chunks")


def rank_local_chunk(chunk: ContextChunk, ownership: TokenOwnership) -> ContextParallelChunk:
    """Return a chunk, extended by the numbers of its tokens on each of the D context-parallel ranks.

    Args:
        chunk: chunk from `plan_context_chunks`, for the D ranks and the interleave I of `ownership`. In such a chunk,
            the first token of each request is at a multiple of D * I.
        ownership: the tokens that this rank owns.

    Returns:
        The chunk for this rank, on the same device.

    Raises:
        ValueError: a request's first token in the chunk is not at a multiple of D * I.
    """
    check_type("ownership", ownership, TokenOwnership)
    check_type("chunk", chunk, ContextChunk)
    check_tensor("chunk.starts", chunk.starts, ("B",), (torch.int32,))
    check_chunk(chunk, chunk.starts.shape[0], chunk.starts.device)
    round_tokens = ownership.size * ownership.interleave
    starts, lengths = chunk.starts.tolist(), chunk.cu_seq_lens.diff().tolist()
    for request, start in enumerate(starts):
        check(
            start % round_tokens == 0, "chunk.starts", f"multiples of {round_tokens}", f"{start} at request {request}"
        )
    ranks = [TokenOwnership(ownership.size, rank, ownership.interleave) for rank in range(ownership.size)]
    local = [[0, *itertools.accumulate(map(rank.count, lengths))] for rank in ranks]
    device = chunk.starts.device
    return ContextParallelChunk(
        starts=chunk.starts,
        cu_seq_lens=chunk.cu_seq_lens,
        num_tokens=chunk.num_tokens,
        max_seq_len=chunk.max_seq_len,
        bounded=chunk.bounded,
        run=chunk.run,
        run_query_start_loc=chunk.run_query_start_loc,
        local_starts=torch.tensor([start // ownership.size for start in starts], dtype=torch.int32, device=device),
        local_cu_seq_lens=torch.tensor(local, dtype=torch.int32, device=device),
        local_tokens=local[ownership.rank][-1],
        padded_tokens=local[0][-1],
        ownership=ownership,
    )


def clamp_context_chunk(chunk: ContextChunk, context_lens: Int32[Tensor, " B"]) -> ContextChunk:
    """Return a chunk that was planned from upper bounds of the context lengths, cut to the true lengths.

    If an engine does not know the context lengths on the CPU, it plans chunks from upper bounds. This function then
    corrects the tensors of a chunk from the true lengths, which are on the device. The ints of the chunk (`num_tokens`,
    `max_seq_len`, `local_tokens`, `padded_tokens`) stay upper bounds. A request may have no token left in the chunk.

    Args:
        chunk: chunk of `plan_context_chunks` or `rank_local_chunk`.
        context_lens: [B], context length of each request, at most the upper bound; on the device of the chunk.

    Returns:
        The chunk with `bounded` True and a new `cu_seq_lens`. A `ContextParallelChunk` also has a new
        `local_cu_seq_lens`.

    Raises:
        ValueError: shapes, dtypes or devices do not match.
    """
    check_type("chunk", chunk, ContextChunk)
    check_tensor("context_lens", context_lens, ("B",), (torch.int32,))
    check_chunk(chunk, context_lens.shape[0], context_lens.device)
    lengths = []
    for start, length, context in zip(
        chunk.starts.tolist(), chunk.cu_seq_lens.diff().tolist(), context_lens.tolist(), strict=True
    ):
        lengths.append(max(0, min(start + length, context) - start))
    device = chunk.starts.device
    changed = {"cu_seq_lens": [0, *itertools.accumulate(lengths)]}
    if isinstance(chunk, ContextParallelChunk):
        size, interleave = chunk.ownership.size, chunk.ownership.interleave
        ranks = [TokenOwnership(size, rank, interleave) for rank in range(size)]
        changed["local_cu_seq_lens"] = [[0, *itertools.accumulate(map(rank.count, lengths))] for rank in ranks]
    tensors = {name: torch.tensor(values, dtype=torch.int32, device=device) for name, values in changed.items()}
    return dataclasses.replace(chunk, bounded=True, **tensors)
