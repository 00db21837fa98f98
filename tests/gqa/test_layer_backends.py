"""Tests of what a layer of grouped-query attention refuses because of its backends, and of checks that run only once.

A layer writes the cache before it attends. A step that no backend can serve must be refused before the write: cache,
output and scales then keep their bits. The backends of these tests run the kernels of the backends "cpu" and "torch" on
CPU tensors, and declare less than these kernels can do.
"""

from __future__ import annotations

import contextlib
import copy
from dataclasses import replace

import pytest
import torch

import fast
from fast.backends import Backend
from fast.backends.own import CPU, TORCH
from fast.gqa import layer as layers
from reference.interfaces import (
    CAUSAL,
    COMPUTE_FORMAT,
    E4M3,
    FP8_E4M3,
    UNDIVIDED,
    DecodeSchedule,
    UnsupportedConfiguration,
)
from reference.interfaces.gqa import AttentionType, EncoderMetadata, GQAConfig, step_arguments

from ..support.backends import registered
from ..support.factories import assert_close64, assert_same_bits, offsets
from ..support.gqa import CONFIGS, GROUPED, LENS, SLOPES, gqa_batch, gqa_step

F32 = torch.float32
ALL = CONFIGS["all of them"]
NEW = ((1, 1), (2, 2), (5, 5))  # requests without context
OPS = ("gqa_paged_attention", "gqa_varlen_attention", "reshape_and_cache")
FEATURES = {
    "alibi": replace(GROUPED, alibi_slopes=SLOPES),
    "window": replace(GROUPED, sliding_window=19),
    "sinks": replace(GROUPED, attention_sinks=True),
    "soft_cap": replace(GROUPED, logits_soft_cap=1.5),
}


def declaring(name, ops=OPS, of=CPU, **declared):
    """Return a backend with the kernels of another backend for some ops, and other declarations."""
    return Backend(name, 99, "cpu", {op: replace(of.ops[op], **declared) for op in ops}, only_named=True)


def lacking(feature, ops=OPS):
    """Return the backend "lacking", which lacks a feature."""
    return declaring("lacking", ops, features=tuple(each for each in CPU.ops[OPS[0]].features if each != feature))


@contextlib.contextmanager
def all_registered(*wanted):
    with contextlib.ExitStack() as stack:
        for backend in wanted:
            stack.enter_context(registered(backend))
        yield


def new_layer(batch, **options):
    """Return a layer whose scales are not chosen yet."""
    return fast.GQAAttention(batch.config, batch.cache_format, sinks=batch.sinks, **options)


def check_refused(layer, batch, plan, error, message, cached=True):
    """Run a step twice -> the error; cache, output, scales and observed numbers are as they were."""
    cache, output = batch.kv_cache.clone() if cached else None, torch.full_like(batch.q, 7)
    layer.observed, layer.observed_values, layer.observed_queries = [], [], []
    sources = [None if scale is None else scale.source for scale in (layer.k_scale, layer.v_scale)]
    for _ in range(2):
        with pytest.raises(error, match=message) as caught:
            layer(batch.q, batch.new_k, batch.new_v, cache, plan, output)
        assert "\n" not in str(caught.value)
    if cached:
        assert_same_bits(cache, batch.kv_cache)
    assert output.eq(7).all()
    assert [None if scale is None else scale.source for scale in (layer.k_scale, layer.v_scale)] == sources
    assert layer.observed == layer.observed_values == layer.observed_queries == []
    layer.observed = layer.observed_values = layer.observed_queries = None


def ones(batch):
    """Return scales of 1 for a cache that has scales."""
    return {"k_scale": 1.0, "v_scale": 1.0} if batch.cache_format.scaled else {}


def tokens_of(batch):
    return batch.q, batch.new_k, batch.new_v


def step_batch(config=GROUPED, lens=LENS, **options):
    return gqa_batch(config, lens, dtype=F32, new_tokens=False, **options)


# Refusals before the write.


