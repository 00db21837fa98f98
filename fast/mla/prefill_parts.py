"""Split a prefill into parts: consecutive requests that all have context, or that all have no context."""

from __future__ import annotations

import itertools

import torch
from jaxtyping import Int32
from torch import Tensor

from reference.interfaces import ChunkRows, ContextChunk, PrefillMetadata, PrefillPart, check_chunk, check_tensor

CPU = torch.device("cpu")


def split_by_context(prefill: PrefillMetadata, context_lens: Int32[Tensor, " B"]) -> tuple[PrefillPart, ...]:
    """Return the parts of a prefill, or no part if all requests have context or no request has context.

    See `reference.mla.prefill_parts.split_by_context` for the use of the parts.

    Args:
        prefill: plan of the prefill, whose `query_start_loc` and chunks are on the CPU.
        context_lens: [B], cached tokens of each request, on the CPU.

    Returns:
        The parts, in the order of the requests. Their tensors are on the CPU, except the block tables.

    Raises:
        ValueError: a tensor has a wrong shape, dtype or device.
    """
    requests = prefill.block_table.shape[0]
    check_tensor("context_lens", context_lens, (requests,), (torch.int32,), CPU)
    check_tensor("prefill.query_start_loc", prefill.query_start_loc, (requests + 1,), (torch.int32,), CPU)
    for chunk in prefill.context_chunks:
        check_chunk(chunk, requests, CPU, "prefill.context_chunks")
    has_context = context_lens > 0
    bounds = [0, *(has_context.diff().nonzero().flatten() + 1).tolist(), requests]
    if len(bounds) == 2:
        return ()
    starts = prefill.query_start_loc
    first_has, tokens = bool(has_context[0]), starts[bounds].tolist()
    ends = [chunk.cu_seq_lens[bounds].tolist() for chunk in prefill.context_chunks]  # [chunks, parts + 1]
    parts = []
    for number, (first, end) in enumerate(itertools.pairwise(bounds)):
        chunks, rows = [], []
        if (number % 2 == 0) == first_has:
            for index, chunk in enumerate(prefill.context_chunks):
                low, high = ends[index][number : number + 2]
                if high > low:
                    offsets = chunk.cu_seq_lens[first : end + 1] - low
                    chunks.append(ContextChunk(chunk.starts[first:end], offsets, high - low, int(offsets.diff().max())))
                    rows.append(ChunkRows(index, low, high))
        own = starts[first : end + 1] - tokens[number]
        plan = PrefillMetadata(
            prefill.block_table[first:end], own, int(own.diff().max()), tuple(chunks), prefill.block_size
        )
        parts.append(PrefillPart(tokens[number], tokens[number + 1], plan, tuple(rows)))
    return tuple(parts)
