"""Plant small faults in the sources, one at a time, and count how many faults the tests notice.

`python -m tests.mutants --session mutants.jsonl` draws a sample of mutants and runs tests on each mutant. A mutant is a
source file in which the package cosmic-ray changed one operator, number, keyword or condition. A mutant survives if all
tests pass. The command prints the surviving mutants.

- Sample: the mutants are a simple random sample, without replacement, of all mutants of the files in `TABLE`. A mutant
  that does not compile, or that has the same syntax tree as the source, is replaced by the next mutant.
- Code without mutants: signatures and other code that has no behaviour are never changed (`is_left_alone`).
- Judge: for each file, `TABLE` names the tests that run on its mutants. These tests are the *judge* of the file. They
  must first pass on the unchanged sources in at most 30 s of CPU time (the baseline).
- Verdict: the judge's tests run on the mutant, in a copy of the repository, until the first test fails. If the tests
  need more than 60 s of CPU time, the mutant is reported as timed out. It then counts as noticed.
- Session file: every verdict is one line of this file. If a run was interrupted, repeat its command to continue it.

The command needs the package's extra `dev` (cosmic-ray) and a POSIX system. The process imports torch, transformers and
pytest once, and the tests of each mutant run in a fork of the process.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import difflib
import hashlib
import importlib.metadata
import itertools
import json
import os
import platform
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from .support.mutant_judges import SUBJECTS, TABLE, Judge

ROOT = Path(__file__).resolve().parents[1]
BASELINE_LIMIT_S, LIMIT_S = 30, 60  # limits of the tests' CPU time in seconds: on the unchanged sources, on a mutant
PATIENCE = 4  # the tests of a mutant are stopped after PATIENCE x LIMIT_S seconds of wall-clock time
MEMORY_LIMIT = 24 << 30  # largest address space of a run in bytes; without it a mutated size could fill the memory
COPIED = ("fast", "reference", "tests", "docs", "pyproject.toml", "README.md", "CHANGELOG.md", "CONTRIBUTING.md")
PRELOADED = (
    "torch", "hypothesis", "beartype", "jaxtyping", "einops", "safetensors.torch",
    "transformers.models.deepseek_v2.modeling_deepseek_v2", "transformers.models.deepseek_v3.modeling_deepseek_v3",
)  # fmt: skip


# The outcomes of a verdict, in the order of the report.
KILLED, TIMED_OUT, SURVIVED = "killed", "timed out", "survived"


# The mutants.


@dataclass(frozen=True, order=True)
class Mutant:
    """One change of one file.

    Attributes:
        file: path relative to the root of the repository.
        line: line of the change, from 1.
        column: column of the change, from 0.
        operator: name of cosmic-ray's operator.
        occurrence: index of the change among all positions of the file where the operator applies, from 0.
    """

    file: str
    line: int
    column: int
    operator: str
    occurrence: int


def operators() -> dict[str, object]:
    """Return cosmic-ray's operators by name.

    Operators that need arguments, that draw random numbers or that remove decorators are left out.
    """
    from cosmic_ray.operators.provider import OperatorProvider

    provider = OperatorProvider()
    left_out = {"RemoveDecorator", "VariableReplacer", "VariableInserter"}
    return {name: provider[name]() for name in sorted(provider) if name not in left_out}


def is_left_alone(node) -> bool:
    """Return whether a node of parso's tree has no behaviour, so that no mutant changes the node.

    These nodes are left alone:

    - imports
    - decorators, which contain the schemas of ops
    - parameters of a function or lambda, with their annotations and defaults
    - return annotations and other annotations
    - fields of a class with their defaults, because fields are the signature of a dataclass
    - assignments to a name that begins and ends with two underscores
    """
    while node is not None:
        parent = node.parent
        if node.type in ("import_name", "import_from", "decorator", "decorators", "parameters", "param"):
            return True
        if parent is not None and parent.type == "funcdef" and node is parent.annotation:
            return True
        if node.type == "operator" and parent.type == "lambdef" and node.value != ":":
            return True  # the star in *args
        if parent is not None and parent.type == "annassign" and node is parent.children[1]:
            return True
        if node.type == "expr_stmt":
            target, first = node.children[:2]
            if first.type == "annassign" and _stands_in(parent, "classdef"):
                return True
            if target.type == "name" and target.value.startswith("__") and target.value.endswith("__"):
                return True
        node = parent
    return False


def _stands_in(statement, kind: str) -> bool:
    """Return whether a statement stands directly in the body of a node of this kind, such as "classdef"."""
    block = statement.parent
    return block is not None and block.parent is not None and block.parent.type == kind


def mutants_of(file: str, source: str) -> list[Mutant]:
    """Return all mutants of a source, in the order of the file."""
    from cosmic_ray.ast import ast_nodes, get_ast

    nodes = list(ast_nodes(get_ast(source)))
    left_alone = {id(node): is_left_alone(node) for node in nodes}
    found = []
    for name, operator in operators().items():
        occurrence = itertools.count()
        for node in nodes:
            for start, _ in operator.mutation_positions(node):
                number = next(occurrence)
                if not left_alone[id(node)]:
                    found.append(Mutant(file, *start, name, number))
    return sorted(found)


def mutate(source: str, mutant: Mutant) -> str | None:
    """Return the changed source; None if the changed source does not compile or has the syntax tree of `source`."""
    from cosmic_ray.mutating import mutate_code

    changed = mutate_code(source, operators()[mutant.operator], mutant.occurrence)
    try:
        tree = ast.parse(changed)
        with warnings.catch_warnings(action="ignore", category=SyntaxWarning):  # e.g. for `is` with a number
            compile(tree, mutant.file, "exec")
    except SyntaxError:
        return None
    return None if ast.dump(tree) == ast.dump(ast.parse(source)) else changed


def draw(sources: dict[str, str], seed: int, sample: int) -> tuple[list[Mutant], int]:
    """Draw a simple random sample over the mutants of all sources.

    Args:
        sources: source text by file.
        seed: seed of the sample.
        sample: number of mutants to draw; if there are fewer mutants, all are drawn.

    Returns:
        The drawn mutants, and the number of all mutants.
    """
    population = [mutant for file in sorted(sources) for mutant in mutants_of(file, sources[file])]
    shuffled = random.Random(seed).sample(population, len(population))
    fit = (mutant for mutant in shuffled if mutate(sources[mutant.file], mutant) is not None)
    return list(itertools.islice(fit, sample)), len(population)


def diff_of(source: str, mutant: Mutant) -> list[str]:
    """Return the changed lines, without context, as `- old` and `+ new`."""
    changed = mutate(source, mutant)
    lines = difflib.unified_diff(source.splitlines(), changed.splitlines(), lineterm="", n=0)
    return [line[0] + " " + line[1:].strip() for line in lines if line[0] in "+-" and line[:3] not in ("+++", "---")]


# The tests of a mutant.


class FirstFailure:
    """Plugin of pytest that records the first failure, sorts the test modules, and switches shrinking off.

    Shrinking is the search of hypothesis for a smaller example after a failure. The search takes time.
    """

    def __init__(self, tree: Path, modules: Sequence[str]):
        self.tree, self.modules, self.test, self.said = tree, modules, None, ""

    def pytest_sessionstart(self):
        """Load a hypothesis profile without shrinking; it replaces the profile that conftest.py has loaded."""
        with contextlib.suppress(ModuleNotFoundError):
            from hypothesis import Phase, settings

            phases = Phase.explicit, Phase.generate
            settings.register_profile("first failure", parent=settings(), phases=phases, report_multiple_bugs=False)
            settings.load_profile("first failure")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        """Sort the tests by the judge's order of modules, after conftest.py has sorted them in another order."""
        tests = self.tree / "tests"
        items.sort(key=lambda item: self.modules.index(item.path.relative_to(tests).with_suffix("").as_posix()))

    def pytest_runtest_logreport(self, report):
        """Record the failure of a test."""
        self._note(report)

    def pytest_collectreport(self, report):
        """Record a module that cannot be imported."""
        self._note(report)

    def _note(self, report):
        if report.failed and self.test is None:
            lines = [line[1:].strip() for line in report.longreprtext.splitlines() if line.startswith("E ")]
            self.test, self.said = report.nodeid, (lines or [""])[0][:200]

    def pytest_sessionfinish(self):
        """Raise an error if the tests imported `reference` or `fast` from another folder than the copy."""
        for name in ("reference", "fast"):
            module = sys.modules.get(name)
            if module is not None and not Path(module.__file__).is_relative_to(self.tree):
                raise RuntimeError(f"{name}: expected the copy in {self.tree}, got {module.__file__}")