@pytest.mark.parametrize("cache_format", [COMPUTE_FORMAT, FP8_E4M3], ids=lambda each: each.name)
@pytest.mark.parametrize("num_decodes", [0, 5, len(LENS)])
@pytest.mark.parametrize("feature", FEATURES)
def test_a_missing_feature(feature, num_decodes, cache_format):
    """Bind attention to a backend that lacks a feature -> decodes and prefills are refused before the write."""
    batch = step_batch(FEATURES[feature], cache_format=cache_format)
    plan = gqa_step(batch, num_decodes)
    for ops in (OPS, OPS[:1]):  # the second backend does not declare the write
        with registered(lacking(feature, ops)):
            for backend in ("lacking", {"gqa_paged_attention": "lacking"}):
                layer = new_layer(batch, backend=backend)
                check_refused(layer, batch, plan, UnsupportedConfiguration, f"^lacking: has no {feature}$")
            layer = new_layer(batch, **ones(batch))  # another backend serves the step
            layer(*tokens_of(batch), batch.kv_cache.clone(), plan)


def test_backends_that_a_plan_names():
    """Plan a part with an unknown backend, with another one than the layer's, or with one that lacks a feature."""
    batch, window = step_batch(), step_batch(FEATURES["window"], cache_format=FP8_E4M3)
    with all_registered(lacking("window"), declaring("second")):
        for name, decodes in (("decode", 5), ("prefill", 5), ("decode", len(LENS)), ("prefill", 0)):
            for of, backend, planned, error, message in (
                (batch, None, "nosuch", ValueError, "expected one of cpu, .*, got nosuch$"),
                (batch, "second", "cpu", ValueError, "expected second, the backend of the layer, got cpu$"),
                (batch, "second", "nosuch", ValueError, "expected second, the backend of the layer, got nosuch$"),
                (window, None, "lacking", UnsupportedConfiguration, "lacking: has no window$"),
            ):
                plan = gqa_step(of, decodes)
                plan = replace(plan, **{name: replace(getattr(plan, name), backend=planned)})
                message = f"^metadata.{name}.backend: {message}"
                check_refused(new_layer(of, backend=backend), of, plan, error, message)
        plan = gqa_step(batch, 5)
        plan = replace(plan, decode=replace(plan.decode, backend="second"))
        layer = new_layer(batch)
        value = layer(batch.q, batch.new_k, batch.new_v, batch.kv_cache.clone(), plan)
        assert_same_bits(value, layer(batch.q, batch.new_k, batch.new_v, batch.kv_cache.clone(), gqa_step(batch, 5)))


def cascade_step(**options):
    """Return a batch of decodes that share two blocks, and a plan with a cascade."""
    config = replace(GROUPED, attention_sinks=True)
    batch = step_batch(config, [(1, 33), (1, 50), (1, 0), (1, 49), (7, 7)], **options)
    table = batch.metadata.block_table.clone()
    table[:4, :2] = table[0, :2]
    batch = replace(batch, metadata=replace(batch.metadata, block_table=table))
    plan = gqa_step(batch, 4)
    return batch, replace(plan, cascade=fast.split_shared_prefix(plan.decode, 32, 16))


