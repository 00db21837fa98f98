"""Tests of `forward_prefill` with an output in e4m3 (8 bits)."""

from __future__ import annotations

import pytest
import torch

import fast
import reference
from fast.parity import compare
from reference.interfaces import E4M3, UnsupportedConfiguration, to_e4m3

from ..support.factories import (
    CONFIGS,
    assert_same_bits,
    make_batch,
    make_cache,
    make_entries,
    make_up_projections,
)

CONFIG = CONFIGS["direct"]
BATCHES = {  # new tokens and all tokens of each request
    "no context": ([5, 2, 7], [5, 2, 7]),
    "context": ([5, 3, 7], [40, 20, 70]),
    "both": ([5, 9, 3, 7], [40, 9, 3, 70]),
    "no requests": ([], []),
}


def make_call(ops, name, dtype=torch.float32):
    """Return the arguments of `forward_prefill` for a batch of prefills; its context, if any, has several chunks."""
    c, batch = CONFIG, make_batch(*BATCHES[name])
    cache = make_cache(batch, make_entries(batch, c.head_size, dtype), c.head_size, dtype)
    metadata = ops.build_mla_metadata(batch.common, 16, 64)
    assert metadata.num_decodes == 0
    plan = metadata.prefill
    q, kv_c, k_pe = (torch.randn(batch.num_tokens, *shape).to(dtype)
                     for shape in ((c.num_heads, c.qk_head_dim), (c.kv_lora_rank,), (c.qk_rope_head_dim,)))  # fmt: skip
    return (q, kv_c, k_pe, cache, plan, *make_up_projections(c, dtype), 0.3)


@pytest.mark.parametrize("name", BATCHES)
def test_output(ops, name):
    """The output in e4m3 is the float32 output / the scale, rounded once; a scale does not change the LSE."""
    arguments, scale = make_call(ops, name), torch.tensor(0.004)
    wanted = ops.forward_prefill(*arguments)
    found = ops.forward_prefill(*arguments, output_scale=scale)
    assert found.out.dtype == E4M3
    assert_same_bits(found.out.view(torch.uint8), to_e4m3(wanted.out, scale).view(torch.uint8))
    assert_same_bits(found.lse, wanted.lse)
    alone = ops.forward_prefill(*arguments, return_lse=False, output_scale=scale)
    assert_same_bits(alone.view(torch.uint8), found.out.view(torch.uint8))
    if name == "both":
        assert (found.out.float().abs() == 448).any() and found.out.float().abs().min() < 448


@pytest.mark.parametrize("name", BATCHES)
def test_half_precision(name):
    """With bfloat16 inputs, the e4m3 output of `fast` is within the budget (docs/correctness.md)."""
    arguments, scale = make_call(fast, name, torch.bfloat16), torch.tensor(0.01)
    found, low = (ops.forward_prefill(*arguments, return_lse=False, output_scale=scale).float() * scale
                  for ops in (fast, reference))  # fmt: skip
    wide = [x.double() if isinstance(x, torch.Tensor) else x for x in arguments]
    gold = reference.forward_prefill(*wide, return_lse=False)
    parity = compare("forward_prefill", found, low, gold)
    assert parity.passed, parity


def test_out():
    """`fast.forward_prefill` writes e4m3 into an `out` of any strides, and refuses another dtype."""
    arguments, scale = make_call(fast, "both"), torch.tensor(0.004)
    wanted = fast.forward_prefill(*arguments, return_lse=False, output_scale=scale)
    for memory in (torch.zeros(wanted.shape), torch.zeros(*wanted.shape[:2], 2 * wanted.shape[2])[..., ::2]):
        out = torch.empty_strided(memory.shape, memory.stride(), dtype=E4M3)
        assert fast.forward_prefill(*arguments, return_lse=False, output_scale=scale, out=out) is out
        assert_same_bits(out.view(torch.uint8), wanted.view(torch.uint8))
    with pytest.raises(ValueError, match="^out: expected dtype torch.float8_e4m3fn, got torch.float32$"):
        fast.forward_prefill(*arguments, output_scale=scale, out=torch.zeros(wanted.shape))


def test_refusals(ops, plain_errors):
    arguments = make_call(ops, "both")
    with pytest.raises(UnsupportedConfiguration, match="^output_block_scale: block-scaled outputs are not implemented"):
        ops.forward_prefill(*arguments, output_block_scale=torch.ones(3))
    for scale, message in ((torch.tensor(-1.0), "a finite number above 0, got -1.0"), (1.0, "a tensor, got float"),
                           (torch.ones(1), r"shape \[\], got \[1\]")):  # fmt: skip
        with pytest.raises((TypeError, ValueError), match=f"^output_scale: expected {message}$"):
            ops.forward_prefill(*arguments, output_scale=scale)
