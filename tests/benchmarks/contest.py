"""Compare kernels on the same shapes: check the outputs, time the kernels in turns, write a table and a JSON file.

A contender is one implementation that is timed: `fast`, a variant of `fast` such as "fast, planned", or a peer. A peer
is a kernel of another project. A row is one shape.

The error of each contender is compared with a budget, which is computed from results of `reference`. A row is timed
only if the errors of `fast` and its variants are within the budget. A peer that exceeds the budget is still timed, and
the table marks the peer with "!".
"""

from __future__ import annotations

import argparse
import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from rich.table import Table

from fast.parity import Parity
from reference.interfaces import CACHE_FORMATS, COMPUTE_FORMAT

from .command_line import CannotRun, check_device, check_peers, one_line, run, wide_console, write_report
from .report import provenance
from .targets import Verdicts
from .timing import LAYERS, Call, Ceilings, Clock, Spread, in_turn, measure_ceilings

OURS = "fast"
# The ceiling of a rate is the highest rate that a simple operation reaches on this GPU. RATES has for each rate three
# keys of a result: the key of the rate, of the fraction rate / ceiling, and of the work that the rate counts.
RATES = (("tflops", "share_of_matmul", "flops"), ("gb_s", "share_of_bandwidth", "bytes"))


@dataclass
class Contender:
    """One implementation of the computation of a row.

    Attributes:
        calls: one call for each set of inputs; a call does the timed work and nothing else.
        view: converts the output of a call to the shape that the check expects; the conversion is not timed.
        step: function that plans a step of `timing.LAYERS` layers and runs all layers, for the times "stepped". If
            `step` is None, a step is `timing.LAYERS` calls of `calls`.
    """

    calls: Sequence[Call]
    view: Callable[[Any], Any] = lambda output: output
    step: Call | None = None

    def whole_step(self) -> Call:
        """Return a step of `timing.LAYERS` layers."""
        return self.step or in_turn(self.calls, LAYERS)


@dataclass
class Case:
    """One row and its inputs.

    Attributes:
        flops: floating-point operations that the work needs.
        bytes: the least memory traffic of the work: each input is read once, each output is written once.
        contenders: the contenders by name; `fast` is the first.
        check: compares the output for the first set of inputs with the expected output.
        absent: contenders that cannot compute this row, with the reason.
        figures: further entries of the result of the row, which `check` may fill. The entry "contender_bytes" has the
            memory traffic by contender, if it differs between contenders.
        compare: function that runs after the checks of all contenders, and returns further comparisons by contender.
    """

    flops: int
    bytes: int
    contenders: dict[str, Contender]
    check: Callable[[Any], list[Parity]]
    absent: dict[str, str] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)
    compare: Callable[[], Mapping[str, list[Parity]]] = dict


def is_ours(who: str) -> bool:
    """Return True for `fast` and its variants, such as "fast, planned"."""
    return who.split(",")[0] == OURS


def finite(op: str, value: torch.Tensor) -> Parity:
    """Return a comparison that fails if any element of an output is NaN or infinite.

    This comparison covers all elements of the output. The comparison with `reference` covers only a part of them.
    """
    wrong = float((~value.isfinite()).sum())
    return Parity(f"{op}: elements not finite", wrong, 0.0, 0.0, 0.0)


