"""Tests that the chunks of a plan fit into the workspace of the layer.

The workspace is the memory in which a prefill expands one chunk of context. A call of the layer without a plan (the
memory-profile run) allocates the workspace, so that an engine can measure how much memory a step needs.
"""

from __future__ import annotations

import contextlib

import pytest
import torch

import fast
import reference
from reference.interfaces import MOST_WORKSPACE_TOKENS

from ..support.factories import CONFIGS, make_batch, make_cache, make_entries, make_layer, make_weights

CONFIG = CONFIGS["direct"]


@pytest.fixture(params=["reference", "fast"])
def ops(request):
    return {"reference": reference, "fast": fast}[request.param]


def test_the_plan_says_its_workspace(ops):
    common = make_batch([9], [40]).common
    assert ops.build_mla_metadata(common, 16, 48).workspace_tokens == 48
    builder = ops.MLAMetadataBuilder(CONFIG, 16, 200_000, 4)
    assert builder.workspace_tokens == builder.build(0, common).workspace_tokens == MOST_WORKSPACE_TOKENS == 65536


def test_a_chunk_beyond_the_profiled_workspace_raises(ops, plain_errors):
    """A layer refuses a plan whose chunks exceed the workspace of the layer, and does not write the cache."""
    batch = make_batch([9], [100])
    layer = make_layer(ops, CONFIG, make_weights(CONFIG, torch.float32), torch.float32, workspace_tokens=48)
    entries = make_entries(batch, CONFIG.head_size, torch.float32)
    cache = make_cache(batch, entries, CONFIG.head_size, torch.float32, new_tokens=False)
    before = cache.clone()
    hidden, positions = torch.randn(9, CONFIG.hidden_size), torch.arange(91, 100)
    plan = ops.build_mla_metadata(batch.common, 16, 64)
    wanted = (
        "^metadata.workspace_tokens: expected chunks of at most 48 tokens, the layer's workspace_tokens, "
        "got a chunk of 64 tokens in a plan with workspace_tokens 64$"
    )
    with pytest.raises(ValueError, match=wanted):
        layer(hidden, positions, cache, plan)
    q = torch.randn(9, CONFIG.num_heads, CONFIG.qk_head_dim)
    given = q, torch.randn(9, CONFIG.kv_lora_rank), torch.randn(9, CONFIG.qk_rope_head_dim)
    with pytest.raises(ValueError, match=wanted):
        layer.forward_attention(*given, cache, plan, torch.empty(9, CONFIG.num_heads, CONFIG.v_head_dim))
    assert torch.equal(cache.nan_to_num(7), before.nan_to_num(7))
    assert layer(hidden, positions, cache, ops.build_mla_metadata(batch.common, 16, 48)).isfinite().all()


def test_the_profile_run_touches_the_workspace(ops, monkeypatch):
    """The memory-profile run expands `workspace_tokens` tokens, which are MOST_WORKSPACE_TOKENS by default."""
    expanded = []
    function = {reference: "reference.mla.layer.expand_kv", fast: "fast.mla.memory_profile.expand_into"}[ops]

    def expand(latents, w_uk, w_uv, workspace, block_rows=0):
        if workspace is not None and block_rows == 0:
            expanded.append(latents.shape[0])

    monkeypatch.setattr(function, expand)
    weights = make_weights(CONFIG, torch.float32)
    cache = torch.zeros(1, 16, CONFIG.head_size)
    hidden, positions = torch.zeros(3, CONFIG.hidden_size), torch.arange(3)
    for options, wanted in (({}, MOST_WORKSPACE_TOKENS), ({"workspace_tokens": 80}, 80)):
        make_layer(ops, CONFIG, weights, torch.float32, **options)(hidden, positions, cache, None)
        assert expanded.pop() == wanted and not expanded
    assert not cache.any()
    with pytest.raises(ValueError, match="^workspace_tokens: expected a positive int, got 0$"):
        make_layer(ops, CONFIG, weights, torch.float32, workspace_tokens=0)


@pytest.mark.parametrize("block_size", [16, 48, 96, 100, 65536])
@pytest.mark.parametrize("size", [1, 3])
def test_defaults_fit_together(ops, block_size, size):
    """By default, a builder's workspace is the largest multiple of a unit that fits into a layer's workspace.

    The unit is the smallest workspace for the block size and the number of ranks. If the unit is larger than a layer's
    workspace, a builder's workspace is one unit.
    """
    ranks = None if size == 1 else ops.simulate(size, 1, lambda ranks: ranks, tensor_parallel_size=3)[0]
    layer = make_layer(ops, CONFIG, make_weights(CONFIG, torch.float32), torch.float32)
    for sequences in (8, 2048):
        builder = ops.MLAMetadataBuilder(CONFIG, block_size, 200_000, sequences, context_parallel=ranks)
        unit = reference.interfaces.context_unit(block_size, size, 1)
        assert builder.workspace_tokens % unit == 0
        assert builder.workspace_tokens <= max(unit, layer.workspace_tokens)
        assert builder.workspace_tokens > layer.workspace_tokens - unit


def test_a_loop_expands_no_more_than_the_layers_of_its_model(ops, plain_errors):
    """A serving loop refuses a workspace larger than that of the layers, because a long prompt would fail later."""
    pytest.importorskip("transformers")
    from transformers import AutoModelForCausalLM

    from fast.demo.serving import ServingLoop
    from fast.integrations.transformers import restore, use_mla

    model = AutoModelForCausalLM.from_pretrained("fast/assets/tiny-mla", dtype="float32").to("cpu").eval()
    config = ops.MLAConfig.from_hf(model.config)
    sizes = dict(num_blocks=8, block_size=16, max_num_seqs=2, token_budget=16)
    try:
        for given, most in (({"workspace_tokens": 32}, 32), ({}, MOST_WORKSPACE_TOKENS)):
            use_mla(model, ops=ops, block_size=16, **given)
            layers = [layer.self_attn.forward.attention for layer in model.model.layers]
            assert {layer.workspace_tokens for layer in layers} == {most}
            ServingLoop(model, config, ops, workspace_tokens=most, **sizes)
            wanted = f"workspace_tokens: expected at most {most}, the workspace_tokens of the model's layers"
            with pytest.raises(ValueError, match=f"^{wanted}"):
                ServingLoop(model, config, ops, workspace_tokens=most + 16, **sizes)
            restore(model)
    finally:
        with contextlib.suppress(ValueError):
            restore(model)
