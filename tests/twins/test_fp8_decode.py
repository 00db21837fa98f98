"""Tests of `mla_decode` over fp8 caches in `fast`, on the CPU, against the reference over the same stored bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fast
import reference
from fast import backends
from reference.interfaces import FP8_DS_MLA, FP8_E4M3, QueryLenSupport, UnsupportedConfiguration

from ..support.decode_inputs import SCALE, make_stored_inputs, schedule_of, verdict
from ..support.factories import DIRECT, assert_same_bits, assert_states64

FORMATS = {"fp8_e4m3": (FP8_E4M3, (24, 8)), "no rope": (FP8_E4M3, (24, 0)), "fp8_ds_mla": (FP8_DS_MLA, (512, 64))}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
LENS = [([1] * 6, [0, 1, 15, 16, 17, 33]), ([3, 0, 1, 5], [40, 20, 0, 70]), ([], [])]
formats = pytest.mark.parametrize("cache_format, widths", FORMATS.values(), ids=FORMATS)


def decode(inputs, cache_format, kv_scale, **options):
    return fast.mla_decode(*inputs, SCALE, cache_format=cache_format, kv_scale=kv_scale, **options)


@formats
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lens", LENS, ids=["page edges", "ragged", "no requests"])
@pytest.mark.parametrize("chunk_bytes", [1, 4 << 20], ids=["one block at a time", "whole"])
def test_decode(lens, dtype, cache_format, widths, chunk_bytes, monkeypatch):
    """Errors are within the budget, in float64 within rounding; the kernel reads one block or many blocks at a time."""
    monkeypatch.setattr("fast.kernels.cpu.decode.CHUNK_BYTES", chunk_bytes)
    inputs, kv_scale = make_stored_inputs(cache_format, *lens, 3, dtype, widths, 16)
    state = decode(inputs, cache_format, kv_scale)
    if dtype == torch.float64:
        return assert_states64(
            state, reference.mla_decode(*inputs, SCALE, cache_format=cache_format, kv_scale=kv_scale)
        )
    verdict(state, *inputs, cache_format, kv_scale)


@formats
def test_schedules_and_outputs(cache_format, widths):
    """A schedule changes no bit on the CPU, and `out` receives the output."""
    inputs, kv_scale = make_stored_inputs(cache_format, [1, 2], [70, 40], 3, torch.float32, widths, 16)
    state = decode(inputs, cache_format, kv_scale)
    schedule, out = schedule_of(inputs[3], 3, 3), torch.full_like(inputs[0], torch.nan)
    given = decode(inputs, cache_format, kv_scale, schedule=schedule, out=out)
    assert given.out is out
    for one, other in zip(state, given, strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize("scale", [0.0, -1.0, torch.nan, torch.inf])
def test_scales_that_are_refused(ops, scale, plain_errors):
    """A scale on the CPU that is not finite and positive raises in every call, also after calls with a valid scale."""
    inputs, kv_scale = make_stored_inputs(FP8_E4M3, [1], [20], 3, torch.float32, (24, 8), 16)
    ops.mla_decode(*inputs, SCALE, cache_format=FP8_E4M3, kv_scale=kv_scale)
    with pytest.raises(ValueError, match="^kv_scale: expected a finite number above 0, got "):
        ops.mla_decode(*inputs, SCALE, cache_format=FP8_E4M3, kv_scale=torch.tensor(scale))


def test_arguments_that_are_refused(ops, plain_errors):
    """A missing or unneeded scale, and a cache of another format, raise an error of one line."""
    inputs, kv_scale = make_stored_inputs(FP8_E4M3, [1], [20], 3, torch.float32, (24, 8), 16)
    (ql, q_pe, cache, plan), wide = inputs, make_stored_inputs(FP8_DS_MLA, [1], [20], 3, block_size=16)[0]
    for given, message in (
        ((*inputs, SCALE, None, None, FP8_E4M3), "^kv_scale: expected a float32 tensor"),
        ((*inputs, SCALE, None, None, FP8_E4M3, kv_scale.double()), "^kv_scale: expected dtype torch.float32"),
        ((*wide, SCALE, None, None, FP8_DS_MLA, kv_scale), "^kv_scale: expected None for format fp8_ds_mla"),
        ((*inputs, SCALE), "^kv_cache: expected dtype torch.float32"),
        ((ql, q_pe, cache[..., :-1], plan, SCALE, None, None, FP8_E4M3, kv_scale), "^kv_cache: expected shape"),
    ):
        with pytest.raises(ValueError, match=message):
            ops.mla_decode(*given)


def test_who_serves_the_formats():
    """The backends "cpu" and "triton" serve every format in all ops of a decode; "hopper" serves `fp8_e4m3` alone."""
    config = replace(DIRECT, kv_lora_rank=512, qk_rope_head_dim=64)
    served = {"device": "cpu", "dtype": torch.float32, "block_size": 16}
    for cache_format in (FP8_E4M3, FP8_DS_MLA):
        assert fast.decode_programs(config, **served, cache_format=cache_format) == 1
        assert fast.schedule_costs(config, **served, cache_format=cache_format) == fast.schedule_costs(config, **served)
        for op in backends.own.DECODES:
            for backend in (backends.own.CPU, backends.own.TRITON):
                assert cache_format.name in backend.ops[op].cache_formats
            served_by_hopper = cache_format.name in backends.own.HOPPER.ops[op].cache_formats
            assert served_by_hopper == (cache_format is FP8_E4M3)
        request = backends.decode_request(
            torch.device("cpu"), torch.bfloat16, 512, 64, 64, QueryLenSupport.VARLEN, cache_format=cache_format
        )
        with pytest.raises(UnsupportedConfiguration) as refused:
            backends.select(request, "hopper")
        unread = [reason for reason in refused.value.reasons if reason.startswith("hopper: reads caches in ")]
        assert len(unread) == (cache_format is FP8_DS_MLA), refused.value.reasons
