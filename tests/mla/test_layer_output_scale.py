"""Tests of a layer whose attention output is in e4m3 (8 bits): `forward_attention(output_scale=)`."""

from __future__ import annotations

import math

import pytest
import torch

import fast
import reference
from fast.parity import compare
from reference.interfaces import (
    COMPUTE_FORMAT,
    E4M3,
    UnsupportedConfiguration,
    to_e4m3,
)

from ..support.factories import CONFIGS, assert_same_bits, make_batch, make_layer, make_weights
from ..support.format_caches import FORMATS, poisoned_cache, step_of

CASES = {  # cache format, config, scale of the cache, options of the layer
    "16 bit": (COMPUTE_FORMAT, CONFIGS["low-rank"], None, {}),
    "fp8_weights": (COMPUTE_FORMAT, CONFIGS["direct"], None, {"fp8_weights": True}),
    **{name: (*case, {}) for name, case in FORMATS.items()},
    "fp8_query": (*FORMATS["fp8_e4m3"], {"fp8_mode": "fp8_query", "q_scale": 0.02}),
}
LENS = ((1, 30), (3, 20), (9, 9), (6, 45))  # (new tokens, tokens after the step): two decodes, two prompts
PADDING = 3


class Case:
    """A layer, a cache with context, and the inputs of a step with decodes, prompts and padding tokens."""

    def __init__(self, ops, name, dtype):
        cache_format, config, scale, options = CASES[name]
        torch.manual_seed(3)
        weights = make_weights(config, torch.float64)
        self.layer = make_layer(ops, config, weights, dtype, cache_format=cache_format, kv_scale=scale, **options)
        batch = make_batch([length for _, length in LENS], [length for _, length in LENS])
        self.cache = poisoned_cache(batch.num_blocks, 16, config, cache_format, dtype)
        entries = [torch.randn(batch.num_tokens, width).to(dtype)
                   for width in (config.kv_lora_rank, config.qk_rope_head_dim)]  # fmt: skip
        own_scale = None if scale is None else torch.tensor(scale)
        ops.concat_and_cache_mla(*entries, self.cache, batch.common.slot_mapping, cache_format, own_scale)
        mode = {"fp8_mode": self.layer.fp8_mode}
        self.plan = ops.build_mla_metadata(step_of(batch, LENS), 16, 32, 3, cache_format=cache_format, **mode)
        assert self.plan.num_decodes == 2 and len(self.plan.prefill.context_chunks) == 2
        self.tokens = self.plan.num_actual_tokens + PADDING
        shapes = (config.num_heads, config.qk_head_dim), (config.kv_lora_rank,), (config.qk_rope_head_dim,)
        self.inputs = [torch.randn(self.tokens, *shape).to(dtype) for shape in shapes]

    def output(self, dtype):
        """Return memory for an output, with NaN in every element."""
        c = self.layer.config
        return torch.full((self.tokens, c.num_heads, c.v_head_dim), math.nan).to(dtype)

    def attend(self, scale=None, plan=True):
        """Return the output of the step, in e4m3 if a scale is given; the layer gets no plan if `plan` is False."""
        output = self.output(self.inputs[0].dtype if scale is None else E4M3)
        plan = self.plan if plan else None
        assert self.layer.forward_attention(*self.inputs, self.cache, plan, output, output_scale=scale) is None
        return output


@pytest.mark.parametrize("name", CASES)
def test_output(ops, name):
    """In float64, an output with a scale equals the output without one, divided by the scale and rounded once."""
    scale = torch.tensor(0.002)
    wanted, case = Case(ops, name, torch.float64).attend(), Case(ops, name, torch.float64)
    found = case.attend(scale)
    assert_same_bits(found.view(torch.uint8), to_e4m3(wanted, scale).view(torch.uint8))
    assert found[:-PADDING].float().abs().amax() == 448  # some elements saturate, and not all
    assert not found[-PADDING:].float().any() and found[:-PADDING].float().abs().median() < 448


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_packages_agree(name, dtype):
    """The error of `fast` is within the budget, which is computed from the error of the reference's output in e4m3."""
    scale = torch.tensor(0.02)
    found, low = (Case(ops, name, dtype).attend(scale).float() * scale for ops in (fast, reference))
    gold = Case(reference, name, dtype)
    if "query" not in name:  # in "fp8_query", gold must round the same queries to e4m3, so it keeps `dtype`
        gold.layer.double()
        gold.inputs = [x.double() for x in gold.inputs]
        gold.cache = gold.cache.double() if gold.cache.dtype == dtype else gold.cache
    wide = gold.attend().double()
    parity = compare(name, found, low, wide)
    assert parity.passed, parity


def test_memory_profile_run(ops):
    """Without a plan (an engine's run to measure memory), the layer writes zeros to an output in e4m3."""
    assert not Case(ops, "16 bit", torch.float32).attend(torch.tensor(0.5), plan=False).float().any()


def test_refusals(ops, plain_errors):
    """A wrong scale or output raises an error of one line, and nothing is written to the cache or the output."""
    case = Case(ops, "16 bit", torch.float32)
    before, output, plain = case.cache.clone(), case.output(E4M3), case.output(torch.float32)

    def refused(message, out=output, error=ValueError, **options):
        with pytest.raises(error, match=message):
            case.layer.forward_attention(*case.inputs, case.cache, case.plan, out, **options)
        assert_same_bits(case.cache, before)
        assert torch.isnan(output.float()).all() and torch.isnan(plain).all()

    refused("^output: expected dtype torch.float32, got torch.float8_e4m3fn$")
    refused("^output: expected dtype torch.float8_e4m3fn, got torch.float32$", plain, output_scale=torch.tensor(1.0))
    for value in (0.0, -1.0, math.nan, math.inf):
        refused("^output_scale: expected a finite number above 0, got ", output_scale=torch.tensor(value))
    refused("^output_scale: expected device cpu, got meta$", output_scale=torch.tensor(1.0, device="meta"))
    refused(r"^output_scale: expected shape \[\], got \[2\]", output_scale=torch.ones(2))
    refused("^output_scale: expected a tensor", error=TypeError, output_scale=1.0)
    refused("^output_block_scale: ", error=UnsupportedConfiguration, output_block_scale=torch.ones(1))
