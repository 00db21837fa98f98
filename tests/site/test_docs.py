"""Tests of the README and of the pages: examples run, links lead to files, API pages are complete, numbers are right.

Every `python` block of every page runs by itself. If the first line of a block names a file, such as `# step.py`, the
block is instead written to this file, and a shell command of the same page runs the file. Every line of a shell block
is run by a test of this module or by the script `.ci/run`.
"""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import fast
import reference
from reference.interfaces import PRESETS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,}|~{3,})(?P<language>.*)$")
NOT_RUN = {"sh", "text"}  # languages of blocks that do not run; only these and `python` are allowed
FILE = re.compile(r"# (\w+\.py)\n")  # first line of a block that belongs in a file
DICTIONARIES = {  # names of dictionaries, which have no `__module__`, and the modules that define them
    "CACHE_FORMATS": "reference.interfaces.cache_format",
    "PRESETS": "reference.interfaces.presets",
}
PACKAGES = ("reference", "fast")
ONE_ENTRY = ("fast.backends", "fast.integrations.flash_mla", "fast.integrations.transformers")  # one API entry each
NO_ENTRY = ("fast.kernels", "fast.assets")  # folders without API entries


def modules_of(package: str) -> set[str]:
    """Return the names of a package's public modules that need an API entry; `mla.decode` stands for `fast.mla.decode`.

    A folder of ONE_ENTRY counts as one module, and the folders of NO_ENTRY do not count.
    """
    paths = [path.relative_to(ROOT).with_suffix("").parts for path in (ROOT / package).rglob("[!_]*.py")]
    names = {".".join(parts) for parts in paths if not any(part.startswith("_") for part in parts)}
    folders = {name: folder for name in names for folder in (*ONE_ENTRY, *NO_ENTRY) if name.startswith(f"{folder}.")}
    return {folders.get(name, name).removeprefix(f"{package}.") for name in names if folders.get(name) not in NO_ENTRY}


# modules that exist in both packages and define a public name; `mla.absorbed_path` defines none
PUBLIC_MODULES = {getattr(getattr(reference, name), "__module__", "") for name in reference.__all__}
TWIN_MODULES = sorted(n for n in modules_of("reference") & modules_of("fast") if f"reference.{n}" in PUBLIC_MODULES)


def fenced_blocks(path: Path) -> list[tuple[int, str, str]]:
    """Return (line, language, source) of every fenced block of a page."""
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
    assert opened is None, f"{path.name}:{opened[0]}: this fenced block is never closed"
    return blocks


def python_blocks():
    for path in PAGES:
        for line, language, source in fenced_blocks(path):
            if language == "python" and not FILE.match(source):
                yield pytest.param(path, line, source, id=f"{path.relative_to(ROOT)}:{line}")


def files_of(path: Path) -> dict[str, str]:
    """Return the blocks of a page whose first line names a file: a mapping from file name to block."""
    sources = [source for _, language, source in fenced_blocks(path) if language == "python" and FILE.match(source)]
    return {FILE.match(source)[1]: source for source in sources}


def requirements(*extras: str) -> list[Requirement]:
    lists = [PROJECT["dependencies"], *(PROJECT["optional-dependencies"][extra] for extra in extras)]
    return [Requirement(text) for wanted in lists for text in wanted]


@pytest.mark.parametrize(("path", "line", "source"), list(python_blocks()))
def test_block_runs(path, line, source, monkeypatch):
    """Run a block from the root of the repository, as a reader would run it -> no error."""
    monkeypatch.chdir(ROOT)
    padded = "\n" * line + source  # so that a traceback shows the line numbers of the page
    exec(compile(padded, str(path), "exec", dont_inherit=True), {"__name__": "__main__"})


def test_blocks_are_found():
    """Collect the blocks that run -> the README's examples for transformers and for an engine are among them."""
    sources = [param.values[2] for param in python_blocks() if param.values[0].name == "README.md"]
    assert any("use_mla(model)" in source for source in sources)
    assert any("build_mla_metadata(" in source for source in sources)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_languages(path):
    """Read the languages of all fenced blocks -> `python`, or a language of NOT_RUN."""
    for line, language, _ in fenced_blocks(path):
        assert language in NOT_RUN | {"python"}, f"{path.name}:{line}: expected python, sh or text, got {language!r}"


def test_commands():
    """Read the README's shell lines -> exactly two commands, which `.ci/run` runs; pyproject.toml has five extras."""
    commands = [line for _, language, source in fenced_blocks(ROOT / "README.md") if language == "sh"
                for line in source.splitlines()]  # fmt: skip
    assert commands == [
        'pip install -c constraints.txt -e ".[hf]" && python -m fast',
        'pip install -c constraints.txt -e ".[test]" && pytest',
    ]
    assert {"hf", "test", "docs", "notebooks", "dev"} == set(PROJECT["optional-dependencies"])
    assert "mla-twins[hf]" in PROJECT["optional-dependencies"]["test"]
    assert (ROOT / "fast" / "__main__.py").exists()


