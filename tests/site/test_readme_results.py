"""Tests of the numbers in the README's results: its tables and sentences agree with docs/results."""

from __future__ import annotations

import importlib
import json
import re
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def results_of(name: str) -> dict:
    """Return the contents of docs/results/<name>.json."""
    return json.loads((ROOT / "docs" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def decode_dims(B: int, S: int, N: int, lens: str = "equal") -> dict:
    return {"B": B, "S": S, "Sq": 1, "N": N, "lens": lens}


# kernels of other projects for Hopper GPUs, with the contenders of each; the fastest contender counts
HOPPER_PEERS = {"FlashMLA": ("FlashMLA",), "FA3": ("FA3", "FA3, schedule ahead")}
COLUMNS = (*HOPPER_PEERS, "the fastest peer")
PROMPT = {"B": 1, "Sq": 16384, "Skv": 16384, "N": 128, "mask": "causal"}
SHORTEST = {"ragged": 128, "mixed": 16}  # longest length of a batch / shortest length


def in_words(dims: dict) -> str:
    """Return the dimensions of a decode row in words, as the README writes them."""
    requests, tokens, lens = dims["B"], dims["S"], dims["lens"]
    span = tokens if lens == "equal" else f"{tokens // SHORTEST[lens]} to {tokens}"
    new = f", each with {dims['Sq']} new tokens" if dims["Sq"] > 1 else ""
    planned = "" if lens == "equal" else ", planned"
    return f"{requests} request{'s' * (requests > 1)} of {span} tokens{new}, {dims['N']} heads{planned}"


def hopper_ratios() -> dict[str, tuple[float, list[float]]]:
    """Return for every row the time of `fast` in us, and for each of COLUMNS (its time) / (time of `fast`)."""
    found = {}
    for row in results_of("h200-decode")["rows"]:
        assert row["passed"]
        times, label = row["times"]["replayed"], in_words(row["dims"])
        ours = times["fast, planned" if label.endswith("planned") else "fast"]["median_us"]
        medians = {who: time["median_us"] for who, time in times.items() if who.split(",")[0] != "fast"}
        peers = [min(medians[way] for way in ways if way in medians) for ways in HOPPER_PEERS.values()]
        found[label] = ours, [time / ours for time in (*peers, min(medians.values()))]
    return found


def hopper_rows() -> dict[str, str]:
    """Return for every measured shape, named in words, the expected line of the README's first table."""
    return {
        label: f"| {label} | {ours:.1f} us | {' | '.join(f'{ratio:.2f}' for ratio in ratios)} |"
        for label, (ours, ratios) in hopper_ratios().items()
    }


def other_rows() -> list[str]:
    """Return the expected lines of the README's second table: Triton, prefill, several GPUs, transformers on a CPU."""
    sources = {"decode": results_of("h200-decode-triton"), "prefill": results_of("h200-prefill")}

    def ratios(benchmark: str, dims: dict, kind: str, peers: dict[str, str], ours: str = "fast") -> str:
        row = next(row for row in sources[benchmark]["rows"] if dims.items() <= row["dims"].items())
        times = row["times"][kind]
        assert row["passed"]
        found = [f"{times[peer]['median_us'] / times[ours]['median_us']:.2f}" for peer in peers]
        return f"{', '.join(peers.values())} | {', '.join(found)}"

    names = {"FlashMLA": "FlashMLA", "FA3": "FlashAttention-3", "vLLM Triton": "vLLM's Triton"}
    ranks = next(
        row["speedup"]["a2a"]
        for row in results_of("h200-x4")["between_gpus"]["4 GPUs"]["rows"]
        if {"B": 32, "S": 131072, "N": 128}.items() <= row.items()
    )
    cpu = results_of("cpu-2-cores")
    token = max((row for row in cpu["rows"] if row["who"] == "fast"), key=lambda row: row["context"])
    fa3 = {"FA3": names["FA3"]}
    prefill, portable = (ratios("prefill", PROMPT, "rested", fa3, ours) for ours in ("fast", "fast, portable Triton"))
    triton = ratios("decode", decode_dims(128, 4096, 128), "replayed", names)
    return [
        f"| portable Triton, decode, 128 requests of 4096 tokens, 128 heads | {triton} |",
        f"| prefill, 16384 tokens, 128 heads | {prefill} |",
        f"| portable Triton, prefill, 16384 tokens, 128 heads | {portable} |",
        f"| decode with the keys on four GPUs, 32 requests of 131072 tokens | one GPU | {ranks:.2f} |",
        f"| one decoded token behind {token['context']} others, one DeepSeek-V2-Lite layer on a CPU, float32 | "
        f"transformers {cpu['versions']['transformers'].rpartition('.')[0]} | "
        f"{token['times_faster_than_transformers']:.1f} |",
    ]


def readme_tables() -> list[list[str]]:
    """Return the rows of each table in the README's results, without the head of the table."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    part = text[text.index("[start:results]") : text.index("[end:results]")]
    tables = re.findall(r"(?:^\|.*\|\n)+", part, re.MULTILINE)
    return [table.splitlines()[2:] for table in tables]


def test_hopper_table():
    """Read the README's first table -> at least six measured shapes; each column's lowest ratio is among them."""
    rows, shown = hopper_rows(), readme_tables()[0]
    assert len(shown) >= 6 and set(shown) <= set(rows.values())
    for peer, name in enumerate(COLUMNS):
        label, (_, ratios) = min(hopper_ratios().items(), key=lambda item: item[1][1][peer])
        assert rows[label] in shown, f"the lowest ratio to {name}, {ratios[peer]:.2f}, is not shown: {rows[label]}"


def test_all_shapes_in_words(monkeypatch):
    """Read README and page Performance -> the geometric means and the shapes behind a peer that the hook computes."""
    pytest.importorskip("mkdocs")  # the hooks of the site import it
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "hooks"))
    contenders = importlib.import_module("contenders")
    summary = contenders.decode_summary(results_of("h200-decode"))
    assert summary in " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    assert "<!-- results: decode_summary h200-decode.json -->" in page
    ratios = [ratio for _, (*_, ratio) in hopper_ratios().values()]
    assert f"{statistics.geometric_mean(ratios):.2f} x (replayed)" in summary


def test_costs_in_words():
    """Read the README's text -> the costs of schedules, batch invariance and a hot GPU agree with the results files."""
    plans, cuts, invariants = [], [], []
    for row in results_of("h200-decode")["rows"]:
        for way, times in row["times"].items():
            cut, planned, *invariant = (times[f"fast{how}"]["median_us"] for how in
                                        ("", ", planned", ", invariant", ", invariant, planned"))  # fmt: skip
            invariants.append(min(invariant) / min(cut, planned))
            if way == "replayed":
                plans += [planned / cut] if row["dims"]["lens"] == "equal" else []
                cuts += [cut / planned] if row["dims"]["lens"] != "equal" else []
    prefill = next(row for row in results_of("h200-prefill")["rows"] if PROMPT.items() <= row["dims"].items())
    flushed = {who: found["median_us"] for who, found in prefill["times"]["flushed"].items()}
    hot, portable = (flushed["FA3"] / flushed[ours] for ours in ("fast", "fast, portable Triton"))
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    for said in (
        f"a schedule costs up to {100 * max(plans) - 100:.0f} %",
        f"without a schedule takes {min(cuts):.1f} to {max(cuts):.1f} times as long",
        f"Batch invariance costs {100 * statistics.geometric_mean(invariants) - 100:.0f} %",
        f"and {abs(100 * min(invariants) - 100):.0f} to {100 * max(invariants) - 100:.0f} % for a single shape. Each"
        f" decode is timed with and without a schedule",
        f"On a hot GPU the ratio is {hot:.2f} for the Hopper kernel, and {portable:.2f} for portable Triton",
    ):
        assert said in text, said


def test_other_table():
    """Read the README's second table -> the numbers of the results files; all checks in these files passed."""
    results, ranks = results_of("h200-checks"), results_of("h200-x4")["between_gpus"]
    assert all(results[stage]["ok"] for stage in ("tests", "opcheck", "memcheck", "racecheck"))
    assert results["tests"]["passed"] >= 4348 and not results["tests"]["failed"]
    parts = results["tests"].get("parts", ["1/1"])
    assert len(parts) == int(parts[0].partition("/")[2]), "some parts of the tests did not run"
    assert results_of("h200-main-job")["main_job"]["ok"]
    assert ranks["ok"] and ranks["tests"]["passed"] >= 28 and not ranks["tests"]["failed"]
    assert readme_tables()[1] == other_rows()


def test_hardware_and_dates():
    """Read the text below the README's tables -> the hardware and the dates of the results files."""
    gpus = [results_of(name) for name in ("h200-decode", "h200-decode-triton", "h200-prefill", "h200-x4")]
    cpu = results_of("cpu-2-cores")
    for results in (*gpus, cpu):
        assert {"command", "hardware", "threads", "versions", "date", "fast_sha256"} <= results.keys()
    assert {results["hardware"] for results in gpus} == {"NVIDIA H200"} and "Xeon" in cpu["hardware"]
    first, last = min(results["date"] for results in gpus), max(results["date"] for results in gpus)
    dates = first if first == last else f"{first} to {last}"
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"All other rows were measured on an NVIDIA H200, {dates}." in text
    assert f"two threads of an Intel Xeon at 2.5 GHz, {cpu['date']}." in text and cpu["threads"] == 2
