"""Tests of `reorg_kvcache`, which puts the gathered tokens of all ranks into the order of each sequence.

The CPU kernel reorders 4096 tokens at a time. The test has more than 8192 tokens, so the kernel needs three passes.
"""

from __future__ import annotations

import pytest
import torch

import reference
from fast.kernels.cpu import context_parallel as cpu_kernels
from reference.interfaces import ContextChunk, TokenOwnership

from ..support.context_parallel import gathered_chunk
from ..support.factories import assert_same_bits, integers, offsets

LENS = (2500, 0, 3001, 1, 3900, 64)  # passes begin at tokens 4096 and 8192, inside two different requests


@pytest.mark.parametrize("rows", ["dense", "with gaps"])
@pytest.mark.parametrize(("size", "interleave"), [(1, 1), (2, 16), (3, 5), (8, 1)])
def test_reorg_of_several_thousand_tokens(ops, size, interleave, rows):
    """`reorg_kvcache` puts more than 8192 tokens into the right order and changes no bit of a token.

    The test fails if the kernel reads or writes the second 4096 tokens at a wrong position.
    """
    assert sum(LENS) > 2 * cpu_kernels.CHUNK_TOKENS, "too few tokens for three passes"
    entries = [torch.randn(length, 3) for length in LENS]
    chunk = ContextChunk(integers(*[0] * len(LENS)), offsets(LENS), sum(LENS), max(LENS))
    chunk = reference.rank_local_chunk(chunk, TokenOwnership(size, 0, interleave))
    gathered = gathered_chunk(entries, [0] * len(LENS), size, interleave, chunk.padded_tokens)
    if rows == "with gaps":
        gathered = torch.cat((gathered, gathered), -1)[..., :3]
    found, wanted = ops.reorg_kvcache(gathered, chunk), torch.cat(entries)
    wrong = found.ne(wanted).any(1).nonzero().flatten().tolist()
    assert not wrong, f"{len(wrong)} of {len(wanted)} tokens differ, {wrong[0]} to {wrong[-1]}"
    assert_same_bits(found, wanted)
