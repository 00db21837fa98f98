"""What the README and the site show is true: blocks run, commands and links exist, every name has its entry, pins fit.

Every `python` block of every page runs by itself. One whose first line names a file (`# step.py`) is that file, and a
shell command of its page runs it. Every line of a shell block is run here or by `.ci/run`.

Faults this file was seen to catch: a name misspelt in an example, a block fenced as `py`, a room left out of the
API pages, a pin below its lower bound, a link to a file that is not there, a guard named on the correctness page that
no test has, a planted mistake that no fault names, a shell command that nothing runs, a twin that links to itself.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import statistics
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from PIL import Image

import fast
import reference
from reference.interfaces import PRESETS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,}|~{3,})(?P<language>.*)$")
NOT_RUN = {"sh", "text"}  # every other language than python would hide a block from being run
FILE = re.compile(r"# (\w+\.py)\n")  # the first line of a block that is a file
PRESETS_HOME = "reference.interfaces.presets"
ONE_ENTRY = ("fast.backends", "fast.integrations.transformers")  # folders whose `__init__` is their one entry
NO_ENTRY = ("fast.kernels", "fast.assets")  # kernels are told by their files; nobody imports the assets


def modules_of(wing: str) -> set[str]:
    """Every module of a wing, below the wing; a folder of `ONE_ENTRY` is one, and private modules are left out."""
    paths = [path.relative_to(ROOT).with_suffix("").parts for path in (ROOT / wing).rglob("[!_]*.py")]
    names = {".".join(parts) for parts in paths if not any(part.startswith("_") for part in parts)}
    folders = {name: folder for name in names for folder in (*ONE_ENTRY, *NO_ENTRY) if name.startswith(f"{folder}.")}
    return {folders.get(name, name).removeprefix(f"{wing}.") for name in names if folders.get(name) not in NO_ENTRY}


ROOMS = sorted(modules_of("reference") & modules_of("fast"))  # `reference.<room>` and `fast.<room>` are twins


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
            if language == "python" and not FILE.match(source):
                yield pytest.param(path, line, source, id=f"{path.relative_to(ROOT)}:{line}")


def files_of(path: Path) -> dict[str, str]:
    """The blocks of a page that are files, by name."""
    sources = [source for _, language, source in fenced_blocks(path) if language == "python" and FILE.match(source)]
    return {FILE.match(source)[1]: source for source in sources}


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


# Lines of shell blocks that `.ci/run` runs, each with what is found there; it takes the first two from the README.
RUN_BY_CI = {
    'pip install -c constraints.txt -e ".[hf]" && python -m fast': 'main_line=$(readme_line "python -m fast")',
    'pip install -c constraints.txt -e ".[test]" && pytest': "test_line=$(readme_line pytest)",
}
# Lines that are run here, each with what it must say and how often.
RUN_HERE = {
    "python -m fast --help": (r"--context-parallel", 1),
    'python -m fast --prompt "import os" --max-new-tokens 8 --no-picture': (r"parity", 1),
    "torchrun --standalone --nproc-per-node 4 dcp_step.py": (r"of 4: equal to one rank", 4),
    'torchrun --standalone --nproc-per-node 2 -m fast --context-parallel 2 --device cpu --prompt "import os" '
    "--max-new-tokens 8": (r"\bidentical\b", 2),
}  # fmt: skip


def shell_lines() -> dict[str, list[Path]]:
    """Every line of every shell block that the README and the site show, and on which pages."""
    found: dict[str, list[Path]] = {}
    for path in PAGES:
        if path.name != "CONTRIBUTING.md":  # how a checkout is set up to be changed; its commands are make's
            for _, language, source in fenced_blocks(path):
                for line in source.splitlines() if language == "sh" else ():
                    found.setdefault(line, []).append(path)
    return found


def test_every_shell_line_is_run():
    """A command that is shown is run here or by CI, and whatever is listed is shown."""
    assert shell_lines().keys() == RUN_BY_CI.keys() | RUN_HERE.keys()
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    for line, found in RUN_BY_CI.items():
        assert found in ci, line
    for path in PAGES:
        for name in files_of(path):
            mine = [line for line, pages in shell_lines().items() if path in pages and line in RUN_HERE]
            assert any(name in line.split() for line in mine), f"{path.name}: no command runs {name}"


@pytest.mark.parametrize("line", RUN_HERE)
def test_shell_line_runs(line, tmp_path):
    """In a folder that holds the files of its page, as a reader would paste it."""
    for path in shell_lines()[line]:
        for name, source in files_of(path).items():
            (tmp_path / name).write_text(source, encoding="utf-8")
    if line.startswith("python -m fast --prompt") or "-m fast --context-parallel" in line:
        pytest.importorskip("transformers")
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", line], cwd=tmp_path, env=environment, text=True,
                          capture_output=True, timeout=240, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    wanted, times = RUN_HERE[line]
    assert len(re.findall(wanted, done.stdout, re.IGNORECASE)) >= times, done.stdout


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


def api_pages() -> dict[str, str]:
    """Every page of the API, by its path below docs/api without the suffix."""
    folder = ROOT / "docs" / "api"
    return {
        path.relative_to(folder).with_suffix("").as_posix(): path.read_text(encoding="utf-8")
        for path in folder.rglob("*.md")
    }


def page_of(room: str) -> str:
    """Where the room has its page: the pages follow the tree."""
    return room.replace(".", "/")


def directives(text: str) -> list[str]:
    """What mkdocstrings is asked for."""
    return re.findall(r"^::: (\S+)$", text, re.MULTILINE)


def homes() -> dict[str, tuple[str, str]]:
    """Where every public name is defined, in both wings: the same place where it is of the contract."""
    found = {}
    for name in reference.__all__:
        # a dictionary has no module
        modules = [getattr(getattr(wing, name), "__module__", PRESETS_HOME) for wing in (reference, fast)]
        found[name] = tuple(f"{module}.{name}" for module in modules)
    return found


def test_api_rooms():
    """Every room of both wings has its entry, on one page alone, and the pages of a folder lie in a folder."""
    names = {f"{wing}.{room}" for wing in ("reference", "fast") for room in modules_of(wing)} | {"reference.interfaces"}
    shown = [name for page in api_pages().values() for name in directives(page)]
    assert len(shown) == len(set(shown))
    assert names <= set(shown)
    objects = set(shown) - names
    assert {name.rpartition(".")[0] for name in objects} <= names
    twins = {name for pair in homes().values() if pair[0] != pair[1] for name in pair}
    assert {name for name in objects if name.partition(".")[2].rpartition(".")[0] in ROOMS} >= twins
    for page, text in api_pages().items():
        for name in directives(text):
            assert "/" not in page or name.split(".")[1] == page.split("/")[0], f"{page}: {name}"


@pytest.mark.parametrize("wing", ["reference", "fast"])
def test_api_names(wing):
    """The page of a wing lists every public name, with a link to its entry and one to its twin."""
    page, which = api_pages()[wing], ("reference", "fast").index(wing)
    for name, pair in homes().items():
        mine, twin = pair[which], pair[1 - which]
        if mine == twin:
            assert f"[`{name}`][{mine}]" in page, name
        else:
            file, other = page_of(mine.partition(".")[2].rpartition(".")[0]), twin.split(".")[0]
            assert f"| [`{name}`]({file}.md#{mine}) | [`{other}.{name}`]({file}.md#{twin}) |" in page.splitlines(), name


@pytest.mark.parametrize("room", ROOMS)
def test_api_twins(room):
    """Reference first, then fast; each entry, and each room, is followed by the link to its twin."""
    text = api_pages()[page_of(room)]
    pairs = [pair for pair in homes().values() if pair[0].startswith(f"reference.{room}.")]
    assert pairs
    for pair in [(f"reference.{room}", f"fast.{room}"), *pairs]:
        at = []
        for mine, twin in (pair, pair[::-1]):
            entry = rf"^::: {mine}\n    options: .*\n\nTwin: \[`{twin}`\]\(#{twin}\)\n"
            (found,) = re.finditer(entry, text, re.MULTILINE)
            at.append(found.start())
        assert at == sorted(at)
        name = pair[0].rpartition(".")[2]
        both = f"## {name}\n\nTwins: [`reference.{name}`](#{pair[0]}), [`fast.{name}`](#{pair[1]})\n"
        assert pair not in pairs or text.count(both) == 1, name
    alone = [name for name in directives(text) if name.startswith(f"fast.{room}.")]
    module = importlib.import_module(f"fast.{room}")
    public = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    assert {name.rpartition(".")[2] for name in alone} == {name for name in public if not name.startswith("_")}


def names_of_tests(path: Path) -> set[str]:
    """Names of the tests of a file, those of its classes behind the class."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        inner = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        found |= {prefix + item.name for item in inner if isinstance(item, ast.FunctionDef)}
    return {name for name in found if name.rpartition(":")[2].startswith("test_")}


