"""Tests of the benchmark `adapter_calls`, which times calls through adapters beside the calls of their libraries."""

from __future__ import annotations

import json
import types

import pytest
import torch

from fast.backends.adapters import torch_varlen

from ..benchmarks import adapter_calls
from ..benchmarks.adapter_calls import Entry, in_the_library, measure, recorded


def test_a_prefill_through_pytorch(tmp_path, capsys):
    """Time PyTorch's kernel on the CPU -> both host times, their difference, a profile; others are absent."""
    path = tmp_path / "calls.json"
    options = ["--device", "cpu", "--dtype", "float32", "--profile", "3", "--json", str(path)]
    assert adapter_calls.main(options) == 0
    report = json.loads(path.read_text())
    row, parts = report["rows"]
    assert (row["backend"], row["row"], row["calls_of_the_library"]) == ("torch_flash", "prefill", 1)
    assert parts["row"] == "prefill, keys in two parts"
    host = {who: times["median_us"] for who, times in row["host_us"].items()}
    assert host["library"] > 0 and row["added_us"] == pytest.approx(host["fast"] - host["library"])
    assert row["replayed_us"] == {} and report["absent"]["flashmla"] == "serves none of the rows here"
    assert {"hardware", "versions", "date", "fast_sha256", "command", "target_us"} <= report.keys()
    printed = capsys.readouterr().out
    assert printed.count("due to restriction <3>") == 2 and "torch_flash, prefill, keys in two parts\n" in printed


def test_the_same_calls_are_made_alone():
    """Record two calls, then make them alone -> the same function gets the same arguments; the library is restored."""
    seen = []
    library = types.SimpleNamespace(attend=lambda *arguments, **options: seen.append((arguments, options)))
    real = library.attend
    with recorded([Entry(library, "attend")]) as calls:
        library.attend(1, scale=2)
        library.attend(3)
    assert library.attend is real and len(calls) == 2
    in_the_library("flash_attn_3", calls)()
    assert seen == [((1,), {"scale": 2}), ((3,), {})] * 2


def test_nothing_is_recorded_afterwards():
    """Let an adapter keep a recorded function -> it calls the function of the library itself afterwards."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    real = varlen.varlen_attn
    with recorded(adapter_calls.entries_of("torch_varlen")):
        assert torch_varlen._library().func is not real
    assert torch_varlen._library().func is real is varlen.varlen_attn


def test_a_call_that_is_not_recorded(monkeypatch):
    """Call another function of the library than the benchmark records -> an error that names the backend, no time."""
    library = types.SimpleNamespace(attend=None, other=lambda: None)
    monkeypatch.setattr(adapter_calls, "entries_of", lambda backend: [Entry(library, "attend")])
    with pytest.raises(RuntimeError, match="^flashmla: no call of its library was recorded$"):
        measure("flashmla", lambda: library.other, "cpu", None)


def test_unknown_backend(capsys):
    assert adapter_calls.main(["--device", "cpu", "--backends", "flashinfer", "cpu"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: --backends: expected names of adapters (") and message.endswith(", got cpu\n")


def test_rows_of_an_adapter():
    """Ask for the rows of PyTorch's kernel -> the prefill without context alone, because it returns no LSE."""
    (backend,) = (each for each in adapter_calls.backends.registered() if each.name == "torch_flash")
    assert list(adapter_calls.cases(backend, torch.float32, "cpu")) == ["prefill", "prefill, keys in two parts"]
