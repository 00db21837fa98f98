"""Split a prefill into parts: consecutive requests that all have context, or that all have no context."""

from __future__ import annotations

import itertools

import torch
from jaxtyping import Int32
from torch import Tensor

from ..interfaces import ChunkRows, ContextChunk, PrefillMetadata, PrefillPart, check_chunk, check_tensor

CPU = torch.device("cpu")


def split_by_context(prefill: PrefillMetadata, context_lens: Int32[Tensor, " B"]) -> tuple[PrefillPart, ...]:
    """Return the parts of a prefill, or no part if all requests have context or no request has context.

    Only requests with context need an attention state that is merged. The output of the other requests is final after
    one call of the attention kernel. A kernel takes consecutive requests, so each part has consecutive requests.

    Args:
        prefill: plan of the prefill, whose `query_start_loc` and chunks are on the CPU; its parts are not read.
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
    starts, contexts = prefill.query_start_loc.tolist(), context_lens.tolist()
    parts, first = [], 0
    for has_context, group in itertools.groupby(contexts, key=lambda context: context > 0):
        end = first + len(list(group))
        chunks, rows = [], []
        for number, chunk in enumerate(prefill.context_chunks):
            lens = chunk.cu_seq_lens.diff()[first:end].tolist()
            if has_context and sum(lens) > 0:
                before = int(chunk.cu_seq_lens[first])
                offsets = [sum(lens[:request]) for request in range(len(lens) + 1)]
                offsets = torch.tensor(offsets, dtype=torch.int32, device="cpu")
                chunks.append(ContextChunk(chunk.starts[first:end], offsets, sum(lens), max(lens)))
                rows.append(ChunkRows(number, before, before + sum(lens)))
        own = [start - starts[first] for start in starts[first : end + 1]]
        plan = PrefillMetadata(
            block_table=prefill.block_table[first:end],
            query_start_loc=torch.tensor(own, dtype=torch.int32, device="cpu"),
            max_query_len=max(after - before for before, after in itertools.pairwise(own)),
            context_chunks=tuple(chunks),
            block_size=prefill.block_size,
        )
        parts.append(PrefillPart(starts[first], starts[end], plan, tuple(rows)))
        first = end
    return tuple(parts) if len(parts) > 1 else ()