@dataclass(frozen=True)
class Verdict:
    """Result of the tests of one mutant.

    Attributes:
        outcome: killed, timed out or survived.
        by: first test that failed; None if no test failed.
        said: first line of this test's error message.
        seconds: CPU time of the tests.
    """

    outcome: str
    by: str | None
    said: str
    seconds: float


class Bench:
    """A copy of the repository in which tests run; each run has a process of its own."""

    def __init__(self, folder: Path):
        self.tree = folder
        skipped = shutil.ignore_patterns("__pycache__", "*.pyc")
        for name in (name for name in COPIED if (ROOT / name).exists()):
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copyfile
            copy(ROOT / name, folder / name, **({"ignore": skipped} if copy is shutil.copytree else {}))

    def plant(self, file: str, source: str) -> None:
        """Write a source file of the copy, and delete the bytecode that Python compiled from its previous text."""
        path = self.tree / file
        path.write_text(source, encoding="utf-8")
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
            compiled.unlink()

    def start(self, judge: Judge, cache_bytecode: bool = False) -> int:
        """Run a judge's tests in a forked process and return the process id."""
        self.answer.unlink(missing_ok=True)
        pid = os.fork()
        if pid == 0:
            status = 70
            try:
                status = self._run(judge, cache_bytecode)
            finally:
                os._exit(status)
        return pid

    @property
    def answer(self) -> Path:
        """The file that a run writes: exit status, first failed test, and the message of this test."""
        return self.tree / "answer.json"

    def _run(self, judge: Judge, cache_bytecode: bool) -> int:
        os.setpgid(0, 0)
        with (self.tree / "log.txt").open("wb") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S + 5))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
        os.chdir(self.tree)
        sys.dont_write_bytecode = not cache_bytecode
        for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "fast", "reference")]:
            del sys.modules[name]
        sys.path[:] = [str(self.tree), *(path for path in sys.path if Path(path or ".").resolve() != ROOT)]
        importlib.invalidate_caches()
        # with this number of workers, conftest.py lets torch use one thread; no test result depends on the threads
        os.environ |= {"PYTEST_XDIST_WORKER_COUNT": str(os.cpu_count()), "HF_HUB_OFFLINE": "1"}
        noted = FirstFailure(self.tree, judge.modules)
        options = ["-x", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "--no-header", "-W", "ignore"]
        status = int(pytest.main([*options, *judge.command], plugins=[noted]))
        self.answer.write_text(json.dumps({"status": status, "by": noted.test, "said": noted.said}))
        sys.stdout.flush()
        return status

    def verdict(self, status: int, used: resource.struct_rusage, late: bool) -> Verdict:
        """Return the verdict of a run that has ended.

        Args:
            status: wait status of the run's process.
            used: resources that the process used.
            late: whether the process was killed at the limit of wall-clock time.

        Raises:
            RuntimeError: the run executed no test, or did not import the packages of the copy.
        """
        seconds = round(used.ru_utime + used.ru_stime, 1)
        signalled = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        if late or signalled == signal.SIGXCPU or seconds >= LIMIT_S:
            return Verdict(TIMED_OUT, None, "", seconds)
        if signalled:
            return Verdict(KILLED, None, f"ended by {signal.Signals(signalled).name}", seconds)
        said = json.loads(self.answer.read_text()) if self.answer.exists() else None
        if said is None or said["status"] == 5:
            raise RuntimeError(f"expected a run of tests, got\n{(self.tree / 'log.txt').read_text()[-3000:]}")
        if said["status"] == 0:
            return Verdict(SURVIVED, None, "", seconds)
        # if the run failed but no test failed, the import of conftest.py failed
        return Verdict(KILLED, said["by"] or "tests/conftest.py", said["said"], seconds)


