"""Tests that builders, plans, decode graphs and layers must have the same fp8 mode and the same cache format.

The modes of a decode over a cache in e4m3 are explained at `reference.mla_decode`.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import replace

import pytest
import torch

import fast
from fast import backends
from fast.backends.own import CPU as CPU_BACKEND
from fast.backends.own import DECODES
from reference.interfaces import (
    COMPUTE_FORMAT,
    FP8_DS_MLA,
    FP8_E4M3,
    FP8_MODES,
    GraphSupport,
    TokenOwnership,
    UnsupportedConfiguration,
)

from ..support.backends import registered as backends_registered
from ..support.backends import with_backends
from ..support.factories import assert_same_bits, make_batch, make_layer, make_weights
from ..support.format_caches import SMALL, poisoned_cache, step_of

LENS = (21, 9)
MODE = "fp8_query"


def make_builder(ops, cache_format=FP8_E4M3, fp8_mode=MODE, **options):
    return ops.MLAMetadataBuilder(
        SMALL, 16, 128, 4, num_speculative_tokens=1, cache_format=cache_format, fp8_mode=fp8_mode, **options
    )


def test_every_plan_has_the_mode(ops):
    """Every plan has the given mode: the plan of a step, of a captured step, and of a batch without host lengths."""
    batch, prefill = make_batch((1, 2), (40, 23)), make_batch((1, 9), (40, 23))
    unknown = replace(batch.common, seq_lens_cpu=None, max_seq_len=40)
    given = dict(cache_format=FP8_DS_MLA, fp8_mode=MODE)
    for options in ({}, {"batch_invariant": True}, {"num_programs": 3}):
        builder = make_builder(ops, **options)
        plans = [
            builder.build(0, batch.common), builder.build(0, prefill.common), builder.build(0, unknown),
            builder.build(0, batch.common, fast_build=True), builder.build_for_cudagraph_capture(batch.common),
        ]  # fmt: skip
        assert {plan.fp8_mode for plan in plans} == {MODE}
    plans = [
        ops.build_mla_metadata(batch.common, 16, 64, 2, **given),
        ops.build_mla_metadata(batch.common, 16, 64, 2, ownership=TokenOwnership(1, 0), **given),
        ops.plan_captured_decodes(batch.common, 16, 0, graph=GraphSupport.ANY, **given),
    ]
    assert {plan.fp8_mode for plan in plans} == {MODE}
    assert ops.build_mla_metadata(batch.common, 16, 64, 2).fp8_mode == "converted"


def test_refusals(ops, plain_errors):
    """Builder and planners refuse an unknown mode, and a mode for a cache that is not in e4m3."""
    common = make_batch((1, 1), LENS).common
    calls = {
        "builder": lambda **given: make_builder(ops, **given),
        "step": lambda **given: ops.build_mla_metadata(common, 16, 64, **given),
        "capture": lambda **given: ops.plan_captured_decodes(common, 16, 0, **given),
    }
    for call in calls.values():
        with pytest.raises(ValueError, match="^fp8_mode: expected one of converted, fp8_query, fp8_product, got fp8$"):
            call(fp8_mode="fp8")
        message = "^fp8_mode: expected converted for format compute_dtype, got fp8_product$"
        with pytest.raises(ValueError, match=message):
            call(fp8_mode="fp8_product", cache_format=COMPUTE_FORMAT)


def test_captured_plan_of_another_mode(ops):
    """A captured plan of another mode is refused before anything is written into it."""
    batch = make_batch((1, 1), LENS)
    captured = make_builder(ops).build_for_cudagraph_capture(batch.common)
    before = captured.decode.visible_lens.clone()
    message = "^captured.fp8_mode: expected fp8_product, the builder's mode, got fp8_query$"
    with pytest.raises(ValueError, match=message):
        make_builder(ops, fp8_mode="fp8_product").update_captured(captured, make_batch((1, 1), (5, 5)).common)
    assert torch.equal(captured.decode.visible_lens, before)


# The choice of a backend.


def without_modes(name="plain", priority=5):
    """Return a backend that has only the mode `converted`, and a higher priority than the backend "cpu"."""
    plain = {op: replace(CPU_BACKEND.ops[op], fp8_modes=("converted",)) for op in DECODES}

    def other_programs(*_):
        return 7

    plain["decode_programs"] = replace(plain["decode_programs"], launcher=other_programs)
    return replace(CPU_BACKEND, name=name, priority=priority, ops=CPU_BACKEND.ops | plain)


def test_schedules_are_for_a_backend_with_the_mode(monkeypatch):
    """A schedule has the programs and costs of a backend with the mode; a named backend without the mode is refused."""
    with_backends(monkeypatch, CPU_BACKEND, without_modes())
    given = dict(device="cpu", dtype=torch.float32, block_size=16, cache_format=FP8_E4M3)
    assert fast.decode_programs(SMALL, **given) == 7
    batch = make_batch((1, 1), (100, 100))
    chosen = {mode: make_builder(fast, fp8_mode=mode).build(0, batch.common).schedule_choice for mode in FP8_MODES}
    assert [chosen[mode].num_programs for mode in FP8_MODES] == [7, 1, 1]
    for mode in FP8_MODES[1:]:
        assert fast.decode_programs(SMALL, **given, fp8_mode=mode) == 1
        message = f"^plain: decodes in the fp8 modes converted, got {mode}$"
        calls = (
            lambda mode=mode: fast.decode_programs(SMALL, **given, fp8_mode=mode, backend="plain"),
            lambda mode=mode: fast.schedule_costs(SMALL, **given, fp8_mode=mode, backend="plain"),
            lambda mode=mode: make_builder(fast, fp8_mode=mode, backend="plain").build(0, batch.common),
            lambda mode=mode: make_builder(fast, fp8_mode=mode, backend="plain").build_for_cudagraph_capture(
                batch.common
            ),
            lambda mode=mode: fast.build_mla_metadata(
                batch.common, 16, 64, 1, SMALL, cache_format=FP8_E4M3, fp8_mode=mode, backend="plain"
            ),
        )
        for call in calls:
            with pytest.raises(UnsupportedConfiguration, match=message):
                call()
    lines = backends.explain(SMALL, **given, fp8_mode=MODE).splitlines()
    assert f"mla_decode: cpu, chosen by priority (plain: decodes in the fp8 modes converted, got {MODE})" in lines
    assert "mla_decode: plain, chosen by priority" in backends.explain(SMALL, **given).splitlines()


def test_what_hopper_plans():
    """The backend "hopper" plans decodes over `fp8_e4m3` in every mode, and refuses `fp8_ds_mla`, for all three ops."""
    hopper = {each.name: each for each in backends.registered()}["hopper"]
    unread = "hopper: reads caches in compute_dtype, fp8_e4m3, got fp8_ds_mla"
    for op in DECODES:
        for mode in FP8_MODES:
            for cache_format in (FP8_E4M3, FP8_DS_MLA):
                request = backends.decode_request(
                    torch.device("cpu"), torch.bfloat16, 512, 64, 64, fast.QueryLenSupport.VARLEN, op=op,
                    cache_format=cache_format, fp8_mode=mode,
                )  # fmt: skip
                reasons = hopper.validate_configuration(request)
                assert (unread in reasons) == (cache_format is FP8_DS_MLA)
                assert not [reason for reason in reasons if "modes" in reason]


def test_layer_refuses_a_backend_by_name(monkeypatch):
    """A layer that names a backend without the mode raises an error with this name in its first decode."""
    with_backends(monkeypatch, CPU_BACKEND, without_modes())
    case = Case(fast, backend={"mla_decode": "plain"})
    message = f"^plain: decodes in the fp8 modes converted, got {MODE}$"
    with pytest.raises(UnsupportedConfiguration, match=message):
        case.step(case.hidden, case.positions, case.builder.build(0, case.common))


def library(**limits) -> backends.Backend:
    """Return a backend of another library with the decode of this package, and with limits."""
    ops = {op: replace(CPU_BACKEND.ops[op], **limits) for op in DECODES}
    return backends.Backend("other", -100, "cpu", ops, library="Other")


@pytest.mark.parametrize(
    ("limits", "options", "reason"),
    [
        (dict(format_modes={"fp8_e4m3": ("fp8_product",)}), dict(fp8_mode="converted", q_scale=None),
         "decodes caches in fp8_e4m3 in the fp8 modes fp8_product, got converted"),
        (dict(head_scales=False), dict(q_scale=torch.full((SMALL.num_heads,), 2.0**-6)),
         "serves one scale for all queries, got one scale for each head"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("plan_has_name", [False, True])
def test_nothing_is_written_before_a_refusal(limits, options, reason, plan_has_name):
    """Run a layer in a mode that its library has not over the cache's format -> the reason; the cache is unchanged."""
    mode = options.get("fp8_mode", MODE)
    given = dict(fp8_mode=mode, num_programs=0)
    plan = make_builder(fast, **given).build(0, Case(fast).common)
    if plan_has_name:
        plan = replace(plan, decode=replace(plan.decode, backend="other"))
    for declared in ({}, limits):
        with backends_registered(library(**declared)):
            case = Case(fast, **options, backend="other")
            before = case.cache.clone().view(torch.uint8)
            if declared:
                prefix = "metadata.decode.backend: " if plan_has_name else ""
                with pytest.raises(UnsupportedConfiguration, match=f"^{prefix}other: {reason}$"):
                    case.step(case.hidden, case.positions, plan)
            else:
                case.step(case.hidden, case.positions, plan)
            assert torch.equal(case.cache.view(torch.uint8), before) == bool(declared)


