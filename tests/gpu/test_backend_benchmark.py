"""Tests of the benchmark `backends`, which times a prefill with every backend that can serve it."""

from __future__ import annotations

import argparse
import json
import sys

import pytest
import torch

import fast
from fast.backends import AttentionSizes, Backend, OpSupport, measured
from fast.backends.adapters import conversion
from fast.backends.measured import MeasuredRow, MeasuredTable
from fast.backends.own import CPU

from ..benchmarks import backends
from ..support.backends import registered


def test_every_backend_is_timed(tmp_path, capsys):
    """Time two small rows on the CPU -> each backend has a time, the default first; errors are within the budget."""
    path = tmp_path / "backends.json"
    options = ["--device", "cpu", "--rows", "2,5,2", "1,40,3", "2,6,2,70", "--rounds", "2", "--json", str(path)]
    assert backends.main(options) == 0
    report = json.loads(path.read_text())
    assert [tuple(row["dims"].values()) for row in report["rows"]] == [
        (2, 5, 2, 0), (1, 40, 3, 0), (2, 6, 2, 70)
    ]  # fmt: skip
    for row in report["rows"]:
        assert list(row["backends"]) == (["cpu"] if row["dims"]["C"] else ["cpu", "torch_flash"])  # no LSE
        assert row["backends"]["cpu"]["times_faster_than_default"] == 1
        assert all(found["median_us"] > 0 and found["error_of_budget"] <= 1 for found in row["backends"].values())
    assert {"hardware", "versions", "date", "fast_sha256", "command"} <= report.keys()
    assert "torch_flash" in capsys.readouterr().out


@pytest.mark.parametrize("row", [backends.Row(2, 5, 2), backends.Row(2, 6, 2, 70)])
@pytest.mark.parametrize("fast_one", ["other", "cpu"])
def test_the_default_is_the_choice_of_a_builder(row, fast_one, monkeypatch):
    """Ship times in which one backend is faster -> it is the default of the row, and the choice of `backend=None`."""
    other = Backend("other", -5, "cpu", {"flash_attn_varlen": CPU.ops["flash_attn_varlen"]})
    times = {name: 1.0 if name == fast_one else 2.0 for name in ("cpu", "other")}
    slow_elsewhere = {name: 3.0 - time for name, time in times.items()}
    calls = [(True, row.T), *([(False, row.C)] if row.C else [])]  # whether the mask is causal, and the keys
    sizes = [(causal, AttentionSizes.rounded(row.B, row.N, row.T, keys)) for causal, keys in calls]
    far = AttentionSizes(64, 64, 4096, 4096)
    table = MeasuredTable("a GPU", (
        *(MeasuredRow(causal, each, times, torch.float32) for causal, each in sizes),
        *(MeasuredRow(causal, far, slow_elsewhere, torch.float32) for causal, _ in sizes),
    ))  # fmt: skip
    with registered(other):
        monkeypatch.setattr(measured, "table_of", lambda device: table)
        inputs = backends.make_inputs(row, torch.float32, "cpu")
        assert backends.candidates(row, torch.float32, "cpu")[0] == fast_one
        assert backends.plan_of(row, inputs, torch.float32, None).backend == fast_one


@pytest.mark.parametrize("row", [backends.Row(2, 5, 2), backends.Row(2, 6, 2, 70)])
def test_keys_as_from_a_layer(row, monkeypatch):
    """Time a backend that needs whole keys -> it gets whole keys, and no timed call joins the two parts of the keys."""
    joined = []

    def join(k, k_pe):
        joined.append(k_pe.shape[1])
        return conversion.whole_keys(k, k_pe)

    monkeypatch.setattr(sys.modules["fast.attention.varlen"], "whole_keys", join)
    whole = Backend("whole", -5, "cpu", {"flash_attn_varlen": OpSupport(whole_keys_launcher, whole_keys=True)})
    with registered(whole):
        found = backends.measure(row, torch.float32, "cpu", 2)
        assert found["backends"]["whole"]["error_of_budget"] <= 1 and set(joined) == {0}
        inputs = backends.make_inputs(row, torch.float32, "cpu")
        assert backends.keys_for("cpu", inputs) == (inputs.k_nope, inputs.k_pe)


def whole_keys_launcher(q, k, k_pe, v, *rest):
    """Attend whole keys with the kernel of "cpu", which takes them without a rope part."""
    assert k_pe is None and k.shape[2] == q.shape[2]
    return fast.backends.kernel("cpu", "flash_attn_varlen")(q, k, None, v, *rest)


def test_a_wrong_backend_is_not_timed():
    """Register a backend with a wrong scale -> an error that names it, and no time."""

    def attend(*arguments):
        out, _ = fast.backends.kernel("cpu", "flash_attn_varlen")(*arguments)
        return out.mul_(1.02), None

    with (
        registered(Backend("wrong", -5, "cpu", {"flash_attn_varlen": OpSupport(attend, lse=False)})),
        pytest.raises(RuntimeError, match="wrong.* exceeds the budget"),
    ):
        backends.measure(backends.Row(1, 9, 2), torch.float32, "cpu", 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--rows", "1,2"],
            "error: --rows: expected B,T,N or B,T,N,C with at least 2 tokens, such as 1,512,16, got 1,2\n",
        ),
        (["--rows", "1,0,2"], "such as 1,512,16, got 1,0,2\n"),
        (["--rounds", "0"], "error: --rounds: expected at least 1, got 0\n"),
        (["--asset"], "error: --asset: expected --device cuda --dtype bfloat16, got cpu, float32\n"),
    ],
)
def test_bad_input(options, message, capsys):
    assert backends.main(["--device", "cpu", *options]) == 2
    assert capsys.readouterr().err.endswith(message)


def test_the_times_that_ship(tmp_path, monkeypatch, capsys):
    """Time the shapes of `--grid` for the file that ships -> the file has the rows of the results file.

    The file is in the place where `fast` looks for the times of this compute capability.
    """
    path, small = tmp_path / "results.json", (backends.Row(1, 5, 2), backends.Row(1, 3, 2, 9))
    monkeypatch.setattr(backends, "GRID", small)
    monkeypatch.setattr(backends, "asset_path", lambda arguments: tmp_path / "9.0.json" if arguments.asset else None)
    options = ["--device", "cpu", "--grid", "--rounds", "1", "--json", str(path)]
    assert backends.main(options) == 0 and not (tmp_path / "9.0.json").exists()
    assert backends.main([*options, "--asset"]) == 0
    assert json.loads((tmp_path / "9.0.json").read_text()) == json.loads(path.read_text())
    assert [tuple(row["dims"].values()) for row in json.loads(path.read_text())["rows"]] == [*map(tuple, small)]
    capsys.readouterr()
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    arguments = argparse.Namespace(asset=True, device="cuda", dtype="bfloat16")
    assert backends.asset_path(arguments) == measured.TABLES / "9.0.json"


def test_shapes_of_the_grid_differ():
    """Round the sizes of the grid as a choice does -> other sizes for each shape, so that each has times of its own."""
    sizes = [(not row.C, AttentionSizes.rounded(row.B, row.N, row.T, row.C or row.T)) for row in backends.GRID]
    assert len(set(sizes)) == len(sizes) >= 8
