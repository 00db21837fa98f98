"""compute-sanitizer over `tests.memory_checks`, in shares: what it reports, and whether it was given everything.

racecheck takes none but the arriving thread for ordered by an mbarrier, whatever barrier its warps met at before: where
one thread arrives for all, it reports what the others have read and written. So it is given the kernels with every
thread arriving (`fast.kernels.hopper.common.arrivals`), and three controls say each time what its reports are worth:
`tests.hand_over` in that form, with one thread arriving for all, and with nobody waiting. That the barrier is before
each arrival `test_hopper_compilation` reads in the code that is served.

It also reports the bytes by which Triton starts and ends what `warp_specialize` runs, in any kernel that has one. All
threads meet before and after they are written, and no line of ours touches them: of each report of them both places
are the kernel's head and the call. A report now and then names neither kernel nor line: its share runs again. Every
other report is a failure, and so is one that still names nothing then.

What it does not follow, none of this shows: what the copy engine and asynchronous copies bring, and what products read.
The arrivals of that form also wait for the asynchronous copies of their thread. Launches are one after another, so that
no kernel begins while another's reports are made.
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
AGAIN = 2  # times at most that a share runs once more, for a report that names nothing
TROUBLE = re.compile(r"={5,}.*\b(Error|Internal|Fatal|failed)\b")  # besides what is reported
ACCESS = re.compile(r"=+ .*\b(Read|Write) access at (?P<kernel>\w+)\+0x[0-9a-f]+ in (?P<file>[\w.]+):(?P<line>\d+)")


class Place(NamedTuple):
    """A line of a kernel, as racecheck names it."""

    kernel: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line} ({self.kernel})"


def run_memcheck(args: argparse.Namespace) -> dict[str, Any]:
    """No op reads or writes outside its tensors, whatever the indices say."""
    if not sanitizer("memcheck"):
        return absent("memcheck")
    from .support.triton_mode import ON_HOPPER  # needs Triton

    report = shares_report(run_shares("memcheck", args, [], "--error-exitcode", "9"), ON_HOPPER)
    print("memcheck: " + "; ".join(report["summary"]))
    return report


def run_racecheck(args: argparse.Namespace) -> dict[str, Any]:
    """No thread loads or stores in shared memory before those that it waits for are done; beside controls."""
    if not sanitizer("racecheck"):
        return absent("racecheck")
    from .support.triton_mode import ON_HOPPER  # needs Triton

    outcomes = run_shares("racecheck", args, ["--every-thread-arrives"])
    earlier: list[str] = []
    for _ in range(AGAIN):
        nowhere = [share for share, (_, output) in enumerate(outcomes, 1) if not all(map(named, races(output)))]
        if not nowhere:
            break
        earlier += [outcomes[share - 1][1] for share in nowhere]
        again = run_shares("racecheck", args, ["--every-thread-arrives"], shares=nowhere)
        for share, outcome in zip(nowhere, again, strict=True):
            outcomes[share - 1] = outcome
    said = {}
    for name, options in CONTROLS.items() if ON_HOPPER else ():  # elsewhere no warps are specialized
        command = [*sanitizer("racecheck"), sys.executable, "-m", "tests.hand_over", *options]
        said[name] = run(command, args.limit)[1]
    return races_report(outcomes, said, ON_HOPPER, earlier)


def sanitizer(tool: str) -> list[str]:
    """How a tool is called; nothing where compute-sanitizer is not on PATH."""
    program = shutil.which("compute-sanitizer")
    return [program, "--tool", tool, "--print-limit", "0"] if program else []


def absent(tool: str) -> dict[str, Any]:
    """What a stage comes to without compute-sanitizer."""
    reason = "compute-sanitizer is not on PATH"
    print(f"{tool}: skipped, {reason}")
    return {"ok": True, "not_run": reason}


def run_shares(
    tool: str, args: argparse.Namespace, given: Sequence[str], *options: str, shares: Sequence[int] = ()
) -> list[tuple[int, str]]:
    """Status and output of each share of `tests.memory_checks`, or of some.

    Each tensor has an allocation of its own, and a launch ends before the next begins.
    """

    def one(share: int) -> tuple[int, str]:
        command = [sys.executable, "-m", "tests.memory_checks", f"{share}/{args.jobs}", *given]
        settings = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "CUDA_LAUNCH_BLOCKING": "1"}
        return run([*sanitizer(tool), *options, *command], args.limit, **settings)

    with ThreadPoolExecutor(args.jobs) as pool:
        return list(pool.map(one, shares or range(1, args.jobs + 1)))


def shares_report(outcomes: Sequence[tuple[int, str]], hopper: bool) -> dict[str, Any]:
    """What the shares say together: whether all are clean and came to their end, and what none of them launched."""
    lines = [line for _, output in outcomes for line in output.splitlines()]
    said = [line.strip("= ") for line in lines if "SUMMARY" in line]
    ended = sum(bool(re.fullmatch(r"share \d+ of \d+ came to its end", line)) for line in lines)
    launched = sorted({line.removeprefix("launched: ") for line in lines if line.startswith("launched: ")})
    missing = memory_checks.never_launched(launched, hopper)
    for status, output in outcomes:
        if status:
            print(output[:20000])
    whole = ended == len(outcomes) and not missing
    summary = ["every op and every variant was launched" if whole else f"{ended} of {len(outcomes)} shares ended"]
    summary += [f"never launched: {name}" for name in missing]
    summary += [f"{count} x {line}" for line, count in sorted(Counter(said).items())]
    clean = not any(status for status, _ in outcomes) and len(said) == len(outcomes)
    return {"ok": clean and whole, "summary": summary, "launched": launched}


def races_report(
    outcomes: Sequence[tuple[int, str]], controls: dict[str, str], hopper: bool, earlier: Sequence[str] = ()
) -> dict[str, Any]:
    """What racecheck found, between which places, Triton's own hand-over apart; fails too where a control does.

    Args:
        outcomes: status and output of each share.
        controls: output of each of CONTROLS; none where warps are not specialized.
        hopper: whether the kernels for Hopper had to be launched.
        earlier: output of shares that ran again, for a report that names nothing; what else they report counts.
    """
    report = shares_report(outcomes, hopper)
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
        told = report["controls"]["every thread arrives"] == 0 < report["controls"]["nobody waits"]
        report["ok"] = report["ok"] and ended and came and told
    report["summary"] = [
        *(line for line in report["summary"] if "SUMMARY" not in line), f"{ours.total()} races",
        f"{found.total() - of_ours(found).total()} at Triton's warp_specialize",
        *([f"{len(earlier)} shares again, for a report that names nothing"] if earlier else []), *trouble,
        "controls: " + ", ".join(f"{name} {'yes' if pairs else 'no'}" for name, pairs in report["controls"].items()),
    ]  # fmt: skip
    for output in (*earlier, *(output for _, output in outcomes if of_ours(races(output)))):
        print(output[:20000])
    print("racecheck: " + "; ".join(report["summary"] + report["races"]))
    return report


def races(output: str) -> Counter[tuple[Place, Place]]:
    """How often racecheck reports which two places; what is said of them in words unknown here counts too."""
    found: Counter[tuple[Place, Place]] = Counter()
    first = None
    for line in output.splitlines():
        if "Race reported" in line:
            first = place_in(line)
        elif first is not None and re.match(r"=+ +and ", line):
            found[first, place_in(line)] += 1
    return found


def place_in(line: str) -> Place:
    """The place that a line of a report names; the line itself where it names none."""
    known = ACCESS.match(line)
    return Place(known["kernel"], known["file"], int(known["line"])) if known else Place(line.strip("= "), "", 0)


def named(pair: tuple[Place, Place]) -> bool:
    """Whether the report names anything: once in hundreds it names neither kernel nor line."""
    return not all(re.search(r"access at\s*(\[|$)", place.kernel) for place in pair)


def of_ours(found: Counter[tuple[Place, Place]]) -> Counter[tuple[Place, Place]]:
    """Without what both ends of lie where Triton starts and ends what `warp_specialize` runs."""
    return Counter({pair: count for pair, count in found.items() if not set(pair) <= tritons_own()})


@functools.cache
def tritons_own() -> frozenset[Place]:
    """The head of each kernel that specializes warps, and the line where it does."""
    places = []
    for path in [*(ROOT / "fast" / "kernels" / "hopper").rglob("*.py"), ROOT / "tests" / "hand_over.py"]:
        for kernel in ast.parse(path.read_text()).body:
            for node in ast.walk(kernel) if isinstance(kernel, ast.FunctionDef) else ():
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "gl.warp_specialize":
                    places += [Place(kernel.name, path.name, line) for line in (kernel.lineno, node.lineno)]
    return frozenset(places)
