"""Tests of the Triton kernels that rotate queries (rope) and return them in e4m3 (8 bits).

On a GPU the kernels are compiled. Without a GPU, one test runs this file again in Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch

from reference.interfaces import E4M3, FP8_DS_MLA, FP8_E4M3, to_e4m3

from ...support.factories import assert_same_bits
from ...support.triton_mode import DEVICE, INTERPRETED, ON_GPU, run_in_interpreter, runs, starts_interpreter

HEADS = 5
SCALES = {"one": torch.tensor(0.004), "of heads": torch.tensor([0.01, 0.003, 0.05, 1.0, 0.0001])}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@starts_interpreter
def test_in_the_interpreter():
    run_in_interpreter(__file__)


def make_inputs(dtype, rope=24, latent=32, tokens=7):
    """Return positions, rope parts of queries, latents, rope parts of keys, and frequencies; one query contains NaN."""
    q_pe = torch.randn(tokens, HEADS, rope).to(dtype)
    q_pe[2, 1, 3], q_pe[3] = torch.nan, q_pe[3] * 1000
    tensors = (
        torch.arange(tokens) * 13,
        q_pe,
        torch.randn(tokens, latent).to(dtype),
        torch.randn(tokens, rope).to(dtype),
    )
    return [x.to(DEVICE) for x in (*tensors, torch.rand(rope // 2))]


def assert_quantised(found, rotated, scale):
    """Assert that `found` equals `rotated` divided by the scale and rounded once to e4m3, bit for bit."""
    assert found.dtype == E4M3
    wanted = to_e4m3(rotated.cpu(), scale.view(-1, 1)).view(torch.uint8)
    assert_same_bits(found.cpu().view(torch.uint8), wanted)
    assert (wanted == 0x7F).any() and ((wanted & 0x7F) == 0x7E).any()  # both NaN and 448 occur


@runs
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_apply_rope(scale, dtype, interleaved):
    """With a scale, the kernel quantises its float32 rotation of queries; the rotated keys do not change."""
    from fast.kernels.triton.rope import apply_rope

    positions, q_pe, _, k_pe, frequencies = make_inputs(dtype)
    found, key = apply_rope(positions, q_pe, k_pe, frequencies, 1.3, interleaved, scale.to(DEVICE))
    rotated, _ = apply_rope(positions, q_pe.float(), k_pe.float(), frequencies, 1.3, interleaved)
    assert_quantised(found, rotated, scale)
    assert_same_bits(key, apply_rope(positions, q_pe, k_pe, frequencies, 1.3, interleaved)[1])


@runs
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cache_format", [FP8_E4M3, FP8_DS_MLA], ids=lambda x: x.name)
def test_rope_norm_and_cache(cache_format, dtype, interleaved):
    """With a query scale, `rope_norm_and_cache` returns e4m3 queries; its other outputs and the cache do not change."""
    from fast.kernels.triton.rope import apply_rope, rope_norm_and_cache

    latent, rope = cache_format.dims or (32, 24)
    positions, q_pe, kv_c, k_pe, frequencies = make_inputs(dtype, rope, latent)
    slots = torch.tensor([3, -1, 0, 17, 400, 5, 6], device=DEVICE)
    weight = torch.rand(latent).to(dtype).to(DEVICE)
    scale = SCALES["of heads"]
    results = []
    for q_scale in (scale.to(DEVICE), None):
        columns = cache_format.columns(latent, rope)
        cache = torch.zeros(2, 16, columns, dtype=torch.uint8, device=DEVICE).view(cache_format.storage_dtype)
        kv_scale = torch.tensor(0.02, device=DEVICE) if cache_format.layer_scale else None
        results.append((*rope_norm_and_cache(
            positions, q_pe, kv_c, k_pe, cache, slots, weight, 1e-6, frequencies, 1.0, interleaved, cache_format,
            kv_scale, q_scale,
        ), cache.view(torch.uint8)))  # fmt: skip
    rotated, _ = apply_rope(positions, q_pe.float(), k_pe.float(), frequencies, 1.0, interleaved)
    assert_quantised(results[0][0], rotated, scale)
    for one, other in zip(results[0][1:], results[1][1:], strict=True):
        assert_same_bits(one, other)


@pytest.mark.skipif(INTERPRETED or ON_GPU, reason="needs tensors on the CPU and no Triton interpreter")
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0)], ids=str)
def test_compiles_for(capability, monkeypatch):
    """The compiled kernels of `apply_rope` and `rope_norm_and_cache` use a GPU instruction to convert to e4m3.

    GPUs of compute capability below 8.9 have no such instruction, and the kernels do not use it there.
    """
    from fast.kernels.device import DeviceFacts
    from fast.kernels.triton import fp8, rope

    from ...support.compiled import Recorded, compiled

    launches: dict = {}
    monkeypatch.setattr(fp8, "device_facts", lambda device: DeviceFacts(100, capability, 101376))
    for name in ("_rope_kernel", "_rope_norm_quantize_kernel"):
        monkeypatch.setattr(rope, name, Recorded(getattr(rope, name), launches))
    monkeypatch.setattr(rope, "launch", lambda kernel, grid, *given, **constants: kernel[grid](*given, **constants))
    positions, q_pe, kv_c, k_pe, frequencies = make_inputs(torch.bfloat16)
    cache, weight = torch.zeros(2, 16, 56, dtype=torch.uint8).view(E4M3), torch.rand(32).bfloat16()
    for interleaved in (False, True):
        rope.apply_rope(positions, q_pe, k_pe, frequencies, 1.0, interleaved, SCALES["of heads"])
        rope.rope_norm_and_cache(
            positions, q_pe, kv_c, k_pe, cache, torch.arange(7), weight, 1e-6, frequencies, 1.0, interleaved, FP8_E4M3,
            torch.tensor(0.02), SCALES["one"],
        )  # fmt: skip
    ptx = [compiled(*launch, capability).asm["ptx"] for launch in launches.values()]
    assert len(ptx) == 4
    assert all(("satfinite.e4m3x2" in each) == (capability >= (8, 9)) for each in ptx)
