"""Time a decode step with keys divided over several GPUs, and the same step on one GPU; bfloat16, DeepSeek-V3's dims.

    python -m tests.benchmarks.context_parallel --ranks 4
    python -m tests.benchmarks.context_parallel --ranks 2 --rows 32,131072,128 --json h200-x2.json

The benchmark starts one process ("rank") for each GPU; the processes communicate through NCCL. A step has three parts:
gather the queries, decode over the keys that the rank keeps, merge the attention states of all ranks. A CUDA graph
replays the step.

For comparison, each GPU also runs the whole decode alone, with all heads and all keys. All GPUs run this decode at the
same time, so that they are equally warm.

The time of a replay is the time of the slowest rank. The table shows the median over all replays. It also shows the
bytes that a rank received, and in parentheses the bytes that `dcp_wire_bytes` predicts. All decodes use a schedule of
`plan_decode`; the times do not contain the planning.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fast
import reference
from fast.parity import compare_states
from reference.distributed.groups import ContextParallel
from reference.interfaces import AttentionState, CommonAttentionMetadata, MLAConfig

from ..support.processes import run_ranks, values_of
from ..support.ranks import make_groups
from .command_line import CannotRun, run, write_report
from .report import provenance
from .timing import Spread

LATENT, ROPE = 512, 64
WIDTH = LATENT + ROPE
BLOCK_SIZE = 64
INTERLEAVE = 16
SCALE = 192**-0.5
DTYPE = torch.bfloat16
CHECKED_REQUESTS, CHECKED_HEADS = 2, 3
REPLAYS, ROUNDS = 5, 9
VARIANTS = ("a2a", "ag_rs")


@dataclasses.dataclass(frozen=True)
class Row:
    """One shape.

    Attributes:
        B: number of requests, with one new token each.
        S: keys of each request.
        N: number of heads.
    """

    B: int
    S: int
    N: int


ROWS = (Row(32, 131072, 128), Row(1, 131072, 128), Row(128, 4096, 128), Row(64, 16384, 128), Row(32, 131072, 16))
FLOORS = {(2, ROWS[0]): 1.7, (4, ROWS[0]): 3.0}  # (number of GPUs, row): least speedup


def entries_of(row: Row, request: int) -> Tensor:
    """Return the cache entries of one request, [S, 576]; every GPU gets the same entries."""
    generator = torch.Generator("cuda").manual_seed(request)
    return torch.randn(row.S, WIDTH, dtype=DTYPE, device="cuda", generator=generator)


def make_plan(row: Row, ranks: ContextParallel | None, heads: int) -> tuple[Tensor, Any, Any]:
    """Return a cache, the plan of the decode and its schedule.

    The cache holds the tokens of this rank, or all tokens if `ranks` is None. The block table is random.
    """
    ownership = None if ranks is None else ranks.ownership
    size, rank, interleave = (
        (1, 0, BLOCK_SIZE) if ownership is None else (ownership.size, ownership.rank, ownership.interleave)
    )
    local = row.S // size  # tokens of a request on this rank; S is a multiple of size x interleave
    blocks = -(-local // BLOCK_SIZE)
    table = torch.randperm(row.B * blocks, generator=torch.Generator().manual_seed(1)).view(row.B, blocks).int().cuda()
    cache = torch.empty(row.B * blocks, BLOCK_SIZE, WIDTH, dtype=DTYPE, device="cuda")
    for request in range(row.B):
        mine = entries_of(row, request).view(-1, size, interleave, WIDTH)[:, rank].reshape(blocks, BLOCK_SIZE, WIDTH)
        cache[table[request].long()] = mine
    lens = torch.full((row.B,), row.S, dtype=torch.int32)
    starts = torch.arange(row.B + 1, dtype=torch.int32)
    slots = torch.full((row.B,), -1, dtype=torch.int64, device="cuda")
    common = CommonAttentionMetadata.make(starts, lens, table, slots)
    plan = fast.build_mla_metadata(common, BLOCK_SIZE, 65536, ownership=ownership).decode
    config = dataclasses.replace(MLAConfig.from_preset("deepseek-v3"), num_heads=heads)
    served = {"device": "cuda", "dtype": DTYPE, "block_size": BLOCK_SIZE}
    programs, costs = fast.decode_programs(config, **served), fast.schedule_costs(config, **served)
    return cache, plan, fast.plan_decode(plan.seq_lens, programs, costs)


def captured_us(step: Callable[[], object]) -> list[float]:
    """Replay a CUDA graph of REPLAYS steps; return the microseconds of one step for each of ROUNDS replays.

    A barrier before each replay makes all ranks begin at the same time.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(REPLAYS):
            step()
    graph.replay()
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        dist.barrier()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(end) / REPLAYS)
    return times