# A key is a line of a shell block in the README. The value is the command of `.ci/run` that finds this line.
RUN_BY_CI = {
    'pip install -c constraints.txt -e ".[hf]" && python -m fast': 'main_line=$(readme_line "python -m fast")',
    'pip install -c constraints.txt -e ".[test]" && pytest': "test_line=$(readme_line pytest)",
}
# A key is a line of a shell block that a test of this file runs. The value is a pattern for the output of the line, and
# the least number of matches.
RUN_HERE = {
    "python -m fast --help": (r"--context-parallel", 1),
    "python -m fast backends --preset deepseek-v3 --device cpu": (r"torch_flash", 1),
    "python -m fast backends --family gqa --preset gpt-oss-120b --device cpu": (r"gqa_paged_attention", 1),
    'python -m fast --prompt "import os" --max-new-tokens 8 --no-picture': (r"parity", 1),
    'python -m fast --family gqa --prompt "import os" --max-new-tokens 8 --no-picture': (r"parity", 1),
    'python -m fast --prompt "import os" --max-new-tokens 8 --cache-format fp8_e4m3 --no-picture': ("bits per", 1),
    'python -m fast --prompt "import os" --max-new-tokens 8 --cache-format fp8_e4m3 --fp8-mode fp8_query '
    "--no-picture": (r"mode\s+fp8_query", 1),
    "torchrun --standalone --nproc-per-node 4 dcp_step.py": (r"of 4: equal to one rank", 4),
    'torchrun --standalone --nproc-per-node 2 -m fast --context-parallel 2 --device cpu --prompt "import os" '
    "--max-new-tokens 8": (r"\bidentical\b", 2),
}  # fmt: skip


def shell_lines() -> dict[str, list[Path]]:
    """Return every line of every shell block of the README and of the site, with the pages that show the line."""
    found: dict[str, list[Path]] = {}
    for path in PAGES:
        if path.name != "CONTRIBUTING.md":  # its commands only set up a checkout for development
            for _, language, source in fenced_blocks(path):
                for line in source.splitlines() if language == "sh" else ():
                    found.setdefault(line, []).append(path)
    return found


