"""Tests of the benchmark `backends`, which times a prefill with every backend that can serve it."""

from __future__ import annotations

import json

import pytest
import torch

import fast
from fast.backends import Backend, OpSupport

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
    ],
)
def test_bad_input(options, message, capsys):
    assert backends.main(["--device", "cpu", *options]) == 2
    assert capsys.readouterr().err.endswith(message)
