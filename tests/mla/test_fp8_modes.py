"""Tests of decodes with queries in e4m3 (8 bits), and of the functions that make such queries.

The modes of a decode over a cache in e4m3 are explained at `reference.mla_decode`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fast
import reference
from fast import backends
from fast.backends.own import CPU as CPU_BACKEND
from fast.parity import compare_states
from reference.interfaces import (
    CACHE_FORMATS,
    E4M3,
    FP8_DS_MLA,
    FP8_E4M3,
    FP8_MODES,
    AttentionState,
    MLAConfig,
    RopeConfig,
    UnsupportedConfiguration,
    to_e4m3,
)

from ..support.backends import with_backends
from ..support.factories import DIRECT, assert_close64, assert_same_bits, integers, make_batch
from ..support.format_caches import poisoned_cache

IN_E4M3 = FP8_MODES[1:]
WIDE = replace(DIRECT, kv_lora_rank=512, qk_rope_head_dim=64)
FORMATS = {"fp8_e4m3": (FP8_E4M3, DIRECT, torch.tensor(0.02)), "fp8_ds_mla": (FP8_DS_MLA, WIDE, None)}
LENS = ([1, 2, 0, 1], [20, 33, 0, 1])
INF, NAN = float("inf"), float("nan")


@pytest.fixture(params=FORMATS.values(), ids=FORMATS)
def case(request):
    """Return queries in float64, a cache, a plan, and keyword arguments, for a decode in `converted` mode."""
    cache_format, config, kv_scale = request.param
    return make_case(cache_format, config, kv_scale)


def make_case(cache_format, config: MLAConfig, kv_scale, lens=LENS):
    batch = make_batch(*lens)
    cache = poisoned_cache(batch.num_blocks, 16, config, cache_format, torch.float32)
    for own in batch.slots:
        slots = torch.tensor([block * 16 + at for block, at in own], dtype=torch.int64)
        kv_c, k_pe = torch.randn(len(own), config.kv_lora_rank), torch.randn(len(own), config.qk_rope_head_dim)
        reference.concat_and_cache_mla(kv_c, k_pe, cache, slots, cache_format, kv_scale)
    plan = reference.build_mla_metadata(batch.common, 16, 4096, 4, cache_format=cache_format).decode
    ql, q_pe = (torch.randn(batch.num_tokens, config.num_heads, width, dtype=torch.float64)
                for width in (config.kv_lora_rank, config.qk_rope_head_dim))  # fmt: skip
    return ql, q_pe, cache, plan, dict(cache_format=cache_format, kv_scale=kv_scale)


def quantised(ql, q_pe, scale):
    """Return queries in e4m3, and the float64 queries that they stand for."""
    stored = [to_e4m3(x, scale.view(-1, 1)) for x in (ql, q_pe)]
    return stored, [x.double() * scale.double().view(-1, 1) for x in stored]


SCALES = {"one": torch.tensor(0.01), "of heads": torch.tensor([0.01, 0.003, 0.05])}


@pytest.mark.parametrize("mode", IN_E4M3)
@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_reference(case, scale, mode):
    """`reference` computes with the numbers that queries and cache stand for, and rounds none of them."""
    ql, q_pe, cache, plan, options = case
    stored, exact = quantised(ql, q_pe, scale)
    found = reference.mla_decode(
        *stored, cache, plan, 0.1, None, torch.float64, **options, fp8_mode=mode, q_scale=scale
    )
    wanted = reference.mla_decode(*exact, cache, plan, 0.1, **options)
    assert_close64(found.out, wanted.out)
    assert_close64(found.lse, wanted.lse)


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", IN_E4M3)
@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_cpu(case, scale, mode, out_dtype):
    """With `fp8_query`, output and LSE of the backend "cpu" are within the budget; with `fp8_product`, the LSE is.

    `fp8_product` rounds each probability with a relative error of at most 1/16. The error of the output is on average
    much smaller: its root mean square is below 3 % of the root mean square of the output.
    """
    ql, q_pe, cache, plan, options = case
    stored, exact = quantised(ql, q_pe, scale)
    options |= dict(fp8_mode=mode, q_scale=scale, out_dtype=out_dtype)
    found = fast.mla_decode(*stored, cache, plan, 0.03, **options, backend="cpu")
    gold = reference.mla_decode(*exact, cache, plan, 0.03, cache_format=options["cache_format"],
                                kv_scale=options["kv_scale"])  # fmt: skip
    low = reference.mla_decode(*stored, cache, plan, 0.03, **options)
    assert found.out.dtype == low.out.dtype == out_dtype and found.lse.dtype == torch.float32
    compared = compare_states("mla_decode", found, low, gold)
    if mode == "fp8_query":
        assert all(parity.passed for parity in compared), compared
    else:
        assert compared[1].passed, compared
        assert (
            0 < float((found.out.double() - gold.out).square().mean().sqrt() / gold.out.square().mean().sqrt()) < 0.03
        )
    out = torch.empty(found.out.shape, dtype=out_dtype)
    assert_same_bits(fast.mla_decode(*stored, cache, plan, 0.03, **options, out=out).out, found.out)


def test_rounding_of_probabilities():
    """In `fp8_product`, exp(score - largest) x 2^8 is rounded to e4m3 before it is multiplied by the values.

    The sum of exponentials, by which the output is divided, is a sum of the unrounded numbers.
    """
    ql, q_pe, cache, plan, options = make_case(*FORMATS["fp8_e4m3"], ([1], [16]))
    scale = torch.tensor(0.01)
    stored, exact = quantised(ql, q_pe, scale)
    entries = reference.gather_and_maybe_dequant_cache(
        cache, plan.block_table, integers(0, 16), integers(0), 16, options["cache_format"], torch.float64,
        options["kv_scale"],
    )  # fmt: skip
    scores = torch.cat(exact, -1)[0] @ entries.T * 0.1
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    rounded = to_e4m3(weights, torch.tensor(2.0**-8)).double() / 2**8
    wanted = rounded @ entries[:, : ql.shape[2]] / weights.sum(-1, keepdim=True)
    found = fast.mla_decode(*stored, cache, plan, 0.1, out_dtype=torch.float64, **options, fp8_mode="fp8_product",
                            q_scale=scale).out[0]  # fmt: skip
    assert ((found - wanted).abs() <= 1e-6 * wanted.abs().max()).all()
    assert (wanted - weights @ entries[:, : ql.shape[2]] / weights.sum(-1, keepdim=True)).abs().max() > 1e-3


def test_equal_probabilities():
    """If all scores are equal, `fp8_product` rounds no probability, so it gives the same bits as `fp8_query`."""
    ql, q_pe, cache, plan, options = make_case(*FORMATS["fp8_e4m3"], ([1], [32]))
    stored = [torch.zeros(x.shape).to(E4M3) for x in (ql, q_pe)]
    options |= dict(out_dtype=torch.float32, q_scale=torch.tensor(1.0))
    one, other = (fast.mla_decode(*stored, cache, plan, 0.1, **options, fp8_mode=mode) for mode in IN_E4M3)
    assert_same_bits(one.out, other.out)
    assert_same_bits(one.lse, other.lse)


def test_large_queries(case):
    """Queries of 1e5 with a fitting scale give finite results; NaN in a query makes only the row of this query NaN."""
    ql, q_pe, cache, plan, options = case
    scale = torch.tensor(1e5 / 448)
    stored, _ = quantised(ql / ql.abs().max() * 1e5, q_pe, scale)
    options |= dict(out_dtype=torch.float32, q_scale=scale)
    for ops in (reference, fast):
        for mode in IN_E4M3:
            state = ops.mla_decode(*stored, cache, plan, 0.1, **options, fp8_mode=mode)
            assert state.out.isfinite().all() and state.lse.isfinite().all()
            bad = stored[0].clone()
            bad.view(torch.uint8)[1, 2, 3] = 0x7F
            poisoned = ops.mla_decode(bad, stored[1], cache, plan, 0.1, **options, fp8_mode=mode)
            assert poisoned.out[1, 2].isnan().all() and poisoned.lse[2, 1].isnan()
            kept = torch.ones(state.out.shape[:2], dtype=torch.bool)
            kept[1, 2] = False
            assert_same_bits(poisoned.out[kept], state.out[kept])


def test_refusals(ops, case, plain_errors):
    ql, q_pe, cache, plan, options = case
    scale = torch.tensor(0.01)
    stored, _ = quantised(ql, q_pe, scale)
    plain = [x.float() for x in (ql, q_pe)]

    def refused(message, queries=stored, kind=ValueError, **given):
        given = options | dict(out_dtype=torch.float32, fp8_mode="fp8_query", q_scale=scale) | given
        with pytest.raises(kind, match=f"^{message}$"):
            ops.mla_decode(*queries, cache, plan, 0.1, **given)

    refused("fp8_mode: expected one of converted, fp8_query, fp8_product, got fp8", fp8_mode="fp8")
    refused("fp8_mode: expected a str, got bool", kind=TypeError, fp8_mode=True)
    refused("out_dtype: expected a dtype for fp8_mode fp8_query, got None", out_dtype=None)
    refused("out_dtype: expected one of torch.float32, .*, got torch.float8_e4m3fn", out_dtype=E4M3)
    refused("ql_nope: expected dtype torch.float8_e4m3fn, got torch.float32", plain)
    refused("q_pe: expected dtype torch.float8_e4m3fn, got torch.float32", (stored[0], plain[1]))
    refused("ql_nope: expected dtype torch.float32 or .*, got torch.float8_e4m3fn", fp8_mode="converted")
    refused("q_scale: expected None for fp8_mode converted, got a scale", plain, fp8_mode="converted")
    refused("q_scale: expected a tensor, got NoneType", kind=TypeError, q_scale=None)
    refused(r"q_scale: expected shape \[3\], got \[2\]", q_scale=torch.ones(2))
    refused(r"q_scale: expected shape \[\] or \[3\], got \[1, 3\]", q_scale=torch.ones(1, 3))
    refused("q_scale: expected device cpu, got meta", q_scale=torch.ones((), device="meta"))
    for value in (0.0, -1.0, NAN, INF):
        refused(f"q_scale: expected a finite number above 0, got {value}", q_scale=torch.tensor(value))
    for mode in IN_E4M3:
        cache = torch.zeros(cache.shape[0], 16, ql.shape[2] + q_pe.shape[2])
        message = "fp8_mode: expected converted for format compute_dtype"
        refused(f"{message}, got {mode}", fp8_mode=mode, cache_format=CACHE_FORMATS["compute_dtype"], kv_scale=None)


def test_backends_declare_their_modes(case, monkeypatch):
    """Naming a backend without the mode is an error; without a name, only a backend with the mode is chosen.

    A call without `fp8_mode` is in the mode `converted`, which both backends of this test declare.
    """
    ql, q_pe, cache, plan, options = case
    scale = torch.tensor(0.01)
    stored, _ = quantised(ql, q_pe, scale)
    support = replace(CPU_BACKEND.ops["mla_decode"], fp8_modes=("converted",))
    plain = replace(CPU_BACKEND, name="plain", priority=5, ops=CPU_BACKEND.ops | {"mla_decode": support})
    with_backends(monkeypatch, CPU_BACKEND, plain)
    given = options | dict(out_dtype=torch.float32, q_scale=scale)
    for mode in IN_E4M3:
        message = f"^plain: decodes in the fp8 modes converted, got {mode}$"
        with pytest.raises(UnsupportedConfiguration, match=message):
            fast.mla_decode(*stored, cache, plan, 0.1, **given, fp8_mode=mode, backend="plain")
        fast.mla_decode(*stored, cache, plan, 0.1, **given, fp8_mode=mode)
    request = backends.decode_request(
        ql.device, torch.float32, ql.shape[2], q_pe.shape[2], 16, reference.QueryLenSupport.VARLEN,
        out_dtype=torch.float32, cache_format=options["cache_format"],
    )  # fmt: skip
    assert backends.select(request).name == "plain"
    assert backends.select(replace(request, dtype=None, fp8_mode="fp8_product")).name == "cpu"
    with pytest.raises(ValueError, match="^fp8_modes: expected one of converted, fp8_query, fp8_product, got fp8$"):
        replace(support, fp8_modes=("fp8",))


@pytest.mark.parametrize("name, wanted", [("cpu", FP8_MODES), ("triton", FP8_MODES), ("hopper", FP8_MODES)])
def test_modes_of_the_kernels(name, wanted):
    """Every backend of this package declares every mode; "hopper" only over `fp8_e4m3`."""
    declared = {each.name: each for each in backends.registered()}[name].ops["mla_decode"]
    assert declared.fp8_modes == wanted
    limited = {"hopper": {"compute_dtype": ("converted",)}}
    assert {name: modes for name, modes in declared.format_modes.items() if modes != FP8_MODES} == limited.get(name, {})


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_rotated_queries(ops, scale, dtype, interleaved):
    """`apply_rope` quantises the rotated query without rounding it to 16 bits first; the scale changes no key."""
    rope = RopeConfig(interleaved=interleaved)
    positions, q_pe, k_pe = torch.arange(5) * 7, torch.randn(5, 3, 8).to(dtype), torch.randn(5, 8).to(dtype)
    wide = q_pe.double() if dtype == torch.float64 else q_pe.float()
    found, key = ops.apply_rope(positions, q_pe, k_pe, rope, scale)
    rotated, _ = ops.apply_rope(positions, wide, k_pe.to(wide.dtype), rope)
    assert found.dtype == E4M3
    assert_same_bits(found.view(torch.uint8), to_e4m3(rotated, scale.view(-1, 1)).view(torch.uint8))
    assert_same_bits(key, ops.apply_rope(positions, q_pe, k_pe, rope)[1])
    with pytest.raises(ValueError, match=r"^q_scale: expected a finite number above 0, got 0.0$"):
        ops.apply_rope(positions, q_pe, k_pe, rope, torch.tensor(0.0))


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_fused_write(scale, plain_errors):
    """With `q_scale`, `rope_norm_and_cache` returns the e4m3 query of `apply_rope`; its other results do not change."""
    from fast.mla.cache_write import rope_norm_and_cache

    rope, kv_scale = RopeConfig(), torch.tensor(0.02)
    shapes = ((4, 3, 8), (4, 24), (4, 8))
    positions, tensors = torch.arange(4), [torch.randn(shape, dtype=torch.bfloat16) for shape in shapes]
    slots, weight = torch.tensor([3, -1, 0, 17]), torch.rand(24)

    def write(*scales, cache_format=FP8_E4M3):
        cache = torch.zeros(2, 16, 32, dtype=torch.uint8).view(E4M3)
        return *rope_norm_and_cache(positions, *tensors, cache, slots, weight, 1e-6, rope, cache_format, *scales), cache

    query, *others = write(kv_scale, scale)
    _, *wanted = write(kv_scale)
    rotated = fast.apply_rope(positions, tensors[0], tensors[2], rope, scale)[0]
    for one, other in zip((query, *others), (rotated, *wanted), strict=True):
        assert one.dtype == other.dtype
        assert_same_bits(*(x.view(torch.uint8) if x.dtype == E4M3 else x for x in (one, other)))
    with pytest.raises(ValueError, match="^q_scale: expected a finite number above 0, got nan$"):
        write(kv_scale, torch.tensor(NAN))
    tensors = [x.float() for x in tensors]
    with pytest.raises(ValueError, match="^q_scale: expected None for format compute_dtype, got a scale$"):
        rope_norm_and_cache(positions, *tensors, torch.zeros(2, 16, 32), slots, weight, 1e-6, rope, q_scale=scale)


def test_whole_path(case):
    """Decode e4m3 queries of `query_to_latent` and `apply_rope` -> about the output of exact queries."""
    ql, q_pe, cache, plan, options = case
    tokens, heads, latent = ql.shape
    rope, scale = RopeConfig(), torch.tensor(4.0 / 448)
    q_nope, w_uk_t = torch.randn(tokens, heads, 12), torch.randn(heads, 12, latent) / 12
    positions, k_pe = torch.arange(tokens), torch.randn(tokens, q_pe.shape[2])
    exact = AttentionState(torch.zeros(1, 1, 1), torch.zeros(1, 1))
    for ops in (reference, fast):
        absorbed = ops.query_to_latent(q_nope, w_uk_t), ops.apply_rope(positions, q_pe.float(), k_pe, rope)[0]
        in_e4m3 = (
            ops.query_to_latent(q_nope, w_uk_t, scale), ops.apply_rope(positions, q_pe.float(), k_pe, rope, scale)[0]
        )  # fmt: skip
        exact = ops.mla_decode(*absorbed, cache, plan, 0.05, **options)
        found = ops.mla_decode(
            *in_e4m3, cache, plan, 0.05, out_dtype=torch.float32, **options, fp8_mode="fp8_query", q_scale=scale
        )
        error = (found.out - exact.out).square().mean().sqrt() / exact.out.square().mean().sqrt()
        assert 1e-4 < error < 0.08
