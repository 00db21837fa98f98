"""Tests of the Triton kernels that write and read fp8 caches: the same bytes as the reference, in both formats.

On a GPU the kernels are compiled. Without a GPU, one test runs this file again in Triton's interpreter, in which the
kernels convert e4m3 with integer operations. `test_compiles` needs no GPU: it compiles this conversion and the
conversion with the GPU's instructions for e4m3. Every byte of a cache that belongs to no token is 0xFF.
"""

from __future__ import annotations

import re

import pytest
import torch

import reference
from fast.kernels.integers import next_power_of_2
from fast.parity import compare
from reference.interfaces import FP8_DS_MLA, FP8_E4M3, CacheFormat, RopeConfig

from ...support.compiled import Recorded, compiled
from ...support.factories import GARBAGE, assert_same_bits, integers, offsets
from ...support.fp8 import FORMATS, NAN_CODE, assert_same_entries, difficult_rows, new_fp8_cache, scale_of
from ...support.triton_mode import DEVICE, INTERPRETED, ON_GPU, run_in_interpreter, runs, starts_interpreter
from .test_triton_memory import check_rope

from fast.kernels.triton import cache, cache_formats, context_parallel, rope  # isort: skip

# the interpreter rounds towards 0 when it converts to bfloat16, so bfloat16 results are tested on a GPU
READ = [torch.float32, torch.float16] + [torch.bfloat16] * ON_GPU
WRITTEN = [torch.float32, torch.float16, torch.bfloat16]
FAR = 2**31 - 100  # a block id far outside any cache


@starts_interpreter
def test_in_the_interpreter():
    run_in_interpreter(__file__)


@pytest.fixture(autouse=True)
def on_the_cpu():
    """Create tensors on the CPU by default: the expected bytes come from the reference on the CPU."""
    with torch.device("cpu"):
        yield


