"""Tests of the environment variables that name backends, and of the parts of a step that a mapping may name."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

import fast
from fast import backends
from fast.backends import DECODES, Backend
from fast.backends.error_texts import visible
from fast.backends.own import CPU
from reference.interfaces import UnsupportedConfiguration

from ..support.backends import registered
from ..support.factories import DIRECT, assert_same_bits, make_layer, make_weights
from ..support.gqa import GROUPED, LENS, gqa_batch, gqa_step

PREFILL, DECODE, GQA_PREFILL, GQA_DECODE = backends.VARIABLES


def layer(**options):
    return make_layer(fast, DIRECT, make_weights(DIRECT, torch.float32), torch.float32, **options)


def builder(**options):
    return fast.MLAMetadataBuilder(DIRECT, 16, 128, 4, **options)


def test_without_variables(monkeypatch):
    for variable in backends.VARIABLES:
        monkeypatch.setenv(variable, "")
    assert layer().backend is None and builder().backend is None


def test_layer_and_builder_read_the_variables_once(monkeypatch):
    """Set both variables, build a layer and a builder, then change the variables -> the first names stay bound."""
    monkeypatch.setenv(PREFILL, "cpu")
    monkeypatch.setenv(DECODE, "triton")
    made, plans = layer(), builder()
    monkeypatch.setenv(DECODE, "cpu")
    wanted = {"flash_attn_varlen": "cpu"} | dict.fromkeys(DECODES, "triton")
    assert made.backend == plans.backend == wanted
    assert made.backend.variables == {"flash_attn_varlen": PREFILL} | dict.fromkeys(DECODES, DECODE)
    copied = copy.deepcopy(made)
    assert copied.backend == wanted and copied.backend.variables == made.backend.variables


def test_the_argument_wins(monkeypatch):
    """Name a backend by the argument and another one by the environment -> the argument binds its ops."""
    monkeypatch.setenv(DECODE, "hopper")
    monkeypatch.setenv(PREFILL, "torch_flash")
    bound = layer(backend={"mla_decode": "cpu"}).backend
    assert {bound[op] for op in DECODES} == {"cpu"} and bound["flash_attn_varlen"] == "torch_flash"
    assert bound.variables == {"flash_attn_varlen": PREFILL}
    assert set(layer(backend="cpu").backend.values()) == {"cpu"}


def test_direct_calls_do_not_read_the_environment(monkeypatch):
    monkeypatch.setenv(PREFILL, "nosuch")
    q = torch.randn(3, 2, 8)
    starts = torch.tensor([0, 3], dtype=torch.int32)
    assert fast.flash_attn_varlen(q, q, q, starts, starts, 3, 3, 1.0, True).out.shape == (3, 2, 8)


@pytest.mark.parametrize("make", [layer, builder])
@pytest.mark.parametrize(
    ("variable", "value", "error", "message"),
    [
        (PREFILL, "nosuch", ValueError, "trtllm_ragged, got nosuch"),
        (DECODE, "hoper", ValueError, "trtllm_ragged (the most similar name: hopper), got hoper"),
        (PREFILL, "\x00", ValueError, f"{PREFILL}: expected one of"),
        (DECODE, "torch_flash", UnsupportedConfiguration, f"{DECODE}: torch_flash has no kernel for mla_decode"),
        (PREFILL, "torch", UnsupportedConfiguration, f"{PREFILL}: torch has no kernel for flash_attn_varlen"),
    ],
)
def test_rubbish(make, variable, value, error, message, monkeypatch):
    if "\x00" in value:
        monkeypatch.setattr("fast.backends.environment.os.environ", {variable: value})
    else:
        monkeypatch.setenv(variable, value)
    with pytest.raises(error) as raised:
        make()
    assert message in str(raised.value) and "\n" not in str(raised.value).split("; ")[0]


def test_explain_names_the_variable(monkeypatch):
    monkeypatch.setenv(DECODE, "cpu")
    lines = backends.explain(DIRECT, device="cpu", dtype=torch.float32).splitlines()
    said = dict(line.split(": ", 1) for line in lines)
    assert {said[op] for op in DECODES} == {f"cpu, bound by {DECODE}"}
    assert said["apply_rope"].startswith("cpu, chosen by priority (")


def test_most_similar_name():
    with pytest.raises(ValueError, match=r"\(the most similar name: triton\), got tritn$"):
        backends.bind("tritn")
    with pytest.raises(ValueError, match=r"trtllm_ragged \(the most similar name: torch_flash\), got torch_flsh$"):
        backends.bind({"flash_attn_varlen": "torch_flsh"})


@pytest.mark.parametrize(
    "name, similar",
    [("CPU", "cpu"), ("FlashMLA", "flashmla"), ("flash-attn-3", "flash_attn_3"), ("fa3", "flash_attn_3"),
     ("FlashAttn2", "flash_attn_2"), (" cpu", "cpu")],
)  # fmt: skip
def test_similar_but_for_capitals_and_dashes(name, similar):
    """Spell a name as its library does -> the error has the right name."""
    with pytest.raises(ValueError, match=rf"\(the most similar name: {similar}\), got {visible(name)}$"):
        backends.bind(name)


def test_names_that_nobody_sees(monkeypatch):
    """Pass an empty name or blanks -> the error has the name in quotes; it is also in quotes for a variable."""
    for name, shown in (("", "''"), (" ", "' '"), ("cpu\n", r"'cpu\\n'")):
        for given in (name, {"mla_decode": name}, {name: "cpu"}):
            with pytest.raises(ValueError, match=rf", got {shown}$"):
                backends.bind(given)
    monkeypatch.setenv(DECODE, " ")
    with pytest.raises(ValueError, match=f"^{DECODE}: expected one of .*, got ' '$"):
        fast.MLAMetadataBuilder(DIRECT, 16, 128, 4)


def gqa_builder(**options):
    return fast.GQAMetadataBuilder(GROUPED, 16, 128, 4, **options)


def test_parts_of_a_step(monkeypatch):
    """Name one backend for decodes and another one for prefills -> each part of a step takes its own backend."""
    monkeypatch.setenv(GQA_PREFILL, "prefills")
    monkeypatch.setenv(GQA_DECODE, "decodes")
    called = []

    def noting(name, op):
        def launch(*arguments, **options):
            called.append((name, op))
            return backends.kernel("cpu", op)(*arguments, **options)

        return replace(CPU.ops[op], launcher=launch)

    attends = ("gqa_paged_attention", "gqa_varlen_attention")
    made = [Backend(name, -1, "cpu", {op: noting(name, op) for op in attends}) for name in ("decodes", "prefills")]
    batch = gqa_batch(GROUPED, LENS)
    with registered(made[0]), registered(made[1]):
        layer = fast.GQAAttention(GROUPED)
        wanted = {"gqa_prefill": "prefills", "gqa_varlen_attention": "prefills", "gqa_decode": "decodes"}
        assert layer.backend == wanted
        assert layer.backend.variables == {
            "gqa_prefill": GQA_PREFILL, "gqa_varlen_attention": GQA_PREFILL, "gqa_decode": GQA_DECODE
        }  # fmt: skip
        plan = gqa_step(batch, 2)
        assert plan.num_decodes > 0 and plan.num_prefills > 0
        found = layer(batch.q, batch.new_k, batch.new_v, batch.kv_cache.clone(), plan)
        assert called == [("decodes", "gqa_paged_attention"), ("prefills", "gqa_paged_attention")]
        assert_same_bits(found, fast.GQAAttention(GROUPED, backend="cpu")(
            batch.q, batch.new_k, batch.new_v, batch.kv_cache.clone(), plan
        ))  # fmt: skip
        called.clear()
        named = fast.GQAAttention(GROUPED, backend={"gqa_prefill": "decodes", "gqa_decode": "prefills"})
        assert named.backend == {"gqa_prefill": "decodes", "gqa_decode": "prefills", "gqa_varlen_attention": "prefills"}
        named(batch.q, batch.new_k, batch.new_v, batch.kv_cache.clone(), plan)
        assert called == [("prefills", "gqa_paged_attention"), ("decodes", "gqa_paged_attention")]
        called.clear()
        both = fast.GQAAttention(GROUPED, backend={"gqa_prefill": "prefills", "gqa_paged_attention": "decodes"})
        both(batch.q, batch.new_k, batch.new_v, batch.kv_cache.clone(), plan)
        assert called == [("decodes", "gqa_paged_attention"), ("prefills", "gqa_paged_attention")]
        called.clear()
        whole = fast.GQAAttention(GROUPED, backend={"gqa_paged_attention": "cpu"})
        assert whole.backend == {"gqa_paged_attention": "cpu", "gqa_varlen_attention": "prefills"}
        whole(batch.q, batch.new_k, batch.new_v, batch.kv_cache.clone(), plan)
        assert called == []


def test_a_refusal_names_the_part(monkeypatch):
    """Name a backend without a window for the prefills -> a step with prefills is refused, and a decode is served."""
    config = replace(GROUPED, sliding_window=19)
    plain = Backend("plain", -1, "cpu", {"gqa_paged_attention": replace(CPU.ops["gqa_paged_attention"], features=())})
    monkeypatch.setenv(GQA_PREFILL, "plain")
    with registered(plain):
        layer, batch = fast.GQAAttention(config), gqa_batch(config, LENS, new_tokens=False)
        cache = batch.kv_cache.clone()
        with pytest.raises(UnsupportedConfiguration, match="plain: has no window"):
            layer(batch.q, batch.new_k, batch.new_v, cache, gqa_step(batch, 2))
        assert_same_bits(cache, batch.kv_cache)
        layer(batch.q, batch.new_k, batch.new_v, cache, gqa_step(batch, len(batch.lens)))


def test_the_builder_asks_the_backend_of_the_decodes(monkeypatch):
    """Name backends with other numbers of programs -> a builder takes the number of the backend of the decodes."""
    support = CPU.ops["gqa_paged_attention"]
    made = [
        Backend(f"with_{count}", -1, "cpu", {support_op: replace(support, schedule_programs=lambda *_, n=count: n)})
        for support_op, count in (("gqa_paged_attention", 5), ("gqa_paged_attention", 7))
    ]
    with registered(made[0]), registered(made[1]):
        monkeypatch.setenv(GQA_DECODE, "with_5")
        monkeypatch.setenv(GQA_PREFILL, "with_7")
        assert gqa_builder()._programs_for(1) == 5
        assert gqa_builder(backend={"gqa_paged_attention": "with_7"})._programs_for(1) == 7
        assert gqa_builder(backend={"gqa_decode": "with_7"})._programs_for(1) == 7


@pytest.mark.parametrize("make", [lambda: fast.GQAAttention(GROUPED), gqa_builder])
@pytest.mark.parametrize(
    ("variable", "value", "error", "message"),
    [
        (GQA_DECODE, "tritn", ValueError, "(the most similar name: triton), got tritn"),
        (GQA_DECODE, "hopper", UnsupportedConfiguration, f"{GQA_DECODE}: hopper has no kernel for gqa_paged_attention"),
    ],
)
def test_rubbish_of_gqa(make, variable, value, error, message, monkeypatch):
    monkeypatch.setenv(variable, value)
    with pytest.raises(error) as raised:
        make()
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_the_other_family_does_not_read_a_variable(monkeypatch):
    for variable in (GQA_PREFILL, GQA_DECODE):
        monkeypatch.setenv(variable, "nosuch")
    assert layer().backend is None and builder().backend is None
    for variable in (GQA_PREFILL, GQA_DECODE):
        monkeypatch.delenv(variable)
    for variable in (PREFILL, DECODE):
        monkeypatch.setenv(variable, "nosuch")
    assert fast.GQAAttention(GROUPED).backend is None and gqa_builder().backend is None


def test_rubbish_in_a_mapping():
    with pytest.raises(UnsupportedConfiguration, match="^hopper: has no kernel for gqa_paged_attention$"):
        backends.bind({"gqa_prefill": "hopper"})
    with pytest.raises(ValueError, match=r"^backend\['gqa_decode'\]: expected one of .*, got nosuch$"):
        backends.bind({"gqa_decode": "nosuch"})
    with pytest.raises(ValueError, match="gqa_decode, .*gqa_prefill, .*, got gqa_decodes$"):
        backends.bind({"gqa_decodes": "cpu"})


def test_explain_has_a_line_for_each_part(monkeypatch):
    monkeypatch.setenv(GQA_DECODE, "cpu")
    lines = backends.explain(GROUPED, device="cpu", dtype=torch.float32).splitlines()
    said = dict(line.split(": ", 1) for line in lines)
    assert said["gqa_decode"] == f"cpu, bound by {GQA_DECODE}" and "gqa_paged_attention" not in said
    assert said["gqa_prefill"].startswith("cpu, chosen by priority (")
