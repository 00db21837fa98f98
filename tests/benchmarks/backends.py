"""Time the attention of a prefill with every backend that can serve it: of new tokens, and of a chunk of context.

    python -m tests.benchmarks.backends --device cpu
    python -m tests.benchmarks.backends --device cuda --dtype bfloat16 --rows 4,2048,128 1,4096,128,16384 --json x.json
    python -m tests.benchmarks.backends --device cuda --dtype bfloat16 --grid --asset --json docs/results/NAME.json

A row is B,T,N or B,T,N,C: B requests with T new tokens and C tokens of context each, and N heads with DeepSeek-V3's
dims. Without context, the new tokens attend each other with a causal mask, and no LSE is computed. With context, they
attend the context in one chunk, with the LSE. Each backend plans a step as in a builder, and the plan is not timed.
Each backend gets its keys as from a layer: a backend that needs each key in one tensor gets such keys, so no call joins
the two parts of the keys.

`--grid` times the shapes whose times ship with `fast`. `--asset` also writes the file from which `fast` chooses
backends on this GPU (`fast.backends.measured`).

The backends take turns, so that a drift of the machine's speed affects all of them. Before the timing, some rows of the
output of each backend are compared with `reference`; the error must be within the budget.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import Tensor

import fast
import reference
from fast import backends
from fast.backends.adapters.conversion import whole_keys
from fast.backends.measured import TABLES
from fast.demo.job import DTYPES
from fast.parity import compare
from reference.interfaces import CommonAttentionMetadata, MLAConfig, PrefillMetadata, QueryLenSupport

from .command_line import CannotRun, check_device, run, wide_console, write_report
from .report import provenance
from .timing import Spread, wall_times

BLOCK_SIZE = 64
CHECKED_TOKENS, CHECKED_HEADS = 256, 4  # the last tokens of the last request, and the first heads


class Row(NamedTuple):
    """A row: requests, new tokens of each request, heads, and context tokens of each request."""

    B: int
    T: int
    N: int
    C: int = 0


ROWS = (Row(1, 128, 16), Row(1, 512, 16), Row(1, 2048, 16), Row(8, 128, 16), Row(32, 32, 16))

GRID = (  # shapes of long and of short prompts, and of chunks of context
    Row(4, 2048, 128), Row(1, 4096, 128), Row(1, 16384, 128), Row(1, 8192, 16), Row(1, 32768, 16), Row(8, 512, 128),
    Row(1, 4096, 128, 16384), Row(16, 64, 128, 2048),
)  # fmt: skip


def parse_row(text: str) -> Row:
    """Return the row of a text such as "1,512,16" or "1,512,16,4096".

    Raises:
        CannotRun: the text is no row.
    """
    parts = text.split(",")
    row = Row(*map(int, parts)) if len(parts) in (3, 4) and all(part.isdecimal() for part in parts) else Row(0, 0, 0)
    if min(row[:3]) < 1 or row.T < 2:
        raise CannotRun(f"--rows: expected B,T,N or B,T,N,C with at least 2 tokens, such as 1,512,16, got {text}")
    return row


class Inputs(NamedTuple):
    """Queries, keys in two parts and values of a row, and the batch."""

    q: Tensor
    k_nope: Tensor
    k_pe: Tensor
    v: Tensor
    config: MLAConfig
    common: CommonAttentionMetadata


def make_inputs(row: Row, dtype: torch.dtype, device: str) -> Inputs:
    """Return random inputs of a row; the keys are those of the context, if there is one."""
    config = MLAConfig.from_preset("deepseek-v3", num_heads=row.N)
    tokens, keys = row.B * row.T, row.B * (row.C or row.T)
    shapes = (
        (tokens, row.N, config.qk_head_dim), (keys, row.N, config.qk_nope_head_dim), (keys, config.qk_rope_head_dim),
        (keys, row.N, config.v_head_dim),
    )  # fmt: skip
    torch.manual_seed(0)
    tensors = [torch.randn(shape, device=device, dtype=dtype) for shape in shapes]
    width = -(-(row.T + row.C) // BLOCK_SIZE)
    table = torch.arange(row.B * width, dtype=torch.int32, device=device).view(row.B, width)
    common = CommonAttentionMetadata.from_lens([row.T] * row.B, [row.T + row.C] * row.B, table, BLOCK_SIZE)
    return Inputs(*tensors, config, common)


def request_of(row: Row, dtype: torch.dtype, device: str) -> backends.KernelRequest:
    """Return the call of a row, as backends are asked for it; its sizes let measured times choose the default."""
    config = MLAConfig.from_preset("deepseek-v3", num_heads=row.N)
    return backends.KernelRequest(
        "flash_attn_varlen", torch.device(device), dtype,
        (("qk_head_dim", config.qk_head_dim), ("v_head_dim", config.v_head_dim)),
        query_lens=QueryLenSupport.VARLEN, out_dtype=reference.interfaces.wide_dtype(dtype) if row.C else dtype,
        mask=None if row.C else "causal", lse=bool(row.C),
        sizes=backends.AttentionSizes.rounded(row.B, row.N, row.T, row.C or row.T),
    )  # fmt: skip


def able(row: Row, dtype: torch.dtype, device: str) -> list[str]:
    """Return the names of all backends that can serve the calls of a row."""
    request = request_of(row, dtype, device)
    return [each.name for each in backends.registered() if not each.validate_configuration(request)]


def candidates(row: Row, dtype: torch.dtype, device: str, left_out: Sequence[str] = ()) -> list[str]:
    """Return the names of all backends that can serve the calls of a row, the default first, without `left_out`."""
    default = backends.select(request_of(row, dtype, device)).name
    others = [name for name in able(row, dtype, device) if name != default and name not in left_out]
    return [default, *others]


def plan_of(row: Row, inputs: Inputs, dtype: torch.dtype, name: str | None) -> PrefillMetadata:
    """Return the plan of a step whose prefills a backend serves; each context is in one chunk.

    None as the name lets the builder choose, also for the causal call of the new tokens, which a step with context has.
    """
    length = row.T + row.C
    builder = fast.MLAMetadataBuilder(
        inputs.config, BLOCK_SIZE, length, row.B, query_len_support=QueryLenSupport.SINGLE_ONLY, dtype=dtype,
        workspace_tokens=row.B * (length + BLOCK_SIZE) // BLOCK_SIZE * BLOCK_SIZE,
        backend=None if name is None else {"flash_attn_varlen": name},
    )  # fmt: skip
    plan = builder.build(0, inputs.common).prefill
    if len(plan.context_chunks) != bool(row.C):
        raise RuntimeError(f"{name}: expected one chunk of context for {row}, got {len(plan.context_chunks)}")
    return plan


def keys_for(name: str, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Return the keys that a layer passes to a backend: parts without rope and rope parts, or whole keys and [S, 0]."""
    k, k_pe = inputs.k_nope, inputs.k_pe
    if backends.support_of(name, "flash_attn_varlen").whole_keys:
        return whole_keys(k, k_pe), k_pe[:, :0]
    return k, k_pe


