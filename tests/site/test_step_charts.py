"""Tests of docs/hooks/steps.py, which draws the bar chart and the table of steps, and the table of host (CPU) times.

In a page, a comment such as `<!-- results: steps h200-step.json -->` is replaced by the chart and the table of a
results file.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ..benchmarks import host, layers
from ..benchmarks.kernel_times import OTHER, PARTS

ROOT = Path(__file__).resolve().parents[2]
HEAD = {
    "command": "python -m tests.benchmarks.step", "hardware": "NVIDIA H200", "driver": "1", "threads": 1,
    "versions": {"torch": "2.13"}, "date": "2031-02-03", "processor": "Processor 9000",
}  # fmt: skip


@pytest.fixture
def performance(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "hooks"))
    import performance

    return performance


@pytest.fixture
def docs(tmp_path) -> Path:
    (tmp_path / "docs" / "results").mkdir(parents=True)
    return tmp_path / "docs"


def spread(median: float) -> dict:
    return {"median_us": median, "quartiles_us": [median, median], "runs": 3}


def step_report(parts: dict | None) -> dict:
    """Return a results file of the benchmark `step` with one row.

    Args:
        parts: microseconds of each part of the step; None for a file of a run on a CPU, which has no parts.
    """
    split = {} if parts is None else {"parts_us": parts}
    eager = {"wall_us": spread(30000.0), "host_us": spread(21000.0), "busy": 0.912, "busy_traced": 0.9, **split}
    row = {
        "batch": "mixed", "dims": vars(layers.Batch(128, 4096, 2, 1024, 512)), "eager": eager,
        "graph": {"wall_us": spread(25000.0), **split}, "ops_us": 24000.0, "ops": [], "graph_over_ops": 25 / 24,
    }  # fmt: skip
    return {**HEAD, "layers": 61, "weight_sets": 7, "heads": 128, "rows": [row]}


def write(docs: Path, name: str, report: dict) -> None:
    (docs / "results" / name).write_text(json.dumps(report))


def test_not_measured_yet(performance, docs):
    """Draw a section whose results file is missing -> a note if NOT_MEASURED names the file, and otherwise an error.

    The note contains the command that writes the file.
    """
    page = performance.filled("<!-- results: steps h200-step.json -->", docs)
    assert page.startswith("*Not measured yet.") and "--json docs/results/h200-step.json" in page
    assert not re.search(r"<svg|\| ", page)
    for missing in ("steps h200-stepp.json", "host h200-host.json"):
        with pytest.raises(FileNotFoundError):
            performance.filled(f"<!-- results: {missing} -->", docs)


def test_rows_that_lack_a_way(performance, docs):
    """Ask for "stepped" times in an old results file without such times -> a note; an unknown way is an error."""
    write(docs, "h200-decode.json", {**HEAD, "rows": [{"dims": {}, "times": {"replayed": {}}}]})
    page = performance.filled("<!-- results: times h200-decode.json . stepped -->", docs)
    assert page.startswith("*Not measured yet.") and HEAD["command"] in page
    with pytest.raises(IndexError):
        performance.filled("<!-- results: times h200-decode.json . replaid -->", docs)


def test_step_section(performance, docs):
    """Draw a section of steps -> a bar for the eager step, a bar for the CUDA graph, and a table with every number.

    A bar has one segment for each part with a time above 0.
    """
    parts = {"idle": 9000.0, "plan": 0.0, "projections": 12000.0, "attention": 7000.0, "movement": 2000.0}
    write(docs, "h200-step.json", step_report(parts))
    page = performance.filled("<!-- results: steps h200-step.json -->", docs)
    wide = page[page.index('<svg class="wide"') : page.index('<svg class="narrow"')]
    widths = [float(width) for width in re.findall(r'class="mark part \w+" [^>]*width="([\d.]+)"', wide)]
    assert len(widths) == 2 * 4 and widths[0] / widths[2] == pytest.approx(9 / 7, rel=1e-2)
    assert "mixed, eager, attention: 7.00 ms" in wide and "mixed, graph" in wide and "part plan" not in page
    for text in ("128 decodes over 4096 tokens and 2 prompts of 1024 tokens behind 512", "30.00", "21.00", "91.2 %",
                 "25.00", "24.00", "1.042", "2031-02-03", "python -m tests.benchmarks.step",
                 "share 7 sets of weights"):  # fmt: skip
        assert text in page, text


def test_step_section_without_parts(performance, docs):
    """Draw a section from a results file without parts -> the table without a chart."""
    write(docs, "h200-step.json", step_report(None))
    page = performance.filled("<!-- results: steps h200-step.json -->", docs)
    assert "<svg" not in page and "30.00" in page


def test_parts_have_names_and_colours(performance):
    """Look up every part of a step -> a name for the legend, and two colours: for the light and the dark scheme."""
    import steps

    assert set(steps.PARTS) == {"idle", *PARTS, OTHER}
    css = (ROOT / "docs" / "assets" / "site.css").read_text(encoding="utf-8")
    for part in ("idle", *PARTS):
        assert css.count(f"--part-{part}: #") == 2 and f".chart .part.{part} {{" in css


def test_host_section(performance, docs):
    rows = [
        {"op": "mla_decode", "target_us": 80.0, "host_us": {"fast": spread(77.4), "FA3": spread(101.6)}, "absent": {}},
        {"op": "expand_kv", "target_us": None, "host_us": {"fast": spread(33.0)}, "absent": {}},
    ]
    dims = vars(host.DIMS["cuda"])
    write(docs, "h200-host.json", {**HEAD, "calls": 200, "dims": dims, "rows": rows})
    page = performance.filled("<!-- results: host h200-host.json -->", docs)
    assert "| `mla_decode` | 77 | 80 | FA3 102 |" in page and "| `expand_kv` | 33 |  |  |" in page
    assert "Processor 9000" in page and "16 decodes over 4096 tokens" in page


@pytest.mark.parametrize(
    ("longest", "most", "expected"),
    [(30.0, 5, [0, 10, 20, 30]), (0.7, 10, [0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]), (9.9, 10, list(range(10)))],
)
def test_linear_ticks(performance, longest, most, expected):
    from bars import linear_ticks

    assert linear_ticks(longest, most) == pytest.approx(expected)
