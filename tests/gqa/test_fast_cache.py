"""Tests of the paged key/value cache in `fast`: writes by both kernel sets, and copies of blocks with any strides.

tests/gqa/test_reference_attention.py tests the writes and copies of both packages. The tests here compare the bits of
the packages for more dtypes, layouts and strides, and test the kernels of the backend "torch" on CPU tensors.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fast
import reference
from fast.backends import Backend
from fast.backends.own import TORCH as TORCH_BACKEND
from reference.interfaces import COMPUTE_FORMAT, FP8_DS_MLA, FP8_E4M3, UnsupportedConfiguration
from reference.interfaces.gqa import GQAConfig

from ..support.backends import registered
from ..support.factories import assert_same_bits
from ..support.gqa import GROUPED, LENS, WIDE, gqa_batch, poisoned_cache

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
FORMATS = [COMPUTE_FORMAT, FP8_E4M3]
LAYOUTS = ["NHD", "HND"]


@pytest.fixture
def padded():
    """Register the kernels of the backend "torch" for the device of the run; return the name of the new backend."""
    with registered(Backend("padded", -1, torch.get_default_device().type, TORCH_BACKEND.ops)):
        yield "padded"


def written(ops, batch, **options):
    """Return the cache after the new tokens of a batch were written to it."""
    cache = batch.kv_cache.clone()  # keeps the strides
    ops.reshape_and_cache(batch.new_k, batch.new_v, cache, batch.slot_mapping, **batch.scales, **options)
    return cache


@pytest.mark.parametrize("cache_format", FORMATS, ids=lambda each: each.name)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_writes(dtype, layout, cache_format, padded):
    """Write tokens, some of them with slot -1 -> both kernel sets write the bits of the reference."""
    for config, block_size in ((GROUPED, 16), (WIDE, 48)):
        batch = gqa_batch(config, LENS, block_size, dtype, layout, cache_format, padding=3, new_tokens=False)
        wanted = written(reference, batch)
        assert not wanted.view(torch.uint8).eq(batch.kv_cache.view(torch.uint8)).all()
        for backend in (None, padded):
            assert_same_bits(written(fast, batch, backend=backend), wanted)


def test_special_numbers(padded):
    """Write NaN, infinities, subnormal and large numbers to an e4m3 cache -> the bits of the reference."""
    numbers = [torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 448.0, 449.0, -1e30, 2.0**-9, 2.0**-10, 1.0625, 1e-40]
    key = torch.tensor(numbers + [0.5] * 20).view(1, 1, 32)
    scales = torch.tensor(0.75), torch.tensor(1.5)
    caches = [poisoned_cache(2, 16, GQAConfig(1, 1, 32), torch.float32, FP8_E4M3) for _ in range(3)]
    calls = (reference, {}), (fast, {}), (fast, {"backend": padded})
    for cache, (ops, options) in zip(caches, calls, strict=True):
        ops.reshape_and_cache(key, -key, cache, torch.tensor([17]), FP8_E4M3, *scales, **options)
        assert_same_bits(cache, caches[0])
    assert caches[0][0, 1, 1, 0].isnan().tolist()[:4] == [True, False, False, False]


def test_nothing_to_write(padded):
    """Write no token, tokens without slots, and to a cache without blocks -> the cache keeps its bits."""
    batch = gqa_batch(GROUPED, LENS, dtype=torch.float32)
    key = torch.randn(4, 2, 80)
    for backend in (None, padded):
        cache = batch.kv_cache.clone()
        fast.reshape_and_cache(key[:0], key[:0], cache, torch.tensor([3]), backend=backend)
        fast.reshape_and_cache(key, key, cache, torch.full((4,), -1), backend=backend)
        fast.reshape_and_cache(key, key, cache[:, :0], torch.full((6,), -1), backend=backend)
        assert_same_bits(cache, batch.kv_cache)


def test_slots_outside_the_cache(padded, plain_errors):
    """Write to a slot outside the cache -> on a CPU an error before a write; the kernels of "torch" skip the token."""
    if torch.get_default_device().type != "cpu":
        pytest.skip("on a GPU the host does not know the values")
    batch = gqa_batch(GROUPED, ((1, 20),), dtype=torch.float32)
    key, slots = torch.randn(4, 2, 80), batch.kv_cache.shape[1] * 16
    mapping = torch.tensor([slots, 5, -2, 2**40])
    for wrong in ([slots, 5, -1, 4], [5, -2, -1, 4]):
        cache = batch.kv_cache.clone()
        with pytest.raises(ValueError, match=rf"^slot_mapping: expected slots in \[-1, {slots}\), got"):
            fast.reshape_and_cache(key, key, cache, torch.tensor(wrong))
        assert_same_bits(cache, batch.kv_cache)
    wanted = batch.kv_cache.clone()
    wanted[:, 0, 5] = key[1]
    fast.backends.imported("fast.kernels.torch:reshape_and_cache")(key, key, cache, mapping)
    assert_same_bits(cache, wanted)


def test_refused_writes(plain_errors):
    """Write with a latent format, a missing scale or a scale of 0 -> an error, and the cache keeps its bits."""
    if torch.get_default_device().type != "cpu":
        pytest.skip("on a GPU the host does not know the values")
    batch = gqa_batch(GROUPED, LENS, dtype=torch.bfloat16, cache_format=FP8_E4M3)
    before = batch.kv_cache.clone()
    one, given = torch.tensor(1.0), (batch.new_k, batch.new_v, batch.kv_cache, batch.slot_mapping)
    with pytest.raises(UnsupportedConfiguration, match="^cache_format: expected compute_dtype or fp8_e4m3"):
        fast.reshape_and_cache(*given, FP8_DS_MLA)
    for scales, message in (
        ((one, None), "^v_scale: expected a float32 tensor"),
        ((torch.tensor(0.0), one), "^k_scale: expected a finite number above 0, got 0.0"),
        ((one, torch.tensor(torch.nan)), "^v_scale: expected a finite number above 0, got nan"),
    ):
        with pytest.raises(ValueError, match=message):
            fast.reshape_and_cache(*given, FP8_E4M3, *scales)
    assert_same_bits(batch.kv_cache, before)


# Copies of blocks. Both packages copy; `fast` copies views [num_blocks, rows, columns] of a cache.


def strided(shape: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a cache [2, 9, 16, 3, 32] with random bytes and some strides."""
    tokens, heads, width = {"gaps": (16, 6, 64), "gaps of heads": (16, 5, 32)}.get(shape, (16, 3, 32))
    order = (2, 9, heads, tokens) if shape in ("HND", "gaps") else (2, 9, tokens, heads)
    stored = torch.randint(0, 127, (*order, width * dtype.itemsize), dtype=torch.uint8).view(dtype)
    if shape in ("HND", "gaps"):
        stored = stored.transpose(2, 3)
    if shape == "blocks reversed in memory":
        return stored.flip(1).contiguous().transpose(0, 1).contiguous().transpose(0, 1)
    return stored[:, :, :, :3, :32] if shape != "gaps" else stored[:, :, :, ::2, ::2]


