"""The workspace that a plan was cut for and the one that a layer was profiled with belong together."""

from __future__ import annotations

import pytest
import torch

import fast
import reference
from reference.interfaces import MOST_WORKSPACE_TOKENS

from .factories import CONFIGS, make_batch, make_cache, make_entries, make_layer, make_weights

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
    """Without the check the memory-profile run measured 8192 tokens, and a long context then expanded 65536."""
    batch = make_batch([9], [100])
    layer = make_layer(ops, CONFIG, make_weights(CONFIG, torch.float32), torch.float32, workspace_tokens=48)
    entries = make_entries(batch, CONFIG.head_size, torch.float32)
    cache = make_cache(batch, entries, CONFIG.head_size, torch.float32, new_tokens=False)
    before = cache.clone()
    hidden, positions = torch.randn(9, CONFIG.hidden_size), torch.arange(91, 100)
    plan = ops.build_mla_metadata(batch.common, 16, 64)
    wanted = (
        "^metadata.workspace_tokens: expected chunks of at most 48 tokens, the layer's workspace_tokens, "
        "got one of 64 in a plan for 64$"
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
    """As many tokens as a plan may expand at once: by default what the builder of a long-context model asks for."""
    expanded = []
    room = __import__(f"{ops.__name__}.layer", fromlist=["layer"])
    monkeypatch.setattr(room, "expand_kv", lambda latents, *_: expanded.append(latents.shape[0]))
    weights = make_weights(CONFIG, torch.float32)
    cache = torch.zeros(1, 16, CONFIG.head_size)
    hidden, positions = torch.zeros(3, CONFIG.hidden_size), torch.arange(3)
    for options, wanted in (({}, MOST_WORKSPACE_TOKENS), ({"workspace_tokens": 80}, 80)):
        make_layer(ops, CONFIG, weights, torch.float32, **options)(hidden, positions, cache, None)
        assert expanded.pop() == wanted
    with pytest.raises(ValueError, match="^workspace_tokens: expected a positive int, got 0$"):
        make_layer(ops, CONFIG, weights, torch.float32, workspace_tokens=0)
