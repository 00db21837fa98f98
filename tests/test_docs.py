"""What the README and the site show is true: blocks run, commands and links exist, every room has its page, pins fit.

Faults this file was seen to catch: a name misspelt in an example, a block fenced as `py`, a room left out of the
API pages, a pin below its lower bound, a link to a file that is not there.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,}|~{3,})(?P<language>.*)$")
NOT_RUN = {"sh", "text"}  # every other language than python would hide a block from being run


def fenced_blocks(path: Path) -> list[tuple[int, str, str]]:
    """(line, language, source) of every fenced block of a page."""
    blocks, opened = [], None
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        match = FENCE.match(line)
        if opened is None:
            if match:
                opened = (number, match["language"].strip(), match["indent"], match["ticks"], [])
        elif match and match["ticks"] == opened[3] and not match["language"].strip():
            blocks.append((opened[0], opened[1], "\n".join(opened[4]) + "\n"))
            opened = None
        else:
            opened[4].append(line.removeprefix(opened[2]))
    assert opened is None, f"{path.name}:{opened[0]}: a block that is not closed"
    return blocks


def python_blocks():
    for path in PAGES:
        for line, language, source in fenced_blocks(path):
            if language == "python":
                yield pytest.param(path, line, source, id=f"{path.relative_to(ROOT)}:{line}")


def requirements(*extras: str) -> list[Requirement]:
    lists = [PROJECT["dependencies"], *(PROJECT["optional-dependencies"][extra] for extra in extras)]
    return [Requirement(text) for wanted in lists for text in wanted]


@pytest.mark.parametrize(("path", "line", "source"), list(python_blocks()))
def test_block_runs(path, line, source, monkeypatch):
    """Each block runs by itself from the root of the repository, as a reader would paste it."""
    monkeypatch.chdir(ROOT)
    padded = "\n" * line + source  # line numbers of a traceback are those of the page
    exec(compile(padded, str(path), "exec", dont_inherit=True), {"__name__": "__main__"})


def test_blocks_are_found():
    """The transformers example and the engine example are among the blocks that run."""
    sources = [param.values[2] for param in python_blocks() if param.values[0].name == "README.md"]
    assert any("use_mla(model)" in source for source in sources)
    assert any("build_mla_metadata(" in source for source in sources)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_languages(path):
    """A block is `python` and run, or openly something that is not."""
    for line, language, _ in fenced_blocks(path):
        assert language in NOT_RUN | {"python"}, f"{path.name}:{line}: fenced as {language!r}"


def test_commands():
    """The two commands of the README, which CI runs from there, name extras that exist."""
    commands = [line for _, language, source in fenced_blocks(ROOT / "README.md") if language == "sh"
                for line in source.splitlines()]  # fmt: skip
    assert commands == [
        'pip install -c constraints.txt -e ".[hf]" && python -m fast',
        'pip install -c constraints.txt -e ".[test]" && pytest',
    ]
    assert {"hf", "test", "docs", "notebooks", "dev"} == set(PROJECT["optional-dependencies"])
    assert "mla-twins[hf]" in PROJECT["optional-dependencies"]["test"]
    assert (ROOT / "fast" / "__main__.py").exists()


def test_files_of_the_commands():
    """Every path that CONTRIBUTING tells a reader to run is there, and so is every target of make."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    targets = set(re.findall(r"`make ([\w-]+)`", text))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert targets == set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))
    for module in re.findall(r"python -m (tests[\w.]+)", makefile):
        assert (ROOT / (module.replace(".", "/") + ".py")).exists(), module
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o100


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links(path):
    """Relative links lead to files of the repository (mkdocs checks those of the site, not of README)."""
    text = path.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"[a-z]+:|#", target):
            assert (path.parent / target.split("#")[0]).exists(), f"{path.name}: {target}"


