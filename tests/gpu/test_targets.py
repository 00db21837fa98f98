"""Tests of the verdicts on the targets of the benchmarks. The rows are made up, so the tests need no GPU."""

from __future__ import annotations

import io
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from ..benchmarks import bytes as moves
from ..benchmarks import contest, decode, prefill, targets, weights


def result(row, **times: float | None) -> dict:
    """Return a row of a results file in which every contender has one time, in each way of timing.

    A contender is named as an argument: `FA3__schedule_ahead` is "FA3, schedule ahead". A time of None is left out.
    """
    medians = {who.replace("__", ", ").replace("_", " "): {"median_us": us} for who, us in times.items() if us}
    return {"dims": asdict(row), "times": {"flushed": medians, "replayed": dict(medians)}}


def met(found: list[dict]) -> list[bool]:
    return [verdict["met"] for verdict in found]


def test_judged():
    """Judge figures at their bounds and beyond them -> a bound itself is met; the text has everything in words."""
    found = targets.judged("speed", 0.85, least=0.85, op="gather")
    assert found == {"op": "gather", "figure": 0.85, "at_least": 0.85, "met": True,
                     "text": "speed: 0.850, at least 0.85: met"}  # fmt: skip
    found = targets.judged("time", 1.0501, most=1.05)
    assert found == {"figure": 1.0501, "at_most": 1.05, "met": False, "text": "time: 1.050, at most 1.05: missed"}
    assert targets.judged("speed", 0.8499, least=0.85)["met"] is False
    assert targets.judged("time", 1.05, most=1.05)["met"] is True
    row = result(prefill.ROWS[0], fast=1.0)
    assert targets.named(row) == "B 1, Sq 4096, Skv 4096, N 128, causal, equal"


def test_decodes():
    """Judge decodes -> the faster schedule of `fast` against the fastest peer; means only if all target rows are there.

    A peer that is 10 % slower in every row meets no mean: the targets are 1.12 and 1.18.
    """
    assert len(decode.TARGET_ROWS) == 19
    ragged = next(row for row in decode.ROWS if row.lens == "ragged")  # no verdict on stepped times
    rows = [result(row, fast=50.0, fast__planned=40.0, fast__invariant=1.0, FlashMLA=90.0, FA3__schedule_ahead=44.0)
            for row in decode.ROWS]  # fmt: skip
    found = decode.verdicts(rows)
    assert len(found) == 2 * 20 and [each["figure"] for each in found] == pytest.approx([1.1] * 40)
    assert met(found) == [*[True] * 19, False] * 2
    assert [each["at_least"] for each in found if "peers" in each] == [1.12, 1.18]
    assert found[19]["peers"] == ["FA3, schedule ahead", "FlashMLA"]
    assert found[0]["text"] == (
        "B 1, S 8192, Sq 1, N 128, equal: FA3, schedule ahead's time / time of fast, flushed: 1.100, at least 1.0: met"
    )
    rows[1]["times"]["flushed"]["FlashInfer"] = {"median_us": 39.9}
    found = decode.verdicts(rows[:2])
    assert met(found) == [True, False, True, True] and "FlashInfer's time" in found[1]["text"]
    assert decode.verdicts([result(decode.ROWS[0], fast=50.0, fast__planned=40.0)]) == []  # without peers
    assert decode.verdicts([{"dims": asdict(decode.ROWS[0]), "passed": False}]) == []  # not timed
    stepped = {"fast": 100.0, "fast, planned": 103.0, "fast, by default": 103.1, "FlashMLA": 50.0}
    times = {"stepped": {who: {"median_us": time} for who, time in stepped.items()}}
    found = decode.verdicts([{"dims": asdict(row), "times": times} for row in (decode.ROWS[0], ragged)])
    assert met(found) == [True, False] and [each["figure"] for each in found] == pytest.approx([1.03, 1.031])
    assert found[0]["text"].startswith(
        "B 1, S 8192, Sq 1, N 128, equal: time of fast, planned / time of fast, stepped: "
    )
    extra = decode.Row(128, 4096, 1, 32)
    assert extra in decode.ROWS and decode.verdicts([result(extra, fast=50.0, FlashMLA=90.0)]) == []