def run_all(benches: Sequence[Bench], work: Sequence, begin: Callable[[Bench, object], int], done: Callable) -> None:
    """Run the tests of all items of `work`, one item at a time on each bench.

    Args:
        benches: copies of the repository.
        work: items, such as mutants or names of judges.
        begin: `begin(bench, item)` starts a run and returns its process id.
        done: `done(item, bench, verdict)` is called after the run.
    """
    free, running, waiting = list(benches), {}, list(work)
    try:
        while waiting or running:
            while waiting and free:
                bench, item = free.pop(), waiting.pop(0)
                running[begin(bench, item)] = bench, item, time.monotonic() + PATIENCE * LIMIT_S
            time.sleep(0.05)
            for pid, (bench, item, end) in list(running.items()):
                late = time.monotonic() > end
                if late:
                    _end(pid)
                ended, status, used = os.wait4(pid, 0 if late else os.WNOHANG)
                if ended:
                    del running[pid]
                    free.append(bench)
                    done(item, bench, bench.verdict(status, used, late))
    finally:
        for pid in running:
            _end(pid)
            os.waitpid(pid, 0)


def _end(pid: int) -> None:
    """Kill a run and the processes that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


# The session.


class Session:
    """Session file of JSON lines: the first line describes the sample, each further line is a baseline or a verdict.

    A baseline is the CPU time in seconds that a judge's tests need on the unchanged sources.

    Raises:
        ValueError: the file belongs to another sample or to other sources.
    """

    def __init__(self, path: Path, head: dict):
        self.path = path
        self.baselines: dict[str, float] = {}
        self.verdicts: dict[Mutant, dict] = {}
        lines = list(self._lines())
        if not lines:
            self._append({"head": head})
        elif lines[0].get("head") != head:
            held = lines[0].get("head") or {}
            differs = ", ".join(key for key in head if held.get(key) != head[key])
            raise ValueError(f"session: expected a file of this sample, got one with another {differs}; use a new file")
        for line in lines[1:]:
            if "baseline" in line:
                self.baselines[line["baseline"]] = line["seconds"]
            else:
                self.verdicts[Mutant(**line["mutant"])] = line["verdict"]

    def _lines(self) -> Iterator[dict]:
        text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
        whole, _, cut_short = text.rpartition("\n")
        if cut_short:  # a run was interrupted while it wrote a line
            self.path.write_text(whole + "\n" if whole else "", encoding="utf-8")
        return (json.loads(line) for line in whole.splitlines())

    def _append(self, line: dict) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def note_baseline(self, judge: str, seconds: float) -> None:
        """Record the CPU time in seconds that a judge's tests need on the unchanged sources."""
        self.baselines[judge] = seconds
        self._append({"baseline": judge, "seconds": seconds})

    def note_verdict(self, mutant: Mutant, verdict: Verdict) -> None:
        """Record a verdict; the new verdict replaces an earlier verdict of the same mutant."""
        self.verdicts[mutant] = dataclasses.asdict(verdict)
        self._append({"mutant": dataclasses.asdict(mutant), "verdict": self.verdicts[mutant]})