def test_guards_exist():
    """Every test that the correctness page names is there; every planted mistake is named, and nothing else is."""
    text = (ROOT / "docs" / "correctness.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)::([\w:]+)`", text)
    assert len(named) == text.count("`tests/")
    for file, test in named:
        assert test in names_of_tests(ROOT / file), f"{file}::{test}"

    tree = ast.parse((ROOT / "tests" / "mutations" / "test_mutations.py").read_text(encoding="utf-8"))
    (controls,) = (
        node.value for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "CONTROLS"
    )
    planted = {control.elts[0].value for control in controls.elts}
    faults = text[text.index("## Faults") :]
    words = re.sub(r"\s+", " ", faults)
    assert set(re.findall(r"(?<![*\w])\*([^*]+)\*(?!\*)", words)) == planted


def test_every_fault_is_guarded():
    """All faults of the list, in order, each with where it was seen and at least one test or planted mistake."""
    text = (ROOT / "docs" / "correctness.md").read_text(encoding="utf-8")
    faults = re.split(r"^(\d+)\. \*\*", text[text.index("## Faults") :], flags=re.MULTILINE)[1:]
    numbers = [int(number) for number in faults[::2]]
    assert numbers == list(range(1, 22))
    for number, fault in zip(numbers, faults[1::2], strict=True):
        told, found, guards = fault.partition("Guards:")
        assert found and "`tests/" in guards, number
        assert re.search(r"\(.+\)\s*$", told, re.DOTALL), f"{number}: not said where it was seen"