@pytest.mark.parametrize("cache_format", [COMPUTE_FORMAT, FP8_E4M3], ids=lambda each: each.name)
def test_backends_of_a_cascade(cache_format, plain_errors):
    """Plan a part of a cascade with a wrong backend, or bind the merge to one that cannot merge -> refused by name."""
    batch, plan = cascade_step(cache_format=cache_format)
    given = batch.q[:4], batch.kv_cache
    half = declaring("half", ("merge_attn_states",), dtypes=(torch.float16,))
    with all_registered(lacking("sinks"), half, declaring("second")):
        for part, planned, backend, error, message in (
            ("prefix", "nosuch", None, ValueError, "expected one of cpu, .*, got nosuch$"),
            ("suffix", "nosuch", None, ValueError, "expected one of cpu, .*, got nosuch$"),
            ("suffix", "cpu", "second", ValueError, "expected second, the backend of {}, got cpu$"),
            ("suffix", "lacking", None, UnsupportedConfiguration, "lacking: has no sinks$"),
        ):
            cascade = replace(plan.cascade, **{part: replace(getattr(plan.cascade, part), backend=planned)})
            layer, text = new_layer(batch, backend=backend), f"cascade.{part}.backend: {message}"
            named = text.replace("{}", "the layer")
            check_refused(layer, batch, replace(plan, cascade=cascade), error, f"^metadata.{named}")
            named = text.replace("{}", "the call")
            with pytest.raises(error, match=f"^{named}"):
                fast.gqa_cascade_attention(
                    *given, cascade, batch.config, batch.sinks, None, *batch.scales.values(), backend=backend
                )
        layer = new_layer(batch, backend={"merge_attn_states": "half"})
        check_refused(layer, batch, plan, UnsupportedConfiguration, "^half: .*torch.float32$")
        cascade = replace(plan.cascade, prefix=replace(plan.cascade.prefix, backend="lacking"))  # it needs no sinks
        layer, tokens = new_layer(batch, **ones(batch)), (batch.q, batch.new_k, batch.new_v)
        value = layer(*tokens, batch.kv_cache.clone(), replace(plan, cascade=cascade))
        assert_same_bits(value, layer(*tokens, batch.kv_cache.clone(), plan))


@pytest.mark.parametrize("ops", [OPS[:1], OPS[2:], OPS], ids=["attention", "write", "both"])
def test_a_kernel_that_ignores_scales(ops):
    """Bind ops to kernels that ignore scales -> only scales of 1 are served, also if the step would choose others."""
    batch = step_batch(cache_format=FP8_E4M3)
    mixed, decodes = gqa_step(batch, 5), step_batch(lens=((1, 20), (1, 33)), cache_format=FP8_E4M3)
    with registered(declaring("ignoring", ops, features=())):
        layer = new_layer(batch, backend="ignoring", k_scale=1.0, v_scale=0.5)
        check_refused(layer, batch, mixed, UnsupportedConfiguration, "^ignoring: ignores v_scale and needs 1, got 0.5$")
        layer = new_layer(batch, backend="ignoring")  # the first prefill would choose the scales
        check_refused(layer, batch, mixed, UnsupportedConfiguration, "^ignoring: ignores k_scale and needs 1, got 0.0")
        assert float(layer.k_scale.value) == float(layer.v_scale.value) == 1
        with pytest.warns(UserWarning, match="so the scale is 1.0"):
            value = layer(*tokens_of(decodes), decodes.kv_cache.clone(), gqa_step(decodes, 2))
        known = new_layer(batch, **ones(batch))
        assert_same_bits(value, known(*tokens_of(decodes), decodes.kv_cache.clone(), gqa_step(decodes, 2)))


def test_a_kernel_that_is_not_batch_invariant():
    """Plan batch-invariant decodes for a kernel that is not -> refused before the write."""
    batch = step_batch(cache_format=FP8_E4M3)
    plan = replace(gqa_step(batch, 5), schedule=DecodeSchedule(None, None, True))
    with registered(declaring("other", of=TORCH)):
        check_refused(
            new_layer(batch, backend="other"), batch, plan, UnsupportedConfiguration, "^other: is not batch-invariant$"
        )
        layer = new_layer(batch, backend="other", **ones(batch))
        layer(*tokens_of(batch), batch.kv_cache, replace(plan, schedule=None))


def test_prefills_that_are_not_batch_invariant(monkeypatch):
    """Plan batch-invariant prefills for a kernel that is not -> refused; another backend serves the plan."""
    batch = step_batch()
    plan = replace(gqa_step(batch, 0), prefill_schedule=UNDIVIDED)
    with registered(declaring("other", batch_invariant=False)):
        for backend in ("other", {"gqa_prefill": "other"}):
            layer = new_layer(batch, backend=backend)
            check_refused(layer, batch, plan, UnsupportedConfiguration, "other: is not batch-invariant$")
    attend, schedules = layers.gqa_paged_attention, []
    monkeypatch.setattr(
        layers, "gqa_paged_attention", lambda *given, **options: schedules.append(given[5]) or attend(*given, **options)
    )
    found = new_layer(batch)(*tokens_of(batch), batch.kv_cache.clone(), plan)
    assert schedules == [UNDIVIDED]
    assert_same_bits(found, new_layer(batch)(*tokens_of(batch), batch.kv_cache.clone(), gqa_step(batch, 0)))
    again = new_layer(batch)(*tokens_of(batch), batch.kv_cache.clone(), copy.deepcopy(plan))
    assert_same_bits(again, found)
    wrong = replace(plan, prefill_schedule=DecodeSchedule(batch_invariant=True))
    check_refused(new_layer(batch), batch, wrong, ValueError, "^metadata.prefill_schedule: expected None or UNDIVIDED")