# Graphs.


class Case:
    """A layer over a cache in e4m3, its builder, and a step of two decodes."""

    def __init__(self, ops, **options):
        torch.manual_seed(3)
        weights = make_weights(SMALL, torch.float32)
        given = dict(cache_format=FP8_E4M3, kv_scale=0.5, fp8_mode=MODE, q_scale=2.0**-6) | options
        self.ops, self.layer = ops, make_layer(ops, SMALL, weights, torch.float32, **given)
        self.builder, batch = make_builder(ops), make_batch(LENS, LENS)
        self.columns = batch.common.block_table.shape[1]
        self.cache = poisoned_cache(batch.num_blocks, 16, SMALL, FP8_E4M3, torch.float32)
        self.cache.view(torch.uint8).random_(0, 0x70)
        self.common = step_of(batch, tuple((1, length) for length in LENS))
        self.hidden, self.positions = torch.randn(2, SMALL.hidden_size), torch.tensor(LENS) - 1
        self.calls = 0

    def step(self, hidden_states, positions, plan):
        self.calls += 1
        return self.layer(hidden_states, positions, self.cache, plan)

    def graph(self, builder=None, layers=()):
        builder = self.builder if builder is None else builder
        return self.ops.DecodeGraph(
            self.step, builder, [2, 4], self.columns, SMALL.hidden_size, torch.float32, "cpu", layers=layers
        )

    def run(self, graph):
        return graph.run(self.hidden, self.positions, self.common)


