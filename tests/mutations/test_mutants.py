"""Tests of tests/mutants.py, which plants random faults in the sources and counts how many faults the tests notice.

A mutant is a source file with one fault. The tool draws a random sample of mutants and runs tests on each mutant. A
mutant survives if all tests pass. A session file stores the verdict on each mutant (killed, timed out or
survived), so that an interrupted run can continue.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys

import pytest

from .. import mutants
from ..mutants import KILLED, ROOT, SURVIVED, TABLE, TIMED_OUT, Mutant, Session, Verdict


def test_table():
    """Read the table of source files and their tests -> it lists every file of the mutated folders; all files exist."""
    subjects = [*ROOT.glob("fast/kernels/cpu/*.py"), *ROOT.glob("fast/integrations/transformers/*.py")]
    for folder in ("reference/gqa", "fast/gqa", "reference/interfaces/gqa", "fast/kernels/torch"):
        subjects += ROOT.glob(f"{folder}/[!_]*.py")
    subjects += [path for package in ("reference", "fast") for folder in ("planning", "distributed")
                 for path in (ROOT / package / folder).glob("[!_]*.py")]  # fmt: skip
    modules = ("choose_path", "cascade", "metadata", "builder", "captured", "context_parallel")
    subjects += [
        ROOT / "fast" / "mla" / "staging.py",
        ROOT / "fast" / "mla" / "state_rows.py",
        ROOT / "fast" / "mla" / "device_choices.py",
        ROOT / "fast" / "kernels" / "rotation.py",
    ]
    subjects += [ROOT / package / "mla" / f"{module}.py" for package in ("reference", "fast") for module in modules]
    transport = {ROOT / "reference" / "distributed" / f"{name}.py" for name in ("groups", "simulation", "arguments")}
    subjects = set(subjects) - transport
    assert set(TABLE) == {str(path.relative_to(ROOT)) for path in subjects} | {
        f"reference/interfaces/{name}.py"
        for name in (
            "advance_arguments",
            "graph_arguments",
            "ownership",
            "sizes",
            "slots",
            "decode_schedule",
            "builder",
        )
    }
    for file, judge in TABLE.items():
        assert (ROOT / file).is_file(), file
        assert judge.modules and len(set(judge.modules)) == len(judge.modules)
        for module in judge.modules:
            assert (ROOT / "tests" / f"{module}.py").is_file(), f"{file}: {module}"


HEAD = {"seed": 1, "sample": 3, "population": 9, "sources_sha256": "a"}
FIRST, SECOND = Mutant("fast/a.py", 3, 1, "NumberReplacer", 0), Mutant("fast/a.py", 4, 1, "AddNot", 0)


def test_session_continues(tmp_path):
    """Cut off the last line of a session file -> the session continues after the last complete line.

    If a mutant has several verdicts, the last verdict counts.
    """
    path = tmp_path / "session.jsonl"
    session = Session(path, HEAD)
    session.note_baseline("tests", 1.5)
    session.note_verdict(FIRST, Verdict(SURVIVED, None, "", 2.0))
    session.note_verdict(SECOND, Verdict(KILLED, "tests/test_a.py::test", "assert 1 == 2", 2.0))
    whole = path.read_text()
    for cut in range(1, len(whole.splitlines()[-1]) + 1):
        path.write_text(whole[:-cut])
        again = Session(path, HEAD)
        assert again.baselines == {"tests": 1.5} and list(again.verdicts) == [FIRST]
    again.note_verdict(FIRST, Verdict(KILLED, "tests/test_a.py::test", "", 2.0))
    assert Session(path, HEAD).verdicts[FIRST]["outcome"] == KILLED


@pytest.mark.parametrize("key", sorted(HEAD))
def test_session_of_another_draw(tmp_path, key):
    """Open a session file of other sources or of another sample -> an error, so that one file has one sample."""
    path = tmp_path / "session.jsonl"
    Session(path, HEAD)
    with pytest.raises(ValueError, match=f"^session: expected a file of this sample, got one with another {key}; use"):
        Session(path, HEAD | {key: "other"})


def test_survivors_are_explained(monkeypatch):
    """Read docs/results/mutants.json -> at most 15 of 150 mutants survived.

    docs/correctness.md shows the counts and names every survivor.
    """
    pytest.importorskip("mkdocs", reason="the page is drawn by a hook of mkdocs")
    found = json.loads((ROOT / "docs" / "results" / "mutants.json").read_text(encoding="utf-8"))
    text = (ROOT / "docs" / "correctness.md").read_text(encoding="utf-8")
    assert found["all"]["judged"] == found["sample"] == 150
    assert found["all"][SURVIVED] == len(found["survivors"]) <= 15
    for survivor in found["survivors"]:
        assert mutants.entry_of(survivor) in text, mutants.entry_of(survivor)
    for counts in (found["by_subject"], found["by_file"]):
        for outcome in found["all"]:
            assert sum(own[outcome] for own in counts.values()) == found["all"][outcome]
    monkeypatch.syspath_prepend(ROOT / "docs" / "hooks")
    page = importlib.import_module("performance").filled(text, ROOT / "docs")
    assert f"{150 - len(found['survivors'])} of 150 mutants were noticed" in page
    assert f"seed {found['seed']} out of {found['population']}" in page


SOURCE = '''"""Sums."""

from __future__ import annotations

from . import other

__all__ = ["double"] + ["half"]


@schema(3 + 4)
def double(x: int | None = 5, *rest, key: int = 6 + 7, **named) -> int | float:
    """Twice."""
    twice: int | None = x * 2
    return (lambda y=8, *more: y + 9)(twice)


class Share:
    """A share."""

    size: int | None = 10
    name = 11

    def half(self, x: int = 12, *, key=13):
        """Half."""
        if not x:
            return x // 2
'''


def test_signatures_are_left_alone():
    """Make all mutants of SOURCE -> only bodies of functions and assignments of constants are changed.

    No mutant changes a default, an annotation, a decorator, an import, an annotated field of a class or `__all__`.
    """
    pytest.importorskip("cosmic_ray", reason="the extra dev has cosmic-ray")
    found = mutants.mutants_of("fast/a.py", SOURCE)
    lines = SOURCE.splitlines()
    places = {(mutant.line, lines[mutant.line - 1][mutant.column :].split()[0]) for mutant in found}
    assert {text for _, text in places} == {"*", "2", "+", "9)(twice)", "11", "not", "//"}
    assert {line for line, _ in places} == {13, 14, 21, 25, 26}
    assert len({(mutant.operator, mutant.occurrence) for mutant in found}) == len(found)
    for mutant in found:
        changed = mutants.mutate(SOURCE, mutant)
        if changed is not None:
            differs = [number for number, pair in enumerate(zip(lines, changed.splitlines(), strict=True), 1)
                       if pair[0] != pair[1]]  # fmt: skip
            assert differs == [mutant.line], mutant
            assert len(mutants.diff_of(SOURCE, mutant)) == 2


def test_draw_is_the_seeds():
    """Draw a sample twice with one seed -> the same sample.

    A larger sample begins with the smaller sample, and another seed gives another sample.
    """
    pytest.importorskip("cosmic_ray", reason="the extra dev has cosmic-ray")
    sources = {"fast/b.py": "def f(x):\n    return x + 1 < 2 * x\n", "fast/a.py": SOURCE}
    drawn, population = mutants.draw(sources, 26, 20)
    assert len(set(drawn)) == 20 < population
    assert mutants.draw(dict(reversed(sources.items())), 26, 20) == (drawn, population)
    assert mutants.draw(sources, 26, 10)[0] == drawn[:10]
    assert mutants.draw(sources, 27, 20)[0] != drawn
    everything = mutants.draw(sources, 26, 10**6)[0]
    assert len(everything) <= population and set(drawn) < set(everything)
    assert all(mutants.mutate(sources[mutant.file], mutant) is not None for mutant in everything)


PROJECT = {
    "pyproject.toml": '[tool.pytest.ini_options]\npythonpath = ["."]\n',
    "reference/__init__.py": "",
    "tests/__init__.py": "",
    "tests/support/__init__.py": "",
    "fast/__init__.py": (
        "def total(n):\n    i = s = 0\n    while i < n:\n        i += 1\n        s += i\n    return s\n"
    ),
    "tests/test_total.py": (
        "import fast\n\ndef test_total():\n    assert fast.total(3) == 6\n\n"
        "def test_left_out():\n    raise AssertionError('not selected')\n"
    ),
}
COMMAND = """
import json, sys
from pathlib import Path
from tests import mutants

