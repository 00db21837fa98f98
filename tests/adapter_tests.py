"""Run the differential tests of the adapters to other libraries, and write one table of all adapters as JSON.

    python -m tests.adapter_tests --json docs/results/h200-adapters.json
    python -m tests.adapter_tests --device cpu --backends torch_flash
    python -m tests.adapter_tests --versions vllm=0.33.0 --jobs 14 --limit 200 --json h200-adapters.json
    python -m tests.adapter_tests --leave-out flashinfer=128/128

For each adapter the table has the library and its version, the numbers of passed, failed and skipped tests with the
reasons of the skips, and the first messages of failures. An adapter that cannot serve the machine is listed with every
reason why it did not run. A library that was compiled for some shapes only may end the process at another shape:
`--leave-out` names an adapter and a part of the names of the tests that are left out, and the table says so.

The tests are those of `tests/backends/adapters/test_every_adapter.py` (prefills and decodes of MLA) and, on a GPU,
`test_gqa_adapters.py` (grouped-query attention). They compare each adapter with `reference`. Each run of pytest has a
process of its own, so that a crash of one library leaves the results of the others.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fast import backends
from fast.backends.adapters import flash_attn, flashmla
from fast.backends.adapters.sources import Source, loaded

from .benchmarks.command_line import CannotRun, check_device, run, wide_console, write_report
from .benchmarks.report import provenance
from .support.adapters import MOST_ERRORS, unavailable
from .support.commands import run as run_command

FOLDER = "tests/backends/adapters"
EVERY, GROUPED = f"{FOLDER}/test_every_adapter.py", f"{FOLDER}/test_gqa_adapters.py"
OPS = {EVERY: ("flash_attn_varlen", "mla_decode"), GROUPED: ("gqa_varlen_attention", "gqa_paged_attention")}
SOURCES: dict[str, tuple[Source, ...]] = {
    "flash_attn_2": flash_attn.SOURCES_2, "flash_attn_3": flash_attn.SOURCES_3, "flash_attn_4": flash_attn.SOURCES_4,
    "flashmla": flashmla.SOURCES,
}  # fmt: skip
COUNTS = ("passed", "failed", "skipped")


class Run(NamedTuple):
    """One run of pytest: a file, the K-th of N parts of its tests, and the adapter of `--backend`, or None for all.

    Attributes:
        left_out: tests whose names contain this text do not run; None leaves out no test.
    """

    file: str
    part: int
    parts: int
    backend: str | None
    left_out: str | None = None


def version_of(package: str, given: dict[str, str]) -> str:
    """Return the version of a package: of its metadata, or of its module, or of `--versions`, or "unknown"."""
    if package in given:
        return given[package]
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        module = sys.modules.get(package.replace("-", "_"))
        return str(getattr(module, "__version__", "unknown"))


def library_of(backend: backends.Backend, given: dict[str, str]) -> dict[str, str]:
    """Return the library of an adapter that can run, the package that has its kernels, and the package's version."""
    if backend.name in SOURCES:
        package = loaded(SOURCES[backend.name])[0].package
    elif backend.library == "PyTorch":
        package = "torch"
    else:
        package = "flashinfer"
        importlib.import_module(package)
    found = {"library": str(backend.library), "package": package, "version": version_of(package, given)}
    if package == "torch" and torch.backends.cudnn.is_available():
        found["cudnn"] = str(torch.backends.cudnn.version())
    return found


def reasons_against(backend: backends.Backend, device: str) -> list[str]:
    """Return every reason why an adapter can serve no tested op on this machine; an empty list if it can serve one."""
    tested = [op for ops in OPS.values() for op in ops if op in backend.ops]
    found = [unavailable(backend, op, device) for op in tested]
    return [] if not all(found) else list(dict.fromkeys(reason for reasons in found for reason in reasons))


def runs_of(
    able: Sequence[backends.Backend], device: str, parts: int, all_wanted: bool, left_out: dict[str, str]
) -> list[Run]:
    """Return the runs of pytest for the adapters that can serve the machine, those of grouped-query attention first."""
    runs = [
        Run(EVERY, part, parts, each.name, left_out.get(each.name))
        for each in able
        if any(op in each.ops and not unavailable(each, op, device) for op in OPS[EVERY])
        for part in range(1, parts + 1)
    ]
    if device == "cuda" and all_wanted:  # on a CPU, these tests run stand-ins of the libraries
        runs = [Run(GROUPED, part, 2 * parts, None) for part in range(1, 2 * parts + 1)] + runs
    return runs