def test_graph_of_a_mode(ops):
    """A decode graph runs a layer with queries in e4m3, and gives the bits that the layer gives without a graph."""
    case = Case(ops)
    graph = case.graph(layers=[case.layer])
    assert (graph.cache_format, graph.fp8_mode) == (FP8_E4M3, MODE)
    found = case.run(graph).clone()
    assert_same_bits(found, case.step(case.hidden, case.positions, case.builder.build(0, case.common)))


@pytest.mark.parametrize(("name", "value", "message"), [
    ("fp8_mode", "fp8_product", "expected fp8_product, as in the builder, got fp8_query"),
    ("cache_format", COMPUTE_FORMAT, "expected compute_dtype, as in the builder, got fp8_e4m3"),
])  # fmt: skip
def test_graph_of_another_builder(ops, name, value, message):
    """`DecodeGraph` refuses a builder whose format or mode differs from that of a layer, before any step runs."""
    case = Case(ops)
    other = {"cache_format": FP8_E4M3, "fp8_mode": MODE, name: value}
    if value is COMPUTE_FORMAT:
        other["fp8_mode"] = "converted"
    with pytest.raises(ValueError, match=rf"^layers\[0\].{name}: {message}$"):
        case.graph(make_builder(ops, **other), [case.layer])
    assert case.calls == 0
    before = case.cache.view(torch.uint8).clone()
    with pytest.raises(ValueError, match="^metadata.(fp8_mode|cache_format): expected .*, the layer's"):
        case.run(case.graph(make_builder(ops, **other)))  # without `layers`, the layer refuses the plan
    assert torch.equal(case.cache.view(torch.uint8), before)


@pytest.mark.parametrize("where", ["builder", "layers[0]", "plan"])
def test_changes_after_the_capture(ops, where):
    """If the mode of the builder, of a layer or of a plan changes after the capture, the next run raises an error."""
    case = Case(ops)
    graph = case.graph(layers=[case.layer])
    case.run(graph)
    calls = case.calls
    if where == "plan":
        build = case.builder.build_for_cudagraph_capture
        case.builder.build_for_cudagraph_capture = lambda common: dataclasses.replace(
            build(common), fp8_mode="fp8_product"
        )
    else:
        {"builder": case.builder, "layers[0]": case.layer}[where].fp8_mode = "fp8_product"
    message = rf"^{re.escape(where)}.fp8_mode: expected fp8_query, as in the \w+, got fp8_product$"
    with pytest.raises(ValueError, match=message):
        case.run(graph)
    if ops is fast:
        with pytest.raises(ValueError, match=message):
            graph.replay(2)
    assert case.calls == calls


def test_bad_layers(ops, plain_errors):
    """`layers` must be a sequence of layers that have a format and a mode."""
    case = Case(ops)
    with pytest.raises(TypeError, match="^layers: expected a sequence of layers, got Linear$"):
        case.graph(layers=torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"^layers\[0\].cache_format: expected fp8_e4m3, as in the builder, got None$"):
        case.graph(layers=[torch.nn.Linear(2, 2)])
