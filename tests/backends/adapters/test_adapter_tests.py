"""Tests of the command `tests.adapter_tests`, which runs the differential tests of the adapters."""

from __future__ import annotations

import json

import pytest

from ... import adapter_tests
from ...adapter_tests import EVERY, GROUPED, Run, run_one, runs_of, table_of


def report_of(**backends):
    return {"backends": backends}


def counts(passed, failed=0, skipped=0, reasons=None, errors=()):
    return {"passed": passed, "failed": failed, "skipped": skipped, "reasons": reasons or {}, "errors": list(errors)}


def test_reports_are_added_up():
    """Add up parts of two files, one of which crashed -> counts of each file; the crash belongs to its adapter."""
    runs = [Run(EVERY, 1, 2, "mine"), Run(EVERY, 2, 2, "mine"), Run(GROUPED, 1, 1, None), Run(EVERY, 1, 1, "other")]
    reports = [
        report_of(mine=counts(3, 1, 2, {"no LSE": 2}, ["wrong"])),
        report_of(mine=counts(4, 0, 1, {"no LSE": 1})),
        report_of(mine=counts(5), package_2=counts(0, 9)),
        {**report_of(), "crashed": "exit status 139: "},
    ]
    table = table_of(runs, reports, ["mine", "other"])
    assert table["mine"] == {
        "tests": {EVERY: {"passed": 7, "failed": 1, "skipped": 3}, GROUPED: {"passed": 5, "failed": 0, "skipped": 0}},
        "reasons": {"no LSE": 3}, "errors": ["wrong"], "crashed": [],
    }  # fmt: skip
    assert table["other"]["crashed"] == [f"{EVERY}, part 1/1: exit status 139: "] and len(table) == 2


def test_a_run_that_does_not_end():
    """Give pytest no time -> the run counts as a crash, so that the command fails."""
    found = run_one(Run(EVERY, 1, 1, "torch_flash"), "cpu", 0.01)
    assert found["crashed"].startswith("exit status 124: ") and found["backends"] == {}


def test_which_tests_run(monkeypatch):
    """Name adapters -> only the tests of MLA; name none, on a GPU -> grouped-query attention first."""
    (torch_flash,) = (each for each in adapter_tests.backends.registered() if each.name == "torch_flash")
    assert runs_of([torch_flash], "cpu", 2, True, {}) == [Run(EVERY, part, 2, "torch_flash") for part in (1, 2)]
    monkeypatch.setattr(adapter_tests, "unavailable", lambda *_: [])
    assert runs_of([torch_flash], "cuda", 1, False, {"torch_flash": "128/128", "other": "x"}) == [
        Run(EVERY, 1, 1, "torch_flash", "128/128")
    ]
    files = [each.file for each in runs_of([torch_flash], "cuda", 1, True, {})]
    assert files == [GROUPED, GROUPED, EVERY]


def test_tests_that_are_left_out(tmp_path, monkeypatch):
    """Leave out a part of the names -> pytest gets the expression; the table says what was left out."""
    commands, path = [], tmp_path / "adapters.json"
    monkeypatch.setattr(adapter_tests, "run_command", lambda command, *_, **__: commands.append(command) or (0, ""))
    for more in ([], ["--leave-out", "torch_flash=128/128"]):
        options = ["--device", "cpu", "--backends", "torch_flash", "--parts", "1", *more, "--json", str(path)]
        assert adapter_tests.main(options) == 0
    assert "-k" not in commands[0] and commands[1][-2:] == ["-k", "not 128/128"] and len(commands) == 2
    row = json.loads(path.read_text())["adapters"]["torch_flash"]
    assert row["left_out"] == f"tests of {EVERY} whose names contain 128/128"


def test_adapters_that_cannot_run(tmp_path, capsys):
    """Ask for an adapter to a GPU library without a GPU -> no test, every reason in the file, exit status 0."""
    path = tmp_path / "adapters.json"
    assert adapter_tests.main(["--device", "cpu", "--backends", "torch_varlen", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert found["adapters"] == {} and found["not_run"] == {
        "torch_varlen": ["torch_varlen: serves device cuda, got cpu"]
    }
    assert found["command"].startswith("python -m tests.adapter_tests --device cpu")
    assert "torch_varlen: not run: " in capsys.readouterr().out


@pytest.mark.parametrize(
    "options, message",
    [(["--backends", "cpu"], "--backends: expected names of adapters ("),
     (["--versions", "vllm"], "--versions: expected PACKAGE=VERSION, got vllm"),
     (["--leave-out", "flashinfer="], "--leave-out: expected NAME=TEXT, got flashinfer="),
     (["--leave-out", "flashinfr=128/128"], "--leave-out: expected names of adapters (")],
)  # fmt: skip
def test_wrong_options(options, message, capsys):
    assert adapter_tests.main(["--device", "cpu", *options]) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")


def test_versions():
    """A version of the command line counts before the metadata; a package without both is unknown."""
    versions = adapter_tests.parse_pairs("--versions", "PACKAGE=VERSION", ["vllm=0.33.0"])
    assert adapter_tests.version_of("vllm", versions) == "0.33.0"
    found = adapter_tests.version_of("torch", versions)  # the metadata may lack the "+cu130" of the module
    assert found.partition("+")[0] == adapter_tests.torch.__version__.partition("+")[0]
    assert adapter_tests.version_of("nowhere", versions) == "unknown"
