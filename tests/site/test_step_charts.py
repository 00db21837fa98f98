"""Tests of docs/hooks/steps.py and docs/hooks/weights.py: steps, host (CPU) times, fp8 caches and quantised weights.

In a page, a comment such as `<!-- results: steps h200-step.json -->` is replaced by the chart and the table of a
results file.
"""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pytest

from ..benchmarks import contest, host, layers, warmup, weights
from ..benchmarks.kernel_times import OTHER, PARTS
from ..benchmarks.step import HOST_PLAN

SCATTERED = "fast, scattered blocks"  # name of a variant in tests.benchmarks.gqa_vs_transformers
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


def test_decoded_tokens(performance, docs):
    """Draw the section of one layer on a CPU -> a note if its file is missing, otherwise table, chart and command."""
    marker, name = "<!-- results: decoded_tokens gqa-cpu-2-cores.json -->", "gqa-cpu-2-cores.json"
    command = (
        "python -m tests.benchmarks.gqa_vs_transformers --contexts 1024 4096 --threads 2 --steps 25 "
        f"--reference-steps 3 --json docs/results/{name}"
    )
    page = performance.filled(marker, docs)
    assert page.startswith("*Not measured yet.") and f"\n{command}\n" in page and "<svg" not in page
    rows = [
        {"context": context, "who": who, "ms_median": ms * context / 1024, "times_faster_than_transformers": 8.4 / ms}
        for context in (1024, 4096)
        for who, ms in (("transformers", 8.4), ("reference", 95.5), ("fast", 6.0), (SCATTERED, 6.7))
    ]
    write(docs, name, {**HEAD, "command": command, "rows": rows})
    page = performance.filled(marker, docs)
    assert "Not measured" not in page and "2031-02-03" in page and f"```sh\n{command}\n```" in page
    assert "| context | `fast`, x transformers' speed | transformers | `reference` | `fast` | " in page
    assert "| 1024 | 1.40 | 8.4 | 95.5 | 6.0 | 6.7 |" in page and "| 4096 | 1.40 | 33.6 | 382.0 | 24.0 | 26.8 |" in page
    assert "fast, 4096 tokens: 24.0 ms" in page and f"{SCATTERED}, 4096 tokens" not in page


def test_the_page_has_the_section_of_ordinary_models(performance):
    """Draw the page Performance -> its section has either the note or the facts of the file, as the file exists."""
    page = performance.filled((ROOT / "docs" / "performance.md").read_text(encoding="utf-8"), ROOT / "docs")
    section = page.split("## Ordinary models in transformers, on a CPU\n")[1].split("\n## ")[0]
    measured = (ROOT / "docs" / "results" / "gqa-cpu-2-cores.json").exists()
    assert ("Not measured yet" in section) != measured and ("(results/gqa-cpu-2-cores.json)" in section) == measured
    assert "python -m tests.benchmarks.gqa_vs_transformers --contexts 1024 4096 --threads 2" in section


def test_rows_that_lack_a_way(performance, docs):
    """Ask for "stepped" times in a results file without such times -> a note; an unknown kind of time is an error."""
    write(docs, "h200-decode.json", {**HEAD, "rows": [{"dims": {}, "times": {"replayed": {}}}]})
    page = performance.filled("<!-- results: times h200-decode.json . stepped -->", docs)
    assert page.startswith("*Not measured yet.") and HEAD["command"] in page
    with pytest.raises(IndexError):
        performance.filled("<!-- results: times h200-decode.json . replaid -->", docs)


