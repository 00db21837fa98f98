"""Tests that context gathered from several ranks has the same bits, in the same order, as on a single rank.

D ranks share each sequence: each rank in turn holds I consecutive tokens (`interleave`). The last test plants mistakes
in the gather and asserts that `test_reorg` fails for each mistake.
"""

from __future__ import annotations

import itertools

import pytest
import torch

import fast
import reference
from reference.interfaces import ContextChunk, TokenOwnership

from ..support.context_parallel import CONFIGS, gathered_chunk
from ..support.even_chunks import even_chunks
from ..support.factories import GARBAGE, assert_same_bits, integers, offsets
from ..support.ranks import owners


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("interleave", [1, 3, 16])
@pytest.mark.parametrize("size", [1, 2, 4, 7])
def test_reorg(ops, size, interleave, dtype):
    """`reorg_kvcache` returns the bits of the cache entries in the order of the tokens.

    The rows after the tokens of a rank are NaN and must not reach the result.
    """
    turn = size * interleave
    lens, starts = (5, 0, 1, turn, 3 * turn + 2, 200), (0, 0, 0, 0, turn, 2 * turn)
    ends = [start + length for start, length in zip(starts, lens, strict=True)]
    entries = [torch.randn(end, 6, dtype=torch.float64).to(dtype) for end in ends]
    chunk = ContextChunk(integers(*starts), offsets(lens), sum(lens), max(lens))
    chunk = ops.rank_local_chunk(chunk, TokenOwnership(size, 0, interleave))
    gathered = gathered_chunk(entries, starts, size, interleave, chunk.padded_tokens)
    wanted = torch.cat([own[start:] for own, start in zip(entries, starts, strict=True)])
    assert_same_bits(ops.reorg_kvcache(gathered, chunk), wanted)
    wider = torch.cat((gathered, gathered), -1)[..., :6]
    assert_same_bits(ops.reorg_kvcache(wider, chunk), wanted)
    if ops is fast:
        out = torch.full((sum(lens) + 1, 6), 7.0, dtype=dtype)
        assert_same_bits(fast.reorg_kvcache(gathered, chunk, out=out[:-1]), wanted)
        assert out[-1].eq(7).all()


@pytest.mark.parametrize(("size", "interleave", "cut"), [(1, 1, "packed"), (2, 1, "packed"), (3, 16, "even"),
                                                            (4, 4, "packed"), (8, 2, "even")])  # fmt: skip
def test_gather_equals_one_rank(ops, size, interleave, cut):
    """`dcp_gather_context` gives every rank the context of a chunk, with the bits that a single rank would read.

    Slots of the cache without a token are NaN.
    """
    contexts, block_size, width = (333, 0, 5, 64, 1), 16, 7
    entries = [torch.randn(length, width) for length in contexts]
    unit = reference.interfaces.context_unit(block_size, size, interleave)
    workspace = max(4 * unit, 64)
    chunks = ops.plan_context_chunks(integers(*contexts), workspace, block_size, size, interleave)
    if cut == "even":
        chunks = even_chunks(contexts, workspace, block_size, size, interleave)
    assert len(chunks) > 1 or size == 8

    def program(ranks):
        ownership = ranks.ownership
        columns = [-(-ownership.count(length) // block_size) for length in contexts]
        cache = torch.full((sum(columns) + 1, block_size, width), torch.nan)
        table = torch.full((len(contexts), max(columns) + 1), GARBAGE, dtype=torch.int32)
        blocks = itertools.count(1)
        for request, own in enumerate(entries):
            mine = [own[t] for t, owner in enumerate(owners(len(own), size, interleave)) if owner == ranks.rank]
            table[request, : columns[request]] = integers(*itertools.islice(blocks, columns[request]))
            for at, entry in enumerate(mine):
                cache[table[request, at // block_size], at % block_size] = entry
        plan = reference.interfaces.PrefillMetadata(table, offsets([1] * len(contexts)), 1, (), block_size)
        return [ops.dcp_gather_context(cache, plan, ops.rank_local_chunk(chunk, ownership), ranks) for chunk in chunks]

    for gathered in ops.simulate(size, interleave, program):
        for found, chunk in zip(gathered, chunks, strict=True):
            lens = chunk.cu_seq_lens.diff().tolist()
            pieces = [own[s : s + n] for own, s, n in zip(entries, chunk.starts.tolist(), lens, strict=True)]
            assert_same_bits(found, torch.cat(pieces))


def test_gather_in_a_workspace():
    """On D = 4 ranks, a gather needs a workspace of (D + 1) x the rows of one rank; a smaller workspace is refused.

    The workspace holds the rows of this rank and the gathered rows of all ranks.
    """
    config = CONFIGS["direct"]
    cache = torch.randn(30, 16, config.head_size)
    table = torch.arange(12, dtype=torch.int32)[None]
    chunk = fast.plan_context_chunks(integers(700), 1024, 16, 4, 1)[0]
    prefill = reference.interfaces.PrefillMetadata(table, offsets([1]), 1, (), 16)

    def program(ranks):
        local = fast.rank_local_chunk(chunk, ranks.ownership)
        rows = 5 * local.padded_tokens
        assert rows == 5 * 175 <= 1024 // 4 * 5
        workspace = torch.full((rows, config.head_size), torch.nan)
        inside = fast.dcp_gather_context(cache, prefill, local, ranks, workspace=workspace)
        assert not workspace.isnan().any()
        with pytest.raises(ValueError, match=f"^workspace: expected at least {rows} rows without gaps, got"):
            fast.dcp_gather_context(cache, prefill, local, ranks, workspace=workspace[1:])
        return inside.equal(fast.dcp_gather_context(cache, prefill, local, ranks))

    assert fast.simulate(4, 1, program) == [True] * 4


def context_left_in_the_order_of_ranks(patch):
    """Replace `reorg_kvcache` by a function that leaves the tokens in the order of the ranks.

    Attention over context has no mask, so it gives the same result for any order of tokens. Only a comparison of the
    gathered rows detects the mistake.
    """

    def wrong(gathered, chunk):
        rows = []
        for request in range(chunk.starts.shape[0]):
            for rank in range(gathered.shape[0]):
                begin, end = chunk.local_cu_seq_lens[rank, request : request + 2].tolist()
                rows.append(gathered[rank, begin:end])
        return torch.cat(rows)

    patch.setattr(reference, "reorg_kvcache", wrong)


def padding_taken_for_tokens(patch):
    """Replace `reorg_kvcache` by a function that uses the offsets of rank 0 for every rank.

    vLLM had this mistake: https://github.com/vllm-project/vllm/issues/28526
    """

    def wrong(gathered, chunk):
        rows, size, interleave = [], chunk.ownership.size, chunk.ownership.interleave
        for request, length in enumerate(chunk.cu_seq_lens.diff().tolist()):
            first = int(chunk.local_cu_seq_lens[0, request])
            for token in range(length):
                turn, within = divmod(token, size * interleave)
                row = first + turn * interleave + within % interleave
                rows.append(gathered[within // interleave, min(row, chunk.padded_tokens - 1)])
        return torch.stack(rows)

    patch.setattr(reference, "reorg_kvcache", wrong)


@pytest.mark.parametrize("mistake", [context_left_in_the_order_of_ranks, padding_taken_for_tokens],
                         ids=lambda mistake: mistake.__name__)  # fmt: skip
def test_mistakes_of_a_gather(monkeypatch, mistake):
    mistake(monkeypatch)
    with pytest.raises(AssertionError):
        test_reorg(reference, 4, 3, torch.float64)
