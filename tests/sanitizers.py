"""Run the launches of `tests/memory_checks.py` under compute-sanitizer, and report what its tools find.

The tool memcheck finds accesses outside of tensors. The tool racecheck finds data races in shared memory. The launches
are divided into parts ("shards"), and each shard runs in a process of its own. The report also names the kernels that
no shard launched.

racecheck and mbarriers: in our kernels, all warps of a group meet at a barrier, and then one thread arrives at an
mbarrier for the group. For racecheck, this arrival orders only the accesses of the arriving thread. So racecheck would
report the accesses of the other threads as races. Under racecheck the kernels are therefore compiled in a form in which
every thread arrives (`fast/kernels/hopper/common/arrivals.py`). For the ordinary form, `test_hopper_compilation` checks
in the compiled code that a barrier precedes each arrival.

Controls: the small kernel of `tests/hand_over.py` runs under racecheck in three forms. The results show whether
racecheck's reports can be trusted:

- Every thread arrives: racecheck must report no race.
- One thread arrives for all threads: any report is accepted.
- No thread waits: racecheck must report a race.

Three kinds of reports are not failures:

- Triton writes some bytes of shared memory when the warp groups of `warp_specialize` start and end. All threads meet
  before and after these writes, and our kernels do not access these bytes. A report about these writes names only the
  line with the `def` of a kernel or the line with its call of `warp_specialize`.
- In a combine tile with fewer elements than threads, the compiler keeps several copies of each element, and all copies
  have the same value. racecheck reports their writes to shared memory, although the order of equal writes does not
  matter. Both lines of such a report are the line that computes the output or the line that stores it (docs/log.md has
  the evidence).
- A few reports name neither kernel nor line (fewer than 1 %). Some of them name the file in the place of the kernel.
  The shard with such a report runs again, at most `AGAIN` times. A report without kernel and line in the last run is a
  failure. Other reports have the file and the kernel in each other's place; they name everything, and count as usual.

Limits: racecheck does not check asynchronous copies, copies by TMA (the GPU's bulk copy engine), or the reads of matrix
    products. In the form in which every thread arrives, each arrival waits for the asynchronous copies of its thread;
    the ordinary form has no such wait. Launches run one after another, so racecheck cannot find a race between two
    kernels.
"""

from __future__ import annotations

import argparse
import ast
import functools
import re
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from . import memory_checks
from .support.commands import ROOT, run

CONTROLS = {"every thread arrives": (), "one arrives for all": ("--one-arrives",), "nobody waits": ("--racing",)}
AGAIN = 2  # maximum number of repeats of a shard; a shard repeats if a report names neither kernel nor line
TROUBLE = re.compile(r"={5,}.*\b(Error|Internal|Fatal|failed)\b")  # a line that reports an error of the tool itself
ACCESS = re.compile(r"=+ .*\b(Read|Write) access at (?P<kernel>\w+)\+0x[0-9a-f]+ in (?P<file>[\w.]+):(?P<line>\d+)")
EXCHANGED = re.compile(  # the path of the file in the place of the kernel, and the kernel in the place of the file
    r"=+ .*\b(Read|Write) access at /\S*?(?P<file>[\w.]+\.py)\+0x[0-9a-f]+ in (?P<kernel>\w+):(?P<line>\d+)"
)
NAMELESS = re.compile(r"access at\s*(/\S+\.py\+0x[0-9a-f]+\s*)?(\[|$)")  # a report without kernel and line


class Place(NamedTuple):
    """A line of a kernel, as racecheck writes it in a report."""

    kernel: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line} ({self.kernel})"


def run_memcheck(args: argparse.Namespace) -> dict[str, Any]:
    """Check with memcheck that no op reads or writes outside its tensors, also if indices are out of range."""
    if not sanitizer("memcheck"):
        return absent("memcheck")
    from .support.triton_mode import ON_HOPPER  # needs Triton

    report = shards_report(run_shards("memcheck", args, [], "--error-exitcode", "9"), ON_HOPPER)
    print("memcheck: " + "; ".join(report["summary"]))
    return report