@pytest.mark.parametrize(
    "backend, named",
    [
        ("other", "other"),
        ({"gqa_prefill": "other"}, "other"),
        ({"gqa_decode": "other", "gqa_prefill": "torch"}, "other.*torch"),
    ],
)
def test_builder_of_kernels_that_are_not_batch_invariant(backend, named):
    """Name a backend that is not batch-invariant to a batch-invariant builder -> refused by the constructor."""
    config = step_batch().config
    with registered(declaring("other", batch_invariant=False)):
        fast.GQAMetadataBuilder(config, 16, 1024, 8, backend=backend)
        with pytest.raises(UnsupportedConfiguration, match=f"{named}: is not batch-invariant$"):
            fast.GQAMetadataBuilder(config, 16, 1024, 8, batch_invariant=True, backend=backend)
        fast.GQAMetadataBuilder(config, 16, 1024, 8, batch_invariant=True)


def test_a_write_that_is_refused():
    """Bind the write to a backend for other dtypes -> no scale is chosen, and no query is observed."""
    batch = step_batch(cache_format=FP8_E4M3)
    with registered(declaring("half", OPS[2:], dtypes=(torch.float16,))):
        layer = new_layer(batch, backend="half")
        check_refused(layer, batch, gqa_step(batch, 5), UnsupportedConfiguration, "^half: .*torch.float32$")


def test_a_kernel_with_a_causal_mask_alone():
    """Promise a causal mask and plan another one -> refused before the write if the kernel has no other mask."""
    batch = step_batch(lens=((1, 20), (5, 9)), cache_format=FP8_E4M3)
    plan = gqa_step(batch, 1)
    prefill = replace(plan.prefill, mask=CAUSAL)
    wrong = replace(prefill, visible_lens=prefill.visible_lens - 1)
    with registered(declaring("causal", masks=(CAUSAL,))):
        layer = new_layer(batch, backend={"gqa_paged_attention": "causal"})
        check_refused(layer, batch, plan, UnsupportedConfiguration, "^causal: .*mask")
        plan = replace(plan, decode=replace(plan.decode, mask=CAUSAL))
        check_refused(
            layer, batch, replace(plan, prefill=wrong), ValueError, "^metadata.visible_lens: expected 5, the causal m"
        )
        layer(*tokens_of(batch), batch.kv_cache.clone(), replace(plan, prefill=prefill))


@pytest.mark.parametrize("kind", [AttentionType.DECODER, AttentionType.ENCODER])
def test_steps_without_a_cache(kind):
    """Bind packed attention to a backend that lacks a feature -> refused before any output or observation."""
    config = replace(FEATURES["window"], attention_type=kind)
    batch = step_batch(config, NEW)
    plan = gqa_step(batch, 1) if kind is AttentionType.DECODER else EncoderMetadata(config, offsets((1, 2, 5)), 5, 8)
    with registered(lacking("window")):
        layer = new_layer(batch, backend="lacking")
        check_refused(layer, batch, plan, UnsupportedConfiguration, "^lacking: has no window$", cached=False)


