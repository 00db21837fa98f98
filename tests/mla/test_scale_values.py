"""Tests of values of `kv_scale` that functions over a cache in fp8_e4m3 refuse, before they write anything."""

from __future__ import annotations

import math

import pytest
import torch

from reference.interfaces import FP8_E4M3

from ..support.factories import assert_same_bits, make_batch, make_layer, make_weights
from ..support.format_caches import SMALL, poisoned_cache, step_of

LENS = (20, 20)
BAD = {
    "zero": (torch.tensor(0.0), "a finite number above 0, got 0.0"),
    "negative": (torch.tensor(-1.0), "a finite number above 0, got -1.0"),
    "NaN": (torch.tensor(math.nan), "a finite number above 0, got nan"),
    "infinite": (torch.tensor(math.inf), "a finite number above 0, got inf"),
    "device": (torch.ones((), device="meta"), "device cpu, got meta"),
    "dtype": (torch.ones((), dtype=torch.float64), "dtype torch.float32, got torch.float64"),
    "elements": (torch.ones(2), "shape [], got [2]"),
    "empty": (torch.empty(0), "shape [], got [0]"),
}


def calls(ops):
    """Return the cache, and the calls of every function of MLA that takes a scale, by name."""
    layer = make_layer(ops, SMALL, make_weights(SMALL, torch.float64), torch.float64, cache_format=FP8_E4M3)
    batch = make_batch(LENS, LENS)
    cache = poisoned_cache(batch.num_blocks, 16, SMALL, FP8_E4M3, torch.float64)

    def plan(*lens):
        common = batch.common if not lens else step_of(batch, lens)
        return ops.build_mla_metadata(common, 16, 64, cache_format=FP8_E4M3)

    layer(torch.randn(sum(LENS), SMALL.hidden_size, dtype=torch.float64), batch.positions, cache, plan())
    decode, prefill = plan((1, 20), (1, 20)).decode, plan((4, 20), (3, 20)).prefill
    cascade = ops.split_shared_prefix(decode, 16, 16)
    q = torch.randn(7, SMALL.num_heads, SMALL.qk_head_dim, dtype=torch.float64)
    kv_c, k_pe = torch.randn(7, 32, dtype=torch.float64), torch.randn(7, 16, dtype=torch.float64)
    ql = torch.randn(2, SMALL.num_heads, 32, dtype=torch.float64), q[:2, :, 16:]
    stored = dict(cache_format=FP8_E4M3)
    return cache, {
        "mla_decode": lambda scale: ops.mla_decode(*ql, cache, decode, 1.0, **stored, kv_scale=scale),
        "cascade_attention": lambda scale: ops.cascade_attention(*ql, cache, cascade, 1.0, **stored, kv_scale=scale),
        "dcp_decode": lambda scale: ops.simulate(
            1, 1, lambda ranks: ops.dcp_decode(*ql, cache, decode, 1.0, ranks, **stored, kv_scale=scale)
        ),
        "gather_context": lambda scale: ops.gather_context(
            cache, prefill, prefill.context_chunks[0], FP8_E4M3, torch.float64, scale
        ),
        "forward_prefill": lambda scale: ops.forward_prefill(
            q, kv_c, k_pe, cache, prefill, *layer.up_projections(), 1.0, **stored, kv_scale=scale
        ),
    }


@pytest.mark.parametrize("name", ["mla_decode", "cascade_attention", "dcp_decode", "gather_context", "forward_prefill"])
def test_refused_scales(ops, name, plain_errors):
    """A scale that is not one finite and positive float32 number on the device of the cache is refused by name.

    Calls with a legal scale succeed before each refusal. So a fast function checks the number in every call, also if an
    earlier call has the same shapes.
    """
    cache, all_calls = calls(ops)
    call, before = all_calls[name], cache.clone()
    for scale, message in BAD.values():
        call(torch.tensor(0.5))
        with pytest.raises(ValueError) as caught:
            call(scale)
        assert str(caught.value) == f"kv_scale: expected {message}"
    assert_same_bits(cache.view(torch.uint8), before.view(torch.uint8))
