"""Another partition of context than `plan_context_chunks` makes: an equal share of the workspace for each request."""

from __future__ import annotations

import math

from reference.interfaces import ContextChunk

from .factories import integers, offsets


def even_chunks(
    context_lens: list[int], workspace: int, block_size: int, ranks: int = 1, interleave: int = 1
) -> tuple[ContextChunk, ...]:
    """Chunks in which every request with context has the same share of the workspace, in whole units."""
    busy = [length for length in context_lens if length]
    if not busy:
        return ()
    unit = block_size if ranks == 1 else math.lcm(block_size, ranks * interleave)
    share = workspace // len(busy) // unit * unit
    chunks = []
    for start in range(0, max(busy), share):
        lengths = [min(max(length - start, 0), share) for length in context_lens]
        starts = integers(*(start if length else 0 for length in lengths)).cpu()
        chunks.append(ContextChunk(starts, offsets(lengths).cpu(), sum(lengths), max(lengths)))
    return tuple(chunks)
