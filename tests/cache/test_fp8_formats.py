"""Tests of the fp8 cache formats: every bit that they store, and the numbers that these bits stand for.

The expected numbers come from the definition of e4m3 and not from PyTorch: 1 sign bit, 4 exponent bits (e), and 3
mantissa bits (m). The value is 2^(e - 7) * (1 + m / 8), or 2^-9 * m for e = 0; e = 15 with m = 7 is NaN. A code is the
byte of an e4m3 number. Every byte of a cache that belongs to no token is 0xFF.
"""

from __future__ import annotations

import math

import pytest
import torch

import fast
import reference
from reference.interfaces import COMPUTE_FORMAT, FP8_DS_MLA, FP8_E4M3, CacheFormat, RopeConfig, TokenOwnership

from ..support.factories import assert_same_bits, integers, make_batch, offsets
from ..support.fp8 import (
    FORMATS,
    LARGEST,
    NAN_CODE,
    assert_same_entries,
    difficult_rows,
    gather_arguments,
    new_fp8_cache,
    scale_of,
    table_of_values,
)

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def quantized(ops, values: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Return the codes of a vector of numbers that are quantised with one scale."""
    entries = ops.quantize_entries(values[:, None], values[:, None][:, :0], FP8_E4M3, torch.tensor(scale))
    assert entries.dtype == torch.float8_e4m3fn
    return entries.view(torch.uint8)[:, 0]


# Tests of the e4m3 numbers, with one scale for a layer.


@pytest.mark.parametrize("scale", [1.0, 0.5, 0.37, 3e-5, 7e4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_code_is_read(ops, dtype, scale):
    """Read all 256 codes -> value x scale, multiplied in float32 (for float64: in float64) and rounded to the dtype."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, None]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    got = ops.dequantize_entries(codes, FP8_E4M3, dtype, torch.tensor(scale))[:, 0]
    wanted = (table_of_values().to(wide) * torch.tensor(scale).to(wide)).to(dtype)
    assert got.dtype == dtype and got.isnan().nonzero().flatten().tolist() == [0x7F, 0xFF]
    assert_same_bits(got.nan_to_num(7), wanted.nan_to_num(7))


@pytest.mark.parametrize("scale", [1.0, 0.25, 2.0**-20, 2.0**30])
def test_every_code_is_written(ops, scale):
    """Quantise the value of every code with a power of two as scale -> this code; both codes of NaN become 0x7F."""
    got = quantized(ops, table_of_values().float() * scale, scale)
    wanted = torch.arange(256, dtype=torch.uint8)
    wanted[0xFF] = NAN_CODE
    assert_same_bits(got, wanted)


def test_rounding(ops):
    """Quantise numbers between two e4m3 numbers -> the nearer one; the middle is rounded to the even mantissa."""
    values = table_of_values()[:127].float()  # positive, ascending
    low, high = values[:-1], values[1:]
    middle = (low + high) / 2
    codes = torch.arange(126, dtype=torch.uint8)
    even = codes + codes % 2
    below, above = (torch.nextafter(middle, end) for end in (low, high))
    for sign, bit in ((1, 0), (-1, 0x80)):
        for numbers, wanted in ((middle, even), (below, codes), (above, codes + 1)):
            assert_same_bits(quantized(ops, sign * numbers), wanted | bit)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_saturation(ops, dtype):
    """Quantise numbers beyond 448 and infinities -> 448 with the sign; NaN of both signs -> 0x7F."""
    values = torch.tensor([448.0, 449, 464, 465, 6e4, math.inf, -448, -449, -465, -6e4, -math.inf], dtype=dtype)
    assert quantized(ops, values).tolist() == [LARGEST] * 6 + [LARGEST | 0x80] * 5
    nans = torch.tensor([math.nan, -math.nan], dtype=dtype)
    assert quantized(ops, torch.cat((nans, -nans))).tolist() == [NAN_CODE] * 4
    assert quantized(ops, torch.tensor([0.0, -0.0], dtype=dtype)).tolist() == [0, 0x80]


def test_the_quotient_is_rounded_once_to_float32(ops):
    """Quantise with a scale that is no power of two -> the quotient is rounded to float32, and then to e4m3.

    A multiplication with 1 / scale gives other codes for some of these numbers.
    """
    scale = torch.tensor(0.3)
    values = (torch.rand(20_000) + 0.5) * 2.0 ** torch.randint(-12, 9, (20_000,))
    codes = quantized(ops, values, 0.3)
    quotients = (values.double() / scale.double()).float()  # correctly rounded: 53 bits are enough for 24-bit quotients
    assert_same_bits(codes, quantized(ops, quotients))


# Tests of fp8_ds_mla: each group of 128 latent elements has a scale. In this file, a tile is such a group.


def in_tiles(ops, latent: torch.Tensor, dtype=torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes [512] and the scales [4] of one latent of four tiles."""
    entry = ops.quantize_entries(latent[None].to(dtype), torch.zeros(1, 64, dtype=dtype), FP8_DS_MLA)[0]
    assert entry.shape == (656,) and entry.dtype == torch.uint8
    return entry[:512], entry[512:528].clone().view(torch.float32)


def test_tile_scales(ops):
    """Quantise four tiles -> each scale is the tile's largest absolute value / 448, and this value becomes 448."""
    latent = torch.randn(512).mul(0.1).clamp(-1, 1)
    largest = torch.tensor([3.0, 1e-6, 250.0, 7e30])
    latent.view(4, 128)[torch.arange(4), torch.tensor([0, 127, 5, 64])] = torch.tensor([3.0, -1e-6, -250.0, 7e30])
    latent.view(4, 128)[1] *= torch.where(latent.view(4, 128)[1].abs() > 1e-6, 1e-7, 1.0)
    codes, scales = in_tiles(ops, latent)
    assert_same_bits(scales, largest / torch.tensor(448.0))  # on a GPU, a division by the number 448 rounds differently
    at_largest = codes.view(4, 128)[torch.arange(4), torch.tensor([0, 127, 5, 64])]
    assert at_largest.tolist() == [LARGEST, LARGEST | 0x80, LARGEST | 0x80, LARGEST]


@pytest.mark.parametrize(
    "written, scale, codes",
    [
        ([], 2.0**-126, {}),  # a tile of zeros has the smallest normal float32 number as scale, so no quotient is 0 / 0
        ([1e-44], 2.0**-126, {}),
        ([math.nan, 2.0], 2 / 448, {0: NAN_CODE, 1: LARGEST}),
        ([math.nan] * 128, 2.0**-126, dict.fromkeys(range(128), NAN_CODE)),
        ([math.inf, 1.0, -math.inf], None, {0: LARGEST, 1: 0, 2: LARGEST | 0x80}),
    ],
)
def test_special_tiles(ops, written, scale, codes):
    """Quantise a tile with zeros, tiny numbers, NaN or infinity -> a finite positive scale; no other tile changes.

    An infinity counts as the largest float32 number.
    """
    latent = torch.ones(512)
    latent[128:256] = 0
    latent[128 : 128 + len(written)] = torch.tensor(written)
    got, scales = in_tiles(ops, latent)
    largest = torch.tensor(torch.finfo(torch.float32).max)
    wanted = largest / 448 if scale is None else torch.tensor(scale, dtype=torch.float64).float()
    assert_same_bits(scales, torch.stack([torch.tensor(1 / 448), wanted, *[torch.tensor(1 / 448)] * 2]))
    tile = torch.zeros(128, dtype=torch.uint8)
    for column, code in codes.items():
        tile[column] = code
    assert_same_bits(got, torch.cat([torch.full((128,), LARGEST, dtype=torch.uint8), tile,
                                     torch.full((256,), LARGEST, dtype=torch.uint8)]))  # fmt: skip


def test_rope_of_tiles_stays_in_bfloat16(ops):
    """Store and read bfloat16 keys in fp8_ds_mla -> the same bits, also of NaN, infinity and subnormal numbers."""
    keys = torch.arange(2**16).to(torch.int32).to(torch.int16).view(torch.bfloat16).view(-1, 64)
    entries = ops.quantize_entries(torch.ones(len(keys), 512, dtype=torch.bfloat16), keys, FP8_DS_MLA)
    assert_same_bits(entries[:, 528:].clone().view(torch.bfloat16), keys)
    got = ops.dequantize_entries(entries, FP8_DS_MLA, torch.bfloat16)
    assert_same_bits(got[:, 512:], keys)
    assert got[:, :512].eq(1).all()


def test_bytes_of_an_entry():
    """Count the bytes of an entry -> 1152 in bfloat16, 576 in fp8_e4m3, and 656 in fp8_ds_mla."""
    sizes = [each.entry_bytes(512, 64, torch.bfloat16) for each in (COMPUTE_FORMAT, FP8_E4M3, FP8_DS_MLA)]
    assert sizes == [1152, 576, 656]


# Tests of the twins: the same bits in both packages.


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cache_format, latent, rope", FORMATS)
def test_twins_store_the_same_bits(cache_format, latent, rope, dtype):
    """Quantise difficult numbers in both packages -> the same bytes; read these bytes -> the same numbers."""
    rows, scale = difficult_rows(11, latent, rope, dtype), scale_of(cache_format)
    wide = torch.cat((rows, rows), -1)[:, latent:]  # strided inputs
    for kv_c, k_pe in ((rows[:, :latent], rows[:, latent:]), (rows[:, :latent], wide[:, rope : 2 * rope])):
        given = (kv_c, k_pe, cache_format, scale)
        wanted = reference.quantize_entries(*given)
        got = fast.quantize_entries(*given)
        assert_same_entries(got, wanted, cache_format)
    for out_dtype in DTYPES:
        given = (wanted, cache_format, out_dtype, scale)
        numbers = reference.dequantize_entries(*given)
        assert_same_bits(fast.dequantize_entries(*given).nan_to_num(7), numbers.nan_to_num(7))
        out = torch.full((13, latent + rope), 7.0, dtype=out_dtype)
        assert fast.dequantize_entries(*given, out=out[1:-1]).data_ptr() == out[1:].data_ptr()
        assert_same_bits(out[1:-1].nan_to_num(7), numbers.nan_to_num(7))
        assert out[[0, -1]].eq(7).all()


def test_conversions_in_the_compute_dtype(ops):
    """With `compute_dtype`, a stored entry has the bits of latent and key, and a read only converts the dtype."""
    rows = torch.randn(5, 32)
    entries = ops.quantize_entries(rows[:, :24], rows[:, 24:])
    assert_same_bits(entries, rows)
    assert_same_bits(ops.dequantize_entries(entries), rows)
    assert_same_bits(ops.dequantize_entries(entries, out_dtype=torch.float16), rows.half())


def test_entries_at_any_address():
    """Read fp8_ds_mla entries from rows whose address and stride are odd -> the numbers of the aligned entries."""
    entries = reference.quantize_entries(torch.randn(3, 512), torch.randn(3, 64), FP8_DS_MLA)
    odd = torch.zeros(3, 659, dtype=torch.uint8)
    odd[:, 1:657] = entries
    wanted = reference.dequantize_entries(entries, FP8_DS_MLA, torch.float32)
    for given in (odd[:, 1:657], torch.stack((entries, entries), -1)[..., 0]):
        assert_same_bits(fast.dequantize_entries(given, FP8_DS_MLA, torch.float32), wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("cache_format, latent, rope", FORMATS)
def test_write_and_gather(ops, cache_format, latent, rope, strided, dtype):
    """Write tokens into a cache of bytes 0xFF -> the bytes of `quantize_entries` in their slots; no other byte changes.

    A gather returns the numbers that these bytes stand for. With the storage dtype, it returns the bytes themselves.
    """
    batch = make_batch((3, 20, 0), (5, 37, 9), block_size=8, padding=3)
    scale = scale_of(cache_format)
    rows = difficult_rows(batch.num_tokens + 3, latent, rope, dtype)
    cache = new_fp8_cache(cache_format, batch.num_blocks, 8, latent, rope, strided)
    wanted = cache.clone()
    stored = reference.quantize_entries(rows[:, :latent], rows[:, latent:], cache_format, scale)
    for token, slot in enumerate(batch.common.slot_mapping.tolist()):
        if slot >= 0:
            wanted[slot // 8, slot % 8] = stored[token]
    ops.concat_and_cache_mla(rows[:, :latent], rows[:, latent:], cache, batch.common.slot_mapping, cache_format, scale)
    assert_same_entries(cache, wanted, cache_format)
    arguments = gather_arguments(batch.common.block_table, [3, 20, 0], [2, 17, 0])
    entries = ops.gather_and_maybe_dequant_cache(cache, *arguments, cache_format, cache_format.storage_dtype)
    assert_same_entries(entries, stored[: batch.num_tokens], cache_format)
    for out_dtype in DTYPES:
        numbers = reference.dequantize_entries(entries, cache_format, out_dtype, scale)
        got = ops.gather_and_maybe_dequant_cache(cache, *arguments, cache_format, out_dtype, scale)
        assert_same_bits(got.nan_to_num(7), numbers.nan_to_num(7))


@pytest.mark.parametrize("cache_format, latent, rope", FORMATS)
def test_gather_into_a_workspace(cache_format, latent, rope, monkeypatch):
    """Gather 5 tokens at a time into rows of a workspace -> other rows stay; rows behind the last request become 0."""
    monkeypatch.setattr("fast.kernels.cpu.cache.CHUNK_TOKENS", 5)
    cache, scale = new_fp8_cache(cache_format, 6, 8, latent, rope), scale_of(cache_format)
    rows = torch.randn(48, latent + rope)
    fast.concat_and_cache_mla(rows[:, :latent], rows[:, latent:], cache, torch.arange(48), cache_format, scale)
    arguments = gather_arguments(integers(5, 0, 2, 4).view(2, 2), [11, 9], [5, 0])
    for dtype in (torch.float32, cache_format.storage_dtype):
        given = (cache_format, dtype, None if dtype == cache_format.storage_dtype else scale)
        wanted = reference.gather_and_maybe_dequant_cache(cache, *arguments, *given)
        out = torch.ones(27, wanted.shape[1]).to(dtype)
        fast.gather_and_maybe_dequant_cache(cache, *arguments[:-1], 24, *given, out=out[1:-2], bounded=True)
        assert_same_bits(out[1:21], wanted)
        assert not out[21:-2].float().any() and out[[0, -2, -1]].float().eq(1).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("cache_format, latent, rope", FORMATS)
def test_rope_norm_and_cache(cache_format, latent, rope, interleaved, dtype):
    """Rotate, norm and write in one op -> `quantize_entries` of the op's outputs gives the bytes in the cache."""
    tokens, scale = 7, scale_of(cache_format)
    rows = torch.randn(tokens, latent + rope).to(dtype)
    cache = new_fp8_cache(cache_format, 3, 4, latent, rope)
    wanted, slots = cache.clone(), [11, -1, 0, 5, 6, 2]  # the last token has no slot
    q_pe, weight = torch.randn(tokens, 2, rope).to(dtype), torch.rand(latent).to(dtype)
    q, normed, key = fast.mla.cache_write.rope_norm_and_cache(
        torch.arange(tokens) * 1000, q_pe, rows[:, :latent], rows[:, latent:], cache, torch.tensor(slots), weight, 1e-6,
        RopeConfig(interleaved=interleaved), cache_format, scale,
    )  # fmt: skip
    stored = reference.quantize_entries(normed, key, cache_format, scale)
    for token, slot in enumerate(slots):
        if slot >= 0:
            wanted[slot // 4, slot % 4] = stored[token]
    assert_same_entries(cache, wanted, cache_format)
    assert q.shape == q_pe.shape and q.isfinite().all()


# Tests of copies, and of entries from other ranks.


@pytest.mark.parametrize("cache_format, latent, rope", FORMATS)
def test_copies_keep_every_byte(ops, cache_format, latent, rope):
    """Copy and swap blocks of any bytes -> the same bytes, also of NaN; no other byte changes."""
    columns = cache_format.columns(latent, rope)
    raw = torch.randint(0, 256, (2, 6, 4, columns), dtype=torch.uint8)
    caches = [each.clone().view(cache_format.storage_dtype) for each in raw]
    ops.copy_blocks(caches, torch.tensor([[2, 0], [5, 4]]))
    raw[:, 0], raw[:, 4] = raw[:, 2], raw[:, 5]
    assert_same_bits(torch.stack([each.view(torch.uint8) for each in caches]), raw)
    scale = torch.tensor(0.5)
    ops.swap_blocks(caches[0], caches[1], torch.tensor([[1, 3], [5, 0]]), scale, scale.clone())
    raw[1, 3], raw[1, 0] = raw[0, 1], raw[0, 5]
    assert_same_bits(torch.stack([each.view(torch.uint8) for each in caches]), raw)


def test_swap_refuses_other_scales(ops, plain_errors):
    """Swap blocks between caches of unequal or invalid scales -> an error, nothing is written; no scales -> a copy."""
    source = torch.zeros(3, 4, 8).to(torch.float8_e4m3fn)
    target = torch.ones(3, 4, 8).to(torch.float8_e4m3fn)
    pairs, half = torch.tensor([[0, 1]]), torch.tensor(0.5)
    for scales, message in (
        ((half, torch.tensor(0.25)), "^target_scale: expected 0.5, the scale of source, got 0.25$"),
        ((half, None), "^target_scale: expected a float32 tensor .*, got None$"),
        ((None, half), "^source_scale: expected a float32 tensor .*, got None$"),
        ((half, half.double()), "^target_scale: expected dtype torch.float32, got torch.float64$"),
        *(((bad, bad.clone()), f"^source_scale: expected a finite number above 0, got {float(bad)}$")
          for bad in torch.tensor([0.0, -1.0, torch.inf, torch.nan])),
        ((half, half - half), "^target_scale: expected a finite number above 0, got 0.0$"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            ops.swap_blocks(source, target, pairs, *scales)
    assert target.float().eq(1).all()
    ops.swap_blocks(source, target, pairs, None, None)  # the caller vouches for equal scales
    assert target[0].float().eq(1).all() and target[1].float().eq(0).all() and target[2].float().eq(1).all()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("cache_format, latent, rope", FORMATS)
def test_reorg_of_stored_entries(ops, cache_format, latent, rope, size):
    """Reorder the stored entries of all ranks with `reorg_kvcache` -> the same bytes, in the order of the tokens."""
    entries = torch.randint(0, 256, (24, cache_format.columns(latent, rope)), dtype=torch.uint8)
    with torch.device("cpu"):  # the host plans chunks
        chunk = ops.plan_context_chunks(integers(15, 9), 96, 4, size, 1)[0]
    chunk = ops.rank_local_chunk(chunk, TokenOwnership(size, 0)).to(entries.device)
    gathered = torch.full((size, chunk.padded_tokens, entries.shape[1]), 0xFF, dtype=torch.uint8)
    for rank in range(size):
        own = torch.cat((entries[:15][rank::size], entries[15:][rank::size]))
        gathered[rank, : len(own)] = own
    stored = ops.reorg_kvcache(gathered.view(cache_format.storage_dtype), chunk)
    assert stored.dtype == cache_format.storage_dtype
    assert_same_bits(stored.view(torch.uint8), entries)


# Tests of bad input.


def write_arguments(cache_format: CacheFormat, latent: int, rope: int) -> dict:
    return {
        "kv_c_normed": torch.randn(3, latent), "k_pe": torch.randn(3, rope),
        "kv_cache": new_fp8_cache(cache_format, 2, 4, latent, rope), "slot_mapping": torch.arange(3),
        "cache_format": cache_format, "kv_scale": scale_of(cache_format),
    }  # fmt: skip


BAD_SCALES = {
    "zero": (torch.tensor(0.0), "kv_scale: expected a finite number above 0, got 0.0"),
    "negative": (torch.tensor(-1.0), "kv_scale: expected a finite number above 0, got -1.0"),
    "NaN": (torch.tensor(math.nan), "kv_scale: expected a finite number above 0, got nan"),
    "infinite": (torch.tensor(math.inf), "kv_scale: expected a finite number above 0, got inf"),
    "dtype": (torch.tensor(1.0, dtype=torch.float64), "kv_scale: expected dtype torch.float32, got torch.float64"),
    "shape": (torch.ones(1), r"kv_scale: expected shape \[\], got \[1\]"),
    "missing": (None, r"kv_scale: expected a float32 tensor \[\] for format fp8_e4m3, got None"),
    "device": (torch.ones((), device="meta"), "kv_scale: expected device cpu, got meta"),
}


@pytest.mark.parametrize("wrong, message", BAD_SCALES.values(), ids=BAD_SCALES)
def test_bad_scales(ops, wrong, message, plain_errors):
    """Pass a scale that is not a positive finite float32 number on the right device -> an error, nothing is written.

    The error comes in every call, also after a good call with tensors of the same shapes.
    """
    if torch.get_default_device().type != "cpu":
        pytest.skip("the values of a scale on a GPU are not read")
    good = write_arguments(FP8_E4M3, 24, 8)
    cache = good["kv_cache"]
    where = gather_arguments(integers(0).view(1, 1), [3], [0])
    out = torch.full((3, 32), 7.0)
    into = {"out": out} if ops is fast else {}
    bad = good | {"kv_scale": wrong}
    latents, keys = bad["kv_c_normed"], bad["k_pe"]
    calls = [
        lambda: ops.concat_and_cache_mla(**bad),
        lambda: ops.quantize_entries(latents, keys, FP8_E4M3, wrong),
        lambda: ops.dequantize_entries(cache[0], FP8_E4M3, torch.float32, wrong),
        lambda: ops.gather_and_maybe_dequant_cache(cache, *where, FP8_E4M3, torch.float32, wrong, **into),
        lambda: fast.mla.cache_write.rope_norm_and_cache(
            torch.arange(3), torch.randn(3, 2, 8), latents, keys, cache, bad["slot_mapping"], torch.ones(24), 1e-6,
            RopeConfig(), FP8_E4M3, wrong,
        ),
    ]  # fmt: skip
    for _ in range(2):
        was = cache.clone()
        for call in calls:
            with pytest.raises(ValueError, match=f"^{message}$"):
                call()
        assert_same_bits(cache, was)
        assert out.eq(7).all()
        ops.concat_and_cache_mla(**good)
        ops.gather_and_maybe_dequant_cache(cache, *where, FP8_E4M3, torch.float32, good["kv_scale"])


BAD_CACHES = {
    "a scale without use": (FP8_DS_MLA, {"kv_scale": torch.ones(())}, "kv_scale: expected None for format fp8_ds_mla"),
    "dims": (
        FP8_DS_MLA, {"kv_c_normed": torch.randn(3, 256)},
        r"cache_format: expected \(Lkv, R\) = \(512, 64\) for format fp8_ds_mla, got \(256, 64\)",
    ),
    "dtype": (
        FP8_E4M3, {"kv_cache": torch.zeros(2, 4, 32)},
        "kv_cache: expected dtype torch.float8_e4m3fn, got torch.float32",
    ),
    "bytes in place of e4m3": (
        FP8_E4M3, {"kv_cache": torch.zeros(2, 4, 32, dtype=torch.uint8)},
        "kv_cache: expected dtype torch.float8_e4m3fn, got torch.uint8",
    ),
    "columns": (
        FP8_DS_MLA, {"kv_cache": torch.zeros(2, 4, 576, dtype=torch.uint8)},
        r"kv_cache: expected shape \[num_blocks, block_size, 656\], got \[2, 4, 576\]",
    ),
    "alignment": (
        FP8_DS_MLA, {"kv_cache": torch.zeros(2, 4, 664, dtype=torch.uint8)[..., :656]},
        "kv_cache: expected address and strides that are multiples of 16 bytes",
    ),
    "address": (
        FP8_DS_MLA, {"kv_cache": torch.zeros(2, 4, 672, dtype=torch.uint8)[..., 8:664]},
        "kv_cache: expected address and strides that are multiples of 16 bytes",
    ),
    "an fp8 cache without its format": (
        COMPUTE_FORMAT, {"kv_cache": torch.zeros(2, 4, 32).to(torch.float8_e4m3fn)},
        "kv_cache: expected dtype torch.float32, got torch.float8_e4m3fn",
    ),
}  # fmt: skip


@pytest.mark.parametrize("cache_format, wrong, message", BAD_CACHES.values(), ids=BAD_CACHES)
def test_bad_caches(ops, cache_format, wrong, message, plain_errors):
    """Pass a cache that does not fit its format -> an error of one line, and nothing is written."""
    dims = (512, 64) if cache_format is FP8_DS_MLA else (24, 8)
    with torch.device("cpu"):  # the device of the caches in `BAD_CACHES`
        bad = write_arguments(FP8_E4M3 if cache_format is COMPUTE_FORMAT else cache_format, *dims)
    if cache_format is COMPUTE_FORMAT:
        bad |= {"cache_format": COMPUTE_FORMAT, "kv_scale": None}
    bad |= wrong
    was = bad["kv_cache"].clone()
    with pytest.raises(ValueError, match=f"^{message}") as error:
        ops.concat_and_cache_mla(**bad)
    assert "\n" not in str(error.value)
    assert_same_bits(bad["kv_cache"], was)


def test_gather_refuses_what_does_not_fit(ops, plain_errors):
    """Gather with a wrong dtype, or from a cache of another format -> an error of one line."""
    cache = new_fp8_cache(FP8_E4M3, 2, 4, 24, 8)
    arguments, scale = gather_arguments(integers(0).view(1, 1), [3], [0]), torch.tensor(0.5)
    for given, message in (
        ((cache, *arguments, FP8_E4M3, None, scale), "^out_dtype: expected one of torch.float32, .*, got None$"),
        ((cache, *arguments, FP8_E4M3, torch.uint8, scale), "^out_dtype: expected one of .*, got torch.uint8$"),
        ((cache, *arguments, COMPUTE_FORMAT, torch.float32), "^kv_cache: expected dtype .*, got torch.float8_e4m3fn$"),
        ((cache, *arguments, FP8_DS_MLA, torch.float32), "^kv_cache: expected dtype torch.uint8, got .*$"),
        ((cache.view(torch.uint8), *arguments, FP8_DS_MLA, torch.float32), "^kv_cache: expected 656 columns for .*$"),
    ):
        with pytest.raises(ValueError, match=message):
            ops.gather_and_maybe_dequant_cache(*given)
    with pytest.raises(ValueError, match="^entries: expected dtype .*, got torch.float8_e4m3fn$"):
        ops.dequantize_entries(cache[0], COMPUTE_FORMAT, torch.float32)


def test_a_backend_without_the_format_is_named():
    """Name `hopper` for a write to an fp8 cache -> an error, because this backend has no kernel for the write."""
    good = write_arguments(FP8_E4M3, 24, 8)
    with pytest.raises(fast.UnsupportedConfiguration, match="hopper: has no kernel for concat_and_cache_mla"):
        fast.concat_and_cache_mla(**good, backend="hopper")
    explained = fast.backends.explain(
        reference.MLAConfig.from_preset("deepseek-v3"), device="cpu", dtype=torch.float32, cache_format=FP8_E4M3
    )
    served = dict(line.split(": ", 1) for line in explained.splitlines())
    for op in ("concat_and_cache_mla", "gather_and_maybe_dequant_cache", "quantize_entries", "dequantize_entries",
               "rope_norm_and_cache", "reorg_kvcache"):  # fmt: skip
        assert served[op].startswith("cpu"), op


def test_no_request_no_token(ops):
    """Write, read and gather nothing -> empty results, and the cache keeps its bytes."""
    for cache_format, latent, rope in FORMATS[-2:]:
        cache, scale = new_fp8_cache(cache_format, 2, 4, latent, rope), scale_of(cache_format)
        was, none = cache.clone(), torch.empty(0, dtype=torch.int64)
        ops.concat_and_cache_mla(torch.empty(0, latent), torch.empty(0, rope), cache, none, cache_format, scale)
        assert_same_bits(cache, was)
        entries = ops.quantize_entries(torch.empty(0, latent), torch.empty(0, rope), cache_format, scale)
        assert entries.shape == (0, cache.shape[2])
        assert ops.dequantize_entries(entries, cache_format, torch.float32, scale).shape == (0, latent + rope)
        table = torch.empty(0, 1, dtype=torch.int32)
        got = ops.gather_and_maybe_dequant_cache(
            cache, table, offsets([]), integers(), 0, cache_format, torch.float32, scale
        )
        assert got.shape == (0, latent + rope)
