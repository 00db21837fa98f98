"""Time the attention of a prefill without context with every backend that can serve it.

    python -m tests.benchmarks.backends --device cpu
    python -m tests.benchmarks.backends --device cuda --dtype bfloat16 --rows 1,2048,128 4,512,16 --json backends.json

A row is B,T,N: B prompts of T tokens each, and N heads with DeepSeek-V3's dims. The backends take turns, so that a
drift of the machine's speed affects all of them. Before the timing, the output of each backend is compared with
`reference`; the error must be within the budget.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

import fast
import reference
from fast import backends
from fast.demo.job import DTYPES
from fast.parity import compare
from reference.interfaces import MLAConfig, PrefillMetadata

from .command_line import CannotRun, check_device, run, wide_console, write_report
from .report import provenance
from .timing import Spread, wall_times

ROWS = ((1, 128, 16), (1, 512, 16), (1, 2048, 16), (8, 128, 16), (32, 32, 16))
V3 = MLAConfig.from_preset("deepseek-v3")


def parse_row(text: str) -> tuple[int, int, int]:
    """Return (B, T, N) of a row such as "1,512,16".

    Raises:
        CannotRun: the text is no row.
    """
    parts = text.split(",")
    if len(parts) != 3 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise CannotRun(f"--rows: expected B,T,N, three numbers of at least 1, such as 1,512,16, got {text}")
    return int(parts[0]), int(parts[1]), int(parts[2])


def make_inputs(row: tuple[int, int, int], dtype: torch.dtype, device: str) -> tuple[list[Tensor], PrefillMetadata]:
    """Return queries, keys in two parts and values of a row, and the plan of the prompts."""
    requests, length, heads = row
    tokens = requests * length
    shapes = (
        (tokens, heads, V3.qk_head_dim), (tokens, heads, V3.qk_nope_head_dim), (tokens, V3.qk_rope_head_dim),
        (tokens, heads, V3.v_head_dim),
    )  # fmt: skip
    torch.manual_seed(0)
    tensors = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
    starts = torch.arange(0, tokens + 1, length, dtype=torch.int32, device=device)
    table = torch.zeros(requests, 1, dtype=torch.int32, device=device)
    return tensors, PrefillMetadata(table, starts, length, (), 64)


def candidates(dtype: torch.dtype, device: str) -> list[str]:
    """Return the names of all backends that can serve the calls of this benchmark, the default first."""
    request = backends.KernelRequest(
        "flash_attn_varlen", torch.device(device), dtype,
        (("qk_head_dim", V3.qk_head_dim), ("v_head_dim", V3.v_head_dim)), out_dtype=dtype, mask="causal",
    )  # fmt: skip
    default = backends.select(request).name
    able = [each.name for each in backends.registered() if not each.validate_configuration(request)]
    return [default, *(name for name in able if name != default)]


def measure(row: tuple[int, int, int], dtype: torch.dtype, device: str, rounds: int) -> dict[str, Any]:
    """Return the times of one row, by the names of the backends.

    Raises:
        RuntimeError: the error of an output exceeds its budget; nothing is timed.
    """
    tensors, plan = make_inputs(row, dtype, device)
    scale = V3.softmax_scale
    gold = reference.run_prefill_new_tokens(*(x.double().cpu() for x in tensors), _on_cpu(plan), scale, False)
    low = reference.run_prefill_new_tokens(*(x.cpu() for x in tensors), _on_cpu(plan), scale, False)

    def call(name: str) -> Callable[[], Tensor]:
        def attend() -> Tensor:
            out = fast.run_prefill_new_tokens(*tensors, plan, scale, False, backend=name)
            if device == "cuda":
                torch.cuda.synchronize()
            return out

        return attend

    calls = {name: call(name) for name in candidates(dtype, device)}
    errors = {}
    for name, attend in calls.items():
        parity = compare(name, attend().cpu(), low, gold)
        if not parity.passed:
            raise RuntimeError(f"{parity}: the error exceeds the budget for {row}, so nothing was timed")
        errors[name] = parity.max_error / parity.max_budget
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, attend in calls.items():
            times[name].append(wall_times(attend, 1).median_us)
    spreads = {name: Spread.of(found) for name, found in times.items()}
    default = spreads[next(iter(calls))].median_us
    return {
        "dims": dict(zip(("B", "T", "N"), row, strict=True)),
        "backends": {
            name: {"median_us": found.median_us, "quartiles_us": list(found.quartiles_us),
                   "times_faster_than_default": default / found.median_us, "error_of_budget": errors[name]}
            for name, found in spreads.items()
        },
    }  # fmt: skip


def _on_cpu(plan: PrefillMetadata) -> PrefillMetadata:
    return PrefillMetadata(plan.block_table.cpu(), plan.query_start_loc.cpu(), plan.max_query_len, (), plan.block_size)


def run_main(argv: Sequence[str], arguments: argparse.Namespace) -> int:
    """Measure all rows, print a table, and write JSON if `--json` is given."""
    check_device(arguments.device)
    dtype = DTYPES[arguments.dtype]
    rows = ROWS if arguments.rows is None else [parse_row(text) for text in arguments.rows]
    if arguments.rounds < 1:
        raise CannotRun(f"--rounds: expected at least 1, got {arguments.rounds}")
    results = [measure(row, dtype, arguments.device, arguments.rounds) for row in rows]
    table = Table(title=f"Attention of prompts without context, {arguments.dtype}, on {arguments.device}")
    for title in ("B,T,N", "backend", "median us", "quartiles", "x default", "error / budget"):
        table.add_column(title, justify="left" if title in ("B,T,N", "backend") else "right")
    for row in results:
        for name, found in row["backends"].items():
            low, high = found["quartiles_us"]
            table.add_row(
                ",".join(map(str, row["dims"].values())), name, f"{found['median_us']:.0f}", f"{low:.0f} - {high:.0f}",
                f"{found['times_faster_than_default']:.2f}", f"{found['error_of_budget']:.2f}",
            )  # fmt: skip
    wide_console(100).print(table)
    if arguments.json:
        head = provenance("backends", argv, arguments.device)
        write_report(arguments.json, {**head, "dtype": arguments.dtype, "rows": results})
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.backends", description=__doc__.splitlines()[0],
        epilog="Exit status: 0 on success, 2 if the benchmark cannot run here.",
    )  # fmt: skip
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="device (default: cuda)")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float32", help="dtype (default: float32)")
    parser.add_argument("--rows", nargs="+", metavar="B,T,N", help="prompts, tokens of each, heads")
    parser.add_argument("--rounds", type=int, default=15, metavar="N", help="calls of each backend (default: 15)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="file for hardware, versions and times")
    return run(run_main, argv, parser)


if __name__ == "__main__":
    sys.exit(main())