SHAPES = ["NHD", "HND", "gaps", "gaps of heads", "blocks reversed in memory"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_copy_blocks(shape, dtype):
    """Copy blocks within caches with any strides -> the bits of the reference."""
    pairs = torch.tensor([[0, 5], [8, 1], [0, 7]])
    cache = strided(shape, dtype)
    assert cache.shape == (2, 9, 16, 3, 32)
    before, wanted = cache.clone(), cache.clone()
    reference.copy_blocks([wanted], pairs)
    fast.copy_blocks([cache, strided("NHD")], pairs)
    assert_same_bits(cache, wanted)
    assert_same_bits(cache[:, 5], before[:, 0])
    assert not before[:, 5].float().equal(before[:, 0].float())


@pytest.mark.parametrize("target", SHAPES)
@pytest.mark.parametrize("source", SHAPES)
def test_swap_blocks(source, target):
    """Copy blocks between caches with different strides -> the bits of the reference."""
    pairs = torch.tensor([[0, 5], [8, 1], [0, 7]])
    read, written = strided(source), strided(target)
    wanted = written.clone()
    reference.swap_blocks(read, wanted, pairs)
    fast.swap_blocks(read, written, pairs)
    assert_same_bits(written, wanted)
    assert_same_bits(written[:, 5], read[:, 0])


def test_refused_copies_write_nothing(plain_errors):
    """Copy to a block outside a cache, or a block twice -> an error before a write."""
    if torch.get_default_device().type != "cpu":
        pytest.skip("on a GPU the host does not know the values")
    cache = strided("HND")
    before = cache.clone()
    latent = torch.zeros(9, 16, 32)
    for pairs, message in (([[0, 9]], "target blocks"), ([[0, 1], [2, 1]], "distinct"), ([[0, 1], [1, 2]], "no block")):
        with pytest.raises(ValueError, match=f"^block_mapping: expected {message}"):
            fast.copy_blocks([latent, cache], torch.tensor(pairs))
        with pytest.raises(ValueError, match=f"^block_mapping: expected {message}"):
            fast.swap_blocks(cache, cache, torch.tensor(pairs))
    assert latent.eq(0).all()
    assert_same_bits(cache, before)


def test_allocated_caches():
    """Allocate a cache, write to it and attend it -> the layouts give the same state, up to the order of memory."""
    states = []
    for layout in LAYOUTS:
        batch = gqa_batch(GROUPED, LENS, dtype=torch.float64, layout=layout, new_tokens=False, seed=3)
        cache = fast.allocate_key_value_cache(batch.kv_cache.shape[1], 16, 2, 80, torch.float64, batch.q.device,
                                             layout=layout)  # fmt: skip
        assert cache.stride() == batch.kv_cache.stride()
        cache.copy_(batch.kv_cache)
        cache = written(fast, replace(batch, kv_cache=cache))
        states.append(fast.gqa_paged_attention(batch.q, cache, batch.metadata, batch.config))
    torch.testing.assert_close(states[0].out, states[1].out, rtol=1e-12, atol=1e-12)
