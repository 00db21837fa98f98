"""Tests of the chunk sizes of the cpu kernels.

Here, a chunk is what a kernel processes in one iteration of its loop. The size of a chunk changes no result, so a
comparison of results cannot detect a wrong size. These tests record the sizes.
"""

from __future__ import annotations

import importlib
import itertools
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fast
import reference
from reference.interfaces import ContextChunk, TokenOwnership

from ...support.factories import (
    assert_same_bits,
    assert_states64,
    integers,
    make_batch,
    make_cache,
    make_entries,
    new_cache,
    offsets,
)


def cpu_module(name):
    return importlib.import_module(f"fast.kernels.cpu.{name}")


class Shapes(TorchDispatchMode):
    """Dispatch mode that collects the shapes of the results of the given ops, or of all ops if none is given."""

    def __init__(self, *ops: str):
        super().__init__()
        self.ops, self.found = ops, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and (not self.ops or func.overloadpacket.__name__ in self.ops):
            self.found.append(tuple(result.shape))
        return result


BLOCK, WIDTH, LATENT = 8, 32, 24
PAGE = BLOCK * WIDTH * 8  # bytes in float64


@pytest.mark.parametrize(
    ("room_bytes", "pages"), [(1, 1), (PAGE, 1), (2 * PAGE - 1, 1), (2 * PAGE, 2), (3 * PAGE + 7, 3), (99 * PAGE, 7)]
)
@pytest.mark.parametrize("spread", [True, False], ids=["pages apart", "pages side by side"])
def test_decode_reads_as_many_pages_as_fit(monkeypatch, room_bytes, pages, spread):
    """A decode reads as many blocks (pages) at a time as fit into `CHUNK_BYTES`.

    A chunk has at least one block, and at most as many blocks as the longest request. The last chunk of a request can
    be shorter.
    """
    decode, reads = cpu_module("decode"), []

    class Reader(decode._BlockReader):
        def read(self, blocks, count):
            found = super().read(blocks, count)
            reads.append((self.chunk_blocks, count))
            assert found.shape == (count, WIDTH)
            assert self.buffer is None or self.buffer.shape[0] == self.chunk_blocks
            return found

    monkeypatch.setattr(decode, "CHUNK_BYTES", room_bytes)
    monkeypatch.setattr(decode, "_BlockReader", Reader)
    lens = (3, 0, 7 * BLOCK - 2)
    batch = make_batch([1, 1, 2], lens, BLOCK)
    plan = reference.build_mla_metadata(batch.common, BLOCK, 64, 2).decode
    cache = new_cache(batch, WIDTH, torch.float64)
    if not spread:  # move the blocks of each request next to each other
        table = torch.arange(plan.block_table.numel(), dtype=torch.int32).view_as(plan.block_table)
        packed = torch.full((table.numel(), BLOCK, WIDTH), torch.nan, dtype=torch.float64)
        for request, length in enumerate(lens):
            used = math.ceil(length / BLOCK)
            packed[table[request, :used].long()] = cache[plan.block_table[request, :used].long()]
        cache, plan = packed, reference.DecodeMetadata(**{**vars(plan), "block_table": table})
    ql_nope, q_pe = (torch.randn(4, 3, width, dtype=torch.float64) for width in (LATENT, WIDTH - LATENT))
    found = fast.mla_decode(ql_nope, q_pe, cache, plan, 0.3, backend="cpu")
    assert_states64(found, reference.mla_decode(ql_nope, q_pe, cache, plan, 0.3))
    piece = pages * BLOCK
    wanted = [min(piece, length - first) for length in lens for first in range(0, length, piece)]
    assert reads == [(pages, count) for count in wanted]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("rows", "keys"), [(3, 5), (4, 4), (1, 7), (64, 64)])
def test_attention_multiplies_what_is_seen(monkeypatch, rows, keys, causal):
    """The attention kernel multiplies a block of queries with the keys that the last query of the block sees.

    It does so for one block of keys after another, and masks a product only if the first query does not see all keys of
    the block of keys.
    """
    attention = cpu_module("attention")
    monkeypatch.setattr(attention, "QUERY_BLOCK", rows)
    monkeypatch.setattr(attention, "KEY_BLOCK", keys)
    query_lens, key_lens, heads = (9, 1, 0, 4, 6), (14, 8, 3, 4, 2), 2
    q, k, v = (torch.randn(sum(n), heads, width, dtype=torch.float64) for n, width in
               ((query_lens, 6), (key_lens, 6), (key_lens, 5)))  # fmt: skip
    rest = v, offsets(query_lens), offsets(key_lens), 9, 14, 0.3, causal
    # call the kernel directly, because a dispatch mode does not see the ops inside a registered op
    with Shapes("baddbmm_", "triu_") as shapes:
        found = reference.AttentionState(*attention.flash_attn_varlen(q, k, None, *rest, torch.float64))
    assert_states64(found, reference.flash_attn_varlen(q, k, *rest))
    wanted = []
    for query_len, key_len in zip(query_lens, key_lens, strict=True):
        for first, last in ((start, min(start + rows, query_len)) for start in range(0, query_len, rows)):
            seen = key_len - (query_len - last) if causal else key_len
            cuts = [*range(0, seen, keys), max(seen, 0)] if seen > 0 else []
            for begin, end in itertools.pairwise(cuts):
                wanted.append((heads, last - first, end - begin))
                if causal and end > key_len - (query_len - first) + 1:
                    wanted.append((last - first, end - begin))
    assert shapes.found == wanted