@pytest.mark.parametrize("merge, op", [("a2a", "pack_attn_state"), ("ag_rs", "weight_attn_out")])
def test_ranks_refuse_together(merge, op, monkeypatch, plain_errors):
    """Bind ops of ranks that share sequences to backends that cannot serve them -> all raise, and exchange nothing.

    Rank 0 alone counts the sinks, but every rank refuses a backend that has none.
    """
    config = GQAConfig(8, 2, 32, attention_sinks=True)
    ops = (op,) if merge == "ag_rs" else (op, "merge_packed_attn_states")
    half = declaring("half", ops, dtypes=(torch.float16,))

    def rank(groups):
        layer = fast.GQAAttention(config, context_parallel=groups, sinks=torch.zeros(8))
        batch = gqa_batch(layer.local_config, [(1, 20), (3, 9)], dtype=F32, seed=1, new_tokens=False)
        plan = replace(gqa_step(batch, 1), ownership=groups.ownership, config=config)
        unknown = replace(plan, decode=replace(plan.decode, backend="nosuch"))
        for name in ("all_gather", "all_to_all", "reduce_scatter"):
            monkeypatch.setattr(type(groups.cp_group), name, lambda *_: pytest.fail("the ranks exchanged something"))
        for backend, given, error, message in (
            ("lacking", plan, UnsupportedConfiguration, "^lacking: has no sinks$"),
            ("half", plan, UnsupportedConfiguration, "^half: .*torch.float32$"),
            (None, unknown, ValueError, "^metadata.decode.backend: expected one of cpu, .*, got nosuch$"),
        ):
            layer.backend = fast.backends.bind(backend)
            check_refused(layer, batch, given, error, message)
            call = batch.q[:1], batch.kv_cache, given.decode, layer.local_config, groups, layer.sinks[:8]
            with pytest.raises(error, match=message.replace(".decode", "")):
                fast.gqa_dcp_attention(*call, backend=backend)
        return True

    with all_registered(lacking("sinks"), half):
        assert fast.simulate(2, 1, rank, merge=merge) == [True, True]


# Outputs in place.


@pytest.mark.parametrize("merge", ["a2a", "ag_rs"])
def test_out_of_ranks(merge, plain_errors):
    """Attend over ranks into given tensors with any strides -> the bits of new tensors; a wrong tensor is refused."""
    config = GQAConfig(8, 2, 32, sliding_window=21)

    def rank(groups):
        local = groups.local_gqa_config(config)
        batch = gqa_batch(local, [(1, 20), (3, 40)], dtype=F32, seed=groups.cp_group.rank)
        call = batch.q, batch.kv_cache, batch.metadata, local, groups
        wanted = fast.gqa_dcp_attention(*call)
        for out in (torch.full_like(batch.q, 7), torch.full((4, 4, 64), 7.0)[..., ::2].transpose(0, 1)):
            state = fast.gqa_dcp_attention(*call, out=out)
            assert state.out is out
            assert_same_bits(out, wanted.out)
            assert_same_bits(state.lse, wanted.lse)
        for out, message in (
            (batch.q, "^out: expected memory that no input has"),
            (torch.zeros(4, 4, 64), r"^out: expected shape \[4, 4, 32\]"),
            (torch.zeros(4, 4, 32).double(), "^out: expected dtype torch.float32"),
        ):
            with pytest.raises(ValueError, match=message):
                fast.gqa_dcp_attention(*call, out=out)
        return True

    assert fast.simulate(2, 1, rank, merge=merge) == [True, True]


def test_ops_write_the_output_of_a_layer(monkeypatch):
    """Run steps with decodes, prefills, a cascade and ranks -> each op writes its rows; only e4m3 is stored later."""
    stored = []
    right = fast.gqa.layer._Output.store
    monkeypatch.setattr(fast.gqa.layer._Output, "store", lambda *given: stored.append(given[1]) or right(*given))

    def run(layer, batch, plan):
        stored.clear()
        wide = layer(*tokens_of(batch), batch.kv_cache.clone(), plan)
        assert stored == [] and wide.isfinite().all()
        rounded = layer(*tokens_of(batch), batch.kv_cache.clone(), plan, output_scale=torch.tensor(0.01))
        assert stored == [0, plan.num_decode_tokens] and rounded.dtype == E4M3

    batch, plan = cascade_step()
    for each in (plan, replace(plan, cascade=None)):
        run(new_layer(batch), batch, each)

    def rank(groups):
        layer = fast.GQAAttention(GQAConfig(8, 2, 32), context_parallel=groups)
        batch = gqa_batch(layer.local_config, [(1, 20), (3, 9)], dtype=F32, seed=1, new_tokens=False)
        run(layer, batch, replace(gqa_step(batch, 1), ownership=groups.ownership, config=layer.config))

    fast.simulate(1, 1, rank)


