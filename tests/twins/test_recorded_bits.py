"""Tests of the record of bits: the cases, the comparison of two records, and the stored results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from .. import recorded_bits, recorded_calls
from ..recorded_changes import BEFORE, CHANGES, Change
from .test_ops import OPS

RESULTS = sorted((Path(__file__).resolve().parents[2] / "docs" / "results").glob("*-bits.json"))
LATER_OPS = {  # ops that came after the move into folders
    "advance_step", "bmm_out", "compute_visible_lens", "dequantize_entries", "dequantize_entries_out",
    "flash_attn_varlen_out", "merge_attn_states_out", "mla_decode_out", "multiply_heads", "multiply_heads_out",
    "quantize_entries", "zero_padding_tokens",
}  # fmt: skip


def test_every_earlier_op_is_called():
    """List the cases -> each op that existed before the move into folders has a case."""
    names = {name.split()[1] for name, _ in recorded_calls.calls(torch.device("cpu"))}
    assert names == {op.removeprefix("mla_twins::") for op in OPS} - LATER_OPS


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_every_stored_change_has_a_reason(path):
    """Read the stored results -> no unexplained change, each case once, and the commits of `recorded_changes`."""
    report = json.loads(path.read_text(encoding="utf-8"))
    assert report["unexplained"] == [] and report["before"]["commit"] == BEFORE
    assert report["cases"] == len(report["digests"]) + len(report["changed"]) > 0
    assert report["digests"].keys().isdisjoint(report["changed"])
    assert {entry["commit"] for entry in report["changed"].values()} <= {change.commit for change in CHANGES}


def test_a_change_without_reason_is_reported(monkeypatch):
    """Compare three cases: one is the same, one changed on purpose, one changed -> only the last one is unexplained."""
    monkeypatch.setattr(recorded_bits, "CHANGES", (Change("^known", ("cpu",), "1234567", "why"),))
    recorded = {key: "" for key in ("hardware", "versions", "date", "fast_sha256")}
    recorded["digests"] = {"same": "a", "known": "b", "other": "c", "missing": "d"}
    found, differences = {"same": "a", "known": "x", "other": "y"}, {"known": 0.5}
    report = recorded_bits.report_of(recorded, found, differences, "cpu", "command")
    assert report["unexplained"] == ["missing", "other"] and report["same"] == 1
    assert report["changes"] == [
        {"commit": "1234567", "reason": "why", "cases": 1, "largest_relative_difference": 0.5}
    ]  # fmt: skip
    assert report["changed"]["missing"]["after"] is None


def test_largest_relative_difference():
    """Compare outputs -> the difference divided by the largest value; None if NaN or shapes differ."""
    x = torch.tensor([4.0, -1.0, torch.nan])
    assert recorded_bits.largest_relative_difference([x], [x + torch.tensor([0, 1.0, 0])]) == 0.25
    assert recorded_bits.largest_relative_difference([x], [x[:2]]) is None
    assert recorded_bits.largest_relative_difference([x], [x.nan_to_num()]) is None
    assert recorded_bits.largest_relative_difference([], []) is None
