"""Parts that the benchmarks against transformers on a CPU share: the timed steps, the options, the table.

`decode_vs_transformers` and `gqa_vs_transformers` decode one token at a time in a model of one attention layer.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import DynamicCache

from fast.parity import compare

from . import command_line
from .report import provenance

WARM_UP = 2  # steps of each implementation that are not timed, except those of `reference`, which is slow


def stepper(model: nn.Module, cache: DynamicCache) -> Callable[[], torch.Tensor]:
    """Return a function that decodes one token and returns the hidden state of the token, [hidden size]."""
    token = torch.tensor([[3]])

    def step() -> torch.Tensor:
        with torch.inference_mode():
            return model(token, past_key_values=cache, use_cache=True).last_hidden_state[0, 0]

    return step


def timed_rows(
    context: int,
    steppers: Mapping[str, Callable[[], torch.Tensor]],
    gold: torch.Tensor,
    steps: int,
    reference_steps: int,
) -> list[dict[str, Any]]:
    """Compare the first output of each implementation with gold, time the next ones, and return one row for each.

    After each token the next implementation has its turn, so that a drift of the machine's speed affects all.

    Args:
        context: tokens in the caches.
        steppers: the implementations by their names; "transformers" and "reference" are among them.
        gold: first output of transformers in float64.
        steps: number of timed tokens of each implementation except `reference`.
        reference_steps: number of timed tokens of `reference`; at most `steps` + `WARM_UP` are timed.

    Raises:
        RuntimeError: the error of an output exceeds its budget; nothing is timed.
    """
    first_outputs = {name: step() for name, step in steppers.items()}
    low = first_outputs["reference"]  # float32, same formula as `fast`; the budget is computed from the error of `low`
    parities = {name: compare(name, value, low, gold) for name, value in first_outputs.items()}
    for parity in parities.values():
        if not parity.passed:
            raise RuntimeError(f"{parity}: the error exceeds the budget at context {context}, so nothing was timed")

    times: dict[str, list[float]] = {name: [] for name in steppers}
    for turn in range(steps + WARM_UP):
        for name, step in steppers.items():
            if name == "reference" and turn >= reference_steps:
                continue
            start = time.perf_counter()
            step()
            if turn >= WARM_UP or name == "reference":
                times[name].append(1e3 * (time.perf_counter() - start))
    base = statistics.median(times["transformers"])
    rows = []
    for name, values in times.items():
        quartiles = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
        rows.append(
            {
                "context": context, "who": name, "ms_median": quartiles[1],
                "ms_quartiles": [quartiles[0], quartiles[2]], "ms_least": min(values),
                "steps": len(values), "times_faster_than_transformers": base / quartiles[1],
                "max_error": parities[name].max_error, "max_budget": parities[name].max_budget,
            }
        )  # fmt: skip
    return rows


def main(
    name: str,
    description: str,
    title: str,
    measure: Callable[[int, int, int], list[dict[str, Any]]],
    argv: Sequence[str] | None,
) -> int:
    """Measure and print the table, write JSON if `--json` is given, and return the exit status.

    Args:
        name: name of the benchmark's module.
        description: one line for the help.
        title: title of the table.
        measure: function that returns the rows of one context length, for numbers of timed tokens.
        argv: options of the command line; None takes the options of this process.
    """
    parser = argparse.ArgumentParser(prog=f"python -m tests.benchmarks.{name}", description=description)
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096, 16384], help="tokens in the cache")
    parser.add_argument("--steps", type=int, default=15, help="number of timed tokens of transformers and of fast")
    parser.add_argument(
        "--reference-steps", type=int, default=3, help="number of timed tokens of reference, which is slow"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="number of CPU threads of PyTorch")
    parser.add_argument("--json", type=pathlib.Path, help="file for hardware, versions and rows")

    def run(given: Sequence[str], arguments: argparse.Namespace) -> int:
        command_line.check_at_least_one(arguments, "steps", "threads")
        for option, values in (("contexts", arguments.contexts), ("reference-steps", [arguments.reference_steps])):
            if min(values) < 1:
                raise command_line.CannotRun(f"--{option}: expected at least 1, got {min(values)}")
        if arguments.json is not None and not arguments.json.absolute().parent.is_dir():
            raise command_line.CannotRun(f"--json: expected a file in a folder that exists, got {arguments.json}")
        before = torch.get_num_threads()
        torch.set_num_threads(arguments.threads)
        try:
            rows = []
            for context in arguments.contexts:
                rows += measure(context, arguments.steps, arguments.reference_steps)
            head = provenance(name, given, transformers=transformers.__version__)
        finally:
            torch.set_num_threads(before)
        print_rows(title, rows)
        if arguments.json is not None:
            command_line.write_report(arguments.json, {**head, "rows": rows})
        return 0

    return command_line.run(run, argv, parser)


def print_rows(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the rows as a table, with a line between context lengths."""
    table = Table(title=title)
    for column in ("context", "", "median ms", "quartiles", "x transformers", "max error / budget"):
        table.add_column(column, justify="left" if not column else "right")
    for row, after in zip(rows, [*rows[1:], None], strict=True):
        low, high = row["ms_quartiles"]
        table.add_row(
            str(row["context"]), row["who"], f"{row['ms_median']:.2f}", f"{low:.2f} - {high:.2f}",
            f"{row['times_faster_than_transformers']:.1f}", f"{row['max_error']:.1e} / {row['max_budget']:.1e}",
            end_section=after is None or after["context"] != row["context"],
        )  # fmt: skip
    Console(width=max(100, Console().width)).print(table)