def oracle(row: Row, q: Tensor, heads: slice, dtype: torch.dtype) -> AttentionState:
    """Return the result of `reference` over whole sequences, for a few requests and heads."""
    heads = slice(heads.start, heads.start + CHECKED_HEADS)
    blocks = row.S // BLOCK_SIZE
    cache = torch.cat([entries_of(row, request).view(blocks, BLOCK_SIZE, WIDTH) for request in range(checked(row))])
    table = torch.arange(checked(row) * blocks, dtype=torch.int32, device="cuda").view(-1, blocks)
    lens = torch.full((checked(row),), row.S, dtype=torch.int32, device="cuda")
    starts = torch.arange(checked(row) + 1, dtype=torch.int32, device="cuda")
    plan = reference.DecodeMetadata(table, lens, starts, 1, lens, row.S, BLOCK_SIZE)
    q = q[: checked(row), heads].to(dtype)
    return reference.mla_decode(q[..., :LATENT], q[..., LATENT:], cache.to(dtype), plan, SCALE)


def checked(row: Row) -> int:
    """Return the number of requests of a row that are compared with `reference`."""
    return min(CHECKED_REQUESTS, row.B)


def measure(rows: list[Row]) -> list[dict[str, Any]]:
    """Return the measurements of one rank, one dictionary for each row."""
    groups = make_groups(dist.get_world_size(), INTERLEAVE)
    return [measure_row(row, groups) for row in rows]


def measure_row(row: Row, groups: ContextParallel) -> dict[str, Any]:
    """Return times, parity (error and budget) and received bytes of one row on one rank."""
    generator = torch.Generator("cuda").manual_seed(7)
    q = torch.randn(row.B, row.N, WIDTH, dtype=DTYPE, device="cuda", generator=generator)

    def alone() -> AttentionState:
        return fast.mla_decode(q[..., :LATENT], q[..., LATENT:], *paged, SCALE, schedule)

    *paged, schedule = make_plan(row, None, row.N)
    result: dict[str, Any] = {"times": {"one GPU": captured_us(alone)}, "parity": {}, "received": {}, "passed": True}
    *paged, schedule = make_plan(row, groups, row.N)
    own = row.N // groups.size
    heads = slice(groups.rank * own, (groups.rank + 1) * own)  # this rank owns the merged output of these heads
    low, gold = oracle(row, q, heads, DTYPE), oracle(row, q, heads, torch.float64)
    mine = q[:, heads].contiguous()

    def together(ranks: ContextParallel) -> AttentionState:
        q_parts = mine[..., :LATENT], mine[..., LATENT:]
        return fast.dcp_decode(*q_parts, *paged, SCALE, ranks, schedule)

    for variant in VARIANTS:
        ranks = dataclasses.replace(groups, merge=variant)
        step = functools.partial(together, ranks)
        before = ranks.cp_group.received.copy()
        state = step()
        result["received"][variant] = dict(ranks.cp_group.received - before)
        part = AttentionState(state.out[: checked(row), :CHECKED_HEADS], state.lse[:CHECKED_HEADS, : checked(row)])
        parity = compare_states(variant, part, low, gold)
        whole = bool(state.out.isfinite().all() and state.lse.isfinite().all())
        result["parity"][variant] = [{**dataclasses.asdict(p), "passed": p.passed} for p in parity]
        result["passed"] = result["passed"] and whole and all(p.passed for p in parity)
        result["times"][variant] = captured_us(step)
    return result


def head(arguments: Sequence[str]) -> dict[str, Any]:
    """Return hardware, versions and command for the results file; call this function only in the process of a rank."""
    return provenance("context_parallel", arguments, device="cuda", nccl=".".join(map(str, torch.cuda.nccl.version())))