def digest(texts: dict[str, str]) -> str:
    """Return the sha256 of texts and their names."""
    return hashlib.sha256(json.dumps(texts, sort_keys=True).encode()).hexdigest()


def report(session: Session, drawn: Sequence[Mutant], sources: dict[str, str], head: dict) -> dict:
    """Return counts of verdicts, each survivor with its change, and each noticed mutant with the first failed test.

    The verdicts are counted for all mutants together, for each subject (`SUBJECTS`) and for each file.
    """
    judged = {mutant: session.verdicts[mutant] for mutant in drawn if mutant in session.verdicts}

    def counts(mutants) -> dict[str, int]:
        outcomes = [judged[mutant]["outcome"] for mutant in mutants]
        return {"judged": len(outcomes)} | {name: outcomes.count(name) for name in (KILLED, TIMED_OUT, SURVIVED)}

    def described(mutant) -> dict:
        place = {"file": mutant.file, "line": mutant.line, "operator": mutant.operator}
        return place | {"diff": diff_of(sources[mutant.file], mutant)}

    def subject(mutant) -> str:
        return next(name for part, name in SUBJECTS.items() if part in mutant.file)

    files = sorted({mutant.file for mutant in judged})
    survivors = sorted(mutant for mutant in judged if judged[mutant]["outcome"] == SURVIVED)
    noticed = sorted(mutant for mutant in judged if judged[mutant]["outcome"] != SURVIVED)
    return {
        **head,
        "command": f"python -m tests.mutants --seed {head['seed']} --sample {head['sample']}",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "versions": {name: importlib.metadata.version(name) for name in ("cosmic-ray", "parso", "pytest", "torch")}
        | {"python": platform.python_version()},
        "all": counts(judged),
        "by_subject": {
            name: counts([mutant for mutant in judged if subject(mutant) == name])
            for name in dict.fromkeys(reversed(SUBJECTS.values()))
        },
        "by_file": {file: counts([mutant for mutant in judged if mutant.file == file]) for file in files},
        "baseline_seconds": dict(sorted(session.baselines.items())),
        "survivors": [described(mutant) for mutant in survivors],
        "noticed": [described(one) | {key: judged[one][key] for key in ("outcome", "by", "said")} for one in noticed],
    }


def entry_of(survivor: dict) -> str:
    """Return the name of a survivor in docs/correctness.md: the file and the changed line."""
    return f"`{survivor['file']}` `{survivor['diff'][-1].removeprefix('+ ').partition('  # ')[0]}`"