def long(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


def on_device(*tensors: torch.Tensor | None) -> list:
    return [None if each is None else each.to(DEVICE) for each in tensors]


def stored_rows(rows: torch.Tensor, cache_format: CacheFormat, latent: int) -> torch.Tensor:
    """Return the stored entries of rows [T, Lkv + R], from the reference on the CPU."""
    rows = rows.cpu()
    return reference.quantize_entries(rows[:, :latent], rows[:, latent:], cache_format, scale_of(cache_format))


def random_entries(cache_format: CacheFormat, latent: int, rope_dim: int, *shape: int) -> torch.Tensor:
    """Return stored entries with random e4m3 codes, NaN included, and random scales and 16-bit rope parts."""
    columns = cache_format.columns(latent, rope_dim)
    raw = torch.randint(0, 256, (*shape, columns), dtype=torch.uint8)
    if cache_format.scale_tile:
        layout = cache_format.layout(latent, rope_dim)
        scales = torch.rand(*shape, latent // cache_format.scale_tile)
        raw[..., layout.scales : layout.rope] = scales.view(torch.uint8)
        raw[..., layout.rope :] = torch.randn(*shape, rope_dim).to(cache_format.rope_dtype).view(torch.uint8)
    raw.view(-1, columns)[0, 0] = NAN_CODE
    return raw.view(cache_format.storage_dtype)


@runs
@pytest.mark.parametrize("dtype", WRITTEN, ids=str)
@pytest.mark.parametrize("cache_format, latent, rope_dim", FORMATS)
def test_write(cache_format, latent, rope_dim, dtype):
    """Write tokens -> the reference's bytes in their slots; slots out of range are skipped; no other byte changes."""
    tokens, num_blocks, block_size = 21, 6, 8
    capacity = num_blocks * block_size
    rows = difficult_rows(tokens, latent, rope_dim, dtype)
    wanted_rows = stored_rows(rows, cache_format, latent)
    slots = torch.randperm(capacity)[:tokens].tolist()
    for token, bad in {3: -1, 8: capacity, 9: FAR, 14: -5, 20: 2**62}.items():
        slots[token] = bad
    kv_c, k_pe = rows.to(DEVICE).split([latent, rope_dim], -1)
    for strided in (False, True):
        wanted = new_fp8_cache(cache_format, num_blocks, block_size, latent, rope_dim, strided)
        written = new_fp8_cache(cache_format, num_blocks, block_size, latent, rope_dim, strided, DEVICE)
        for token, slot in enumerate(slots):
            if 0 <= slot < capacity:
                wanted[slot // block_size, slot % block_size] = wanted_rows[token]
        (scale,) = on_device(scale_of(cache_format))
        cache.concat_and_cache_mla(kv_c, k_pe, written, long([*slots, 0, 5]), cache_format, scale)
        assert_same_entries(written.cpu(), wanted, cache_format)
        if strided:  # the cache is layer 1 of a tensor of three layers: layers 0 and 2 were not written
            assert written._base.view(torch.uint8)[:, [0, 2]].eq(0xFF).all()


@runs
@pytest.mark.parametrize("dtype", WRITTEN, ids=str)
@pytest.mark.parametrize("cache_format, latent, rope_dim", FORMATS)
def test_quantize(cache_format, latent, rope_dim, dtype):
    """Quantise rows with numbers of all magnitudes, zeros, infinities and NaN -> the reference's bytes."""
    rows = difficult_rows(13, latent, rope_dim, dtype)
    wanted = stored_rows(rows, cache_format, latent)
    for layout in (rows, torch.stack((rows, rows), -1)[..., 0]):
        kv_c, k_pe = layout.to(DEVICE).split([latent, rope_dim], -1)
        out = torch.full((15, wanted.shape[1]), 0xFF, dtype=torch.uint8, device=DEVICE).view(wanted.dtype)
        cache_formats.quantize_entries(kv_c, k_pe, out[1:-1], cache_format, *on_device(scale_of(cache_format)))
        assert_same_entries(out[1:-1].cpu(), wanted, cache_format)
        assert out[[0, -1]].view(torch.uint8).eq(0xFF).all()


@runs
@pytest.mark.parametrize("dtype", READ, ids=str)
@pytest.mark.parametrize("cache_format, latent, rope_dim", FORMATS)
def test_dequantize(cache_format, latent, rope_dim, dtype):
    """Read entries with random codes -> the reference's numbers; NaN stays NaN."""
    entries, scale = random_entries(cache_format, latent, rope_dim, 12), scale_of(cache_format)
    wanted = reference.dequantize_entries(entries, cache_format, dtype, scale)
    odd = torch.zeros(12, entries.shape[1] + 3, dtype=torch.uint8)  # rows at odd addresses
    odd[:, 1:-2] = entries.view(torch.uint8)
    for given in (entries, odd[:, 1:-2].view(entries.dtype)):
        out = torch.full((14, latent + rope_dim), 7.0, dtype=dtype, device=DEVICE)
        moved = odd.to(DEVICE)[:, 1:-2].view(entries.dtype) if given is not entries else entries.to(DEVICE)
        cache_formats.dequantize_entries(moved, out[1:-1], cache_format, *on_device(scale))
        assert wanted.isnan().any() and torch.equal(out[1:-1].isnan().cpu(), wanted.isnan())
        assert_same_bits(out[1:-1].cpu().nan_to_num(7), wanted.nan_to_num(7))
        assert out[[0, -1]].eq(7).all()


@runs
@pytest.mark.parametrize("dtype", READ, ids=str)
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("cache_format, latent, rope_dim", FORMATS)
def test_gather(cache_format, latent, rope_dim, strided, dtype):
    """Gather ranges of tokens -> the reference's numbers, or the stored bytes; rows outside the cache become 0.

    One block id lies outside the cache, one request ends past its block table, and the last rows have no request.
    """
    block_size, scale = 4, scale_of(cache_format)
    held = random_entries(cache_format, latent, rope_dim, 12, block_size)
    moved = new_fp8_cache(cache_format, 12, block_size, latent, rope_dim, strided, DEVICE)
    moved.view(torch.uint8).copy_(held.view(torch.uint8))
    table = torch.randperm(12).int().view(3, 4)
    good = table.clone()
    table[1, 1] = GARBAGE
    lengths, starts = [5, 10, 13], [0, 1, 5]
    rows = [held[int(good[b, p // block_size]), p % block_size] if p < 16 else None
            for b, (s, n) in enumerate(zip(starts, lengths, strict=True)) for p in range(s, s + n)]  # fmt: skip
    outside = [number for number, row in enumerate(rows) if row is None] + [*range(8, 12), 28, 29]
    kept = torch.stack([row if row is not None else held[0, 0] for row in rows] + [held[0, 0]] * 2)
    numbers = reference.dequantize_entries(kept, cache_format, dtype, scale)
    numbers[outside] = 0
    stored = kept.view(torch.uint8).clone()
    stored[outside] = 0
    places = on_device(table, offsets(lengths), integers(*starts))
    out = torch.full((32, latent + rope_dim), 7.0, dtype=dtype, device=DEVICE)
    cache.gather_and_maybe_dequant_cache(moved, *places, out[1:-1], cache_format, *on_device(scale))
    assert_same_bits(out[1:-1].cpu().nan_to_num(5), numbers.nan_to_num(5))
    assert torch.equal(out[1:-1].isnan().cpu(), numbers.isnan()) and out[[0, -1]].eq(7).all()
    raw = torch.full((32, kept.shape[1]), 0xFF, dtype=torch.uint8, device=DEVICE)
    cache.gather_and_maybe_dequant_cache(moved, *places, raw[1:-1].view(kept.dtype), cache_format, None)
    assert_same_bits(raw[1:-1].cpu(), stored)
    assert raw[[0, -1]].eq(0xFF).all()


@runs
@pytest.mark.parametrize("scale", [torch.nan, torch.inf, 0.0])
def test_rows_outside_the_cache_are_zero_with_any_scale(scale):
    """Gather a block outside the cache with a scale that is NaN, infinite or 0 -> the rows of the block are 0."""
    held = new_fp8_cache(FP8_E4M3, 2, 4, 32, 8, device=DEVICE)
    out = torch.full((4, 40), 7.0, device=DEVICE)
    places = on_device(integers(5).view(1, 1), integers(0, 4), integers(0))
    cache.gather_and_maybe_dequant_cache(held, *places, out, FP8_E4M3, torch.tensor(scale, device=DEVICE))
    assert not out.any()


@runs
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16] + [torch.bfloat16] * ON_GPU, ids=str)
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("cache_format, latent, rope_dim", FORMATS)
def test_rope_norm_and_cache(cache_format, latent, rope_dim, interleaved, dtype):
    """Rotate, norm and write in one launch -> `quantize_entries` of the launch's outputs gives the bytes in the cache.

    The errors of the outputs are within the budget. In the interpreter, the outputs have the same bits as the outputs
    of a launch that writes a cache in the compute dtype.
    """
    tokens, capacity = 7, 24
    projected = (torch.randn(tokens, latent + rope_dim) * 3).to(dtype)
    projected[5, 0] = torch.nan
    q_pe, weight = torch.randn(tokens, 3, 16 + rope_dim).to(dtype), torch.randn(latent).to(dtype)
    config = RopeConfig(interleaved=interleaved)
    frequencies = reference.rotary_frequencies(config, rope_dim, torch.float32)
    slots = [capacity - 1, -1, 0, capacity, 5, 9]  # the last token has no slot: padding after the batch
    wanted = new_fp8_cache(cache_format, 6, 4, latent, rope_dim, strided=True)
    written = new_fp8_cache(cache_format, 6, 4, latent, rope_dim, True, DEVICE)
    kv_c, k_pe = projected.to(DEVICE).split([latent, rope_dim], -1)
    weight, frequencies, scale = on_device(weight, frequencies, scale_of(cache_format))
    positions = torch.randint(0, 160_000, (tokens,)).to(DEVICE)
    q_pe = q_pe.to(DEVICE)[..., 16:]

    def launch(kv_cache, *stored):
        return rope.rope_norm_and_cache(
            positions, q_pe, kv_c, k_pe, kv_cache, long(slots), weight, 1e-6, frequencies, 1.0, interleaved, *stored
        )

    outputs = launch(written, cache_format, scale)
    stored = stored_rows(torch.cat(outputs[1:], -1), cache_format, latent)
    for token in (0, 2, 4, 5):
        wanted[slots[token] // 4, slots[token] % 4] = stored[token]
    assert_same_entries(written.cpu(), wanted, cache_format)
    if rope_dim:
        check_rope(outputs[0], positions, q_pe, frequencies, config)
        check_rope(outputs[2][:5], positions[:5], k_pe[:5], frequencies, config)
    norms = [reference.rms_norm(x.cpu()[:5], weight.cpu().to(x.dtype), 1e-6) for x in (kv_c, kv_c.double())]
    parity = compare("norm", outputs[1].cpu()[:5], *norms)
    assert parity.passed, parity
    if INTERPRETED:  # on a GPU the order of a sum depends on the kernel
        plain = torch.zeros(6, 4, latent + rope_dim, dtype=dtype, device=DEVICE)
        for got, want in zip(outputs, launch(plain), strict=True):
            assert_same_bits(got.nan_to_num(7), want.nan_to_num(7))


@runs
@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("cache_format, latent, rope_dim", FORMATS)
def test_heads_are_divided_among_programs(cache_format, latent, rope_dim, quantised, monkeypatch):
    """Rotate the queries of 5 heads in programs of 8, of 2 and of 1 head -> the same queries and the same bytes."""
    tokens, heads = 3, 5
    kv_c, k_pe = torch.randn(tokens, latent, device=DEVICE), torch.randn(tokens, rope_dim, device=DEVICE)
    q_pe, weight = torch.randn(tokens, heads, rope_dim, device=DEVICE), torch.ones(latent, device=DEVICE)
    frequencies = reference.rotary_frequencies(RopeConfig(), rope_dim, torch.float32).to(DEVICE)
    q_scale = torch.rand(heads, device=DEVICE) + 0.5 if quantised else None
    found = []
    for held in (8, 2, 1):
        monkeypatch.setattr(rope, "WARP_ELEMENTS", held * next_power_of_2(max(1, rope_dim)))
        written = new_fp8_cache(cache_format, 6, 4, latent, rope_dim, device=DEVICE)
        outputs = rope.rope_norm_and_cache(
            long([5, 0, 160_000]), q_pe, kv_c, k_pe, written, long([7, 3, 12]), weight, 1e-6, frequencies, 1.0, True,
            cache_format, *on_device(scale_of(cache_format)), q_scale,
        )  # fmt: skip
        found.append([each.view(torch.uint8) for each in (*outputs, written)])
    for other in found[1:]:
        for got, wanted in zip(other, found[0], strict=True):
            assert_same_bits(got, wanted)


@runs
@pytest.mark.parametrize("cache_format, latent, rope_dim", FORMATS)
def test_copies_keep_every_byte(cache_format, latent, rope_dim):
    """Copy and swap blocks, and reorder entries of two ranks -> moved entries keep their bytes, also NaN."""
    raw = torch.randint(0, 256, (2, 6, 4, cache_format.columns(latent, rope_dim)), dtype=torch.uint8)
    caches = [each.clone().to(DEVICE).view(cache_format.storage_dtype) for each in raw]
    cache.copy_blocks(caches, long([[2, 0], [5, 4], [9, 1]]))
    raw[:, 0], raw[:, 4] = raw[:, 2], raw[:, 5]
    cache.swap_blocks(*caches, long([[1, 3], [-1, 0]]))
    raw[1, 3] = raw[0, 1]
    assert_same_bits(torch.stack([each.view(torch.uint8).cpu() for each in caches]), raw)
    gathered = torch.stack(caches).flatten(1, 2)  # 24 entries of each rank
    out = torch.full((46, raw.shape[-1]), 0xFF, dtype=torch.uint8, device=DEVICE).view(cache_format.storage_dtype)
    context_parallel.reorg_kvcache(
        gathered, *on_device(integers(0, 45), integers(0, 23, 0, 22).view(2, 2)), 1, out
    )  # fmt: skip
    wanted = torch.zeros(46, raw.shape[-1], dtype=torch.uint8)
    wanted[:45:2], wanted[1:45:2] = raw[0].flatten(0, 1)[:23], raw[1].flatten(0, 1)[:22]
    assert_same_bits(out.view(torch.uint8).cpu(), wanted)


# Compilation without a GPU.


def recorded(monkeypatch, cache_format: CacheFormat, dtype: torch.dtype, native: bool) -> list[tuple]:
    """Return the launches of all kernels of a format, for the dims of DeepSeek."""
    launches: dict = {}
    for module in (cache_formats, rope):
        for name in [key for key in vars(module) if key.endswith("_kernel")]:
            monkeypatch.setattr(module, name, Recorded(getattr(module, name), launches))
        monkeypatch.setattr(module, "converts_natively", lambda _: native)
    scale, slots = scale_of(cache_format), torch.arange(64)
    held = new_fp8_cache(cache_format, 4, 64, 512, 64)
    kv_c, k_pe = torch.zeros(64, 576, dtype=dtype).split([512, 64], -1)
    out, entries = torch.zeros(64, 576, dtype=dtype), held[0]
    cache.concat_and_cache_mla(kv_c, k_pe, held, slots, cache_format, scale)
    cache_formats.quantize_entries(kv_c, k_pe, entries, cache_format, scale)
    cache_formats.dequantize_entries(entries, out, cache_format, scale)
    places = integers(0).view(1, 1), integers(0, 64), integers(0)
    cache.gather_and_maybe_dequant_cache(held, *places, out, cache_format, scale)
    for interleaved in (True, False):
        rope.rope_norm_and_cache(
            slots, torch.zeros(64, 16, 192, dtype=dtype)[..., 128:], kv_c, k_pe, held, slots,
            torch.ones(512, dtype=dtype), 1e-6, torch.zeros(32), 1.0, interleaved, cache_format, scale,
        )  # fmt: skip
    return list(launches.values())


@pytest.mark.skipif(INTERPRETED, reason="interpreted kernels are not compiled")
@pytest.mark.parametrize("capability, native", [((8, 0), False), ((8, 9), True), ((9, 0), True)])
@pytest.mark.parametrize("cache_format", [FP8_E4M3, FP8_DS_MLA], ids=lambda each: each.name)
def test_compiles(cache_format, capability, native, monkeypatch):
    """Compile every kernel for Ampere, Ada and Hopper -> IEEE divisions, and accesses of 16 bytes to rows of entries.

    Ampere has no instructions for e4m3, so there the kernels convert with integers. Only kernels that quantise divide
    by the scale; a kernel that dequantises has no division.
    """
    launches = recorded(monkeypatch, cache_format, torch.bfloat16, native)
    assert len(launches) == 6
    for launch in launches:
        name, ptx = launch[0].fn.__name__, compiled(*launch, capability).asm["ptx"]
        assert ("e4m3" in ptx) == native, name
        reads = "dequantize" in name
        assert bool(re.search(r"div\.rn\.f32", ptx)) != reads, name
        # only the norm has an approximate division (by the number of elements), and quantisation does not use it
        assert len(re.findall(r"div\.(?:full|approx)", ptx)) == ("norm" in name), name
        assert re.search(r"ld\.global\.v4\.b32|ld\.global\.v2\.b64", ptx), name
        assert re.search(r"st\.global\.v4\.b32|st\.global\.v2\.b64", ptx), name