@pytest.mark.parametrize("wing", ["reference", "fast"])
def test_api_pages(wing):
    """Every room of a wing is on its API page, and nothing else is."""
    page = (ROOT / "docs" / "api" / f"{wing}.md").read_text(encoding="utf-8")
    rooms = [path for path in (ROOT / wing).glob("*.py") if not path.stem.startswith("_")]
    rooms += [path for path in (ROOT / wing / "interfaces").glob("*.py") if path.stem != "__init__"]
    rooms += [path for path in (ROOT / wing / "interfaces",) if path.exists()]
    rooms += (ROOT / wing / "integrations").glob("[!_]*")
    rooms += (ROOT / wing / "demo").glob("[!_]*.py")
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in rooms}
    assert set(re.findall(r"^::: (\S+)$", page, re.MULTILINE)) == names


def test_pins():
    """One exact version a line, no other place to fetch from, each within the bounds of pyproject.toml."""
    pins = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            match = re.fullmatch(r'([a-z0-9-]+)==([0-9][0-9a-z.]*)(; platform_system == "Linux")?', line)
            assert match, line
            assert match[1] not in pins, f"{match[1]} is pinned twice"
            pins[match[1]] = Version(match[2])
    for requirement in requirements("hf", "test", "docs", "notebooks", "dev"):
        if requirement.name != PROJECT["name"]:
            assert requirement.name in pins, f"{requirement.name} is not pinned"
            assert pins[requirement.name] in requirement.specifier, requirement


def test_bounds():
    """Every requirement has a lower bound, and Triton is asked for on Linux alone."""
    for requirement in requirements("hf", "test", "docs", "notebooks", "dev"):
        bounded = any(clause.operator == ">=" for clause in requirement.specifier)
        assert bounded or requirement.name == PROJECT["name"], requirement
        assert (requirement.name == "triton") == (str(requirement.marker) == 'platform_system == "Linux"'), requirement


def decode_dims(B: int, S: int, N: int, lens: str = "equal") -> dict:
    return {"B": B, "S": S, "Sq": 1, "N": N, "lens": lens}


PLAIN, SCHEDULED = "fast", "fast, scheduled"
GPU_ROWS = {
    "decode, 128 requests of 4096 tokens, 128 heads": ("decode", PLAIN, decode_dims(128, 4096, 128)),
    "decode, 128 requests of 4096 tokens, 16 heads": ("decode", PLAIN, decode_dims(128, 4096, 16)),
    "decode, 1 request of 131072 tokens, 16 heads": ("decode", PLAIN, decode_dims(1, 131072, 16)),
    "decode, 128 requests of 1024 to 16384 tokens, 128 heads, scheduled":
        ("decode", SCHEDULED, decode_dims(128, 16384, 128, "mixed")),
    "decode, 128 requests of 1024 to 16384 tokens, 16 heads, scheduled":
        ("decode", SCHEDULED, decode_dims(128, 16384, 16, "mixed")),
    "prefill, 16384 tokens, 128 heads":
        ("prefill", PLAIN, {"B": 1, "Sq": 16384, "Skv": 16384, "N": 128, "mask": "causal"}),
}  # fmt: skip


def gpu_rows() -> list[str]:
    """The README's table of ratios, from the results file."""
    results = json.loads((ROOT / "docs" / "results" / "h200.json").read_text(encoding="utf-8"))
    lines = []
    for label, (benchmark, who, dims) in GPU_ROWS.items():
        row = next(row for row in results["benchmarks"][benchmark]["rows"] if row["dims"] == dims)
        times = row["times"]["replayed" if benchmark == "decode" else "rested"]
        ours = times[who]["median_us"]
        cells = [f" {times[peer]['median_us'] / ours:.2f} " if peer in times else " " for peer in
                 ("FlashMLA", "FA3", "vLLM Triton")]  # fmt: skip
        lines.append(f"| {label} |{'|'.join(cells)}|")
    return lines


def test_gpu_table():
    """Each ratio of the README is that of the results file, which is whole and of a run that passed."""
    results = json.loads((ROOT / "docs" / "results" / "h200.json").read_text(encoding="utf-8"))
    assert all(results[stage]["ok"] for stage in ("tests", "opcheck", "memcheck", "main_job", "benchmarks"))
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for line in gpu_rows():
        assert line in text.splitlines(), line
    assert f"{results['date']}, medians; `make gpu" in text


