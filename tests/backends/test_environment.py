"""Tests of the environment variables MLA_PREFILL_BACKEND and MLA_DECODE_BACKEND."""

from __future__ import annotations

import copy

import pytest
import torch

import fast
from fast import backends
from fast.backends import DECODES
from reference.interfaces import UnsupportedConfiguration

from ..support.factories import DIRECT, make_layer, make_weights

PREFILL, DECODE = backends.VARIABLES


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
        (PREFILL, "hopper", UnsupportedConfiguration, f"{PREFILL}: hopper has no kernel for flash_attn_varlen"),
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