def show(found: dict) -> None:
    """Print the counts, and each survivor with the words with which its entry in docs/correctness.md must begin."""
    for survivor in found["survivors"]:
        print(f"\nsurvived: {survivor['file']}:{survivor['line']} {survivor['operator']}")
        print("\n".join(f"  {line}" for line in survivor["diff"]))
        print(f"  to explain: {entry_of(survivor)}: ")
    width = max(map(len, found["by_file"]), default=0)
    print()
    for file, counts in (*found["by_file"].items(), ("all", found["all"])):
        print(f"{file:{width}}  " + "  ".join(f"{name} {number:3}" for name, number in counts.items()))
    noticed = found["all"][KILLED] + found["all"][TIMED_OUT]
    print(f"{noticed} of {found['all']['judged']} noticed: {noticed / max(1, found['all']['judged']):.1%}")


def main() -> None:
    """Draw mutants, run the tests of each mutant, and print and write the report."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=26, help="seed of the sample (default 26)")
    parser.add_argument("--sample", type=int, default=150, help="number of mutants to judge (default 150)")
    parser.add_argument("--session", type=Path, default=Path("mutants.jsonl"), help="session file, new or to continue")
    parser.add_argument("--jobs", type=int, default=1, help="number of mutants that are judged at a time (default 1)")
    parser.add_argument("--json", type=Path, help="file for the report, such as docs/results/mutants.json")
    parser.add_argument("--again", action="store_true", help="judge the survivors of the session again")
    parser.add_argument("--only", default="", metavar="TEXT", help="judge only files whose path contains TEXT")
    given = parser.parse_args()

    sources = {file: (ROOT / file).read_text(encoding="utf-8") for file in sorted(TABLE)}
    drawn, population = draw(sources, given.seed, given.sample)
    head = {"seed": given.seed, "sample": given.sample, "population": population, "sources_sha256": digest(sources)}
    session = Session(given.session, head)

    def is_open(mutant: Mutant) -> bool:
        verdict = session.verdicts.get(mutant)
        return given.only in mutant.file and (verdict is None or (given.again and verdict["outcome"] == SURVIVED))

    work = [mutant for mutant in drawn if is_open(mutant)]
    for name in PRELOADED if work else ():
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as folder:
        benches = []
        for job in range(min(given.jobs, len(work))):
            (Path(folder).resolve() / str(job)).mkdir()
            benches.append(Bench(Path(folder).resolve() / str(job)))
        measure_baselines(session, benches, work)
        judge_all(session, benches, work, sources)
    found = report(session, drawn, sources, head)
    show(found)
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def measure_baselines(session: Session, benches: Sequence[Bench], work: Sequence[Mutant]) -> None:
    """Run the tests of every judge on the unchanged sources, and record how much CPU time they need.

    Raises:
        RuntimeError: a test fails, or the tests need more than `BASELINE_LIMIT_S`.
    """
    judges = {" ".join(TABLE[mutant.file].command): TABLE[mutant.file] for mutant in work}

    def done(name: str, bench: Bench, verdict: Verdict) -> None:
        said = f"{verdict.outcome} in {verdict.seconds} s by {verdict.by}: {verdict.said}"
        if verdict.outcome != SURVIVED or verdict.seconds > BASELINE_LIMIT_S:
            raise RuntimeError(f"{name}: expected these tests to pass within {BASELINE_LIMIT_S} s, got {said}")
        session.note_baseline(name, verdict.seconds)
        print(f"{verdict.seconds:6.1f} s  unchanged: {name}", flush=True)

    unmeasured = [name for name in judges if name not in session.baselines]
    run_all(benches, unmeasured, lambda bench, name: bench.start(judges[name], cache_bytecode=True), done)


def judge_all(session: Session, benches: Sequence[Bench], work: Sequence[Mutant], sources: dict[str, str]) -> None:
    """Run the tests of each mutant and record the verdicts."""
    number = itertools.count(1)

    def begin(bench: Bench, mutant: Mutant) -> int:
        bench.plant(mutant.file, mutate(sources[mutant.file], mutant))
        return bench.start(TABLE[mutant.file])

    def done(mutant: Mutant, bench: Bench, verdict: Verdict) -> None:
        bench.plant(mutant.file, sources[mutant.file])
        session.note_verdict(mutant, verdict)
        print(f"{next(number):4}/{len(work)} {verdict.seconds:6.1f} s  {verdict.outcome:9} {mutant.file}:{mutant.line} "
              f"{mutant.operator} {verdict.by or ''}", flush=True)  # fmt: skip

    run_all(benches, work, begin, done)


if __name__ == "__main__":
    main()
