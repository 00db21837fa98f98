"""Tests of the paged cache: every slot must have the bits of the token to which the slot belongs.

"Pitfall 6" is entry 6 of the list in `tests/__init__.py`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fast
import reference
from reference.interfaces import FP8_E4M3, ContextChunk, TokenOwnership

from ..support.factories import (
    GARBAGE,
    assert_same_bits,
    integers,
    last_rows,
    make_batch,
    make_cache,
    make_entries,
    offsets,
)
from ..support.properties import given, st

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
LENGTHS = [((1, 3, 0, 17), (1, 16, 15, 17)), ((2, 2), (0, 33)), ((5,), (31,)), ((), ()), ((0, 0), (7, 0))]


def check_write(ops, query_lens, seq_lens, dtype, latent: int = 12, rope: int = 8):
    """Assert that the entry of each new token (latent, then rope) is written to its slot, and no other byte changes."""
    batch = make_batch(query_lens, seq_lens, block_size=16, padding=3)
    entries = make_entries(batch, latent + rope, dtype)
    cache = make_cache(batch, entries, latent + rope, dtype, new_tokens=False)
    rows = torch.cat(
        (last_rows(batch, entries).view(-1, latent + rope).to(dtype), torch.randn(3, latent + rope).to(dtype))
    )
    ops.concat_and_cache_mla(rows[:, :latent], rows[:, latent:], cache, batch.common.slot_mapping)
    assert_same_bits(cache, make_cache(batch, entries, latent + rope, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lens", LENGTHS)
def test_write(ops, lens, dtype):
    """A write changes only the slots of new tokens (pitfall 6).

    Nothing is written for padding rows (requests of length 0) or for tokens after the last request.
    """
    check_write(ops, *lens, dtype)


def test_write_without_rope(ops):
    check_write(ops, (3, 20), (5, 20), torch.bfloat16, rope=0)


def test_write_ignores_slots_past_the_tokens(ops):
    cache = torch.full((2, 4, 5), torch.nan)
    ops.concat_and_cache_mla(torch.ones(2, 3), torch.ones(2, 2), cache, torch.tensor([7, -1, 0, 10_000_000]))
    assert cache[1, 3].eq(1).all() and cache.isnan().sum() == 7 * 5


def check_gather(ops, seq_lens, starts, lengths, dtype, block_size=16):
    """Assert that a gather returns each request's range of tokens, in order, and no entry of another request."""
    batch = make_batch([0] * len(seq_lens), seq_lens, block_size)
    entries = make_entries(batch, 20, dtype)
    cache = make_cache(batch, entries, 20, dtype)
    wanted = torch.cat(
        [own[s : s + n] for own, s, n in zip(entries, starts, lengths, strict=True)] + [cache[:0].view(-1, 20)]
    )
    got = ops.gather_and_maybe_dequant_cache(
        cache, batch.common.block_table, offsets(lengths), integers(*starts), sum(lengths)
    )
    assert_same_bits(got, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "seq_lens, starts, lengths",
    [
        ((33, 5, 16), (0, 0, 0), (33, 5, 16)),
        ((33, 5, 47), (16, 0, 31), (17, 0, 2)),
        ((15, 0, 1), (3, 0, 0), (12, 0, 1)),
        ((40,), (37,), (3,)),
        ((40, 8), (0, 0), (0, 0)),
        ((), (), ()),
    ],
)
def test_gather(ops, seq_lens, starts, lengths, dtype):
    """A gather reads neither the unused end of a request's last block nor the table entries after it (pitfall 7).

    The unused end contains NaN, and the table entries contain garbage.
    """
    check_gather(ops, seq_lens, starts, lengths, dtype)


@given(st.data(), st.sampled_from(["reference", "fast"]), st.sampled_from([1, 2, 7, 16]))
def test_gather_any_piece(data, wing, block_size):
    seq_lens = data.draw(st.lists(st.integers(0, 40), max_size=5))
    starts = [data.draw(st.integers(0, n)) for n in seq_lens]
    lengths = [data.draw(st.integers(0, n - s)) for n, s in zip(seq_lens, starts, strict=True)]
    check_gather({"reference": reference, "fast": fast}[wing], seq_lens, starts, lengths, torch.float32, block_size)


def test_gather_in_small_pieces(monkeypatch):
    monkeypatch.setattr("fast.kernels.cpu.cache.CHUNK_TOKENS", 5)
    check_gather(fast, (33, 5, 47), (16, 0, 30), (17, 5, 2), torch.float32)