mutants.LIMIT_S, mutants.PRELOADED = 2, ()
mutants.TABLE = {"fast/__init__.py": mutants.Judge(("test_total",), "not left_out")}
mutants.main()
"""


def test_judges_and_continues(tmp_path):
    """Run the tool in a small project -> its report has verdicts of all three kinds, and the test that killed a mutant.

    A second run judges only the mutants whose verdicts are missing in the session file.
    """
    pytest.importorskip("cosmic_ray", reason="the extra dev has cosmic-ray")
    tool = {f"tests/{name}": (ROOT / "tests" / name).read_text() for name in ("mutants.py", "support/mutant_judges.py")}
    for name, text in (PROJECT | tool).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    session, path = tmp_path / "session.jsonl", os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    environment = os.environ | {"PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-c", COMMAND, "--session", str(session), "--json", str(tmp_path / "found.json")]

    def run(*options: str) -> str:
        done = subprocess.run([*command, *options], cwd=tmp_path, env=environment, timeout=120,
                              check=False, capture_output=True, text=True)  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    first = run("--sample", "6", "--seed", "6")
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["all"]["judged"] == 6 == sum(found["all"][name] for name in (KILLED, TIMED_OUT, SURVIVED))
    assert all(found["all"][name] for name in (KILLED, TIMED_OUT, SURVIVED)), found["all"]
    noticed = {tuple(one["diff"]): one for one in found["noticed"]}
    assert any(one["by"] == "tests/test_total.py::test_total" and one["said"] for one in noticed.values())
    # this mutant must survive, because its loop also ends at n
    assert ["- while i < n:", "+ while i != n:"] in [one["diff"] for one in found["survivors"]]
    survived = found["all"][SURVIVED]
    assert f"{6 - survived} of 6 noticed" in first and first.count("\nsurvived: ") == survived

    lines = session.read_text().splitlines(keepends=True)
    session.write_text("".join(lines[:-2]) + lines[-2][:20])  # as if a run had ended while it wrote this line
    second = run("--sample", "6", "--seed", "6")
    assert "unchanged:" in first and "unchanged:" not in second and "   2/2" in second
    assert {_place(line) for line in session.read_text().splitlines()[2:]} == {_place(line) for line in lines[2:]}
    assert (tmp_path / "fast" / "__init__.py").read_text() == PROJECT["fast/__init__.py"]


def _place(line: str) -> tuple:
    read = json.loads(line)
    return (*read["mutant"].values(), read["verdict"]["outcome"])