@pytest.mark.parametrize("piece", [1, 5, 64])
@pytest.mark.parametrize("apart", [True, False], ids=["apart", "whole"])
def test_reorg_in_pieces(monkeypatch, piece, apart):
    """`reorg_kvcache` gives the right order for any chunk size, and its index tensors have the length of a chunk."""
    kernel = cpu_module("context_parallel").reorg_kvcache
    monkeypatch.setattr(cpu_module("context_parallel"), "CHUNK_TOKENS", piece)
    size, interleave, lens = 3, 2, (5, 0, 23, 1)
    chunk = ContextChunk(integers(*[0] * 4), offsets(lens), sum(lens), max(lens))
    chunk = fast.rank_local_chunk(chunk, TokenOwnership(size, 0, interleave))
    entries = torch.randn(sum(lens), 4)
    gathered = torch.full((size, chunk.padded_tokens, 8 if apart else 4), torch.nan)[..., :4]
    held = [0] * size
    for token, at in enumerate(at for length in lens for at in range(length)):
        rank = at // interleave % size
        gathered[rank, held[rank]] = entries[token]
        held[rank] += 1
    out = torch.full_like(entries, torch.nan)
    with Shapes("arange", "searchsorted") as shapes:
        kernel(gathered, chunk.cu_seq_lens, chunk.local_cu_seq_lens, interleave, out)
    assert_same_bits(out, entries)
    pieces = [(min(piece, sum(lens) - first),) for first in range(0, sum(lens), piece)]
    assert shapes.found == [shape for shape in pieces for _ in range(2)]


def test_ranks_without_keys_have_weight_zero():
    """The weights of a row add up to 1 if at least one rank has keys for the row. Otherwise all weights are 0."""
    lses = torch.randn(3, 2, 4, dtype=torch.float64)
    lses[1, 0], lses[:, 1, 2] = -torch.inf, -torch.inf
    weights, total = cpu_module("context_parallel").merge_weights(lses)
    assert weights[1, 0].eq(0).all() and weights[:, 1, 2].eq(0).all() and total[1, 2] == -torch.inf
    seen = total.isfinite()
    assert seen.sum() == 7
    torch.testing.assert_close(weights.sum(0)[seen], torch.ones(7, dtype=torch.float64), rtol=0, atol=1e-15)
    torch.testing.assert_close(total[seen], lses.logsumexp(0)[seen], rtol=1e-15, atol=1e-15)


@pytest.mark.parametrize("piece", [1, 5, 64])
def test_gather_in_pieces(monkeypatch, piece):
    """A gather from the cache is right for any chunk size, and its index tensors have the length of a chunk."""
    monkeypatch.setattr(cpu_module("cache"), "CHUNK_TOKENS", piece)
    batch = make_batch([1, 1, 1], [20, 1, 33], 4)
    entries = make_entries(batch, 6, torch.float32)
    cache, starts, lens = make_cache(batch, entries, 6, torch.float32), (4, 0, 8), (15, 1, 21)
    out = torch.full((sum(lens), 6), torch.nan)
    with Shapes("arange", "searchsorted") as shapes:
        cpu_module("cache").gather_and_maybe_dequant_cache(
            cache, batch.common.block_table, offsets(lens), integers(*starts), out
        )
    wanted = torch.cat([own[start : start + n] for own, start, n in zip(entries, starts, lens, strict=True)])
    assert_same_bits(out, wanted)
    pieces = [(min(piece, sum(lens) - first),) for first in range(0, sum(lens), piece)]
    assert shapes.found == [shape for shape in pieces for _ in range(2)]


def test_pieces_are_worth_a_turn_of_the_loop():
    """The default chunk sizes are large enough to hide the cost of the loop, and small enough for a CPU's cache."""
    assert 1 << 20 <= cpu_module("decode").CHUNK_BYTES <= 1 << 24
    for tokens in (cpu_module("cache").CHUNK_TOKENS, cpu_module("context_parallel").CHUNK_TOKENS):
        assert 1 << 10 <= tokens <= 1 << 16
    assert all(
        1 << 6 <= size <= 1 << 10 for size in (cpu_module("attention").QUERY_BLOCK, cpu_module("attention").KEY_BLOCK)
    )