def check(name: str, row: Row, inputs: Inputs, out: Tensor) -> float:
    """Return error / budget of the checked rows of an output.

    Raises:
        RuntimeError: the error exceeds the budget.
    """
    tokens, heads = min(row.T, CHECKED_TOKENS), min(row.N, CHECKED_HEADS)
    keys = row.C or row.T
    k = torch.cat((inputs.k_nope[-keys:], inputs.k_pe[-keys:, None].expand(-1, row.N, -1)), dim=-1)
    tensors = [x[:, :heads] for x in (inputs.q[-tokens:], k, inputs.v[-keys:])]
    device = inputs.q.device
    starts = [torch.tensor([0, count], dtype=torch.int32, device=device) for count in (tokens, keys)]
    rest = (*starts, tokens, keys, inputs.config.softmax_scale, not row.C)
    low = reference.flash_attn_varlen(*tensors, *rest).out
    gold = reference.flash_attn_varlen(*[x.double() for x in tensors], *rest).out
    # a library may write the dtype of the queries, which the adapter converts
    parity = compare(name, out[-tokens:, :heads].to(low.dtype).contiguous(), low, gold)
    if not parity.passed:
        raise RuntimeError(f"{parity}: the error exceeds the budget for {row}, so nothing was timed")
    return parity.max_error / parity.max_budget