def test_gather_out(ops):
    """If `out` is a part of a larger tensor, a gather of `fast` writes all rows of `out` and no other row."""
    if ops is reference:
        return check_gather(ops, (9,), (0,), (9,), torch.float32)
    batch = make_batch((0,), (9,), 4)
    entries = make_entries(batch, 6, torch.float32)
    cache, workspace = make_cache(batch, entries, 6, torch.float32), torch.empty(20, 6)
    out = workspace[:9]
    got = ops.gather_and_maybe_dequant_cache(cache, batch.common.block_table, integers(0, 9), integers(0), 9, out=out)
    assert got is out
    assert_same_bits(workspace[:9], entries[0])
    assert workspace[9:].isnan().all()


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float32])
def test_gather_refuses_an_overlap(stored, plain_errors):
    """An `out` in the memory of the cache, the block table or itself is refused in every call; nothing is written."""
    memory = torch.randint(0, 100, (8 * 16 * 24 * 4,), dtype=torch.uint8)
    cache = memory[: 8 * 16 * 24 * stored.itemsize].view(stored).view(8, 16, 24)
    inside = memory[: 15 * 24 * 4].view(torch.float32).view(15, 24)
    table = torch.tensor([[3, 2], [1, 0]], dtype=torch.int32)
    before = memory.clone(), table.clone()
    options = {"out_dtype": torch.float32}
    if stored != torch.float32:
        options |= {"cache_format": FP8_E4M3, "kv_scale": torch.tensor(1.0)}

    def gather(out, table=table):
        return fast.gather_and_maybe_dequant_cache(
            cache, table, offsets([10, 5]), integers(0, 0), 15, out=out, **options
        )

    gather(torch.empty(15, 24))
    for _ in range(2):
        with pytest.raises(ValueError, match="^out: expected memory that no input has, got a tensor that overlaps"):
            gather(inside)
        with pytest.raises(ValueError, match="^out: expected a tensor whose elements have different addresses, got"):
            gather(torch.empty(1, 24).expand(15, 24))
    rows = torch.zeros(15, 24)
    own = rows.view(torch.int32).view(-1)[:4].view(2, 2)
    with pytest.raises(ValueError, match="^out: expected memory that no input has"):
        gather(rows, own)
    assert_same_bits(memory, before[0])
    assert_same_bits(table, before[1])


def test_dequantize_refuses_an_overlap(plain_errors):
    """An `out` in the memory of the entries, or whose rows share memory, is refused in every call."""
    memory = torch.randint(0, 100, (7 * 24 * 4,), dtype=torch.uint8)
    entries, before = memory[: 7 * 24].view(torch.float8_e4m3fn).view(7, 24), memory.clone()
    inside = memory.view(torch.float32).view(7, 24)
    for _ in range(2):
        arguments = entries, FP8_E4M3, torch.float32, torch.tensor(1.0)
        fast.dequantize_entries(*arguments, out=torch.empty(7, 24))
        with pytest.raises(ValueError, match="^out: expected memory that no input has, got a tensor that overlaps"):
            fast.dequantize_entries(*arguments, out=inside)
        with pytest.raises(ValueError, match="^out: expected a tensor whose elements have different addresses, got"):
            fast.dequantize_entries(*arguments, out=torch.empty(1, 24).expand(7, 24))
    assert_same_bits(memory, before)