def test_back_ends():
    """The table of kernel sets says what they declare: name, priority, least capability, dims, pages."""
    text = (ROOT / "docs" / "use" / "backends.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", text, re.MULTILINE))
    assert rows.keys() == {backend.name for backend in fast.backends.registered()}
    for backend in fast.backends.registered():
        row = rows[backend.name]
        assert row.startswith(f"{backend.priority} | ")
        decode = backend.ops["mla_decode"]
        named = set(re.findall(r"\b(?:b?float\d+)\b", row))
        assert named == {str(dtype).removeprefix("torch.") for dtype in decode.dtypes}
        assert backend.capability is None or "{}.{}".format(*backend.capability) in row
        for sizes in (*(decode.head_dims or {}).values(), decode.block_sizes or ()):
            *most, last = map(str, sizes) if sizes else ("",)
            assert not sizes or f"{', '.join(most)} or {last}" in row


def test_glossary():
    """Every name of ours in the tables of names is a word of the sources, and every letter of the alphabet is there."""
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    letters = re.findall(r"^\| (\w+) \| ", text[: text.index("## Terms")], re.MULTILINE)
    assert " ".join(letters) == "letter T B S Sq C W H N Lq Lkv P R V Dv D I"
    paths = [path for wing in ("reference", "fast") for path in (ROOT / wing).rglob("*.py")]
    paths = [path for path in paths if not {"kernels", "assets", "demo"} & set(path.relative_to(ROOT).parts)]
    sources = [path.read_text(encoding="utf-8") for path in paths]
    words = set(re.findall(r"\w+", "\n".join(sources)))
    ours = re.findall(r"^\|([^|]*)\|", text[text.index("## Names elsewhere") :], re.MULTILINE)
    names = {part for cell in ours for name in re.findall(r"`([\w.]+)`", cell) for part in name.split(".")}
    assert len(names) > 30 and names - words == {"flash_mla_with_kvcache"}  # a row of the conventions of others
    fields = re.findall(r"^\| \w+ \| [^|]* \| (\d+) \| `(\w+)` \|", text, re.MULTILINE)
    assert {field: int(value) for value, field in fields} == PRESETS["deepseek-v3"]


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


