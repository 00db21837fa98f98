"""What runs when: context cut into chunks, decodes cut over programs. Plain loops that can be followed by hand."""

from __future__ import annotations

import itertools

import torch
from jaxtyping import Int32
from torch import Tensor

from .interfaces import (
    DECODE_TILE,
    ContextChunk,
    ContextParallelChunk,
    DecodeSchedule,
    SequenceShare,
    check,
    check_chunk,
    check_chunking,
    check_flag,
    check_int,
    check_not_negative,
    check_tensor,
    check_type,
    choose_schedule,
    chunked_prefill_workspace_size,
    context_unit,
    fold_overhead,
    invariant_split_tiles,
    piece_overhead,
    reorder_batch_threshold,
)

__all__ = [
    "choose_schedule",
    "chunked_prefill_workspace_size",
    "plan_context_chunks",
    "plan_decode",
    "reorder_batch_threshold",
    "share_chunk",
]


def plan_context_chunks(
    context_lens: Int32[Tensor, " B"],
    workspace_tokens: int,
    block_size: int,
    policy: str = "packed",
    context_parallel_size: int = 1,
    interleave: int = 1,
) -> tuple[ContextChunk, ...]:
    """Cut the cached context of some requests into chunks that fit the workspace.

    Every context token lies in exactly one chunk, and every piece starts on a unit (`context_unit`: a block, and under
    context parallelism whole turns of the ranks). A piece takes whole units of the workspace.

    "packed" fills one chunk after another in the order of the requests: only the first request of a chunk continues
    from the chunk before, and there are ceil(units of all contexts / units of the workspace) chunks. "even" (vLLM's
    first planner) gives each request with context an equal share of the workspace, in whole units, in every chunk.

    Args:
        context_lens: [B], on the CPU; 0 = no context.
        workspace_tokens: most tokens in one chunk.
        block_size: tokens a block.
        policy: "packed" or "even".
        context_parallel_size: D, ranks that share each context.
        interleave: I, tokens that lie on one rank in a row.

    Returns:
        The chunks, on the CPU; none where no request has context.

    Raises:
        ValueError: a workspace smaller than one unit (for "even": one unit for each request with context); a negative
            length; another policy.
    """
    check_tensor("context_lens", context_lens, ("B",), (torch.int32,), torch.device("cpu"))
    unit = context_unit(block_size, context_parallel_size, interleave)
    check_chunking(policy, workspace_tokens, unit)
    check_not_negative("context_lens", context_lens)
    lens = context_lens.tolist()
    cut = _pack if policy == "packed" else _share_evenly
    return tuple(_chunk(pieces, len(lens)) for pieces in cut(lens, workspace_tokens, unit))


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


def _share_evenly(lens: list[int], workspace_tokens: int, unit: int) -> list[dict[int, tuple[int, int]]]:
    """Chunks as {request: (start, length)}, an equal share for each request with context in all of them."""
    with_context = sum(length > 0 for length in lens)
    if with_context == 0:
        return []
    share = workspace_tokens // with_context // unit * unit
    check(share > 0, "workspace_tokens", f"at least a unit of {unit} tokens for each of {with_context} requests",
          workspace_tokens)  # fmt: skip
    return [
        {request: (start, min(length - start, share)) for request, length in enumerate(lens) if length > start}
        for start in range(0, max(lens), share)
    ]


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