def contest(case: Case, clock: Clock, ways: Sequence[str]) -> dict[str, Any]:
    """Check and time one row.

    Args:
        case: the row and its inputs.
        clock: clock that times the contenders.
        ways: ways of timing: names of methods of `Clock`, such as "flushed" and "replayed".

    Returns:
        A dictionary with flops, bytes, the parity (error and budget) of each contender, and the absent contenders with
        the reasons. If `fast` passed, the dictionary also has the times of each contender for each of `ways`, the host
        time to launch each contender, and for each contender the ratio: speed of `fast` / speed of the contender.
    """
    absent, parity = dict(case.absent), {}
    for who, contender in case.contenders.items():
        try:
            parity[who] = case.check(contender.view(contender.calls[0]()))
        except ValueError as error:
            if is_ours(who):
                raise  # the command line is wrong, such as an unknown backend: end the benchmark
            absent[who] = one_line(error)
        except Exception as error:  # one contender failed: continue with the other contenders
            absent[who] = f"{type(error).__name__}: {one_line(error)}"
    for who, found in case.compare().items():
        parity[who] += found
    row: dict[str, Any] = {
        "flops": case.flops,
        "bytes": case.bytes,
        "passed": OURS in parity and all(found.passed for who in parity if is_ours(who) for found in parity[who]),
        "parity": {
            who: [{**asdict(found), "passed": found.passed} for found in founds] for who, founds in parity.items()
        },
        "absent": absent,
        **case.figures,
    }
    if not row["passed"]:
        return row
    calls = {who: contender.calls for who, contender in case.contenders.items() if who not in absent}
    steps = {who: case.contenders[who].whole_step() for who in calls}
    spreads = {way: getattr(clock, way)(steps if way == "stepped" else calls) for way in ways}
    for way, found in spreads.items():
        if OURS not in found:
            raise CannotRun(f"{OURS} could not be {way}: {clock.not_captured[OURS]}")
    row["times"] = {way: {who: asdict(spread) for who, spread in found.items()} for way, found in spreads.items()}
    row["host_us"] = {who: spread.median_us for who, spread in clock.host(calls).items()}
    row["fast_against"] = {
        way: {who: spread.median_us / found[OURS].median_us for who, spread in found.items() if who != OURS}
        for way, found in spreads.items()
    }
    return row


def add_shares(row: dict[str, Any], ceilings: Ceilings, bandwidth: str) -> None:
    """Add to every time of a row two rates, TFLOPS and GB/s, and the fraction rate / ceiling of each.

    Args:
        row: result of `contest`; it is changed in place.
        ceilings: highest rates of simple operations, measured in this run.
        bandwidth: name of the ceiling by which GB/s are divided, "read_gb_s" or "copy_gb_s".
    """
    traffic = row.get("contender_bytes", {})
    for times in row.get("times", {}).values():
        for who, found in times.items():
            tflops = row["flops"] / found["median_us"] / 1e6
            gb_s = traffic.get(who, row["bytes"]) / found["median_us"] / 1e3
            found["tflops"], found["share_of_matmul"] = tflops, tflops / ceilings.matmul_tflops
            found["gb_s"], found["share_of_bandwidth"] = gb_s, gb_s / getattr(ceilings, bandwidth)


def draw_table(title: str, columns: Sequence[str], rows: Sequence[Mapping], ways: Sequence[str], bandwidth: str):
    """Return a table with one section for each row and one line for each contender.

    The rates in the table are computed from the times of the first element of `ways`.

    Args:
        title: title of the table.
        columns: names of the dimensions of a row.
        rows: results of `contest`, with "dims" and the results of `add_shares`.
        ways: ways of timing, as in `contest`.
        bandwidth: ceiling of the GB/s, as in `add_shares`.
    """
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for way in ways:
        table.add_column(f"{way} us", justify="right", no_wrap=True)
        table.add_column("quartiles", justify="right", no_wrap=True)
    table.add_column("host us", justify="right", no_wrap=True)
    shown = [what for what, _, work in RATES if any(row[work] for row in rows)]
    heads = {"tflops": ("TFLOPS", "of matmul"), "gb_s": ("GB/s", f"of {bandwidth.split('_')[0]}")}
    for column in [column for what in shown for column in heads[what]] + ["error / budget"]:
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("speed of fast / this", justify="right", no_wrap=True)
    for row in rows:
        contenders = list(row["parity"] if OURS in row["parity"] else (OURS, *row["parity"]))
        for place, who in enumerate(contenders):
            found = row["parity"].get(who, [])
            worst = max(found, key=lambda p: p["max_error"] / p["max_budget"] if p["max_budget"] else 0.0, default=None)
            outside = not all(p["passed"] for p in found)
            cells = [str(value) if place == 0 else "" for value in row["dims"].values()] + [who + " !" * outside]
            if "times" in row:
                for way in ways:
                    found = row["times"][way].get(who)
                    if found is None:
                        cells += ["-", "not captured"]
                        continue
                    low, high = found["quartiles_us"]
                    cells += [f"{found['median_us']:.1f}", f"{low:.1f} - {high:.1f}"]
                found = row["times"][ways[0]][who]
                cells.append(f"{row['host_us'][who]:.0f}")
                rates = {what: [f"{found[what]:.0f}", f"{found[share]:.0%}"] for what, share, _ in RATES}
                cells += [cell for what in shown for cell in rates[what]]
                against = [f"{row['fast_against'][way].get(who, math.nan):.2f}" for way in ways if who != OURS]
            else:
                cells += ["not timed", *[""] * (2 * len(ways) + 2 * len(shown))]
                against = []
            error = "failed" if worst is None else f"{worst['max_error']:.1e} / {worst['max_budget']:.1e}"
            cells += [error, " / ".join(against)]
            table.add_row(*cells, end_section=place == len(contenders) - 1)
    return table


