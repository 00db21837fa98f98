"""Plant a mistake in plans, groups, captured plans and ranks of grouped-query attention -> a named test must fail.

The numerics of attention have mutants of their own (`test_gqa_mutations`). Here a check is mostly a test function of
another module that the mutant must turn red. A mutant is a function that gets a package and pytest's `monkeypatch`, and
returns the package with a mistake.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from reference.interfaces import GraphSupport

from ..gqa import test_gqa_advance as advance
from ..gqa import test_gqa_builder as builder
from ..gqa import test_gqa_cascade_choice as cascade_choice
from ..gqa import test_gqa_graphs as graphs
from ..gqa import test_gqa_local_attention as local_attention
from ..gqa.test_reference_layer import check_kv_sharing, check_ranks_are_one_rank
from ..interfaces.gqa.test_gqa_groups import check_a_field_makes_a_group, check_groups
from .test_gqa_mutations import call, named
from .test_mutations import altered


def everywhere(ops, patch, name, wrap):
    """Replace the function `name` by `wrap(function)` in every module of `ops.gqa` that imports it."""
    modules = [module for module in vars(ops.gqa).values() if hasattr(module, "__file__") and hasattr(module, name)]
    assert modules, name
    for module in modules:
        patch.setattr(module, name, wrap(getattr(module, name)))
    return ops


def window_of_the_captured_batch(ops, patch):
    """Leave the first visible keys of a captured plan as they were when `update_captured` writes the next batch."""

    def wrap(write):
        def wrong(captured, plan):
            kept = captured.decode.first_visible.clone()
            write(captured, plan)
            captured.decode.first_visible.copy_(kept)

        return wrong

    return everywhere(ops, patch, "write_captured", wrap)


def window_of_the_first_run(ops, patch):
    """Plan each run of a decode graph with the window of the first batch with as many tokens."""
    first = {}

    class Wrong(ops.GQAMetadataBuilder):
        def build_for_cudagraph_capture(self, common):
            plan = super().build_for_cudagraph_capture(common)
            found = plan.decode.first_visible
            found.copy_(first.setdefault(found.shape, found.clone()).minimum(plan.decode.visible_lens))
            return plan

    return altered(ops, GQAMetadataBuilder=Wrong)


def window_of_the_step_before(ops, patch):
    """After `advance_step`, plan with the window of the step before."""
    advanced, last = [], []

    def wrong_advance(*args, **kwargs):
        advanced.append(ops.advance_step(*args, **kwargs))
        return advanced[-1]

    class Wrong(ops.GQAMetadataBuilder):
        def build_for_cudagraph_capture(self, common):
            plan = super().build_for_cudagraph_capture(common)
            if last and any(common is each for each in advanced):
                plan = replace(plan, decode=replace(plan.decode, first_visible=last[-1]))
            last.append(plan.decode.first_visible)
            return plan

    return altered(ops, GQAMetadataBuilder=Wrong, advance_step=wrong_advance)


def window_not_scheduled(ops, patch):
    """Count all keys of a request for a schedule, although a window leaves most of them out."""

    def wrap(function):
        return lambda starts, lens, window=None, *rest, **kwargs: function(starts, lens, None, *rest, **kwargs)

    everywhere(ops, patch, "scheduled_lens", wrap)
    patch.setattr(ops.planning.visible_lens, "scheduled_lens", wrap(ops.planning.visible_lens.scheduled_lens))
    return ops


def cascade_with_a_window(ops, patch):
    """Choose and plan a cascade for every config."""
    return everywhere(ops, patch, "supports_cascade", lambda function: lambda config: True)


def groups_without_a_field(name):
    """Return a mutant whose `group_layers` ignores a field of the configs."""

    def mutant(ops, patch):
        def wrong(layers):
            groups = {}
            for config, names in ops.group_layers(layers).items():
                config = replace(config, **{name: None})
                groups[config] = (*groups.get(config, ()), *names)
            return groups

        return altered(ops, group_layers=wrong)

    return mutant


def sharing_layer_writes_its_tokens(ops, patch):
    """Let a layer that reads the cache of another layer write the slots of its tokens, with keys and values of 0."""

    class Wrong(ops.GQAAttention):
        def forward(self, q, k, v, kv_cache, metadata, *args, **kwargs):
            if self.config.kv_sharing_layer is not None:
                slots = metadata.slot_mapping[: metadata.num_actual_tokens]
                slots = slots[slots >= 0]
                kv_cache[:, slots // kv_cache.shape[2], slots % kv_cache.shape[2]] = 0
            return super().forward(q, k, v, kv_cache, metadata, *args, **kwargs)

    return altered(ops, GQAAttention=Wrong)


def sinks_of_two_ranks(ops, patch):
    """Let one rank more than rank 0 count the sinks, so that the merge counts them twice."""
    module, kept, number = ops.gqa.context_parallel, {}, itertools.count()
    right = module.gathered_config

    def wrong_config(config, size, has_sinks=True):
        # of the size - 1 calls for the other ranks, the first one counts the sinks too
        return right(config, size, has_sinks or next(number) % (size - 1) == 0)

    def wrap(attend):
        def wrong(q, kv_cache, metadata, config, sinks=None, *args, **kwargs):
            if sinks is not None:
                kept["sinks"] = sinks
            sinks = kept["all"] if config.attention_sinks else None
            return attend(q, kv_cache, metadata, config, sinks, *args, **kwargs)

        return wrong

    def wrap_call(call_of_ranks):
        def wrong(q, kv_cache, metadata, config, ranks, sinks=None, *args, **kwargs):
            kept["all"] = sinks
            return call_of_ranks(q, kv_cache, metadata, config, ranks, sinks, *args, **kwargs)

        return wrong

    patch.setattr(module, "gathered_config", wrong_config)
    patch.setattr(module, "gqa_paged_attention", wrap(module.gqa_paged_attention))
    patch.setattr(ops.gqa.layer, "gqa_dcp_attention", wrap_call(ops.gqa.layer.gqa_dcp_attention))
    return ops


def no_virtual_requests(ops, patch):
    """Plan the requests of a batch in place of the virtual requests of their attention chunks."""
    return everywhere(ops, patch, "make_local_attention_virtual_batches", lambda function: lambda batch, *_: batch)


def check_llama4(ops):
    """Generate with a tiny Llama 4, whose attention is chunked, and compare the tokens with those of stock."""
    pytest.importorskip("transformers", reason="the integration runs transformers models")
    from ..integrations.transformers.gqa.test_gqa_models import test_generate_gives_the_same_tokens

    test_generate_gives_the_same_tokens("llama4", ops)


WINDOWED = replace(cascade_choice.LLAMA, sliding_window=10**6)
CONTROLS = [
    ("window of the captured batch", window_of_the_captured_batch,
     call(graphs.test_updates, GraphSupport.ANY, graphs.WINDOW)),
    ("window of the captured batch", window_of_the_captured_batch,
     call(graphs.test_updates, GraphSupport.ONE_QUERY_LEN, graphs.LOCAL)),
    ("window of the first run", window_of_the_first_run, call(graphs.test_runs, "window of a page + 1", 0, False)),
    ("window not scheduled", window_not_scheduled, builder.test_a_window_takes_the_schedule_away),
    ("cascade with a window", cascade_with_a_window, cascade_choice.test_plans),
    ("cascade with a window", cascade_with_a_window, call(cascade_choice.test_configs_without_a_cascade, WINDOWED)),
    ("groups without the soft cap", groups_without_a_field("logits_soft_cap"),
     call(check_a_field_makes_a_group, dict(logits_soft_cap=2.0))),
    ("groups without the soft cap", groups_without_a_field("logits_soft_cap"), check_groups),
    ("groups without the slopes", groups_without_a_field("alibi_slopes"),
     call(check_a_field_makes_a_group, dict(alibi_slopes=(0.5,) * 8))),
    ("window of the step before", window_of_the_step_before, call(advance.test_steps, "window of a page", 0)),
    ("sharing layer writes its tokens", sharing_layer_writes_its_tokens, check_kv_sharing),
    ("sinks of two ranks", sinks_of_two_ranks, call(check_ranks_are_one_rank, 2, 2)),
    ("sinks of two ranks", sinks_of_two_ranks, call(check_ranks_are_one_rank, 4, 4, "ag_rs")),
    ("no virtual requests", no_virtual_requests, local_attention.test_virtual_requests_of_a_plan),
    ("no virtual requests", no_virtual_requests, check_llama4),
]  # fmt: skip


@pytest.mark.parametrize("name, mutant, check", CONTROLS, ids=map(named, CONTROLS))
def test_planted_mistake_is_found(ops, monkeypatch, name, mutant, check):
    """Run a check -> it passes on the unchanged package and fails on the package with the planted mistake.

    A mistake in a window may let a token attend keys in freed blocks. The check of a layer's plan then finds it first.
    """
    check(ops)
    with pytest.raises((AssertionError, ValueError)) as found:
        check(mutant(ops, monkeypatch))
    assert isinstance(found.value, AssertionError) or "block_table: expected blocks in " in str(found.value)


def test_sinks_of_two_ranks_are_two(ops, monkeypatch):
    """Of 4 ranks, one counts the sinks, and exactly two under the mutant."""
    module, counted = ops.gqa.context_parallel, []
    attend = module.gqa_paged_attention

    def noted(q, kv_cache, metadata, config, sinks=None, *args, **kwargs):
        counted.append(sinks is not None)
        return attend(q, kv_cache, metadata, config, sinks, *args, **kwargs)

    monkeypatch.setattr(module, "gqa_paged_attention", noted)
    check_ranks_are_one_rank(ops, 4, 4)
    assert 4 * sum(counted) == len(counted) > 0
    counted.clear()
    with pytest.raises(AssertionError):
        check_ranks_are_one_rank(sinks_of_two_ranks(ops, monkeypatch), 4, 4)
    assert 2 * sum(counted) == len(counted) > 0
