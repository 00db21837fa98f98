"""A partition of context that is simpler than `plan_context_chunks`: all requests get equal parts of the workspace."""

from __future__ import annotations

import math

from reference.interfaces import ContextChunk

from .factories import integers, offsets


def even_chunks(
    context_lens: list[int], workspace: int, block_size: int, ranks: int = 1, interleave: int = 1
) -> tuple[ContextChunk, ...]:
    """Return chunks in which every request with context has room for the same number of tokens.

    This number is a multiple of `block_size`, and with several ranks also of `ranks * interleave`.
    """
    with_context = [length for length in context_lens if length]
    if not with_context:
        return ()
    unit = block_size if ranks == 1 else math.lcm(block_size, ranks * interleave)
    tokens = workspace // len(with_context) // unit * unit
    chunks = []
    for start in range(0, max(with_context), tokens):
        lengths = [min(max(length - start, 0), tokens) for length in context_lens]
        starts = integers(*(start if length else 0 for length in lengths)).cpu()
        chunks.append(ContextChunk(starts, offsets(lengths).cpu(), sum(lengths), max(lengths)))
    return tuple(chunks)
