"""Time decodes that share a prefix with and without a cascade, and compare the faster way with the builder's choice.

    python -m tests.benchmarks.gqa_cascade
    python -m tests.benchmarks.gqa_cascade --json gqa-cascade.json
    python -m tests.benchmarks.gqa_cascade --times gqa-cascade.json --json gqa-cascade.json

A cascade attends the shared prefix once, with the queries of all requests, then the suffix of each request, and merges
both states. Each point of the grid is a batch of equal requests with one new token each. Its times are those of calls
from a CUDA graph (`timing.Clock.replayed`). The loss of a choice is its time / the time of the faster way, minus 1. A
block of the cache has 64 tokens, and the dtype is bfloat16.

With `--times`, the times are those of an earlier run, and the choices are those of the present sources for the GPU of
that run. This needs no GPU. The results file then has the field "choices" with the command, the date and the digest of
these sources; all other fields but the choices and their losses stay those of the run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import fast
from fast.kernels.schedule_costs import GPU_CASCADE_COSTS

from .command_line import CannotRun, check_device, run, write_report
from .gqa import Row, make_inputs
from .layers import BLOCK_SIZE, DTYPE
from .report import provenance
from .timing import Clock, input_sets

CONFIGS = ((64, 8, 128), (32, 4, 128), (32, 32, 128))  # heads, KV heads, head dim
REQUESTS, PREFIXES, SUFFIXES = (2, 8, 32, 128), (256, 1024, 4096, 16384), (64, 512, 2048)
CHOICES = ("command", "date", "fast_sha256")  # what a results file says of choices that were made after its run
MOST_LOST = 0.10  # the last line of the output says whether the loss of a choice is larger at any point


def measure(row: Row, clock: Clock, device: str = "cuda") -> dict[str, Any]:
    """Return the dimensions of a row, the times of both ways in microseconds, the builder's choice, and its loss."""
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size if device == "cuda" else 1
    inputs, config = make_inputs(row, input_sets(row.bytes, l2_bytes, 8), device), row.config
    out = torch.empty_like(inputs.q)
    split = [fast.split_shared_prefix(plan, row.shared, BLOCK_SIZE, 0) for plan in inputs.plans]
    calls = {
        "whole": [
            partial(fast.gqa_paged_attention, inputs.q, inputs.cache, plan, config, out=out) for plan in inputs.plans
        ],
        "cascade": [
            partial(fast.gqa_cascade_attention, inputs.q, inputs.cache, cascade, config, out=out) for cascade in split
        ],
    }
    times = {who: spread.median_us for who, spread in clock.replayed(calls).items()}
    return judge(row, times, device=device)


def judge(row: Row, times: dict[str, float], **options: Any) -> dict[str, Any]:
    """Return a point: the dimensions of a row, its times in microseconds, the builder's choice, and the loss.

    Args:
        row: the row.
        times: times with and without a cascade.
        options: arguments of the builder that describe the device.
    """
    builder = fast.GQAMetadataBuilder(row.config, BLOCK_SIZE, row.S, row.B, dtype=DTYPE, **options)
    query_lens, seq_lens = (torch.full((row.B,), length, dtype=torch.int32) for length in (row.Sq, row.S))
    chosen = "cascade" if builder.use_cascade_attention(row.shared, query_lens, seq_lens) else "whole"
    dims = {"B": row.B, "N": row.N, "Nkv": row.Nkv, "D": row.D, "prefix": row.shared, "suffix": row.S - row.shared}
    return {
        "dims": dims,
        "times_us": times,
        "chosen": chosen,
        "loss": times[chosen] / min(times.values()) - 1,
    }  # fmt: skip


def judge_again(path: Path, argv: Sequence[str]) -> dict[str, Any]:
    """Return the report of an earlier run with the choices of the present sources.

    Raises:
        CannotRun: the file is no results file of this benchmark.
    """
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        device = {
            "device": "cpu", "num_processors": report["multiprocessors"], "cascade_costs": GPU_CASCADE_COSTS
        }  # fmt: skip
        again = []
        for point in report["points"]:
            requests, heads, kv_heads, head_dim, prefix, suffix = (
                point["dims"][name] for name in ("B", "N", "Nkv", "D", "prefix", "suffix")
            )
            row = Row(requests, 1, prefix + suffix, heads, kv_heads, head_dim, shared=prefix)
            again.append(judge(row, point["times_us"], **device))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CannotRun(f"--times: expected a results file of this benchmark, got {path}: {error!r}") from error
    if not again:
        raise CannotRun(f"--times: expected a results file with points, got {path} without one")
    choices = {name: value for name, value in provenance("gqa_cascade", argv).items() if name in CHOICES}
    return {**report, "points": again, "choices": choices}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the grid, print it and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.gqa_cascade", description=__doc__.splitlines()[0],
        epilog=f"Exit status: 0 on success, 1 if a choice loses more than {MOST_LOST:.0%}, 2 without a CUDA device.",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="PATH", help="file for hardware, versions and times")
    parser.add_argument("--time", type=float, default=10.0, metavar="MS",
                        help="milliseconds of timing for each way and point (default: %(default)s)")  # fmt: skip
    parser.add_argument("--times", type=Path, metavar="PATH", help="results file of an earlier run: compare its times "
                        "with the choices of the present sources; needs no GPU")  # fmt: skip
    return run(_run, argv, parser)


def _run(argv, arguments) -> int:
    if arguments.times is None:
        check_device("cuda")
        clock, found = Clock(arguments.time), []
        for heads, requests, prefix, suffix in itertools.product(CONFIGS, REQUESTS, PREFIXES, SUFFIXES):
            torch.manual_seed(len(found))
            found.append(measure(Row(requests, 1, prefix + suffix, *heads, shared=prefix), clock))
            torch.cuda.empty_cache()
        report = {**provenance("gqa_cascade", argv, device="cuda"), "points": found}
    else:
        report = judge_again(arguments.times, argv)
    found = report["points"]
    console, table = Console(), Table(title=__doc__.splitlines()[0])
    for column in (*found[0]["dims"], "whole us", "cascade us", "chosen", "loss"):
        table.add_column(column, justify="right")
    for point in found:
        times = [f"{point['times_us'][way]:.1f}" for way in ("whole", "cascade")]
        table.add_row(*map(str, point["dims"].values()), *times, point["chosen"], f"{point['loss']:.0%}")
    console.print(table)
    most = max(point["loss"] for point in found)
    wrong = sum(point["loss"] > MOST_LOST for point in found)
    console.print(f"largest loss {most:.1%}; {wrong} of {len(found)} points lose more than {MOST_LOST:.0%}")
    if arguments.json is not None:
        write_report(arguments.json, {**report, "largest_loss": most}, console)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
