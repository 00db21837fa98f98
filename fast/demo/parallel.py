"""The main job on ranks that share heads and sequences: the same prompts by all of them, then by one alone."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from reference.interfaces import ContextParallel, GroupError, check

from .job import Job, one_line, prepare
from .measure import rate, summary

ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # what torchrun sets


def serve_in_parallel(args: argparse.Namespace, ops: ModuleType, oracle: ModuleType) -> int:
    """Serve the prompts on all ranks, then on the first alone, and compare the tokens.

    Args:
        args: the options of the main job; `context_parallel` is D.
        ops: the fast wing.
        oracle: the reference wing.

    Returns:
        The exit status, the same on all ranks: 0, 1 where (in float32) tokens differ or a rank was lost, 2 for bad
        input.
    """
    who = f"rank {os.environ.get('RANK', 0)}"
    try:
        device = check_start(args)
        dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    except ValueError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2
    try:
        args.device, args.no_picture = device, True
        try:
            job = prepare(args, ops, oracle, make_groups(args))
        except (OSError, ValueError) as error:
            print(f"error: {who}: {one_line(error)}", file=sys.stderr)
            return 2
        figures = compare(job)
    except GroupError as error:
        print(f"error: {who}: {one_line(error)}", file=sys.stderr)
        return 1
    finally:
        dist.destroy_process_group()
    if os.environ["RANK"] == "0":
        console = Console()
        show(figures, console if console.is_terminal else Console(width=max(console.width, 110)))
        if args.json is not None:
            args.json.write_text(json.dumps(figures, indent=1) + "\n")
    different = any(not row["identical"] for row in figures["wings"].values())
    return 1 if different and figures["dtype"] == "float32" else 0


def check_start(args: argparse.Namespace) -> str:
    """The device of this rank.

    Raises:
        ValueError: not started by torchrun, or with a number of processes that does not fit.
    """
    missing = [name for name in ENVIRONMENT if name not in os.environ]
    check(not missing, "--context-parallel", "a start by torchrun --nproc-per-node N -m fast",
          f"no {' and no '.join(missing)}")  # fmt: skip
    world, size = int(os.environ["WORLD_SIZE"]), args.context_parallel
    check(size >= 1 and world % size == 0, "--context-parallel", f"a divisor of the {world} processes", size)
    check(args.interleave >= 1 and args.block_size % args.interleave == 0, "--interleave",
          f"a divisor of --block-size {args.block_size}", args.interleave)  # fmt: skip
    local = int(os.environ["LOCAL_RANK"])
    if args.device is None:
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    check(args.device in ("cpu", "cuda"), "--device", "cpu or cuda beside --context-parallel", args.device)
    if args.device == "cpu":
        return "cpu"
    check(local < torch.cuda.device_count(), "--device", f"a GPU for each of {world} processes",
          f"{torch.cuda.device_count()} GPUs")  # fmt: skip
    torch.cuda.set_device(local)
    return f"cuda:{local}"


def make_groups(args: argparse.Namespace) -> ContextParallel:
    """Every D consecutive ranks share sequences; all share the heads."""
    world, rank, size = dist.get_world_size(), dist.get_rank(), args.context_parallel
    groups = [dist.new_group(list(range(first, first + size))) for first in range(0, world, size)]
    return ContextParallel(groups[rank // size], dist.group.WORLD, args.interleave, args.merge)


def compare(job: Job) -> dict[str, Any]:
    """Tokens, time and traffic on all ranks, and what the first rank gets alone."""
    from ..integrations.transformers import restore, use_mla

    cp, rows = job.context_parallel, {}
    for name, wing in job.wings.items():
        use_mla(job.model, ops=wing, **job.patch_options(name))
        reports: list[Any] = []
        try:
            before = {**cp.cp_group.received}, {**cp.tp_group.received}
            started = time.perf_counter()
            requests = job.loops[name].run(reports.append)
            seconds = time.perf_counter() - started
        finally:
            restore(job.model)
        tokens = [request.generated_ids for request in requests]
        rows[name] = {
            "speed": rate(tokens, seconds, f"{len(requests)} together"),
            "schedule": summary(reports),
            "received_bytes": {
                group.name: {op: count - then.get(op, 0) for op, count in group.received.items() if count}
                for group, then in zip((cp.cp_group, cp.tp_group), before, strict=True)
            },
            "tokens": tokens,
        }
    alone = alone_tokens(job) if cp.tp_group.rank == 0 else None
    alone = cp.tp_group.all_gather_object(alone)[0]
    for name, row in rows.items():
        row["identical"] = row["tokens"] == alone[name]
    return {
        "ranks": cp.tp_group.size,
        "context_parallel_size": cp.size,
        "interleave": cp.interleave,
        "merge": cp.merge,
        "device": job.device.type,
        "dtype": str(job.dtype).removeprefix("torch."),
        "block_size": job.args.block_size,
        "tokens_per_block": job.args.block_size * cp.size,
        "wings": rows,
    }


def alone_tokens(job: Job) -> dict[str, list[list[int]]]:
    """The tokens of one rank that holds everything, by wing."""
    from ..integrations.transformers import restore, use_mla

    groups, job.context_parallel = job.context_parallel, None
    found = {}
    try:
        for name, wing in job.wings.items():
            use_mla(job.model, ops=wing, **job.patch_options(name))
            try:
                requests = job.make_loop(name, job.prompt_ids, job.args.max_new_tokens).run()
            finally:
                restore(job.model)
            found[name] = [request.generated_ids for request in requests]
    finally:
        job.context_parallel = groups
    return found


def show(figures: dict[str, Any], console: Console) -> None:
    """One line a wing."""
    title = (
        f"{figures['ranks']} ranks share the heads, {figures['context_parallel_size']} each sequence "
        f"(interleave {figures['interleave']}, merge {figures['merge']}, {figures['device']}, {figures['dtype']})"
    )
    table = Table("wing", "tokens/s", "cache at its peak, each rank", "received, each rank", "tokens of one rank",
                  title=title)  # fmt: skip
    for name, row in figures["wings"].items():
        received = sum(sum(by_op.values()) for by_op in row["received_bytes"].values())
        table.add_row(
            name, f"{row['speed']['tokens_per_second']:.1f}", f"{row['schedule']['peak_cache_bytes'] / 1e3:.0f} kB",
            f"{received / 1e6:.2f} MB", "identical" if row["identical"] else "DIFFERENT",
        )  # fmt: skip
    console.print(table)