def run_one(one: Run, device: str, limit: float) -> dict[str, Any]:
    """Run pytest; return its report (`support.adapters.Report`), with "crashed" if pytest did not end by itself."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [
            sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", one.file,
            f"--device={device}", f"--shard={one.part}/{one.parts}", f"--adapter-report={report}",
            *([] if one.backend is None else [f"--backend={one.backend}"]),
            *([] if one.left_out is None else ["-k", f"not {one.left_out}"]),
        ]  # fmt: skip
        status, output = run_command(command, limit, OMP_WAIT_POLICY="PASSIVE")
        found = json.loads(report.read_text()) if report.exists() else {"backends": {}}
    if status not in (0, 1, 5):  # 5: this part has no test
        found["crashed"] = f"exit status {status}: {' '.join(output[-300:].split())}"
    return found


def table_of(runs: Sequence[Run], reports: Sequence[dict[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """Add up the reports; return for each adapter the counts of each file, reasons of skips, errors and crashes."""
    table: dict[str, Any] = {name: {"tests": {}, "reasons": Counter(), "errors": [], "crashed": []} for name in names}
    for one, report in zip(runs, reports, strict=True):
        for name, found in report["backends"].items():
            if name not in table:  # a variant of an adapter, which the test file itself registers
                continue
            row = table[name]
            counts = row["tests"].setdefault(one.file, dict.fromkeys(COUNTS, 0))
            for each in COUNTS:
                counts[each] += found[each]
            row["reasons"].update(found["reasons"])
            row["errors"] = (row["errors"] + found["errors"])[:MOST_ERRORS]
        if "crashed" in report:
            for name in names if one.backend is None else [one.backend]:
                table[name]["crashed"].append(f"{one.file}, part {one.part}/{one.parts}: {report['crashed']}")
    return {name: {**row, "reasons": dict(row["reasons"])} for name, row in table.items()}


def parse_pairs(option: str, form: str, given: Sequence[str]) -> dict[str, str]:
    """Return {left: right} of an option whose values are "left=right"; `form` says so in an error."""
    pairs = [each.partition("=") for each in given]
    if wrong := [f"{left}{sign}{right}" for left, sign, right in pairs if not (left and right)]:
        raise CannotRun(f"{option}: expected {form}, got {wrong[0]}")
    return {left: right for left, _, right in pairs}


def run_main(argv: Sequence[str], arguments: argparse.Namespace) -> int:
    """Run the tests, print the table, and write it if `--json` is given; return 1 if a test failed."""
    check_device(arguments.device)
    versions, device = parse_pairs("--versions", "PACKAGE=VERSION", arguments.versions), arguments.device
    left_out = parse_pairs("--leave-out", "NAME=TEXT", arguments.leave_out)
    known = {each.name: each for each in backends.registered() if each.library is not None}
    wanted = list(known) if arguments.backends is None else arguments.backends
    for option, names in (("--backends", wanted), ("--leave-out", left_out)):
        if unknown := sorted(set(names) - set(known)):
            raise CannotRun(f"{option}: expected names of adapters ({', '.join(known)}), got {', '.join(unknown)}")
    not_run = {name: reasons for name in wanted if (reasons := reasons_against(known[name], device))}
    able = [known[name] for name in wanted if name not in not_run]
    runs = runs_of(able, device, arguments.parts, arguments.backends is None, left_out)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        reports = list(pool.map(lambda one: run_one(one, device, arguments.limit), runs))
    rows = table_of(runs, reports, [each.name for each in able])
    rows = {each.name: library_of(each, versions) | rows[each.name] for each in able}
    for name in rows.keys() & left_out.keys():
        rows[name]["left_out"] = f"tests of {EVERY} whose names contain {left_out[name]}"
    console = wide_console(120)
    for name, row in rows.items():
        counts = [sum(found[each] for found in row["tests"].values()) for each in COUNTS]
        console.print(f"{name} ({row['package']} {row['version']}): "
                      f"{', '.join(f'{count} {each}' for each, count in zip(COUNTS, counts, strict=True))}"
                      f"{', CRASHED' if row['crashed'] else ''}")  # fmt: skip
        for message in (*row["errors"], *row["crashed"]):
            console.print(f"  {message[:200]}")
    for name, reasons in not_run.items():
        console.print(f"{name}: not run: {'; '.join(reasons)}")
    if arguments.json:
        head = provenance("adapter_tests", argv, device)
        head["command"] = head["command"].replace("tests.benchmarks.", "tests.")
        write_report(arguments.json, {**head, "device": device, "adapters": rows, "not_run": not_run})
    failed = any(row["crashed"] or any(each["failed"] for each in row["tests"].values()) for row in rows.values())
    return int(failed)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.adapter_tests", description=__doc__.splitlines()[0],
        epilog="Exit status: 0 if all tests passed, 1 if one failed or crashed, 2 if the command cannot run here.",
    )  # fmt: skip
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="device (default: cuda)")
    parser.add_argument("--backends", nargs="+", metavar="NAME",
                        help="adapters to test, without grouped-query attention (default: all, with it)")  # fmt: skip
    parser.add_argument("--versions", nargs="+", default=[], metavar="PACKAGE=VERSION",
                        help="versions of packages that are on the path without metadata")  # fmt: skip
    parser.add_argument("--leave-out", nargs="+", default=[], metavar="NAME=TEXT",
                        help="leave out the tests of an adapter whose names contain a text")  # fmt: skip
    parser.add_argument("--parts", type=int, default=2, metavar="N",
                        help="number of processes for the tests of each adapter (default: %(default)s)")  # fmt: skip
    parser.add_argument("--jobs", type=int, default=max(1, min(14, (os.cpu_count() or 2) - 2)), metavar="N",
                        help="number of processes at a time (default: %(default)s)")  # fmt: skip
    parser.add_argument("--limit", type=float, default=1800.0, metavar="S",
                        help="time limit of one process in seconds (default: %(default)s)")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="PATH", help="file for the table")
    return run(run_main, argv, parser)


if __name__ == "__main__":
    sys.exit(main())