def test_every_shell_line_is_run():
    """Read all shell lines -> each is in RUN_BY_CI or RUN_HERE; each file that a page defines is run by a line."""
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
    """Run a shell line in a folder with the files of its page -> the expected output."""
    for path in shell_lines()[line]:
        for name, source in files_of(path).items():
            (tmp_path / name).write_text(source, encoding="utf-8")
    if line.startswith(("python -m fast --prompt", "python -m fast --family")) or "-m fast --context-parallel" in line:
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
    """Read CONTRIBUTING.md -> it lists exactly the Makefile's targets; the modules that the Makefile runs exist."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    targets = set(re.findall(r"`make ([\w-]+)`", text))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert targets == set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))
    for module in re.findall(r"python -m (tests[\w.]+)", makefile):
        assert (ROOT / (module.replace(".", "/") + ".py")).exists(), module
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o100


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links(path):
    """Follow every relative link of a page -> a file of the repository."""
    text = path.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"[a-z]+:|#", target):
            assert (path.parent / target.split("#")[0]).exists(), f"{path.name}: {target}"


def api_pages() -> dict[str, str]:
    """Return the text of every API page, by its path below docs/api without the suffix."""
    folder = ROOT / "docs" / "api"
    return {
        path.relative_to(folder).with_suffix("").as_posix(): path.read_text(encoding="utf-8")
        for path in folder.rglob("*.md")
    }


def page_of(module: str) -> str:
    """Return the path of the API page of a module, below docs/api: the folder and the name of the module."""
    return module.replace(".", "/")


def directives(text: str) -> list[str]:
    """Return the names that a page passes to mkdocstrings."""
    return re.findall(r"^::: (\S+)$", text, re.MULTILINE)


def definitions() -> dict[str, tuple[str, str]]:
    """Return for each public name its full names in `reference` and in `fast`, which are equal for the contract."""
    found = {}
    for name in reference.__all__:
        values = [getattr(package, name) for package in (reference, fast)]
        modules = [getattr(value, "__module__", None) or DICTIONARIES[name] for value in values]
        found[name] = tuple(f"{module}.{name}" for module in modules)
    return found


def test_api_modules():
    """Read the API pages -> exactly one entry for every public module, in the folder of the module."""
    names = {f"{package}.{name}" for package in PACKAGES for name in modules_of(package)} | {"reference.interfaces"}
    shown = [name for page in api_pages().values() for name in directives(page)]
    assert len(shown) == len(set(shown))
    assert names <= set(shown)
    objects = set(shown) - names
    assert {name.rpartition(".")[0] for name in objects} <= names
    twins = {name for pair in definitions().values() if pair[0] != pair[1] for name in pair}
    assert {name for name in objects if name.partition(".")[2].rpartition(".")[0] in TWIN_MODULES} >= twins
    for page, text in api_pages().items():
        for name in directives(text):
            assert "/" not in page or name.split(".")[1] == page.split("/")[0], f"{page}: {name}"


@pytest.mark.parametrize("package", PACKAGES)
def test_api_names(package):
    """Read the page of a package -> every public name, with links to its entry and to the entry of its twin.

    The twin of a name is the function or class of the same name in the other package.
    """
    page, which = api_pages()[package], PACKAGES.index(package)
    for name, pair in definitions().items():
        mine, twin = pair[which], pair[1 - which]
        if mine == twin:
            assert f"[`{name}`][{mine}]" in page, name
        else:
            file, other = page_of(mine.partition(".")[2].rpartition(".")[0]), twin.split(".")[0]
            assert f"| [`{name}`]({file}.md#{mine}) | [`{other}.{name}`]({file}.md#{twin}) |" in page.splitlines(), name


@pytest.mark.parametrize("module", TWIN_MODULES)
def test_api_twins(module):
    """Read the page of a module -> for each name the entry of `reference`, then the entry of `fast`, with links.

    The page also has every public name that only `fast` defines in the module.
    """
    text = api_pages()[page_of(module)]
    pairs = [pair for pair in definitions().values() if pair[0].startswith(f"reference.{module}.")]
    assert pairs
    for pair in [(f"reference.{module}", f"fast.{module}"), *pairs]:
        at = []
        for mine, twin in (pair, pair[::-1]):
            entry = rf"^::: {mine}\n    options: .*\n\nTwin: \[`{twin}`\]\(#{twin}\)\n"
            (found,) = re.finditer(entry, text, re.MULTILINE)
            at.append(found.start())
        assert at == sorted(at)
        name = pair[0].rpartition(".")[2]
        both = f"## {name}\n\nTwins: [`reference.{name}`](#{pair[0]}), [`fast.{name}`](#{pair[1]})\n"
        assert pair not in pairs or text.count(both) == 1, name
    alone = [name for name in directives(text) if name.startswith(f"fast.{module}.")]
    loaded = importlib.import_module(f"fast.{module}")
    public = [name for name, value in vars(loaded).items() if getattr(value, "__module__", "") == loaded.__name__]
    assert {name.rpartition(".")[2] for name in alone} == {name for name in public if not name.startswith("_")}


def names_of_tests(path: Path) -> set[str]:
    """Return the names of the tests of a file; a test inside a class has the name `Class::test`."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        inner = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        found |= {prefix + item.name for item in inner if isinstance(item, ast.FunctionDef)}
    return {name for name in found if name.rpartition(":")[2].startswith("test_")}


def test_guards_exist():
    """Read the page Correctness -> every test that it names exists.

    The page names exactly the planted mistakes of CONTROLS in tests/mutations/test_mutations.py.
    """
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
    """Read the 21 faults of the page Correctness -> each has a source in parentheses, and a test after "Guards:"."""
    text = (ROOT / "docs" / "correctness.md").read_text(encoding="utf-8")
    faults = re.split(r"^(\d+)\. \*\*", text[text.index("## Faults") :], flags=re.MULTILINE)[1:]
    numbers = [int(number) for number in faults[::2]]
    assert numbers == list(range(1, 22))
    for number, fault in zip(numbers, faults[1::2], strict=True):
        told, found, guards = fault.partition("Guards:")
        assert found and "`tests/" in guards, number
        assert re.search(r"\(.+\)\s*$", told, re.DOTALL), f"fault {number}: no source in parentheses"


def test_backends():
    """Read the page of backends -> its table has the names, priorities, dtypes and sizes that the code declares."""
    text = (ROOT / "docs" / "use" / "backends.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([a-z_0-9]+)` \| (.*) \|$", text, re.MULTILINE))
    assert rows.keys() == {backend.name for backend in fast.backends.registered()}
    for backend in fast.backends.registered():
        row = rows[backend.name]
        if backend.library is not None:
            assert row.startswith(f"{backend.library}: ")
            continue
        assert row.startswith(f"{backend.priority} | ")
        decode = backend.ops["mla_decode" if "mla_decode" in backend.ops else "gqa_paged_attention"]
        named = set(re.findall(r"\b(?:b?float\d+)\b", row))
        assert named == {str(dtype).removeprefix("torch.") for dtype in decode.dtypes}
        assert backend.capability is None or "{}.{}".format(*backend.capability) in row
        for sizes in (*(decode.head_dims or {}).values(), decode.block_sizes or ()):
            *most, last = map(str, sizes) if sizes else ("",)
            assert not sizes or f"{', '.join(most)} or {last}" in row


