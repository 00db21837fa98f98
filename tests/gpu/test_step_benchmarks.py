"""Tests of the benchmarks of host time and of whole steps, with small dims on a CPU."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from ..benchmarks import host, layers

HEAD = {"command", "hardware", "versions", "date", "fast_sha256"}


@pytest.mark.parametrize("module", [host])
def test_without_a_gpu(module, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert module.main([]) == 2
    assert capsys.readouterr().err == "error: needs a CUDA device, and torch sees none\n"


def test_batches():
    """Requests own disjoint blocks, and the slots are those of their last tokens."""
    torch.manual_seed(0)
    common = layers.make_batch([1, 70], [130, 200], "cpu")
    used = common.block_table[0, :3].tolist() + common.block_table[1, :4].tolist()
    assert sorted(used) == list(range(layers.num_blocks([130, 200])))
    assert common.slot_mapping[0] == common.block_table[0, 2] * 64 + 1
    assert common.slot_mapping[-1] == common.block_table[1, 3] * 64 + 7
    assert layers.positions_of([1, 3], [5, 4], "cpu").tolist() == [4, 1, 2, 3]


def test_config_of_a_device():
    assert layers.config_for("cuda").hidden_size == 7168 and layers.config_for("cuda", 16).num_heads == 16
    assert layers.config_for("cpu") == layers.SMALL


def test_host_on_a_cpu(tmp_path, capsys):
    """Every op is timed, and the file has the provenance, the sizes and the spread of every op."""
    assert host.main(["--device", "cpu", "--calls", "2", "--json", str(tmp_path / "host.json")]) == 0
    report = json.loads((tmp_path / "host.json").read_text())
    assert report.keys() >= HEAD | {"dims", "calls", "rows"}
    times = {row["op"]: row["host_us"]["fast"] for row in report["rows"]}
    assert times.keys() >= host.TARGETS_US.keys()
    assert all(spread["runs"] == 2 and spread["median_us"] > 0 for spread in times.values())
    assert {row["target_us"] for row in report["rows"]} == {None}  # the targets hold for the dims on a GPU
    assert "Host time of one eager call" in capsys.readouterr().out


def test_host_profile(capsys):
    """The profile names functions of the op, and prints no table of times."""
    assert host.main(["--device", "cpu", "--calls", "3", "--profile", "concat_and_cache_mla"]) == 0
    out = capsys.readouterr().out
    assert "one call under the profiler" in out and "concat_and_cache_mla" in out and "median us" not in out


def test_host_refusals(capsys, tmp_path):
    cpu = ["--device", "cpu"]
    for options, told in (
        ([*cpu, "--ops", "mla_encode"], "got mla_encode"),
        ([*cpu, "--profile", "mla_encode"], "got mla_encode"),
        ([*cpu, "--calls", "0"], "--calls: expected at least 1, got 0"),
        ([*cpu, "--peers", str(tmp_path)], "--peers: expected a folder with peers.py"),
    ):
        assert host.main(options) == 2
        assert told in capsys.readouterr().err


def test_peers_are_timed_beside(monkeypatch, capsys):
    """A peer whose library is missing is absent with the reason; a peer that raises does not end the benchmark."""
    here = SimpleNamespace(
        available=lambda: {"flashmla": False, "fa3": True, "vllm_triton": False},
        fa3_mla_decode=lambda *arguments: None,
        fa3_prefill=lambda *arguments: 1 / 0,
    )
    ops = host.make_ops(layers.SMALL, host.Dims(2, 20, 1, 3, 16), "cpu", None, here)
    rows = {row["op"]: row for row in host.measure(ops, "cpu", 2, with_targets=True)}
    assert set(rows["mla_decode"]["host_us"]) == {"fast", "FA3"}
    assert rows["mla_decode"]["absent"] == {"vLLM Triton": "its library could not be loaded"}
    assert rows["mla_decode, planned"]["absent"] == {"FlashMLA": "its library could not be loaded"}
    assert rows["run_prefill_new_tokens"]["absent"] == {"FA3": "ZeroDivisionError: division by zero"}
    assert rows["mla_decode"]["target_us"] == 80.0
    rows["mla_decode"]["host_us"]["fast"]["median_us"] = 81.0
    host.Console(width=120).print(host.draw([rows["mla_decode"]], "times"))
    assert "81.0 !" in capsys.readouterr().out
