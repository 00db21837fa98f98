"""Tests of the benchmark `warmup`, which times `fast.warmup` in processes of its own."""

from __future__ import annotations

import json

import pytest
import torch

import fast

from ..benchmarks import warmup
from ..benchmarks.command_line import CannotRun
from ..benchmarks.layers import SMALL

CPU = ["--device", "cpu"]


def test_one_process(monkeypatch, capsys):
    """Run the part that a new process runs -> it warms up for the given layer, and prints seconds and variants."""
    calls = []
    monkeypatch.setattr(fast, "warmup", lambda config, **given: calls.append((config, given)) or ["a", "b", "c"])
    options = ["--threads", "3", "--cache-formats", "fp8_e4m3", "--decode-threshold", "2", "--heads", "8"]
    assert warmup.main([*CPU, warmup.IN_PROCESS, *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["variants"] == 3 and found["seconds"] > 0
    ((config, given),) = calls
    assert config.num_heads == 8 and config.hidden_size == SMALL.hidden_size
    chosen = given["cache_format"].name, given["threads"], given["decode_threshold"], given["device"]
    assert chosen == ("fp8_e4m3", 3, 2, "cpu")


def test_report(monkeypatch, tmp_path, capsys):
    """Run the benchmark -> each cache format has a row with times, variants and verdicts, and the file has its facts.

    The cold time of one cache format is exactly at its limit, which is met; the warm time of the other is above.
    """
    times = {("compute_dtype", 0): 90.0, ("compute_dtype", 1): 5.01, ("fp8_e4m3", 0): 90.5, ("fp8_e4m3", 1): 1.5}
    folders, asked = {}, []

    def time_process(argv, cache_format, threads, cache):
        runs = folders.setdefault(cache, [])
        runs.append(cache_format)
        asked.append((tuple(argv), threads))
        return {"seconds": times[cache_format, len(runs) - 1], "variants": 40}

    monkeypatch.setattr(warmup, "time_process", time_process)
    path = tmp_path / "warmup.json"
    assert warmup.main([*CPU, "--threads", "4", "--heads", "8", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert report.keys() >= {"command", "hardware", "versions", "date", "fast_sha256", "cores", "most_seconds"}
    assert [(row["cache_format"], row["met"]) for row in report["rows"]] == [
        ("compute_dtype", {"cold": True, "warm": False}), ("fp8_e4m3", {"cold": False, "warm": True}),
    ]  # fmt: skip
    assert all(row["cold"]["variants"] == 40 and row["threads"] == 4 for row in report["rows"])
    assert list(folders.values()) == [["compute_dtype"] * 2, ["fp8_e4m3"] * 2]  # cold and warm share a new folder
    assert set(asked) == {((*CPU, "--decode-threshold", "1", "--heads", "8"), 4)}
    shown = capsys.readouterr().out
    assert "90.0 " in shown and "5.0 !" in shown and "90.5 !" in shown and "1.5 " in shown and "1.5 !" not in shown


def test_failures(monkeypatch, capsys):
    """Ask for what cannot run -> one line with the reason; a process that fails tells its last line."""
    with pytest.raises(CannotRun, match=r"^the process with compute_dtype and 2 threads failed: .*no_such_backend"):
        warmup.time_process([*CPU, "--backend", "no_such_backend"], "compute_dtype", 2, "unused")
    assert warmup.main([*CPU, "--threads", "0"]) == 2
    assert "--threads: expected at least 1, got 0" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert warmup.main([]) == 2
    assert capsys.readouterr().err == "error: needs a CUDA device, and torch sees none\n"