# Values of a plan are checked once.


@pytest.fixture
def checked(monkeypatch):
    """Return the list of the plans whose values are checked, in order."""
    found = []
    for module in (fast.gqa.attention, step_arguments):
        right = module.check_paged_values
        monkeypatch.setattr(
            module, "check_paged_values", lambda plan, *given, right=right: found.append(plan) or right(plan, *given)
        )
    return found


@pytest.mark.parametrize("check_every_call", [False, True])
def test_values_are_checked_once(check_every_call, checked):
    """Run steps of a layer on a CPU -> each part of the plan is checked once in each call, and an empty part never."""
    batch, cascade = cascade_step()
    for of, plan, parts in (
        (step_batch(ALL), None, ("decode", "prefill")),
        (step_batch(ALL, ((1, 20), (1, 3))), None, ("decode",)),
        (batch, cascade, ("decode", "prefill", "cascade.prefix", "cascade.suffix")),
    ):
        plan = gqa_step(of, min(len(of.lens), 5)) if plan is None else plan
        layer = new_layer(of, check_every_call=check_every_call)
        for _ in range(3):
            checked.clear()
            layer(*tokens_of(of), of.kv_cache.clone(), plan)
            wanted = [plan.cascade if name.startswith("cascade") else plan for name in parts]
            wanted = [getattr(each, name.removeprefix("cascade.")) for each, name in zip(wanted, parts, strict=True)]
            assert [id(each) for each in checked] == [id(each) for each in wanted]


def test_values_of_direct_calls_are_checked(checked):
    """Call attention directly, in a layer's kernel and after a layer -> the values are checked in every call."""
    batch = step_batch(lens=((1, 20), (1, 3)))
    plan, layer = gqa_step(batch, 2), new_layer(batch)
    call = batch.q, batch.kv_cache.nan_to_num(0), plan.decode, GROUPED
    for _ in range(3):
        fast.gqa_paged_attention(*call)
    assert len(checked) == 3
    layer(*tokens_of(batch), batch.kv_cache.clone(), plan)
    fast.gqa_paged_attention(*call)
    assert len(checked) == 5
    wrong = replace(plan.decode, visible_lens=plan.decode.visible_lens + 100)
    right = fast.backends.imported("fast.kernels.cpu:gqa_paged_attention")

    def inside(*given, **options):
        """Call attention with other plans than the plan of the layer."""
        fast.gqa_paged_attention(*call, backend="cpu")  # another cache
        with pytest.raises(ValueError, match="^metadata.visible_lens: expected a value in"):
            fast.gqa_paged_attention(batch.q, given[1], wrong, GROUPED, backend="cpu")
        return right(*given, **options)

    with registered(Backend("calling", 99, "cpu", {OPS[0]: replace(CPU.ops[OPS[0]], launcher=inside)})):
        layer(*tokens_of(batch), batch.kv_cache.clone(), plan)
    assert len(checked) == 8


def test_ranks_check_values_once(checked):
    """Run a step on one rank of a group -> the gathered queries use the checked plan."""

    def rank(groups):
        layer = fast.GQAAttention(GQAConfig(8, 2, 32), context_parallel=groups)
        batch = gqa_batch(layer.local_config, [(1, 20), (3, 9)], dtype=torch.float64, seed=1, new_tokens=False)
        plan = replace(gqa_step(batch, 1), ownership=groups.ownership, config=layer.config)
        value = layer(*tokens_of(batch), batch.kv_cache.clone(), plan)
        alone = fast.GQAAttention(layer.config)(*tokens_of(batch), batch.kv_cache.clone(), gqa_step(batch, 1))
        assert_close64(value, alone)

    fast.simulate(1, 1, rank)
    assert len(checked) == 4