HOPPER_ROWS = {
    "128 requests of 4096 tokens, 128 heads": decode_dims(128, 4096, 128),
    "256 requests of 1024 tokens, 128 heads": decode_dims(256, 1024, 128),
    "32 requests of 32768 tokens, 128 heads": decode_dims(32, 32768, 128),
    "16 requests of 4096 tokens, 128 heads": decode_dims(16, 4096, 128),
    "16 requests of 4096 tokens, 16 heads": decode_dims(16, 4096, 16),
    "1 request of 8192 tokens, 128 heads": decode_dims(1, 8192, 128),
    "1 request of 8192 tokens, 16 heads": decode_dims(1, 8192, 16),
    "1 request of 131072 tokens, 128 heads": decode_dims(1, 131072, 128),
    "1 request of 131072 tokens, 16 heads": decode_dims(1, 131072, 16),
    "96 requests of 256 to 32768 tokens, 128 heads, planned": decode_dims(96, 32768, 128, "ragged"),
    "96 requests of 256 to 32768 tokens, 16 heads, planned": decode_dims(96, 32768, 16, "ragged"),
}


def hopper_rows() -> list[str]:
    """The README's table of the Hopper kernels, from their results file."""
    results = json.loads((ROOT / "docs" / "results" / "h200-decode.json").read_text(encoding="utf-8"))
    lines = []
    for label, dims in HOPPER_ROWS.items():
        row = next(row for row in results["rows"] if row["dims"] == dims)
        assert row["passed"]
        times = row["times"]["replayed"]
        ours = times["fast, planned" if label.endswith("planned") else "fast"]["median_us"]
        ratios = " | ".join(f"{times[peer]['median_us'] / ours:.2f}" for peer in ("FlashMLA", "FA3"))
        lines.append(f"| {label} | {ours:.1f} us | {ratios} |")
    return lines


def test_hopper_table():
    """Every time and ratio is the results file's, and no row of that file is left out."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    for line in hopper_rows():
        assert line in text, line
    results = json.loads((ROOT / "docs" / "results" / "h200-decode.json").read_text(encoding="utf-8"))
    assert [row["dims"] for row in results["rows"]] == list(HOPPER_ROWS.values())


def test_context_parallel_table():
    """Each gain of the README is the default merge's in the results file, which is of a run that passed."""
    results = json.loads((ROOT / "docs" / "results" / "h200-x4.json").read_text(encoding="utf-8"))["between_gpus"]
    assert results["ok"] and results["tests"]["passed"] >= 28 and not results["tests"]["failed"]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for requests, length in ((32, 131072), (64, 16384), (128, 4096), (1, 131072)):
        dims = {"B": requests, "S": length, "N": 128}
        two, four = (
            next(row["speedup"]["a2a"] for row in results[gpus]["rows"] if dims.items() <= row.items())
            for gpus in ("2 GPUs", "4 GPUs")
        )
        times = " times as fast" if requests == 32 else ""
        line = f"| {requests} request{'s' * (requests > 1)} of {length} tokens | {two:.2f}{times} | {four:.2f} |"
        assert line in text.splitlines(), line


def test_results_table():
    """Each row of the README's table is what the results file says, to the digits shown."""
    results = json.loads((ROOT / "docs" / "results" / "cpu-2-cores.json").read_text(encoding="utf-8"))
    assert {"command", "hardware", "threads", "versions", "date", "fast_sha256"} <= results.keys()
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = re.findall(
        r"^\| (\d+) \| ([\d.]+) ms \| ([\d.]+) ms \| ([\d.]+) ms \| ([\d.]+) times faster \|$", text, re.MULTILINE
    )
    by_context: dict[str, dict] = {}
    for row in results["rows"]:
        by_context.setdefault(str(row["context"]), {})[row["who"]] = row
    assert [row[0] for row in shown] == list(by_context)
    for context, *figures in shown:
        rows = by_context[context]
        wanted = [f"{rows[who]['ms_median']:.1f}" for who in ("transformers", "reference", "fast")]
        assert figures == [*wanted, f"{rows['fast']['times_faster_than_transformers']:.1f}"]
    assert f"{results['date']}, medians" in text