def share_chunk(chunk: ContextChunk, share: SequenceShare) -> ContextParallelChunk:
    """Where the tokens of a piece of context lie on the ranks that share it.

    Args:
        chunk: of `plan_context_chunks` for as many ranks, so that its pieces begin with the first rank's turn.
        share: of this rank.

    Returns:
        The piece with each rank's part of it, on the same device.

    Raises:
        ValueError: a piece that begins within a turn of the ranks.
    """
    check_type("share", share, SequenceShare)
    check_type("chunk", chunk, ContextChunk)
    check_tensor("chunk.starts", chunk.starts, ("B",), (torch.int32,))
    check_chunk(chunk, chunk.starts.shape[0], chunk.starts.device)
    turn = share.size * share.interleave
    starts, lengths = chunk.starts.tolist(), chunk.cu_seq_lens.diff().tolist()
    for request, start in enumerate(starts):
        check(start % turn == 0, "chunk.starts", f"multiples of {turn}", f"{start} at request {request}")
    ranks = [SequenceShare(share.size, rank, share.interleave) for rank in range(share.size)]
    local = [[0, *itertools.accumulate(map(rank.count, lengths))] for rank in ranks]
    device = chunk.starts.device
    return ContextParallelChunk(
        starts=chunk.starts,
        cu_seq_lens=chunk.cu_seq_lens,
        num_tokens=chunk.num_tokens,
        max_seq_len=chunk.max_seq_len,
        local_starts=torch.tensor([start // share.size for start in starts], dtype=torch.int32, device=device),
        local_cu_seq_lens=torch.tensor(local, dtype=torch.int32, device=device),
        local_tokens=local[share.rank][-1],
        padded_tokens=local[0][-1],
        share=share,
    )


def plan_decode(
    seq_lens: Int32[Tensor, " B"],
    num_programs: int,
    num_heads: int,
    fixed_overhead: int | None = None,
    batch_invariant: bool = False,
) -> DecodeSchedule:
    """Cut the keys of a decode over programs, so that all take about as long.

    Lay the requests end to end, each as long as its tiles and the overhead of starting on it, and cut the line into
    pieces of Q = ceil(length / programs): program p takes the tiles in [p Q, (p + 1) Q). It pays the overhead of a
    request that it continues once more, so that none carries more than Q and one overhead. A request without keys lies
    nowhere and has no split; the combine writes its empty row.

    With `batch_invariant` a request is cut every `invariant_split_tiles` tiles, by its own length and N alone, whatever
    stands beside it. Splits are laid end to end, each with `fold_overhead` of the overhead (at most all), the first
    with all of it; a program takes those that start in its piece of the line.

    Args:
        seq_lens: [B], keys of each request.
        num_programs: that run at once.
        num_heads: N.
        fixed_overhead: what starting on a request costs, in tiles, or None for `piece_overhead`.
        batch_invariant: see above.

    Returns:
        The schedule, on the device of `seq_lens`.

    Raises:
        ValueError: a number below its least value; a negative length.
    """
    check_tensor("seq_lens", seq_lens, ("B",), (torch.int32,))
    check_int("num_programs", num_programs, 1, "at least 1")
    check_int("num_heads", num_heads, 1, "at least 1")
    check_flag("batch_invariant", batch_invariant)
    if fixed_overhead is None:
        fixed_overhead = piece_overhead(num_heads)
    check_int("fixed_overhead", fixed_overhead, 0, "an int >= 0 or None")
    check_not_negative("seq_lens", seq_lens)
    lens = seq_lens.tolist()

    overheads = (fixed_overhead, 0)  # of a request, and of each split
    if batch_invariant:
        fold = min(fixed_overhead, fold_overhead(num_heads))
        overheads = (fixed_overhead - fold, fold)
    line = []  # what stands at each place of the line: (request, tile, split by its own length, where that starts)
    for request, length in enumerate(lens):
        tiles = -(-length // DECODE_TILE)
        split_tiles = invariant_split_tiles(tiles, num_heads) if batch_invariant else max(1, tiles)
        line += [None] * (overheads[0] if tiles else 0)
        for tile in range(tiles):
            if tile % split_tiles == 0:
                split_start = len(line)
                line += [None] * overheads[1]
            line.append((request, tile, tile // split_tiles, split_start))
    piece = max(1, -(-len(line) // num_programs))
    taken: list[list[tuple[int, int, int]]] = [[] for _ in range(num_programs)]
    for place, item in enumerate(line):
        if item is not None:
            *tile, split_start = item
            taken[(split_start if batch_invariant else place) // piece].append(tuple(tile))

    ranges, splits = [], [0] * len(lens)
    for items in taken:
        if not items:
            ranges.append([len(lens), len(lens) - 1, 0, 0, 0])
            continue
        (first, first_tile, own_split), (last, last_tile, _) = items[0], items[-1]
        ranges.append([first, last, first_tile, last_tile + 1, own_split if batch_invariant else splits[first]])
        for request in sorted({request for request, _, _ in items}):
            own = {split for other, _, split in items if other == request}
            splits[request] += len(own) if batch_invariant else 1
    offsets = [sum(splits[:request]) for request in range(len(lens) + 1)]
    device = seq_lens.device
    return DecodeSchedule(
        tile_ranges=torch.tensor(ranges, dtype=torch.int32, device=device),
        split_offsets=torch.tensor(offsets, dtype=torch.int32, device=device),
        batch_invariant=batch_invariant,
    )