def measure(row: Row, dtype: torch.dtype, device: str, rounds: int, left_out: Sequence[str] = ()) -> dict[str, Any]:
    """Return the times of one row, by the names of the backends; `left_out` names backends that are not timed.

    Raises:
        RuntimeError: the error of an output exceeds its budget; nothing is timed.
    """
    inputs = make_inputs(row, dtype, device)
    scale = inputs.config.softmax_scale

    def call(name: str) -> Callable[[], Tensor]:
        plan = plan_of(row, inputs, dtype, name)
        tensors = inputs.q, *keys_for(name, inputs), inputs.v

        def attend() -> Tensor:
            if row.C:
                out = fast.run_prefill_context_chunk(*tensors, plan, plan.context_chunks[0], scale).out
            else:
                out = fast.run_prefill_new_tokens(*tensors, plan, scale, False)
            if device == "cuda":
                torch.cuda.synchronize()
            return out

        return attend

    calls = {name: call(name) for name in candidates(row, dtype, device, left_out)}
    errors = {name: check(name, row, inputs, attend()) for name, attend in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, attend in calls.items():
            times[name].append(wall_times(attend, 1).median_us)
    spreads = {name: Spread.of(found) for name, found in times.items()}
    default = spreads[next(iter(calls))].median_us
    return {
        "dims": row._asdict(),
        "backends": {
            name: {"median_us": found.median_us, "quartiles_us": list(found.quartiles_us),
                   "times_faster_than_default": default / found.median_us, "error_of_budget": errors[name]}
            for name, found in spreads.items()
        },
    }  # fmt: skip


def asset_path(arguments: argparse.Namespace) -> Path | None:
    """Return the file from which `fast` chooses backends on this GPU; None without `--asset`.

    Raises:
        CannotRun: `fast` reads times of bfloat16 on a GPU alone.
    """
    if not arguments.asset:
        return None
    if arguments.device != "cuda" or arguments.dtype != "bfloat16":
        raise CannotRun(f"--asset: expected --device cuda --dtype bfloat16, got {arguments.device}, {arguments.dtype}")
    return TABLES / "{}.{}.json".format(*torch.cuda.get_device_capability())


def run_main(argv: Sequence[str], arguments: argparse.Namespace) -> int:
    """Measure all rows, print a table, and write JSON if `--json` is given."""
    check_device(arguments.device)
    dtype = DTYPES[arguments.dtype]
    rows = GRID if arguments.grid else ROWS
    if arguments.rows is not None:
        rows = [parse_row(text) for text in arguments.rows]
    path = asset_path(arguments)
    unknown = set(arguments.without) - {each.name for each in backends.registered()}
    if unknown:
        raise CannotRun(f"--without: expected names of backends, got {', '.join(sorted(unknown))}")
    if arguments.rounds < 1:
        raise CannotRun(f"--rounds: expected at least 1, got {arguments.rounds}")
    results = [measure(row, dtype, arguments.device, arguments.rounds, arguments.without) for row in rows]
    table = Table(title=f"Attention of prefills, {arguments.dtype}, on {arguments.device}")
    for title in ("B,T,N,C", "backend", "median us", "quartiles", "x default", "error / budget"):
        table.add_column(title, justify="left" if title in ("B,T,N,C", "backend") else "right")
    for row in results:
        for name, found in row["backends"].items():
            low, high = found["quartiles_us"]
            table.add_row(
                ",".join(map(str, row["dims"].values())), name, f"{found['median_us']:.0f}", f"{low:.0f} - {high:.0f}",
                f"{found['times_faster_than_default']:.2f}", f"{found['error_of_budget']:.2f}",
            )  # fmt: skip
    wide_console(100).print(table)
    head = provenance("backends", argv, arguments.device)
    for target in (arguments.json, path):
        if target is not None:
            write_report(target, {**head, "dtype": arguments.dtype, "rows": results})
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.backends", description=__doc__.splitlines()[0],
        epilog="Exit status: 0 on success, 2 if the benchmark cannot run here.",
    )  # fmt: skip
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="device (default: cuda)")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float32", help="dtype (default: float32)")
    shapes = parser.add_mutually_exclusive_group()
    shapes.add_argument(
        "--rows", nargs="+", metavar="B,T,N[,C]", help="requests, new tokens of each, heads, context tokens of each"
    )
    shapes.add_argument("--grid", action="store_true", help="the shapes whose times ship with `fast`")
    parser.add_argument("--asset", action="store_true",
                        help="also write the file from which `fast` chooses backends on this GPU")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=15, metavar="N", help="calls of each backend (default: 15)")
    parser.add_argument("--without", nargs="+", default=(), metavar="NAME",
                        help="backends that are not timed, except where they are the default")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="PATH", help="file for hardware, versions and times")
    return run(run_main, argv, parser)


if __name__ == "__main__":
    sys.exit(main())