def failures(rows: Sequence[Mapping]) -> list[str]:
    """Return one line for each comparison that `fast` failed, and one for each row on which `fast` raised an error."""
    lines = []
    for row in rows:
        name = " ".join(f"{dim} {size}" for dim, size in row["dims"].items())
        if OURS in row["absent"]:
            lines.append(f"{name}: {row['absent'][OURS]}; not timed")
        lines += [
            f"{name}: {found['op']}: error {found['max_error']:.2e} (mean {found['mean_error']:.2e}), budget "
            f"{found['max_budget']:.2e} (mean {found['mean_budget']:.2e}); not timed"
            for who, founds in row["parity"].items()
            if is_ours(who)
            for found in founds
            if not found["passed"]
        ]
    return lines


def load_peers(folder: Path) -> ModuleType:
    """Load the module peers.py of a folder of peer kernels."""
    spec = importlib.util.spec_from_file_location("peers", folder / "peers.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_benchmark(
    name: str,
    description: str,
    all_rows: Sequence[Any],
    make_case: Callable[[Any, ModuleType | None, str | None], Case],
    argv: Sequence[str] | None,
    *,
    ways: Sequence[str],
    bandwidth: str,
    epilog: str = "",
    cache_formats: bool = False,
    more: Callable[[], Mapping[str, Any]] = dict,
    verdicts: Verdicts = lambda rows: [],
) -> int:
    """Run one benchmark from its options to its exit status.

    Args:
        name: name of the benchmark's module.
        description: one line for the help and the title of the table.
        all_rows: default rows. A row is a frozen dataclass, whose fields are the first columns of the table.
        make_case: function that makes the case of a row from the row, the peers and the name of a backend; with
            `cache_formats` it gets the cache format as keyword argument `cache_format`.
        argv: options of the command line; None takes the options of this process.
        ways: ways of timing, as in `contest`.
        bandwidth: ceiling of the GB/s, as in `add_shares`.
        epilog: sentence before the exit status at the end of the help.
        cache_formats: whether the benchmark has the option `--cache-format`.
        more: function that returns further entries of the results file; it runs after the rows.
        verdicts: function that compares the rows with the targets (`targets`). It is not called for a cache format
            other than the compute dtype, whose rows have no targets.

    Returns:
        The exit status: 0 on success, 1 if `fast` failed for a row (`failures`), 2 if the benchmark cannot run here.
    """
    run_main = partial(_run, name, description, all_rows, make_case, bandwidth, more, verdicts)
    parser = make_parser(name, description, all_rows, ways, epilog)
    if cache_formats:
        parser.add_argument("--cache-format", choices=tuple(CACHE_FORMATS), default=COMPUTE_FORMAT.name,
                            help="format of the cache (default: %(default)s)")  # fmt: skip
    return run(run_main, argv, parser)


def row_name(row: Any) -> str:
    """Return the fields of a row, separated by commas, as in the option `--rows`."""
    return ",".join(str(value) for value in asdict(row).values())