def test_step_section(performance, docs):
    """Draw a section of steps -> a bar for the eager step, a bar for the CUDA graph, and a table with every number.

    A bar has one segment for each part with a time above 0. Older files have no time of the host's planning.
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
    assert "plan on the host" not in page
    report = step_report({HOST_PLAN: 1500.0, **parts, "idle": 7500.0})
    report["rows"][0]["eager"]["host_plan_us"] = spread(1500.0)
    write(docs, "h200-step.json", report)
    page = performance.filled("<!-- results: steps h200-step.json -->", docs)
    assert "mixed, eager, plan on the host: 1.50 ms" in page and "the column *graph* does not contain it" in page


def test_step_section_without_parts(performance, docs):
    """Draw a section from a results file without parts -> the table without a chart."""
    write(docs, "h200-step.json", step_report(None))
    page = performance.filled("<!-- results: steps h200-step.json -->", docs)
    assert "<svg" not in page and "30.00" in page


def test_parts_have_names_and_colours(performance):
    """Look up every part of a step -> a name for the legend, and two colours: for the light and the dark scheme."""
    import steps

    assert set(steps.PARTS) == {HOST_PLAN, "idle", *PARTS, OTHER}
    css = (ROOT / "docs" / "assets" / "site.css").read_text(encoding="utf-8")
    for part in (HOST_PLAN, "idle", *PARTS):
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


def test_warmup_section(performance, docs):
    """Draw the section of warm-ups -> a note if the file is missing; otherwise seconds, variants and missed limits."""
    request = "<!-- results: warmups h200-warmup.json -->"
    assert "python -m tests.benchmarks.warmup --json docs/results/h200-warmup.json" in performance.filled(request, docs)
    rows = [
        {"cache_format": name, "threads": 4, "cold": {"seconds": 61.24, "variants": 71},
         "warm": {"seconds": warm, "variants": 71}, "met": {"cold": True, "warm": warm <= 5}}
        for name, warm in (("compute_dtype", 2.31), ("fp8_e4m3", 6.0))
    ]  # fmt: skip
    write(docs, "h200-warmup.json", {**HEAD, "cores": 16, "most_seconds": warmup.MOST_SECONDS, "rows": rows})
    page = performance.filled(request, docs)
    assert (
        "| `compute_dtype` | 4 | 71 | 61.2 | 2.3 |" in page and "| `fp8_e4m3` | 4 | 71 | 61.2 | 6.0 (missed) |" in page
    )
    assert "cold (limit 90)" in page and "on 16 cores" in page and "2031-02-03" in page


@pytest.mark.parametrize(
    ("longest", "most", "expected"),
    [(30.0, 5, [0, 10, 20, 30]), (0.7, 10, [0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]), (9.9, 10, list(range(10)))],
)
def test_linear_ticks(performance, longest, most, expected):
    from bars import linear_ticks

    assert linear_ticks(longest, most) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["h200-decode-fp8-ds-mla.json", "h200-weights.json"])
def test_commands_of_missing_files(performance, docs, name):
    """Draw a section whose file is missing -> a note with a command whose options the benchmark accepts.

    docs/performance.md has a section for each file that `name` lists.
    """
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    requests = [line for line in page.splitlines() if f" {name} " in line and line.startswith("<!-- results:")]
    assert requests
    for request in requests:
        note = performance.filled(request, docs)
        assert note.startswith("*Not measured yet.") and not re.search(r"\| ", note)
        (command,) = re.findall(r"^python -m tests\.benchmarks\.(.*)$", note, re.MULTILINE)
        module, *argv = command.split()
        assert argv[-2:] == ["--json", f"docs/results/{name}"]
        benchmark = importlib.import_module(f"tests.benchmarks.{module}")
        parser = contest.make_parser(module, "", benchmark.ROWS, ("flushed", "replayed"), "")
        parser.add_argument("--cache-format")
        rows = contest.parse_rows(benchmark.ROWS, parser.parse_args(argv).rows)
        assert len(rows) == len(benchmark.ROWS)


def timed_row(dims: dict, times: dict, **more) -> dict:
    """Return a row of a benchmark in which all contenders passed."""
    parity = {who: [{"passed": True}] for who in times}
    return {"dims": dims, "times": {"replayed": {who: spread(time) for who, time in times.items()}}, "passed": True,
            "absent": {}, "parity": parity, **more}  # fmt: skip


def test_movement_section(performance, docs):
    """Draw the section of byte movement -> the speed of each op relative to a plain copy, a ratio of two times."""
    rows = [timed_row({"op": f"gather{suffix}", "tokens": 65536}, {"fast": time, "plain copy": 40.0})
            for suffix, time in (("", 50.0), ("_fp8_e4m3", 44.0))]  # fmt: skip
    write(docs, "h200-movement.json", {**HEAD, "command": "python -m tests.benchmarks.bytes", "rows": rows})
    page = performance.filled("<!-- results: measured h200-movement.json replayed -->", docs)
    assert "x plain copy's speed" in page and "tests.benchmarks.bytes" in page and "2031-02-03" in page
    assert "| gather | 0.80 | 50.0 | **40.0** |" in page and "| gather_fp8_e4m3 | 0.91 | 44.0 | **40.0** |" in page


def test_decode_section_names_peers_outside_the_budget(performance, docs):
    """Draw the section of fp8 decodes -> it names the peers whose errors exceed the budget, and shows their times."""
    rows = [timed_row({"B": batch, "S": 64}, {"fast": 30.0, "FlashMLA fp8": 20.0, "vLLM Triton": 60.0})
            for batch in (1, 2)]  # fmt: skip
    write(docs, "h200-decode-fp8.json", {**HEAD, "rows": rows})
    request = "<!-- results: measured h200-decode-fp8.json replayed -->"
    assert "exceeds the budget" not in performance.filled(request, docs)
    rows[1]["parity"]["FlashMLA fp8"][0]["passed"] = False
    write(docs, "h200-decode-fp8.json", {**HEAD, "rows": rows})
    page = performance.filled(request, docs)
    assert "the error of FlashMLA fp8 exceeds the budget" in page and "**20.0**" in page
    assert "the outputs of `fast` passed" in page and "the outputs of every row passed" not in page


def test_weights_section(performance, docs):
    """Draw the section of quantised weights -> every time, speed, byte count and error, also of a row that failed."""
    names = [weights.OURS, weights.PER_HEAD, weights.ONE_SCALE]
    figures = {
        "errors": dict(zip(names, (1.63e-3, 2.65e-2, 2.71e-2), strict=True)),
        "contender_bytes": dict(zip(names, (18e6, 9.5e6, 9.4e6), strict=True)),
        "held_bytes": dict(zip(names, (16e6, 8.1e6, 8e6), strict=True)),
    }
    rows = [
        timed_row({"op": "query_to_latent", "T": 16, "N": 128}, dict(zip(names, (9.0, 6.0, 5.0), strict=True)),
                  **figures),
        {"dims": {"op": "latent_to_value", "T": 1, "N": 16}, "passed": False, **figures},
        timed_row({"op": "expand_kv", "T": 512, "N": 128}, {"fast": 70.0, weights.ROUNDING: 35.0},
                  **{key: {"fast": 3e6, weights.ROUNDING: 1e6} for key in figures}),
    ]  # fmt: skip
    errors = {"all": 1.5e-2, "worst head": 2.5e-2}
    scales = [{"weight": "random, query_to_latent", "N": 128, "one scale": errors, "one for each head": errors}]
    write(docs, "h200-weights.json", {**HEAD, "rows": rows, "scales": scales})
    page = {part: performance.filled(f"<!-- results: weights h200-weights.json {part} -->", docs)
            for part in ("products", "expansions", "scales")}  # fmt: skip
    lines = page["products"].splitlines()
    first = "| `query_to_latent` | 16 | 128 | the product in bfloat16 | 1.00 | 9.0 (9.0 to 9.0) | 18.00 | 16.00 |"
    assert f"{first} 1.6e-03 |" in lines
    assert "|  |  |  | e4m3 | 1.50 | 6.0 (6.0 to 6.0) | 9.50 | 8.10 | 2.6e-02 |" in lines
    assert (
        "| `latent_to_value` | 1 | 16 | the product in bfloat16 | parity failed | - | 18.00 | 16.00 | 1.6e-03 |"
        in lines
    )
    assert "expand_kv" not in page["products"] and "query_to_latent" not in page["expansions"]
    assert "|  |  |  | e4m3 module | 2.00 | 35.0 (35.0 to 35.0) | 1.00 | 1.00 | 1.0e+06 |" in page["expansions"]
    assert "| random, query_to_latent | 128 | 1.50e-02 | 2.50e-02 | 1.50e-02 | 2.50e-02 |" in page["scales"]
    assert all(HEAD["command"] in drawn for drawn in page.values())