def run_racecheck(args: argparse.Namespace) -> dict[str, Any]:
    """Check with racecheck that threads access shared memory without races, and run the controls."""
    if not sanitizer("racecheck"):
        return absent("racecheck")
    from .support.triton_mode import ON_HOPPER  # needs Triton

    outcomes = run_shards("racecheck", args, ["--every-thread-arrives"])
    earlier: list[str] = []
    for _ in range(AGAIN):
        unnamed = [shard for shard, (_, output) in enumerate(outcomes, 1) if not all(map(named, races(output)))]
        if not unnamed:
            break
        earlier += [outcomes[shard - 1][1] for shard in unnamed]
        again = run_shards("racecheck", args, ["--every-thread-arrives"], shards=unnamed)
        for shard, outcome in zip(unnamed, again, strict=True):
            outcomes[shard - 1] = outcome
    controls = {}
    for name, options in CONTROLS.items() if ON_HOPPER else ():  # kernels of other GPUs do not specialise warps
        command = [*sanitizer("racecheck"), sys.executable, "-m", "tests.hand_over", *options]
        controls[name] = run(command, args.limit)[1]
    return races_report(outcomes, controls, ON_HOPPER, earlier)


def sanitizer(tool: str) -> list[str]:
    """Return the command line of a tool; an empty list if compute-sanitizer is not on PATH."""
    program = shutil.which("compute-sanitizer")
    return [program, "--tool", tool, "--print-limit", "0"] if program else []


def absent(tool: str) -> dict[str, Any]:
    """Return the result of a stage that is skipped because compute-sanitizer is missing."""
    reason = "compute-sanitizer is not on PATH"
    print(f"{tool}: skipped, {reason}")
    return {"ok": True, "not_run": reason}


def run_shards(
    tool: str, args: argparse.Namespace, given: Sequence[str], *options: str, shards: Sequence[int] = ()
) -> list[tuple[int, str]]:
    """Run shards of `tests/memory_checks.py` under a tool; return the exit status and output of each shard.

    Each tensor gets an allocation of its own, so that the tool notices an access behind the end of a tensor. Each
    launch ends before the next launch begins.

    Args:
        tool: "memcheck" or "racecheck".
        args: options of the GPU suite.
        given: further options of `tests/memory_checks.py`.
        options: further options of the tool.
        shards: numbers of the shards to run; empty for all shards.
    """

    def one(shard: int) -> tuple[int, str]:
        command = [sys.executable, "-m", "tests.memory_checks", f"{shard}/{args.jobs}", *given]
        settings = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "CUDA_LAUNCH_BLOCKING": "1"}
        return run([*sanitizer(tool), *options, *command], args.limit, **settings)

    with ThreadPoolExecutor(args.jobs) as pool:
        return list(pool.map(one, shards or range(1, args.jobs + 1)))


def shards_report(outcomes: Sequence[tuple[int, str]], hopper: bool) -> dict[str, Any]:
    """Return whether the shards passed ("ok"), a summary, and the launched kernels.

    "ok" is true if all shards ended without findings, and every kernel and variant was launched by some shard.
    """
    lines = [line for _, output in outcomes for line in output.splitlines()]
    said = [line.strip("= ") for line in lines if "SUMMARY" in line]
    ended = sum(bool(re.fullmatch(r"shard \d+ of \d+ has ended", line)) for line in lines)
    launched = sorted({line.removeprefix("launched: ") for line in lines if line.startswith("launched: ")})
    missing = memory_checks.never_launched(launched, hopper)
    for status, output in outcomes:
        if status:
            print(output[:10000])
            print(output[10000:][-10000:])  # an error of Python stands behind the reports of the tool
    whole = ended == len(outcomes) and not missing
    summary = ["every op and every variant was launched" if whole else f"{ended} of {len(outcomes)} shards ended"]
    summary += [f"never launched: {name}" for name in missing]
    summary += [f"{count} x {line}" for line, count in sorted(Counter(said).items())]
    clean = not any(status for status, _ in outcomes) and len(said) == len(outcomes)
    return {"ok": clean and whole, "summary": summary, "launched": launched}


