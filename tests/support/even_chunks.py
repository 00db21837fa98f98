"""Divide contexts into chunks in a simpler way than `plan_context_chunks`: all requests get equal room in a chunk."""

from __future__ import annotations

import math

from reference.interfaces import ContextChunk

from .factories import integers, offsets


def even_chunks(
    context_lens: list[int], workspace: int, block_size: int, ranks: int = 1, interleave: int = 1
) -> tuple[ContextChunk, ...]:
    """Return chunks in which every request with context has room for the same number of tokens.

    This number is a multiple of `block_size`. With several ranks it is also a multiple of `ranks * interleave`.

    Args:
        context_lens: context tokens of each request.
        workspace: largest number of tokens in a chunk.
        block_size: number of tokens in a block.
        ranks: number of ranks that share the sequences.
        interleave: number of consecutive tokens that a rank keeps.
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