def make_parser(
    name: str, description: str, all_rows: Sequence[Any], ways: Sequence[str], epilog: str
) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks have."""
    fields = ",".join(asdict(all_rows[0]))
    parser = argparse.ArgumentParser(
        prog=f"python -m tests.benchmarks.{name}",
        description=description,
        epilog=f"{epilog} Exit status: 0 on success, 1 if fast fails or exceeds its budget for a row (that row is not "
        "timed), 2 if the benchmark cannot run here.".strip(),
    )
    parser.add_argument("--peers", type=Path, metavar="DIR", help="folder with a module peers.py, whose kernels "
                        "are timed as well")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="PATH", help="file for hardware, versions, ceilings and rows")
    parser.add_argument("--rows", nargs="+", metavar=fields.upper(), help=f"rows to time, such as "
                        f"{row_name(all_rows[0])} (default: all {len(all_rows)})")  # fmt: skip
    parser.add_argument("--backend", metavar="NAME", help="backend of fast (default: chosen for the device)")
    parser.add_argument("--ways", nargs="+", choices=ways, default=ways, help="ways of timing (default: all of them)")
    parser.add_argument("--time", type=float, default=200.0, metavar="MS", help="milliseconds of timing for each row, "
                        "contender and way of timing (default: %(default)s)")  # fmt: skip
    return parser


def parse_rows(all_rows: Sequence[Any], texts: Sequence[str] | None) -> list[Any]:
    """Return the rows that `--rows` describes; rows that are not default rows are allowed.

    Raises:
        CannotRun: a text does not describe a row.
    """
    if texts is None:
        return list(all_rows)
    fields = list(asdict(all_rows[0]))
    found = []
    for text in texts:
        parts = text.split(",")
        expected = f"--rows: expected {','.join(fields)}, such as {row_name(all_rows[0])}, got {text}"
        if len(parts) != len(fields):
            raise CannotRun(expected)
        try:
            found.append(type(all_rows[0]).parse(*parts))
        except ValueError as error:
            raise CannotRun(f"{expected} ({error})") from error
    return found


def _run(name, description, all_rows, make_case, bandwidth, more, verdicts, argv, arguments) -> int:
    rows, ways = parse_rows(all_rows, arguments.rows), tuple(arguments.ways)
    check_peers(arguments.peers)
    check_device("cuda")
    console = wide_console(190)
    peers = None if arguments.peers is None else load_peers(arguments.peers)
    clock = Clock(arguments.time)
    ceilings = measure_ceilings(clock)
    results, options = [], {}
    if getattr(arguments, "cache_format", COMPUTE_FORMAT.name) != COMPUTE_FORMAT.name:
        options = {"cache_format": CACHE_FORMATS[arguments.cache_format]}
        description = f"{description} Cache format: {arguments.cache_format}."
    for number, row in enumerate(rows):
        torch.manual_seed(number)
        result = {"dims": asdict(row), **contest(make_case(row, peers, arguments.backend, **options), clock, ways)}
        add_shares(result, ceilings, bandwidth)
        results.append(result)
        torch.cuda.empty_cache()
    console.print(draw_table(description, list(asdict(rows[0])), results, ways, bandwidth))
    console.print(
        f"ceilings in this run: copy {ceilings.copy_gb_s:.0f} GB/s (read + written), read {ceilings.read_gb_s:.0f} "
        f"GB/s, bfloat16 matmul {ceilings.matmul_tflops:.0f} TFLOPS rested and {ceilings.sustained_matmul_tflops:.0f} "
        "sustained"
    )
    for who, reason in sorted(clock.not_captured.items()):
        console.print(f"{who}: not captured: {reason}", markup=False, soft_wrap=True)
    for who, reason in sorted({pair for result in results for pair in result["absent"].items() if pair[0] != OURS}):
        console.print(f"{who}: not timed in some rows: {reason}", markup=False, soft_wrap=True)
    found, targets = more(), [] if options else verdicts(results)
    for verdict in targets:
        console.print(verdict["text"], markup=False, soft_wrap=True)
    failed = failures(results)
    for line in failed:
        console.print(f"FAILED {line}", markup=False, soft_wrap=True)
    if arguments.json is not None:
        head = provenance(name, argv, device="cuda")
        if options:
            head["cache_format"] = arguments.cache_format
        report = {**head, "ceilings": ceilings.as_json(), "bandwidth": bandwidth, "targets": targets, "rows": results}
        report |= found
        write_report(arguments.json, report, console)
    return 1 if failed else 0


__all__ = ["OURS", "CannotRun", "Case", "Contender", "Spread", "contest", "finite", "run_benchmark"]