@pytest.mark.parametrize("number, floor", [(1, 0.95), (2, 0.95), (3, 0.98), (5, 0.95), (6, 1.05), (7, 1.05)])
def test_prefills(number, floor):
    """Judge a prefill at its floor and below it -> the fastest peer counts, but no call that joins the keys."""
    row = prefill.ROWS[number]
    for time, expected in ((100 * floor, True), (100 * floor - 0.1, False)):
        found = prefill.verdicts([result(row, fast=100.0, FA3=200.0, FlashInfer=time, FA3__with_the_join=1.0)])
        assert met(found) == [expected] * 2 and [each["way"] for each in found] == ["flushed", "replayed"]
        assert all(each["at_least"] == floor and "FlashInfer's time" in each["text"] for each in found)


def test_prefills_in_portable_triton():
    """Judge portable Triton -> at least 0.65 of FA3's speed in every row, also in rows without a floor."""
    row = prefill.ROWS[0]
    for time, expected in ((65.0, True), (64.9, False)):
        found = prefill.verdicts([result(row, fast=70.0, fast__portable_Triton=100.0, FA3=time, FlashInfer=1.0)])
        assert met(found) == [expected] * 2 and all("portable Triton" in each["text"] for each in found)
    assert prefill.verdicts([result(row, fast=70.0, FA3=1.0)]) == []


@pytest.mark.parametrize("op", moves.MAKERS)
def test_moved_bytes(op):
    """Judge an operation at its bound and below it, flushed -> the bounds of the project; a cache write has none."""
    floor = next((least for name, least in moves.LEAST_OF_COPY.items() if op.startswith(name)), None)
    rows = [result(moves.Row(op, tokens), fast=100.0, plain_copy=time)
            for tokens, time in ((65536, 90.0), (65536, 87.9), (65536, 84.9), (1024, 1.0))]  # fmt: skip
    found = moves.verdicts(rows)
    if op.startswith("cache_write"):
        assert floor is None and found == []
    else:
        assert met(found) == [True, floor <= 0.85, False] and {each["at_least"] for each in found} == {floor}
    rows[0]["times"].pop("flushed")
    assert len(moves.verdicts(rows)) == len(found[1:])


def test_products_of_weights():
    """Judge absorbed products -> at most 1.05 x the time of torch.bmm, for at most 256 tokens and no expansion."""
    for op in weights.OPS[:2]:
        row = weights.Row(op, 256, 16)
        assert met(weights.verdicts([result(row, fast=105.0, **{"torch.bmm": 100.0})])) == [True] * 2
        assert met(weights.verdicts([result(row, fast=105.2, **{"torch.bmm": 100.0})])) == [False] * 2
        assert weights.verdicts([result(row, fast=105.2)]) == []  # an older file has no torch.bmm
    assert weights.verdicts([result(weights.Row(op, 512, 16), fast=105.2, **{"torch.bmm": 100.0})]) == []
    assert weights.verdicts([result(weights.Row(weights.EXPANSION, 64, 16), fast=105.2)]) == []


@pytest.mark.parametrize("cache_format", ["compute_dtype", "fp8_e4m3"])
def test_verdicts_are_printed(cache_format, monkeypatch, tmp_path):
    """Run a benchmark with a fake contest -> its verdicts are printed and written; other cache formats have none."""
    console, written = Console(width=190, record=True, file=io.StringIO()), {}
    monkeypatch.setattr(contest, "check_device", lambda device: None)
    monkeypatch.setattr(contest, "wide_console", lambda width: console)
    monkeypatch.setattr(contest, "Clock", lambda milliseconds: SimpleNamespace(not_captured={}))
    rates = contest.Ceilings(copy_gb_s=1.0, read_gb_s=1.0, matmul_tflops=1.0, sustained_matmul_tflops=1.0)
    monkeypatch.setattr(contest, "measure_ceilings", lambda clock: rates)
    monkeypatch.setattr(contest, "provenance", lambda name, argv, device: {})
    monkeypatch.setattr(contest, "write_report", lambda path, report, console: written.update(report))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(decode, "make_case", lambda *given, **options: None)
    row = result(decode.ROWS[0], fast=50.0, fast__planned=41.0, FA3=40.0)
    timed = {**row, "passed": True, "parity": {}, "absent": {}, "flops": 1, "bytes": 1}
    monkeypatch.setattr(contest, "contest", lambda case, clock, ways: timed)
    monkeypatch.setattr(contest, "draw_table", lambda *given: "the table")
    argv = ["--rows", contest.row_name(decode.ROWS[0]), "--json", str(tmp_path / "x"), "--cache-format", cache_format]
    assert decode.main(argv) == 0
    shown = console.export_text()
    if cache_format == "compute_dtype":
        assert met(written["targets"]) == [False, False] and shown.count("at least 1.0: missed") == 2
    else:
        assert written["targets"] == [] and "missed" not in shown