def rank_task(rows: list[Row], arguments: Sequence[str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the result of `head` and the measurements of this rank; the process of every rank runs this function."""
    return head(arguments), measure(rows)


def summarise(row: Row, size: int, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one row of the results: times of the slowest rank, parity of all ranks, received and predicted bytes."""
    times = {}
    for way in ranks[0]["times"]:
        slowest = [max(at) for at in zip(*(rank["times"][way] for rank in ranks), strict=True)]
        times[way] = dataclasses.asdict(Spread.of(slowest))
    one = times["one GPU"]["median_us"]
    formula = {
        variant: fast.dcp_wire_bytes(row.B, row.N, LATENT, ROPE, size, variant, DTYPE.itemsize) for variant in VARIANTS
    }
    speedup = {way: one / found["median_us"] for way, found in times.items() if way != "one GPU"}
    best = max(speedup.values())
    blocks = row.B * row.S // BLOCK_SIZE
    return {
        "B": row.B, "S": row.S, "N": row.N, "passed": all(rank["passed"] for rank in ranks),
        "times": times, "speedup": speedup, "floor": FLOORS.get((size, row)),
        "reached": FLOORS.get((size, row)) is None or best >= FLOORS[(size, row)],
        "received_bytes": ranks[0]["received"], "formula_bytes": formula,
        "cache_tokens": {"one GPU": blocks * BLOCK_SIZE, f"{size} GPUs of as many blocks": size * blocks * BLOCK_SIZE},
        "parity": [rank["parity"] for rank in ranks],
    }  # fmt: skip


def show(size: int, rows: list[dict[str, Any]]) -> None:
    """Print one line for each row and merge variant."""
    columns = f"{'variant':18} {'one GPU':>10} {f'{size} GPUs':>10} {'gain':>6}  received (formula)"
    print(f"{'B':>4} {'S':>7} {'N':>4}  {columns}")
    for row in rows:
        one = row["times"]["one GPU"]["median_us"]
        for variant in VARIANTS:
            received, formula = row["received_bytes"][variant], row["formula_bytes"][variant]
            told = ", ".join(f"{op} {received.get(op, 0)} ({formula[op]})" for op in formula)
            wrong = ("" if row["passed"] else "  PARITY FAILED") + ("" if row["reached"] else f"  BELOW {row['floor']}")
            print(
                f"{row['B']:>4} {row['S']:>7} {row['N']:>4}  {variant:18} {one:>8.1f}us "
                f"{row['times'][variant]['median_us']:>8.1f}us {row['speedup'][variant]:>6.2f}  {told}{wrong}"
            )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit status.

    The status is 1 if the error of an output exceeds its budget (the largest error that docs/correctness.md allows), or
    if the larger speedup of the two merges is below FLOORS in a row. The status is 2 if there are too few GPUs or a row
    is invalid.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.context_parallel", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="number of GPUs (default: %(default)s)")
    parser.add_argument("--rows", nargs="+", metavar="B,S,N", help="shapes to time (default: as in docs/results)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="file for the results")
    return run(_run, argv, parser)


def _run(given: Sequence[str], args: argparse.Namespace) -> int:
    present = torch.cuda.device_count()
    if present < args.ranks:
        raise CannotRun(f"--ranks: expected at most {present} GPUs, got {args.ranks}")
    rows = [Row(*map(int, row.split(","))) for row in args.rows] if args.rows else list(ROWS)
    for row in rows:
        whole = row.S % (BLOCK_SIZE * args.ranks) == 0 and row.N % args.ranks == 0
        if not whole:
            expected = f"S to be a multiple of {BLOCK_SIZE * args.ranks} and N a multiple of {args.ranks}"
            raise CannotRun(f"--rows: expected {expected}, got {row}")
    told = values_of(run_ranks(args.ranks, rank_task, rows, given, backend="nccl", timeout_s=120.0, limit_s=540.0))
    facts = told[0][0]
    results = [summarise(row, args.ranks, [found[number] for _, found in told]) for number, row in enumerate(rows)]
    show(args.ranks, results)
    if args.json is not None:
        write_report(args.json, {**facts, "ranks": args.ranks, "interleave": INTERLEAVE, "rows": results})
    return 0 if all(row["passed"] and row["reached"] for row in results) else 1


if __name__ == "__main__":
    sys.exit(main())
