"""Time `fast.warmup` for layers of DeepSeek-V3, first with an empty cache of Triton and then with the filled cache.

`fast.warmup` compiles every kernel that later steps need. The layers are in bfloat16; each cache format has its own
kernels. Layers of grouped-query attention are not timed, because `fast.warmup` refuses their config.

    python -m tests.benchmarks.warmup --json docs/results/h200-warmup.json
    python -m tests.benchmarks.warmup --cache-formats fp8_ds_mla --threads 1 4

Each time is measured in a new process, because a process keeps the kernels that it compiled. The process "cold" starts
with an empty cache folder. The process "warm" starts with this folder, in which "cold" stored its compiled kernels. The
times do not contain the import of the packages and the start of the GPU. "variants" is the number of compiled kernel
variants; a variant is a kernel compiled for one combination of constants and kinds of arguments.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
from rich.table import Table

import fast
from fast.compilation import MOST_THREADS
from reference.interfaces import COMPUTE_FORMAT, FP8_DS_MLA, FP8_E4M3

from . import command_line
from .command_line import CannotRun, check_at_least_one, check_device, wide_console, write_report
from .layers import BLOCK_SIZE, config_for, dtype_for
from .report import provenance

MOST_SECONDS = {"cold": 90.0, "warm": 5.0}  # longest acceptable times on a CPU with 16 cores
FORMATS = {cache_format.name: cache_format for cache_format in (COMPUTE_FORMAT, FP8_E4M3, FP8_DS_MLA)}
IN_PROCESS = "--in-process"  # hidden option that makes a process run and time the warm-up itself


def time_here(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of one warm-up in this process, and the number of variants that it compiled or loaded."""
    device = arguments.device
    torch.zeros(1, device=device)
    begun = time.perf_counter()
    compiled = fast.warmup(
        config_for(device, arguments.heads), device=device, dtype=dtype_for(device), block_size=BLOCK_SIZE,
        decode_threshold=arguments.decode_threshold, cache_format=FORMATS[arguments.cache_formats[0]],
        backend=arguments.backend, threads=arguments.threads[0], progress=False,
    )  # fmt: skip
    if device == "cuda":
        torch.cuda.synchronize()
    return {"seconds": time.perf_counter() - begun, "variants": len(compiled)}


def time_process(argv: Sequence[str], cache_format: str, threads: int, cache: str) -> dict[str, Any]:
    """Call `time_here` in a new process and return its result; Triton keeps compiled kernels in the folder `cache`.

    Raises:
        CannotRun: the process failed; the message ends with the last line of its stderr.
    """
    chosen = ["--cache-formats", cache_format, "--threads", str(threads)]
    command = [sys.executable, "-m", "tests.benchmarks.warmup", *argv, IN_PROCESS, *chosen]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "TRITON_CACHE_DIR": cache}
    )
    lines = (done.stdout if done.returncode == 0 else done.stderr).splitlines() or [""]
    if done.returncode != 0:
        raise CannotRun(f"the process with {cache_format} and {threads} threads failed: {lines[-1]}")
    return json.loads(lines[-1])


def measure(argv: Sequence[str], cache_formats: Sequence[str], threads: Sequence[int]) -> list[dict[str, Any]]:
    """Return one row for each cache format and number of threads.

    A row has the results of `time_here` for "cold" and for "warm", and whether each time is within its limit ("met").
    """
    rows = []
    for cache_format, count in itertools.product(cache_formats, threads):
        with tempfile.TemporaryDirectory() as cache:
            times = {kind: time_process(argv, cache_format, count, cache) for kind in MOST_SECONDS}
        met = {kind: times[kind]["seconds"] <= most for kind, most in MOST_SECONDS.items()}
        rows.append({"cache_format": cache_format, "threads": count, **times, "met": met})
    return rows


def draw(rows: Sequence[dict[str, Any]]) -> Table:
    """Return the table of the rows; "!" marks a time above its limit."""
    table = Table(title="Seconds of a warm-up")
    for column in (
        "cache format",
        "threads",
        "variants",
        *(f"{kind} (limit {most:g})" for kind, most in MOST_SECONDS.items()),
    ):
        table.add_column(column, justify="left" if column == "cache format" else "right", no_wrap=True)
    for row in rows:
        texts = [f"{row[kind]['seconds']:.1f}" + " !" * (not row["met"][kind]) for kind in MOST_SECONDS]
        table.add_row(row["cache_format"], str(row["threads"]), str(row["cold"]["variants"]), *texts)
    return table


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = command_line.make_parser("warmup", __doc__.splitlines()[0])
    parser.add_argument("--threads", nargs="+", type=int, default=[MOST_THREADS], metavar="N",
                        help="numbers of threads (default: the maximum of `fast.warmup`)")  # fmt: skip
    parser.add_argument("--cache-formats", nargs="+", choices=tuple(FORMATS), metavar="FORMAT",
                        default=[COMPUTE_FORMAT.name, FP8_E4M3.name],
                        help=f"cache formats: {', '.join(FORMATS)} (default: the first two)")  # fmt: skip
    parser.add_argument("--decode-threshold", type=int, default=1, metavar="SQ", help="largest number of "
                        "query tokens of a decode (default: %(default)s)")  # fmt: skip
    parser.add_argument(IN_PROCESS, action="store_true", help=argparse.SUPPRESS)
    return parser


def _run(argv: Sequence[str], arguments: argparse.Namespace) -> int:
    check_device(arguments.device)
    check_at_least_one(arguments, "heads", "decode_threshold")
    if min(arguments.threads) < 1:
        raise CannotRun(f"--threads: expected at least 1, got {min(arguments.threads)}")
    if arguments.in_process:
        print(json.dumps(time_here(arguments)))
        return 0
    given = ["--device", arguments.device, "--decode-threshold", str(arguments.decode_threshold)]
    for name in ("heads", "backend"):
        value = getattr(arguments, name)
        given += [] if value is None else [f"--{name}", str(value)]
    console = wide_console(80)
    rows = measure(given, arguments.cache_formats, arguments.threads)
    console.print(draw(rows))
    if arguments.json is not None:
        head = provenance("warmup", argv, device=arguments.device)
        limits = {"cores": os.cpu_count(), "most_seconds": MOST_SECONDS}
        write_report(arguments.json, {**head, **limits, "rows": rows}, console)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Time warm-ups, print and write the times, and return the exit status."""
    return command_line.run(_run, argv, make_parser())


if __name__ == "__main__":
    sys.exit(main())