def results_of(name: str) -> dict:
    """A file of measured results."""
    return json.loads((ROOT / "docs" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def decode_dims(B: int, S: int, N: int, lens: str = "equal") -> dict:
    return {"B": B, "S": S, "Sq": 1, "N": N, "lens": lens}


HOPPER_PEERS = ("FlashMLA", "FA3")
SHORTEST = {"ragged": 128, "mixed": 16}  # how many times the shortest request goes into the longest


def in_words(dims: dict) -> str:
    """The dims of a row of the decode benchmark; requests of several lengths are decoded as they were planned."""
    requests, tokens, lens = dims["B"], dims["S"], dims["lens"]
    span = tokens if lens == "equal" else f"{tokens // SHORTEST[lens]} to {tokens}"
    new = f", {dims['Sq']} new each" if dims["Sq"] > 1 else ""
    planned = "" if lens == "equal" else ", planned"
    return f"{requests} request{'s' * (requests > 1)} of {span} tokens{new}, {dims['N']} heads{planned}"


def hopper_ratios() -> dict[str, tuple[float, list[float]]]:
    """The time of every row, and each peer's time in times of it."""
    found = {}
    for row in results_of("h200-decode")["rows"]:
        assert row["passed"]
        times, label = row["times"]["replayed"], in_words(row["dims"])
        ours = times["fast, planned" if label.endswith("planned") else "fast"]["median_us"]
        found[label] = ours, [times[peer]["median_us"] / ours for peer in HOPPER_PEERS]
    return found


def hopper_rows() -> dict[str, str]:
    """Every row of the Hopper kernels as the README writes it, by what was measured."""
    return {
        label: f"| {label} | {ours:.1f} us | {' | '.join(f'{ratio:.2f}' for ratio in ratios)} |"
        for label, (ours, ratios) in hopper_ratios().items()
    }


def other_rows() -> list[str]:
    """The README's other gains: portable Triton, prefill, several GPUs, transformers on a CPU."""
    sources = {"decode": results_of("h200-decode-triton"), "prefill": results_of("h200")["benchmarks"]["prefill"]}

    def ratios(benchmark: str, dims: dict, kind: str, peers: dict[str, str]) -> str:
        row = next(row for row in sources[benchmark]["rows"] if row["dims"] == dims)
        times = row["times"][kind]
        assert row["passed"]
        found = [f"{times[peer]['median_us'] / times['fast']['median_us']:.2f}" for peer in peers]
        return f"{', '.join(peers.values())} | {', '.join(found)}"

    names = {"FlashMLA": "FlashMLA", "FA3": "FlashAttention-3", "vLLM Triton": "vLLM's Triton"}
    ranks = next(
        row["speedup"]["a2a"]
        for row in results_of("h200-x4")["between_gpus"]["4 GPUs"]["rows"]
        if {"B": 32, "S": 131072, "N": 128}.items() <= row.items()
    )
    cpu = results_of("cpu-2-cores")
    token = max((row for row in cpu["rows"] if row["who"] == "fast"), key=lambda row: row["context"])
    prefill = {"B": 1, "Sq": 16384, "Skv": 16384, "N": 128, "mask": "causal"}
    triton = ratios("decode", decode_dims(128, 4096, 128), "replayed", names)
    return [
        f"| portable Triton, decode, 128 requests of 4096 tokens, 128 heads | {triton} |",
        f"| prefill, 16384 tokens, 128 heads | {ratios('prefill', prefill, 'rested', {'FA3': names['FA3']})} |",
        f"| decode with the keys on four GPUs, 32 requests of 131072 tokens | one GPU | {ranks:.2f} |",
        f"| one decoded token behind {token['context']} others, one DeepSeek-V2-Lite layer on a CPU, float32 | "
        f"transformers {cpu['versions']['transformers'].rpartition('.')[0]} | "
        f"{token['times_faster_than_transformers']:.1f} |",
    ]


def readme_tables() -> list[list[str]]:
    """The rows of the tables of the README's results, without their heads."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    part = text[text.index("[start:results]") : text.index("[end:results]")]
    tables = re.findall(r"(?:^\|.*\|\n)+", part, re.MULTILINE)
    return [table.splitlines()[2:] for table in tables]


def test_hopper_table():
    """Each row of the README is the results file's, six at least, and the least ratio to each peer is among them."""
    rows, shown = hopper_rows(), readme_tables()[0]
    assert len(shown) >= 6 and set(shown) <= set(rows.values())
    for peer, name in enumerate(HOPPER_PEERS):
        label, (_, ratios) = min(hopper_ratios().items(), key=lambda item: item[1][1][peer])
        assert rows[label] in shown, f"the least of {name}, {ratios[peer]:.2f}, is left out: {rows[label]}"


def test_costs_in_words():
    """What the README's text says of plans, of batch invariance and of a hot card are the extremes of the files."""
    plans, cuts, invariants = [], [], []
    for row in results_of("h200-decode")["rows"]:
        for way, times in row["times"].items():
            cut, planned, *invariant = (times[f"fast{how}"]["median_us"] for how in
                                        ("", ", planned", ", invariant", ", invariant, planned"))  # fmt: skip
            invariants.append(min(invariant) / min(cut, planned))
            if way == "replayed":
                plans += [planned / cut] if row["dims"]["lens"] == "equal" else []
                cuts += [cut / planned] if row["dims"]["lens"] != "equal" else []
    dims = {"B": 1, "Sq": 16384, "Skv": 16384, "N": 128, "mask": "causal"}
    prefill = next(row for row in results_of("h200")["benchmarks"]["prefill"]["rows"] if row["dims"] == dims)
    hot = prefill["times"]["flushed"]["FA3"]["median_us"] / prefill["times"]["flushed"]["fast"]["median_us"]
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    for said in (
        f"a plan costs up to {100 * max(plans) - 100:.0f} %",
        f"own cut takes {min(cuts):.1f} to {max(cuts):.1f} times as long",
        f"Batch invariance costs {100 * statistics.geometric_mean(invariants) - 100:.0f} %",
        f"{'nothing' if min(invariants) < 1.005 else f'{100 * min(invariants) - 100:.0f} %'} to"
        f" {100 * max(invariants) - 100:.0f} % of a row, the better of planned and not on both sides",
        f"on a hot card it is {hot:.2f}",
    ):
        assert said in text, said


def test_picture():
    """It shows the results that are in docs/results now; `python docs/hooks/picture.py` draws it."""
    sys.path.insert(0, str(ROOT / "docs" / "hooks"))
    try:
        from picture import PICTURE, results_digest
    finally:
        sys.path.pop(0)
    with Image.open(PICTURE) as picture:
        assert picture.info["Source"] == results_digest()


def test_other_table():
    """Each gain, and each loss, is of a run that passed."""
    results, ranks = results_of("h200-checks"), results_of("h200-x4")["between_gpus"]
    assert all(results[stage]["ok"] for stage in ("tests", "opcheck", "memcheck", "racecheck"))
    assert results["tests"]["passed"] >= 4348 and not results["tests"]["failed"]
    assert results_of("h200-main-job")["main_job"]["ok"]
    assert results_of("h200")["benchmarks"]["ok"]
    assert ranks["ok"] and ranks["tests"]["passed"] >= 28 and not ranks["tests"]["failed"]
    assert readme_tables()[1] == other_rows()


def test_hardware_and_dates():
    """What stands below the tables is what the files say they were measured on, and when."""
    gpus, cpu = (
        [results_of(name) for name in ("h200", "h200-decode", "h200-decode-triton", "h200-x4")],
        results_of("cpu-2-cores"),
    )
    for results in (*gpus, cpu):
        assert {"command", "hardware", "threads", "versions", "date", "fast_sha256"} <= results.keys()
    assert {results["hardware"] for results in gpus} == {"NVIDIA H200"} and "Xeon" in cpu["hardware"]
    first, last = min(results["date"] for results in gpus), max(results["date"] for results in gpus)
    dates = first if first == last else f"{first} to {last}"
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"NVIDIA H200, {dates}; the last row on two threads" in text
    assert f"2.5 GHz, {cpu['date']}; medians" in text and cpu["threads"] == 2