def test_reorg_refuses_an_overlap(plain_errors):
    """An `out` in the memory of `gathered` or of the plan's offsets, or whose rows share memory, is refused."""
    chunk = fast.rank_local_chunk(ContextChunk(integers(0), offsets([5]), 5, 5), TokenOwnership(2, 0))
    memory = torch.randn(2 * 3 * 6)
    gathered, before = memory.view(2, 3, 6), memory.clone()
    for _ in range(2):
        fast.reorg_kvcache(gathered, chunk, out=torch.empty(5, 6))
        with pytest.raises(ValueError, match="^out: expected memory that no input has, got a tensor that overlaps"):
            fast.reorg_kvcache(gathered, chunk, out=memory[6:].view(5, 6))
        with pytest.raises(ValueError, match="^out: expected a tensor whose elements have different addresses, got"):
            fast.reorg_kvcache(gathered, chunk, out=torch.empty(1, 6).expand(5, 6))
    rows = torch.zeros(5, 6)
    inside = replace(chunk, cu_seq_lens=rows.view(torch.int32).view(-1)[:2])
    inside.cu_seq_lens.copy_(chunk.cu_seq_lens)
    with pytest.raises(ValueError, match="^out: expected memory that no input has"):
        fast.reorg_kvcache(gathered, inside, out=rows)
    assert_same_bits(memory, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_copy_and_swap(ops, dtype):
    """`copy_blocks` and `swap_blocks` copy whole blocks bit by bit, also NaN, and change no other byte."""
    caches = [torch.randn(6, 4, 5).to(dtype) for _ in range(2)]
    caches[1][2, 3] = torch.nan
    pairs = {2: 0, 5: 4}
    mapping = torch.tensor([list(pair) for pair in pairs.items()], dtype=torch.int64)
    wanted = [torch.stack([c[{t: s for s, t in pairs.items()}.get(b, b)] for b in range(6)]) for c in caches]
    ops.copy_blocks(caches, mapping)
    for got, want in zip(caches, wanted, strict=True):
        assert_same_bits(got, want)

    source, target = caches[1], torch.full((9, 4, 5), torch.nan).to(dtype)
    was = source.clone()
    ops.swap_blocks(source, target, torch.tensor([[2, 8], [2, 0], [4, 4]]))
    for block in range(9):
        origin = {8: 2, 0: 2, 4: 4}.get(block)
        assert_same_bits(target[block], torch.full((4, 5), torch.nan).to(dtype) if origin is None else source[origin])
    assert_same_bits(source, was)


def test_nothing_to_copy(ops):
    cache = torch.randn(3, 4, 5)
    was = cache.clone()
    ops.copy_blocks([cache], torch.empty(0, 2, dtype=torch.int64))
    ops.copy_blocks([], torch.tensor([[0, 1]]))
    ops.swap_blocks(cache, torch.randn(2, 4, 5), torch.empty(0, 2, dtype=torch.int64))
    assert_same_bits(cache, was)


def test_allocate(ops):
    cache = ops.allocate_kv_cache(3, 16, 20, torch.bfloat16)
    assert cache.shape == ops.kv_cache_shape(3, 16, 20) and cache.dtype == torch.bfloat16
    assert ops.allocate_kv_cache(0, 16, 20, torch.float32).numel() == 0


def test_offsets_beyond_32_bit(ops):
    """Cache ops give right results if the element offset of a slot exceeds 2^31 (pitfall 8).

    The cache has 4 GiB of virtual memory, but only the few blocks that the ops access need physical memory.
    """
    head_size, block_size, num_blocks = 1024, 64, 2**15 + 2  # 2^31 + 2^17 elements of 16 bits
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        cache = torch.empty(num_blocks, block_size, head_size, dtype=torch.float16)
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = True
    assert cache.numel() > 2**31
    entries = torch.randn(3, head_size).half()
    slots = torch.tensor([num_blocks * block_size - 1, 5, (num_blocks - 2) * block_size])
    ops.concat_and_cache_mla(entries[:, :1000], entries[:, 1000:], cache, slots)
    assert_same_bits(cache[num_blocks - 1, block_size - 1], entries[0])
    table = integers(num_blocks - 1, GARBAGE, 0, GARBAGE, num_blocks - 2, GARBAGE).view(3, 2)
    got = ops.gather_and_maybe_dequant_cache(cache, table, integers(0, 1, 2, 3), integers(63, 5, 0), 3)
    assert_same_bits(got, entries)
    ops.copy_blocks([cache], torch.tensor([[num_blocks - 2, 1]]))
    assert_same_bits(cache[1, 0], entries[2])


@pytest.mark.parametrize("layout", ["layers_first", "blocks_first"])
def test_all_layers_in_one_tensor(ops, layout):
    """If one tensor has the caches of all layers, an op changes only the given layer, in both orders of the axes."""
    layers, blocks, block_size, width = 3, 5, 4, 32
    device = torch.get_default_device()
    caches = ops.allocate_kv_cache(blocks, block_size, width, torch.float32, device, num_layers=layers, layout=layout)
    assert caches.shape == (layers, blocks, block_size, width) and caches[0].stride(2) == 1
    layer_stride, block_stride = caches.stride()[:2]
    inner = block_size * width
    assert (layer_stride, block_stride) == (
        (blocks * inner, inner) if layout == "layers_first" else (inner, layers * inner)
    )
    caches.fill_(torch.nan)
    entries = torch.randn(layers, 6, width)
    slots = torch.tensor([3, 4, 19, 0, 7, -1])
    for layer in range(layers):
        ops.concat_and_cache_mla(entries[layer, :, :24], entries[layer, :, 24:], caches[layer], slots)
    table = integers(0, 1, 4).view(1, 3)
    for layer in range(layers):
        found = ops.gather_and_maybe_dequant_cache(caches[layer], table, integers(0, 12), integers(0), 12)
        for row, slot in ((3, 0), (0, 3), (1, 4), (4, 7)):
            assert_same_bits(found[slot], entries[layer, row])
        assert_same_bits(found[11], entries[layer, 2])
    ops.copy_blocks(list(caches), torch.tensor([[4, 2]]))
    assert_same_bits(caches[1, 2, 3], entries[1, 2])