def races_report(
    outcomes: Sequence[tuple[int, str]], controls: dict[str, str], hopper: bool, earlier: Sequence[str] = ()
) -> dict[str, Any]:
    """Return a report of the races that racecheck found, except races in Triton's own code of `warp_specialize`.

    "ok" is false if there is a race, if the tool failed, if a shard did not end, or if a control is wrong.

    Args:
        outcomes: exit status and output of each shard.
        controls: mapping from the name of a control to its output; empty on GPUs whose kernels do not specialise warps.
        hopper: whether the kernels for Hopper must have been launched.
        earlier: outputs of the earlier runs of shards that ran again. A shard runs again if a report names neither
            kernel nor line. All other reports of its earlier run are counted as well.
    """
    report = shards_report(outcomes, hopper)
    found = sum((races(output) for _, output in outcomes), Counter())
    before = Counter({pair: n for output in earlier for pair, n in races(output).items() if named(pair)})
    ours = of_ours(found + before)
    trouble = [line for _, output in outcomes for line in output.splitlines()
               if TROUBLE.match(line) and "Race reported" not in line]  # fmt: skip
    whole = all(output.count("Race reported") == sum(map(int, re.findall(r"(\d+) hazards? displayed", output)))
                for _, output in outcomes)  # fmt: skip
    report["races"] = [f"{count} x {first}, {second}" for (first, second), count in sorted(ours.items())]
    report["controls"] = {name: len(of_ours(races(output))) for name, output in controls.items()}
    report["ok"] = report["ok"] and whole and not ours and not trouble
    if controls:
        ended = all("hand-over: " in output and "RACECHECK SUMMARY" in output for output in controls.values())
        came = all("hand-over: every value came" in controls[name] for name in [*CONTROLS][:2])
        right = report["controls"]["every thread arrives"] == 0 < report["controls"]["nobody waits"]
        report["ok"] = report["ok"] and ended and came and right
    report["summary"] = [
        *(line for line in report["summary"] if "SUMMARY" not in line), f"{ours.total()} races",
        f"{found.total() - of_ours(found).total()} at Triton's warp_specialize",
        *([f"{len(earlier)} shards again, as a report named neither kernel nor line"] if earlier else []), *trouble,
        "controls: " + ", ".join(f"{name} {'yes' if pairs else 'no'}" for name, pairs in report["controls"].items()),
    ]  # fmt: skip
    for output in (*earlier, *(output for _, output in outcomes if of_ours(races(output)))):
        print(output[:20000])
    print("racecheck: " + "; ".join(report["summary"] + report["races"]))
    return report


def races(output: str) -> Counter[tuple[Place, Place]]:
    """Count racecheck's reports by the two lines of source code that a report names (`place_in`)."""
    found: Counter[tuple[Place, Place]] = Counter()
    first = None
    for line in output.splitlines():
        if "Race reported" in line:
            first = place_in(line)
        elif first is not None and re.match(r"=+ +and ", line):
            found[first, place_in(line)] += 1
    return found


def place_in(line: str) -> Place:
    """Return the line of source code that one line of a report names.

    If the report's format is unknown, the attribute `kernel` of the result is the whole line of the report.
    """
    known = ACCESS.match(line) or EXCHANGED.match(line)
    return Place(known["kernel"], known["file"], int(known["line"])) if known else Place(line.strip("= "), "", 0)


def named(pair: tuple[Place, Place]) -> bool:
    """Return whether a report names a kernel or a line."""
    return not all(NAMELESS.search(place.kernel) for place in pair)


def of_ours(found: Counter[tuple[Place, Place]]) -> Counter[tuple[Place, Place]]:
    """Return the reports that name a line outside `tritons_own()`, without writes of equal values (`equal_writes`)."""
    return Counter(
        {pair: count for pair, count in found.items()
         if not set(pair) <= tritons_own() and not (pair[0] == pair[1] and pair[0] in equal_writes())}
    )  # fmt: skip


@functools.cache
def equal_writes() -> frozenset[Place]:
    """Return the lines of the combine kernels at which several threads may write the same value to the same place."""
    path = ROOT / "fast" / "kernels" / "combine" / "kernels.py"
    functions = {node.name: node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
    lines = [
        node.lineno for node in functions["write_rows"].body
        if ast.unparse(node).startswith(("combined = ", "tl.store(out + "))
    ]  # fmt: skip
    return frozenset(Place(name, path.name, line) for name in functions if name.endswith("_kernel") for line in lines)


@functools.cache
def tritons_own() -> frozenset[Place]:
    """Return the lines that racecheck names for Triton's own accesses in `warp_specialize`.

    For each kernel that calls `warp_specialize`, the result has the lines of the kernel's `def`, of each call, and of
    each `if` that contains a call. (After the last call, Triton writes to shared memory that the other warps end. This
    write has the line of the `if`.)
    """
    places = []
    for path in [*(ROOT / "fast" / "kernels" / "hopper").rglob("*.py"), ROOT / "tests" / "hand_over.py"]:
        for kernel in ast.parse(path.read_text()).body:
            for node in ast.walk(kernel) if isinstance(kernel, ast.FunctionDef) else ():
                around = isinstance(node, ast.FunctionDef | ast.If) and any(map(_specializes, ast.walk(node)))
                if around or _specializes(node):
                    places.append(Place(kernel.name, path.name, node.lineno))
    return frozenset(places)


def _specializes(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "gl.warp_specialize"
