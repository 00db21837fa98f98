"""Divide the cached context of prefills into chunks that fit into a workspace.

The context of a request is the tokens that it had in the cache before this step. A prefill expands its context into
keys and values, one chunk at a time. The workspace is the memory for the largest chunk.
"""

from __future__ import annotations

import bisect
import dataclasses

import torch
from jaxtyping import Int32
from torch import Tensor

from reference.interfaces import (
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
    get_dcp_local_seq_lens,
)


def plan_context_chunks(
    context_lens: Int32[Tensor, " B"],
    workspace_tokens: int,
    block_size: int,
    context_parallel_size: int = 1,
    interleave: int = 1,
    batch_invariant: bool = False,
) -> tuple[ContextChunk, ...]:
    """Divide the cached context of the requests into chunks that fit into the workspace.

    See `reference.planning.context_chunks.plan_context_chunks` for the order and the number of the chunks, and for the
    places where contexts are cut.

    Args:
        context_lens: [B], number of context tokens of each request, on the CPU.
        workspace_tokens: largest number of tokens of a chunk.
        block_size: tokens per block.
        context_parallel_size: D, number of ranks that divide each context among themselves.
        interleave: I, number of consecutive tokens that each rank gets in turn.
        batch_invariant: if True, the other requests do not change where the context of a request is cut.

    Returns:
        The chunks, on the CPU; an empty tuple if no request has context.

    Raises:
        ValueError: the workspace is smaller than the smallest chunk (`context_unit`), or a length is negative.
    """
    check_tensor("context_lens", context_lens, ("B",), (torch.int32,), torch.device("cpu"))
    unit = context_unit(block_size, context_parallel_size, interleave)
    check_chunking(workspace_tokens, unit)
    check_not_negative("context_lens", context_lens)
    check_flag("batch_invariant", batch_invariant)
    if context_lens.numel() == 0:
        return ()
    longest = int(context_lens.max())
    if longest == 0:
        return ()
    units = ((context_lens.long() + (unit - 1)) // unit).cumsum(0)
    if int(units[-1]) * unit <= workspace_tokens:  # in most steps one chunk has all contexts
        offsets = torch.zeros(context_lens.shape[0] + 1, dtype=torch.int32, device="cpu")
        torch.cumsum(context_lens, 0, dtype=torch.int32, out=offsets[1:])
        return (ContextChunk(torch.zeros_like(context_lens), offsets, int(offsets[-1]), longest),)
    pack = _pack_ranges if batch_invariant else _pack
    starts, lengths = pack(context_lens, units, workspace_tokens // unit, unit)
    offsets = torch.nn.functional.pad(lengths.cumsum(1, dtype=torch.int32), (1, 0))
    totals, longest_lengths = offsets[:, -1].tolist(), lengths.amax(1).tolist()
    return tuple(map(ContextChunk, starts.unbind(), offsets.unbind(), totals, longest_lengths))


def _pack(context_lens: Tensor, ends: Tensor, units_per_chunk: int, unit: int) -> tuple[Tensor, Tensor]:
    """Put all contexts one after another on a line, and cut the line every `units_per_chunk` units.

    A unit is `unit` tokens. The length of each context on the line is rounded up to whole units.

    Args:
        context_lens: [B], in tokens.
        ends: [B], end of each context on the line, in units.
        units_per_chunk: number of units that fit into the workspace.
        unit: tokens per unit.

    Returns:
        First context token and number of tokens of each request in each chunk, both [chunks, B] int32.
    """
    lens = context_lens.long()
    starts = torch.nn.functional.pad(ends, (1, 0))[:-1]
    cuts = torch.arange(0, int(ends[-1]), units_per_chunk, device="cpu")[:, None]  # [chunks, 1]
    first = (cuts - starts).clamp_(min=0).mul_(unit)  # [chunks, B], tokens of each request before the chunk
    end = torch.minimum((cuts + units_per_chunk - starts).clamp_(min=0).mul_(unit), lens)
    lengths = (end - first).clamp_(min=0)
    return (first * (lengths > 0)).to(torch.int32), lengths.to(torch.int32)


def _pack_ranges(context_lens: Tensor, ends: Tensor, units_per_chunk: int, unit: int) -> tuple[Tensor, Tensor]:
    """Cut each context every `units_per_chunk` units, and put these ranges into chunks without dividing a range.

    See `_pack` for the arguments and the result. A full range has a chunk of its own. A shorter range is the last range
    of its request: its chunk also takes the whole contexts of the next requests, as many as fit.
    """
    lens, last_units, requests = context_lens.tolist(), ends.tolist(), context_lens.shape[0]
    range_tokens, chunks, request = units_per_chunk * unit, [], 0  # a chunk: first and end request, start and length
    while request < requests:
        if lens[request] == 0:
            request += 1
            continue
        full = (lens[request] - 1) // range_tokens  # ranges before the last range
        chunks += [(request, request + 1, number * range_tokens, range_tokens) for number in range(full)]
        start = full * range_tokens
        rest = -(-(lens[request] - start) // unit)  # units of the last range
        end = bisect.bisect_right(last_units, last_units[request] - rest + units_per_chunk)
        chunks.append((request, end, start, lens[request] - start))
        request = end
    starts = torch.zeros(len(chunks), requests, dtype=torch.int32, device="cpu")
    lengths = torch.zeros_like(starts)
    for number, (first, end, start, length) in enumerate(chunks):
        lengths[number, first:end] = context_lens[first:end]
        starts[number, first], lengths[number, first] = start, length
    return starts, lengths


def plan_chunk_runs(
    chunks: tuple[ContextChunk, ...], query_start_loc: Int32[Tensor, " offsets"]
) -> tuple[ContextChunk, ...]:
    """Return the chunks of a prefill with their runs: the requests whose query tokens attend a chunk (`ChunkRun`).

    See `reference.planning.context_chunks.plan_chunk_runs` for the requests that a run contains, and for the query
    tokens that attend no later chunk.

    Args:
        chunks: all chunks of the prefill, in order, on the CPU.
        query_start_loc: [B + 1], prefix sum of the query lengths of the requests, on the CPU.

    Returns:
        The chunks with `run` and `run_query_start_loc`, on the CPU.

    Raises:
        ValueError: shapes, dtypes or devices do not match; the offsets do not start at 0, or decrease.
    """
    _check_runs(chunks, query_start_loc)
    starts, planned = query_start_loc.tolist(), []
    next_first = requests = len(starts) - 1  # first request of all later runs
    for chunk in reversed(chunks):
        offsets = chunk.cu_seq_lens.tolist()
        first = end = 0
        if offsets[-1] > 0:
            first, end = bisect.bisect_right(offsets, 0) - 1, bisect.bisect_left(offsets, offsets[-1])
        finished, own = min(max(first, next_first), end), query_start_loc[first : end + 1]
        longest = int(own.diff().max()) if end > first else 0
        run = ChunkRun(first, end, starts[first], starts[end], starts[finished], longest)
        own = own - starts[first] if end - first < requests else None
        planned.append(dataclasses.replace(chunk, run=run, run_query_start_loc=own))
        next_first = min(next_first, first) if end > first else next_first
    return tuple(reversed(planned))


def _check_runs(chunks: tuple[ContextChunk, ...], query_start_loc: Tensor) -> None:
    """Check the arguments of `plan_chunk_runs`."""
    check_type("chunks", chunks, (tuple, list), "a tuple of chunks")
    cpu = torch.device("cpu")
    check_tensor("query_start_loc", query_start_loc, ("B + 1",), (torch.int32,), cpu)
    check_offsets("query_start_loc", query_start_loc)
    for chunk in chunks:
        check_chunk(chunk, query_start_loc.shape[0] - 1, cpu, "chunks")


def rank_local_chunk(chunk: ContextChunk, ownership: TokenOwnership) -> ContextParallelChunk:
    """Return a chunk with the place and the number of its tokens in the cache of each rank.

    With context parallelism, D ranks divide the tokens of each context among themselves. Each rank in turn keeps I
    consecutive tokens.

    Args:
        chunk: chunk that `plan_context_chunks` made for D ranks. In such a chunk, the tokens of each request start at a
            multiple of D x I.
        ownership: the tokens that this rank keeps.

    Returns:
        The chunk with the fields for the tokens of each rank, on the same device.

    Raises:
        ValueError: for CPU tensors, a request does not start at a multiple of D x I.
    """
    check_type("ownership", ownership, TokenOwnership)
    check_type("chunk", chunk, ContextChunk)
    check_tensor("chunk.starts", chunk.starts, ("B",), (torch.int32,))
    check_chunk(chunk, chunk.starts.shape[0], chunk.starts.device)
    period = ownership.size * ownership.interleave
    misaligned = (chunk.starts % period).nonzero() if chunk.starts.device.type == "cpu" else chunk.starts[:0]
    if misaligned.numel():
        request = int(misaligned[0])
        check(False, "chunk.starts", f"multiples of {period}", f"{int(chunk.starts[request])} at request {request}")
    offsets = _rank_local_offsets(chunk.cu_seq_lens.diff(), ownership)
    return ContextParallelChunk(
        starts=chunk.starts,
        cu_seq_lens=chunk.cu_seq_lens,
        num_tokens=chunk.num_tokens,
        max_seq_len=chunk.max_seq_len,
        bounded=chunk.bounded,
        run=chunk.run,
        run_query_start_loc=chunk.run_query_start_loc,
        local_starts=chunk.starts.div(ownership.size, rounding_mode="floor"),
        local_cu_seq_lens=offsets,
        local_tokens=int(offsets[ownership.rank, -1]),
        padded_tokens=int(offsets[0, -1]),
        ownership=ownership,
    )


def clamp_context_chunk(chunk: ContextChunk, context_lens: Int32[Tensor, " B"]) -> ContextChunk:
    """Shorten a chunk that was made from upper bounds of the context lengths: use the true context lengths instead.

    See `reference.planning.context_chunks.clamp_context_chunk` for the numbers that stay upper bounds. The true lengths
    may be on a GPU; the host does not read the true lengths.

    Args:
        chunk: chunk of `plan_context_chunks` or `rank_local_chunk`.
        context_lens: [B], context length of each request; on the device of the chunk.

    Returns:
        The chunk with `bounded` True and new `cu_seq_lens`. A chunk of `rank_local_chunk` also gets new
        `local_cu_seq_lens`.

    Raises:
        ValueError: shapes, dtypes or devices do not match.
    """
    check_type("chunk", chunk, ContextChunk)
    check_tensor("context_lens", context_lens, ("B",), (torch.int32,))
    check_chunk(chunk, context_lens.shape[0], context_lens.device)
    lengths = torch.minimum(chunk.cu_seq_lens.diff(), (context_lens - chunk.starts).clamp_(min=0))
    offsets = torch.zeros_like(chunk.cu_seq_lens)
    torch.cumsum(lengths, 0, dtype=torch.int32, out=offsets[1:])
    changed = {"cu_seq_lens": offsets}
    if isinstance(chunk, ContextParallelChunk):
        changed["local_cu_seq_lens"] = _rank_local_offsets(lengths, chunk.ownership)
    return dataclasses.replace(chunk, bounded=True, **changed)


def _rank_local_offsets(lengths: Tensor, ownership: TokenOwnership) -> Tensor:
    """Return [D, B + 1]: row r is the prefix sum of the numbers of tokens that rank r owns in each request."""
    lengths = get_dcp_local_seq_lens(lengths, ownership.size, None, ownership.interleave)
    offsets = torch.zeros(ownership.size, lengths.shape[0] + 1, dtype=torch.int32, device=lengths.device)
    torch.cumsum(lengths.T, 1, dtype=torch.int32, out=offsets[:, 1:])
    return offsets
