"""Context parallelism in the main job: all ranks serve the prompts together, then one rank serves them alone.

D ranks share each sequence: each rank caches a part of the tokens of the sequence.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from reference.distributed.groups import ContextParallel
from reference.interfaces import GroupError, check

from .job import Job, check_outputs, one_line, prepare
from .measure import numbers_of, rate, summary, tokens_must_agree
from .mla_figures import compile_ahead, kernels
from .predictions import compare_bits_per_byte, format_in_words, in_words
from .report import show_kernels, write_json

ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # set by torchrun


def serve_in_parallel(args: argparse.Namespace, ops: ModuleType, oracle: ModuleType) -> int:
    """Serve the prompts on all ranks, then on the first rank alone, and compare the tokens.

    Args:
        args: options of the main job; `context_parallel` is D.
        ops: the package `fast`.
        oracle: the package `reference`.

    Returns:
        The exit status:

        - 0: success.
        - 1: another rank did not answer; or, on the first rank, the compared tokens differ where they must agree
            (`tokens_must_agree`).
        - 2: an option is invalid, or a file cannot be read or written.
    """
    who = f"rank {os.environ.get('RANK', 0)}"
    args.no_picture = True
    try:
        device = check_start(args)
        if os.environ["RANK"] == "0":  # only rank 0 writes files; check their paths before it waits for other ranks
            check_outputs(args)
        dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    except (ValueError, RuntimeError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2
    args.device = device
    try:
        job = prepare(args, ops, oracle, make_groups(args))
        figures = serve(job)
    except (OSError, ValueError, GroupError) as error:
        print(f"error: {who}: {one_line(error)}", file=sys.stderr, flush=True)
        status = 1 if isinstance(error, GroupError) else 2
        if device != "cpu":
            os._exit(status)  # a normal exit would destroy the communicator, and may wait for dead ranks
        return status
    dist.destroy_process_group()  # not called after an error, because it could then wait for dead ranks
    if job.context_parallel.tp_group.rank > 0:
        return 0
    alone = alone_tokens(job)
    figures["bits_per_byte"] = compare_bits_per_byte(job)
    for name, row in figures["backends"].items():
        row["identical"] = row["tokens"] == alone[name]
    console = Console()
    console = console if console.is_terminal else Console(width=max(console.width, 110))
    show(figures, console)
    show_kernels(console, figures, args.verbose)
    try:
        if args.json is not None:
            write_json(figures, args.json)
    except OSError as error:
        print(f"error: {who}: {one_line(error)}", file=sys.stderr)
        return 2
    different = any(not row["identical"] for row in figures["backends"].values())
    return 1 if different and tokens_must_agree(figures["dtype"], figures["device"], figures["fp8_mode"]) else 0


def check_start(args: argparse.Namespace) -> str:
    """Check that torchrun started this process, set missing options to their defaults, and return the rank's device.

    Raises:
        ValueError: the process was not started by torchrun, an option is invalid, or there are too few GPUs.
    """
    missing = [name for name in ENVIRONMENT if name not in os.environ]
    check(not missing, "--context-parallel", "a start by torchrun --nproc-per-node N -m fast",
          f"no {' and no '.join(missing)}")  # fmt: skip
    world, size = int(os.environ["WORLD_SIZE"]), args.context_parallel
    check(size >= 1 and world % size == 0, "--context-parallel", f"a divisor of the {world} processes", size)
    interleave = 1 if args.interleave is None else args.interleave
    check(interleave >= 1 and args.block_size % interleave == 0, "--interleave",
          f"a divisor of --block-size {args.block_size}", interleave)  # fmt: skip
    args.interleave, args.merge = interleave, args.merge or "a2a"
    local = int(os.environ["LOCAL_RANK"])
    if args.device is None:
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    check(args.device in ("cpu", "cuda"), "--device", "cpu or cuda, because --context-parallel is given", args.device)
    if args.device == "cpu":
        return "cpu"
    check(local < torch.cuda.device_count(), "--device", f"a GPU for each of {world} processes",
          f"{torch.cuda.device_count()} GPUs")  # fmt: skip
    torch.cuda.set_device(local)
    return f"cuda:{local}"


def make_groups(args: argparse.Namespace) -> ContextParallel:
    """Make the groups of ranks: D consecutive ranks divide each sequence, and all ranks divide the heads."""
    world, rank, size = dist.get_world_size(), dist.get_rank(), args.context_parallel
    groups = [dist.new_group(list(range(first, first + size))) for first in range(0, world, size)]
    return ContextParallel(groups[rank // size], dist.group.WORLD, args.interleave, args.merge)


def serve(job: Job) -> dict[str, Any]:
    """Serve the prompts with each package on all ranks; return settings, tokens, speeds and received bytes."""
    from ..integrations.transformers import restore, use_mla

    cp, rows = job.context_parallel, {}
    if "fast" in job.packages and job.device.type == "cuda":
        compile_ahead(job, Console(quiet=cp.tp_group.rank > 0))
    for name, package in job.packages.items():
        use_mla(job.model, ops=package, **job.patch_options(name))
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
    return {
        "ranks": cp.tp_group.size,
        "context_parallel_size": cp.size,
        "interleave": cp.interleave,
        "merge": cp.merge,
        "device": job.device.type,
        "dtype": str(job.dtype).removeprefix("torch."),
        "cache_format": job.cache_format.name,
        "fp8_mode": job.fp8_mode,
        "kv_scales": job.kv_scales,
        "q_scales": numbers_of(job.q_scales),
        "block_size": job.args.block_size,
        "tokens_per_block": job.args.block_size * cp.size,
        "kernels": {"device": job.device.type, **kernels(job)},
        "backends": rows,
    }


def alone_tokens(job: Job) -> dict[str, list[list[int]]]:
    """Serve the prompts with each package on this rank alone; return the tokens by package name."""
    from ..integrations.transformers import restore, use_mla

    groups, job.context_parallel = job.context_parallel, None
    found = {}
    try:
        for name, package in job.packages.items():
            use_mla(job.model, ops=package, **job.patch_options(name))
            try:
                requests = job.make_loop(name, job.prompt_ids, job.args.max_new_tokens).run()
            finally:
                restore(job.model)
            found[name] = [request.generated_ids for request in requests]
    finally:
        job.context_parallel = groups
    return found


def show(figures: dict[str, Any], console: Console) -> None:
    """Print a table with one line for each package."""
    title = (
        f"{figures['ranks']} ranks share the heads, {figures['context_parallel_size']} share each sequence "
        f"(interleave {figures['interleave']}, merge {figures['merge']}, {figures['device']}, {figures['dtype']}, "
        f"cache format {format_in_words(figures['cache_format'], figures['fp8_mode'])})"
    )
    table = Table("package", "tokens/s", "peak cache per rank", "received per rank", "tokens as on one rank",
                  title=title)  # fmt: skip
    for name, row in figures["backends"].items():
        received = sum(sum(by_op.values()) for by_op in row["received_bytes"].values())
        table.add_row(
            name, f"{row['speed']['tokens_per_second']:.1f}", f"{row['schedule']['peak_cache_bytes'] / 1e3:.0f} kB",
            f"{received / 1e6:.2f} MB", "identical" if row["identical"] else "DIFFERENT",
        )  # fmt: skip
    console.print(table)
    if figures["bits_per_byte"] is not None:
        console.print(in_words(figures["bits_per_byte"]), markup=False)
