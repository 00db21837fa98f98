"""Tests of decodes in CUDA graphs on a Hopper GPU: outputs of a bfloat16 layer are compared with the reference.

An output is "within the budget" if its error against the reference is at most the budget of docs/correctness.md.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fast
from fast.parity import compare

from ....planning.test_graphs import BLOCK, judged_steps, make_graph
from ....support.factories import LOW_RANK, make_weights, moved
from ....support.triton_mode import DEVICE, ON_HOPPER

if not ON_HOPPER:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

BF16 = torch.bfloat16


@pytest.mark.parametrize("options", [
    {}, {"num_programs": 0}, {"batch_invariant": True}, {"num_programs": 0, "batch_invariant": True},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("query_len", [1, 2])
@pytest.mark.parametrize("heads, latent, rope", [(16, 512, 64), (64, 512, 64), (40, 256, 32)])
def test_replays(heads, latent, rope, query_len, options):
    """Replay one graph for several batches -> each output is within the budget, with and without a schedule."""
    config = replace(LOW_RANK, num_heads=heads, kv_lora_rank=latent, qk_rope_head_dim=rope)
    assert "mla_decode: hopper" in fast.backends.explain(config, device=DEVICE, dtype=BF16, block_size=BLOCK)
    weights = {name: weight.cpu() for name, weight in make_weights(config, BF16).items()}
    _, held, graph = make_graph(fast, config, weights, BF16, DEVICE, query_len, **options)
    for batch, cache, hidden, positions, gold, low in judged_steps(config, weights, BF16, query_len):
        held.copy_(cache)
        value = graph.run(hidden.to(DEVICE), positions.to(DEVICE), moved(batch.common, DEVICE)).cpu()
        parity = compare("graph", value, low, gold)
        assert parity.passed, parity
