"""Tests of the tables of the page Performance, which docs/hooks/performance.py draws from docs/results."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("mkdocs")

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture
def performance(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS / "hooks"))
    import performance

    return performance


def heads(page: str) -> list[tuple[list[str], int]]:
    """Return the heads of the columns of each table, and the number of columns at the left that are aligned left.

    The columns of the shape are aligned left, and the columns of numbers are aligned right.
    """
    found = re.findall(r"^\| (.*) \|\n\|((?::---\|)+)(?:---:\|)*$", page, re.MULTILINE)
    return [(head.split(" | "), aligned.count(":---")) for head, aligned in found]


def test_ratio_follows_the_shape(performance):
    """Draw the page -> in each table that compares speeds, the ratio directly follows the columns of the shape."""
    page = performance.filled((DOCS / "performance.md").read_text(encoding="utf-8"), DOCS)
    ratios = 0
    for head, shape in heads(page):
        places = [place for place, text in enumerate(head) if re.search(r"\bx .*speed\b", text)]
        assert places in ([], [shape]), head
        ratios += len(places)
    assert ratios >= 12
    assert any("x the speed of one GPU" in head for head, _ in heads(page))
    assert any("`fast`, x transformers' speed" in head for head, _ in heads(page))


def test_ratio_of_the_fastest_merge(performance):
    """Draw the table of several GPUs -> each ratio is the speed of the fastest merge / the speed of one GPU."""
    name = "h200-x4.json"
    report = json.loads((DOCS / "results" / name).read_text(encoding="utf-8"))["between_gpus"]
    lines = performance.filled(f"<!-- results: ranks {name} -->", DOCS).splitlines()[2:]
    rows = [row for gpus in sorted(key for key in report if key.endswith(" GPUs")) for row in report[gpus]["rows"]]
    assert 0 < len(rows) <= len(lines)
    for row, line in zip(rows, lines, strict=False):  # a sentence follows the rows
        times = {who: time["median_us"] for who, time in row["times"].items()}
        fastest = min(times, key=times.get)
        assert f"| {times['one GPU'] / times[fastest]:.2f} ({fastest}) | {times['one GPU']:.1f} |" in line


def test_summary_of_decodes(performance, tmp_path):
    """Summarise two shapes -> the means over the fastest peer of each shape; the shape behind a peer is named.

    Of several ways to time a peer, the fastest counts. A failed row does not count.
    """

    def row(dims: tuple, passed: bool = True, **times: dict[str, float]) -> dict:
        medians = {way: {who: {"median_us": us} for who, us in found.items()} for way, found in times.items()}
        return {"dims": dict(zip(("B", "S", "Sq", "N", "lens"), dims, strict=True)), "passed": passed, "times": medians}

    ours = {"fast": 50.0, "fast, planned": 40.0, "fast, by default": 30.0}
    one = ours | {"FlashMLA": 90.0, "FA3": 80.0, "FA3, schedule ahead": 60.0}
    two = ours | {"FlashMLA": 44.0, "FlashInfer": 48.0}
    mixed = (2, 32, 2, 16, "mixed")
    rows = [row((1, 8, 1, 128, "equal"), replayed=one, flushed=one | {"FA3, schedule ahead": 38.0}),
            row(mixed, replayed=two, flushed=two), row(mixed, False, replayed=ours, flushed=ours)]  # fmt: skip
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "decode.json").write_text(json.dumps({"rows": rows}))
    text = performance.filled("<!-- results: decode_summary decode.json -->", tmp_path)
    assert "Over 2 shapes" in text and "is 1.28 x (replayed) and 1.02 x (flushed)" in text
    assert "The peers are FlashMLA, FlashAttention-3 and FlashInfer." in text
    assert text.endswith("in 1 of 4 comparisons (1 request of 8 tokens, 128 heads, flushed: 0.95 x FlashAttention-3's "
                         "speed).")  # fmt: skip
    import contenders

    assert contenders.in_words(rows[1]["dims"]) == "2 requests of 2 to 32 tokens, each with 2 new tokens, 16 heads"


def test_planning(performance, tmp_path):
    """Draw the planning of steps -> facts, both tables and the command of the results file."""
    marker = "<!-- results: planned h200-planning.json -->"
    assert marker in (DOCS / "performance.md").read_text(encoding="utf-8")

    time = {"median_us": 55.5}
    report = {
        "hardware": "NVIDIA H200", "driver": "1", "threads": 1, "versions": {"torch": "2.13"}, "date": "2031-02-03",
        "command": "python -m tests.benchmarks.planning",
        "batches": [{"dims": {"decodes": 64, "prefills": 2}, "host_us": {"fast": time, "builder": time}}],
        "schedule": [{"B": 16, "programs": 132, "replayed": {"plan_decode": time}}],
    }  # fmt: skip
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "h200-planning.json").write_text(json.dumps(report))
    page = performance.filled(marker, tmp_path)
    assert page.count("55.5") == 3 and "2031-02-03" in page and "tests.benchmarks.planning\n```" in page


def test_moved_bytes_are_shown_once(performance):
    """Draw the page -> each way has one table of merges, from the file of the movement of cache entries."""
    page = performance.filled((DOCS / "performance.md").read_text(encoding="utf-8"), DOCS)
    (section,) = re.findall(r"^## Movement of cache entries\n(.*?)^## ", page, re.MULTILINE | re.DOTALL)
    assert page.count("| merge_bfloat16 ") == section.count("| merge_bfloat16 ") == 2
    assert "2026-11-21" not in section and "h200-movement.json" in section


def test_cascades(performance):
    """Draw three points of a grid -> a line for each prefix, and the number of choices that lose more than 10 %."""
    given = (64, 5.0, "whole", 0.0), (64, 8.0, "cascade", 0.25), (256, 30.0, "cascade", 0.0)
    points = [
        {"dims": {"B": 2, "prefix": prefix}, "times_us": {"whole": us, "cascade": 10.0}, "chosen": way, "loss": loss}
        for prefix, us, way, loss in given
    ]
    import cascades

    text = cascades.cascade_table({"points": points, "largest_loss": 0.25})
    assert "| 2 | 64 | 0.50 to 0.80 | 1 of 2 | 25.0% |" in text and "| 2 | 256 | 3.00 to 3.00 | 1 of 1 | 0.0% |" in text
    assert "Of 3 points, 1 has a choice" in text and text.endswith("The largest loss is 25.00 %.")
    later = cascades.cascade_table({"points": points, "largest_loss": 0.25, "choices": {"date": "2026-01-02"}})
    assert later == f"{text} The choices are those of the sources of 2026-01-02; the times are older."


def test_tables_of_the_loss_over_fp8_caches(performance):
    """Draw the page fp8 caches -> the increases, ratios and deviations of the results file, and a link to this file.

    The page names the measures in which `fp8_e4m3` exceeds the limit, and its source has no percentage of a loss.
    """
    name = "fp8-loss-cpu-2-cores.json"
    report = json.loads((DOCS / "results" / name).read_text(encoding="utf-8"))
    source = (DOCS / "use" / "fp8-caches.md").read_text(encoding="utf-8")
    page = performance.filled(source, DOCS, "../").partition("## What is lost where")[2]
    assert "<!-- results:" not in page and f"](../results/{name})" in page and report["command"] in page
    assert not re.search(r"[+-]\d\.\d+ %|\b\d\.\d+ times", source)
    for row in report["bits"]:
        for base, found in row["over"].items():
            for cache, each in found.items():
                shown = f"{each['increase']:+.2%} (± {each['standard_error']:.2%})"
                assert any(shown in line and f"| {row['model']} |" in line for line in page.splitlines()), (base, cache)
    assert all(f"{row['rope'] / row['latent']:.1f}" in page for row in report["scores"])
    assert all(f"{ratio['median']:.2f}" in page for row in report["random_models"] for ratio in row["ratios"].values())
    over = [row for row in report["bits"] if row["over"]["bfloat16"]["fp8_e4m3"]["increase"] > report["limit"]]
    verdict = next(line for line in page.splitlines() if line.startswith("`fp8_e4m3` needs"))
    assert verdict.count("model in") == len(over)