def test_glossary():
    """Read the glossary -> every letter with its size in DeepSeek-V3; names of this project exist in the sources."""
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    letters = re.findall(r"^\| (\w+) \| ", text[: text.index("## Terms")], re.MULTILINE)
    assert " ".join(letters) == "letter T B S Sq C W H N Lq Lkv P R V Dv Nkv Dh D I"
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    paths = [path for path in paths if not {"kernels", "assets", "demo"} & set(path.relative_to(ROOT).parts)]
    sources = [path.read_text(encoding="utf-8") for path in paths]
    words = set(re.findall(r"\w+", "\n".join(sources)))
    ours = re.findall(r"^\|([^|]*)\|", text[text.index("## Names elsewhere") :], re.MULTILINE)
    names = {part for cell in ours for name in re.findall(r"`([\w.]+)`", cell) for part in name.split(".")}
    assert len(names) > 30 and names <= words
    fields = re.findall(r"^\| \w+ \| [^|]* \| (\d+) \| `(\w+)` \|", text, re.MULTILINE)
    assert {field: int(value) for value, field in fields} == PRESETS["deepseek-v3"]


# concepts for which all pages, docstrings and comments use one word
TERMS = (
    "program", "work item", "split", "partial output", "partial LSE", "partial index", "slot", "combine", "merge",
    "row", "row block", "padding row", "column block", "producer", "consumer", "full barrier", "empty barrier",
    "prefetch", "prologue", "main loop", "epilogue", "rank-local tokens", "owner rank", "weight", "backend",
    "context", "chunk",
)  # fmt: skip


def glossary_headings() -> list[str]:
    """Return the headings of the glossary, in lower case."""
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    return [heading.lower() for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)]


def test_glossary_terms():
    """Look up each term in the glossary -> one heading, and one paragraph below the heading."""
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    headings = glossary_headings()
    assert len(headings) == len(set(headings))
    assert set(headings) >= {term.lower() for term in TERMS}
    part = text[text.index("## Terms") : text.index("## Names elsewhere")]
    for entry in re.split(r"^#### ", part, flags=re.MULTILINE)[1:]:
        term, _, body = re.sub(r"^### .*", "", entry, flags=re.MULTILINE).partition("\n")
        (definition,) = body.strip().split("\n\n")
        assert definition.endswith("."), term


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_glossary_links(path):
    """Follow the links of a page to the glossary -> each leads to a heading, and no term is linked twice."""
    anchors = {re.sub(r"[^\w]+", "-", heading).strip("-") for heading in glossary_headings()}
    found = re.findall(r"\]\([\w./-]*glossary\.md#([^)]+)\)", path.read_text(encoding="utf-8"))
    assert set(found) <= anchors, f"{path.name}: {set(found) - anchors}"
    assert len(found) == len(set(found)), f"{path.name}: {sorted(found)}"


def test_log_entries():
    """Read the log -> each entry begins with a paragraph; each list of an entry has the labels of `order`."""
    text = (ROOT / "docs" / "log.md").read_text(encoding="utf-8")
    entries = re.split(r"^## (?=\d)", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), flags=re.MULTILINE)[1:]
    assert len(entries) >= 57
    for entry in entries:
        title, _, body = entry.partition("\n")
        assert re.match(r"\d{4}-\d\d-\d\d  \S", title), title
        first = body.strip().split("\n\n")[0]
        assert first[0] not in "-*|#" and first.endswith("."), f"{title}: {first}"
        labels = re.findall(r"^- \*\*(\w+)\.\*\* \S", body, re.MULTILINE)
        order = ["Prediction", "Measured", "Kept", "Learned"]
        assert labels and labels == order * (len(labels) // 4), f"{title}: {labels}"
        assert not re.search(rf"^(?:{'|'.join(order)})\b", body, re.MULTILINE), title


def test_pins():
    """Read constraints.txt -> each line pins one exact version; every requirement has a pin within its bounds."""
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
    """Read the requirements -> each has a lower bound, and only Triton is restricted to Linux."""
    for requirement in requirements("hf", "test", "docs", "notebooks", "dev"):
        bounded = any(clause.operator == ">=" for clause in requirement.specifier)
        assert bounded or requirement.name == PROJECT["name"], requirement
        assert (requirement.name == "triton") == (str(requirement.marker) == 'platform_system == "Linux"'), requirement
