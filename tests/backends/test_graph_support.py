"""Tests that every op of a captured decode step is served by a backend that can be captured.

In a step that a CUDA graph captures, each op gets the argument `graph`, so that no backend without graph support is
chosen. The tests fail if a layer does not pass `graph` to an op, or if an op does not pass `graph` to the choice of the
backend.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fast
from fast import backends
from fast.backends import Backend, OpSupport
from reference.interfaces import GraphSupport, UnsupportedConfiguration

from ..support.backends import registered
from ..support.factories import DIRECT, make_batch, make_layer, make_weights, new_cache

STEP = ("rope_norm_and_cache", "mla_decode", "plan_decode")  # the ops of a decode step with a schedule on one rank
MERGES = {"ag_rs": ("weight_attn_out",), "a2a": ("pack_attn_state", "merge_packed_attn_states")}


@pytest.fixture
def launched():
    """Register a backend that has the highest priority and cannot be captured.

    The fixture yields the set of ops that this backend served.
    """
    seen: set[str] = set()

    def noted(op):
        launch = backends.kernel("cpu", op)
        return lambda *given: seen.add(op) or launch(*given)

    ops = (*STEP, "concat_and_cache_mla", "apply_rope", "merge_attn_states", *MERGES["ag_rs"], *MERGES["a2a"])
    supports = {op: OpSupport(noted(op), graph=GraphSupport.NONE) for op in ops}
    supports["pack_attn_state"] = replace(supports["pack_attn_state"], reads="merge_packed_attn_states")
    with registered(Backend("eager", 50, "cpu", supports)):
        yield seen


def one_step(captured, attention=False, ranks=None):
    """Run a layer over two requests with one new token each.

    The plan is for the capture of a CUDA graph if `captured`, else for one ordinary step. With `attention`, only
    `project` and `forward_attention` of the layer run.
    """
    config = replace(DIRECT, num_heads=4)
    batch = make_batch([1, 1], [20, 33])
    cache = new_cache(batch, config.head_size, torch.float32)
    weights = make_weights(config if ranks is None else ranks.local_config(config), torch.float32)
    layer = make_layer(fast, config, weights, torch.float32, context_parallel=ranks)
    # without a wish for graphs, the builder chooses the backend with the highest priority, which has no graphs
    builder = fast.MLAMetadataBuilder(config, 16, 4096, 8, num_programs=2, context_parallel=ranks, dtype=torch.float32,
                                      graph_support=GraphSupport.ANY if captured else None)  # fmt: skip
    common = batch.common
    if ranks is not None:  # the slots of `batch` are for one rank; with slots -1 the step writes no cache entries
        common = replace(common, slot_mapping=torch.tensor([-1, -1]))
    plan = builder.build_for_cudagraph_capture(common) if captured else builder.build(0, common)
    if not captured:  # with these lengths the builder makes no schedule
        plan = replace(plan, schedule=fast.plan_decode(plan.decode.seq_lens, 2))
    hidden_states, positions = torch.randn(2, config.hidden_size), torch.tensor([19, 32])
    if attention:
        q, kv_c_normed, k_pe = layer.project(hidden_states, positions)
        output = q.new_empty(2, config.num_heads, config.v_head_dim)
        layer.forward_attention(q, kv_c_normed, k_pe, cache, plan, output)
    else:
        layer(hidden_states, positions, cache, plan)


def test_a_decode_step(launched):
    """Every op of a captured decode step is served by a backend that can be captured, except `apply_rope` in `project`.

    `forward` writes the cache with `rope_norm_and_cache`, and `forward_attention` with `concat_and_cache_mla`.
    """
    one_step(captured=False)
    assert launched == set(STEP)
    launched.clear()
    one_step(captured=True)
    assert launched == set()
    one_step(captured=False, attention=True)
    assert launched == {"apply_rope", "concat_and_cache_mla", "mla_decode", "plan_decode"}
    launched.clear()
    one_step(captured=True, attention=True)
    # `project` gets no plan, so it cannot know that the step is captured; `forward` gets the plan
    assert launched == {"apply_rope"}


@pytest.mark.parametrize("merge", MERGES)
def test_a_merge_over_ranks(launched, merge):
    """In a captured step, a backend that can be captured serves the merge over ranks."""
    fast.simulate(2, 8, lambda ranks: one_step(captured=False, ranks=ranks), merge=merge)
    assert launched == {*STEP, *MERGES[merge]}
    launched.clear()
    fast.simulate(2, 8, lambda ranks: one_step(captured=True, ranks=ranks), merge=merge)
    assert launched == set()


def test_a_named_backend_is_not_replaced(launched, plain_errors):
    """A call of a captured step that names a backend without graph support raises an error with the reason."""
    state = fast.AttentionState(torch.ones(2, 3, 4), torch.zeros(3, 2))
    fast.merge_attn_states(state, state, backend="eager")
    assert launched == {"merge_attn_states"}
    with pytest.raises(UnsupportedConfiguration, match="eager: has graph support 'none', got a call that needs 'any'"):
        fast.merge_attn_states(state, state, graph=GraphSupport.ANY, backend="eager")
    with pytest.raises(TypeError, match="^graph: expected a GraphSupport, got str$"):
        fast.merge_attn_states(state, state, graph="any")
