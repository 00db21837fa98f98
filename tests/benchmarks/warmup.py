"""Time `fast.warmup` for a layer of DeepSeek-V3, first with an empty cache of Triton and then with the filled cache.

`fast.warmup` compiles every kernel that later steps need.

    python -m tests.benchmarks.warmup
    python -m tests.benchmarks.warmup --threads 1 4 --json warmup.json

Each time is measured in a new process, because a process keeps the kernels that it compiled. The process "cold" starts
with an empty cache folder. The process "warm" starts with this folder, in which "cold" stored its compiled kernels. The
times do not contain the import of the packages and the start of the GPU.
"""

from __future__ import annotations

import argparse
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

from . import command_line
from .command_line import CannotRun, check_at_least_one, check_device, wide_console, write_report
from .layers import BLOCK_SIZE, config_for, dtype_for
from .report import provenance

MOST_SECONDS = {"cold": 90.0, "warm": 5.0}  # longest acceptable times on a CPU with 16 cores
IN_PROCESS = "--in-process"  # hidden option that makes a process run and time the warm-up itself


def time_here(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of one warm-up in this process, and the number of kernels that it compiled or loaded."""
    device = arguments.device
    torch.zeros(1, device=device)
    begun = time.perf_counter()
    compiled = fast.warmup(
        config_for(device, arguments.heads), device=device, dtype=dtype_for(device), block_size=BLOCK_SIZE,
        decode_threshold=arguments.decode_threshold, backend=arguments.backend, threads=arguments.threads[0],
        progress=False,
    )  # fmt: skip
    if device == "cuda":
        torch.cuda.synchronize()
    return {"seconds": time.perf_counter() - begun, "kernels": len(compiled)}


def time_process(argv: Sequence[str], threads: int, cache: str) -> dict[str, Any]:
    """Call `time_here` in a new process and return its result; Triton keeps compiled kernels in the folder `cache`.

    Raises:
        CannotRun: the process failed; the message ends with the last line of its stderr.
    """
    command = [sys.executable, "-m", "tests.benchmarks.warmup", *argv, IN_PROCESS, "--threads", str(threads)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "TRITON_CACHE_DIR": cache}
    )
    lines = (done.stdout if done.returncode == 0 else done.stderr).splitlines() or [""]
    if done.returncode != 0:
        raise CannotRun(f"the process with {threads} threads failed: {lines[-1]}")
    return json.loads(lines[-1])


def measure(argv: Sequence[str], threads: Sequence[int]) -> list[dict[str, Any]]:
    """Return one row for each number of threads, with the results of `time_here` for "cold" and for "warm"."""
    rows = []
    for count in threads:
        with tempfile.TemporaryDirectory() as cache:
            rows.append({"threads": count, **{kind: time_process(argv, count, cache) for kind in MOST_SECONDS}})
    return rows


def draw(rows: Sequence[dict[str, Any]]) -> Table:
    """Return the table of the rows; "!" marks a time above its limit."""
    table = Table(title="Seconds of a warm-up")
    for column in ("threads", "kernels", *MOST_SECONDS):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        seconds = {kind: row[kind]["seconds"] for kind in MOST_SECONDS}
        texts = [f"{seconds[kind]:.1f}" + " !" * (seconds[kind] > most) for kind, most in MOST_SECONDS.items()]
        table.add_row(str(row["threads"]), str(row["cold"]["kernels"]), *texts)
    return table


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = command_line.make_parser("warmup", __doc__.splitlines()[0])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, MOST_THREADS], metavar="N",
                        help="numbers of threads (default: 1 and the maximum of `fast.warmup`)")  # fmt: skip
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
    rows = measure(given, arguments.threads)
    console.print(draw(rows))
    if arguments.json is not None:
        report = {**provenance("warmup", argv, device=arguments.device), "most_seconds": MOST_SECONDS, "rows": rows}
        write_report(arguments.json, report, console)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Time warm-ups, print and write the times, and return the exit status."""
    return command_line.run(_run, argv, make_parser())


if __name__ == "__main__":
    sys.exit(main())
