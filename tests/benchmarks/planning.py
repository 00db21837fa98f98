"""Time the planning of a step on the host; on a GPU, also the schedule kernel and a captured decode step.

    python -m tests.benchmarks.planning
    python -m tests.benchmarks.planning --device cuda --json planning.json

Host times are medians on one core. On a GPU the benchmark measures:

- the host time of `MLAMetadataBuilder`, which starts copies to the device and does not wait for the end of the copies;
- the time of `plan_decode` and of `advance_step`, replayed from a CUDA graph;
- a decode step of one layer, replayed from a CUDA graph: the time of each kernel, the time from the start of the first
  kernel to the end of the last kernel, and the sum of the gaps between kernels. These times do not contain the copies
  of a batch into the buffers of the graph.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import fast
import reference
from reference.interfaces import CommonAttentionMetadata, MLAConfig

from .command_line import check_device, run, wide_console, write_report
from .kernel_times import Marker, busy_time, traced_steps
from .layers import make_batch, make_layer, num_blocks, one_thread, positions_of
from .report import provenance
from .timing import Clock, Spread, wall_times

BLOCK_SIZE, WORKSPACE = 16, 65536
PROMPT, CONTEXT = 512, 1024
V3 = MLAConfig.from_preset("deepseek-v3")
SCHEDULED_REQUESTS = (1, 16, 64, 128, 256, 1024, 8192)
STEP = {"B": 64, "S": 4096, "N": 16}
REPLAYS = 50


@dataclass(frozen=True)
class Batch:
    """A batch to plan.

    Attributes:
        decodes: number of requests with one new token and 1 to 4095 context tokens.
        prefills: number of requests with 512 new tokens and 1024 context tokens.
        target_us: longest acceptable planning time on one core, in microseconds; None without a target.
    """

    decodes: int
    prefills: int
    target_us: float | None = None


BATCHES = (
    Batch(256, 0, 60.0), Batch(960, 64, 400.0), Batch(1920, 128), Batch(3840, 256), Batch(7680, 512),
)  # fmt: skip


def make_common(batch: Batch, device: str) -> CommonAttentionMetadata:
    """Return the metadata of the batch; block numbers and slots are 0, because planning does not read them."""
    query_lens = [1] * batch.decodes + [PROMPT] * batch.prefills
    seq_lens = [2 + 37 * i % 4095 for i in range(batch.decodes)] + [PROMPT + CONTEXT] * batch.prefills
    starts = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    table = torch.zeros(len(query_lens), -(-4096 // BLOCK_SIZE), dtype=torch.int32, device=device)
    slots = torch.zeros(sum(query_lens), dtype=torch.int64, device=device)
    return CommonAttentionMetadata.make(starts, torch.tensor(seq_lens, dtype=torch.int32), table, slots)


def time_host(call: Callable[[], object], seconds: float) -> Spread:
    """Return median and quartiles of the host time of a call, after three warm-up calls."""
    for _ in range(3):
        call()
    return wall_times(call, 10, seconds=seconds)


def time_batches(device: str, seconds: float) -> list[dict[str, Any]]:
    """Time `build_mla_metadata` and `MLAMetadataBuilder.build` for every batch of BATCHES.

    By default both functions decide from the lengths whether to make a schedule.
    """
    rows = []
    for batch in BATCHES:
        common = make_common(batch, device)
        builder = fast.MLAMetadataBuilder(V3, BLOCK_SIZE, 8192, common.num_reqs, workspace_tokens=WORKSPACE)
        calls = {
            "fast": lambda c=common: fast.build_mla_metadata(c, BLOCK_SIZE, WORKSPACE, config=V3),
            "builder": lambda c=common, b=builder: b.build(0, c),
        }
        if device == "cpu":
            calls["reference"] = lambda c=common: reference.build_mla_metadata(c, BLOCK_SIZE, WORKSPACE, config=V3)
        found = {}
        for who, call in calls.items():
            found[who] = time_host(call, seconds)
            if device != "cpu":
                torch.cuda.synchronize()
        rows.append({"dims": asdict(batch), "host_us": {who: asdict(spread) for who, spread in found.items()}})
    return rows


def advance_call(lens: torch.Tensor) -> Callable[[], object]:
    """Compare `advance_step` with `reference` on a batch of decodes, and return a function that calls `advance_step`.

    The buffers of the call are on the device of `lens`. Each call makes the requests one token longer. A request stops
    when its row of the block table is full.
    """
    requests, width = lens.shape[0], 8192 // BLOCK_SIZE
    given = []
    for device in ("cpu", lens.device):
        starts = torch.arange(requests + 1, dtype=torch.int32, device="cpu")
        table = torch.arange(requests * width, dtype=torch.int32, device=device).view(requests, width)
        slots = torch.zeros(requests, dtype=torch.int64, device=device)
        common = CommonAttentionMetadata.make(starts, lens.cpu().clone(), table, slots)
        common = replace(common, seq_lens=lens.to(device, copy=True))
        sampled = torch.arange(requests, device=device)
        given.append((sampled, sampled.clone(), sampled.clone(), common, BLOCK_SIZE))
    reference.advance_step(*given[0])
    fast.advance_step(*given[1])
    expected, found = ([ids, positions, step.seq_lens, step.slot_mapping] for _, ids, positions, step, _ in given)
    if not all(one.equal(other.cpu()) for one, other in zip(expected, found, strict=True)):
        raise AssertionError(f"advance_step of {requests} requests differs from the reference")
    return lambda: fast.advance_step(*given[1])


def time_schedule() -> list[dict[str, Any]]:
    """Time `plan_decode` and `advance_step` in a replayed CUDA graph.

    For comparison, the function also times a kernel with almost no work, which fills a tensor of one element.
    """
    clock, rows = Clock(50.0), []
    config = MLAConfig.from_preset("deepseek-v3", num_heads=16)  # a decode with few heads has the most programs
    served = {"device": "cuda", "dtype": torch.bfloat16, "block_size": 64}
    programs, costs = fast.decode_programs(config, **served), fast.schedule_costs(config, **served)
    one = torch.zeros(1, device="cuda")
    for requests in SCHEDULED_REQUESTS:
        lens = torch.randint(0, 8192, (requests,), dtype=torch.int32, device="cuda")
        for invariant in (False, True):
            expected = reference.plan_decode(lens.cpu(), programs, costs, invariant)
            got = fast.plan_decode(lens, programs, costs, invariant)
            if not (got.tile_ranges.cpu().equal(expected.tile_ranges) and
                    got.split_offsets.cpu().equal(expected.split_offsets)):  # fmt: skip
                raise AssertionError(f"plan_decode of {requests} requests differs from the reference")
        calls = {
            "plan_decode": [lambda lens=lens: fast.plan_decode(lens, programs, costs)],
            "advance_step": [advance_call(lens.clamp(1, 8191))],
            "batch_invariant": [lambda lens=lens: fast.plan_decode(lens, programs, costs, True)],
            "fill of one element": [one.zero_],
        }
        found = clock.replayed(calls)
        rows.append(
            {"B": requests, "programs": programs, "replayed": {who: asdict(spread) for who, spread in found.items()}}
        )
    return rows


def profile_step() -> dict[str, Any]:
    """Return the kernels and the gaps of a captured decode step of one layer, with and without a schedule.

    The step with a schedule contains the kernel that makes the schedule.
    """
    config = MLAConfig.from_preset("deepseek-v2-lite", num_heads=STEP["N"])
    requests, length, dtype, block = STEP["B"], STEP["S"], torch.bfloat16, 64
    query_lens, seq_lens = [1] * requests, [length] * requests
    layer = make_layer(config, dtype)
    common, positions = make_batch(query_lens, seq_lens, "cuda", block), positions_of(query_lens, seq_lens, "cuda")
    cache = fast.allocate_kv_cache(num_blocks(seq_lens, block), block, config.head_size, dtype, "cuda").normal_()
    programs = fast.decode_programs(config, device="cuda", dtype=dtype, block_size=block)
    hidden, width = torch.randn(requests, config.hidden_size, dtype=dtype, device="cuda"), common.block_table.shape[1]
    found = {}
    for name, count in (("scheduled", programs), ("kernel's own split", 0)):
        builder = fast.MLAMetadataBuilder(config, block, length, requests, num_programs=count)
        graph = fast.DecodeGraph(
            lambda h, p, m: layer(h, p, cache, m), builder, [requests], width, config.hidden_size, dtype, "cuda"
        )
        graph.run(hidden, positions, common)
        steps = traced_steps(lambda graph=graph: graph.replay(requests), REPLAYS, Marker())
        if len({len(step) for step in steps}) != 1:
            counts = ", ".join(str(len(step)) for step in steps)
            raise AssertionError(f"expected equal numbers of kernels in {REPLAYS} replays, got {counts}")
        spans = [max(kernel.end for kernel in step) - step[0].start for step in steps]
        gaps = [max(0.0, span - busy_time(step)) for span, step in zip(spans, steps, strict=True)]
        middle = steps[REPLAYS // 2]
        found[name] = {
            "kernels": [(kernel.name.split("<")[0][-60:], round(kernel.end - kernel.start, 2)) for kernel in middle],
            "gaps_us": asdict(Spread.of(gaps)), "span_us": asdict(Spread.of(spans)),
        }  # fmt: skip
    return {"dims": STEP, "programs": programs, **found}


def show(report: dict[str, Any], console: Console) -> None:
    """Print the measurements."""
    table = Table(title="Planning a step, host time (us)")
    for column in ("decodes", "prefills", "", "median", "quartiles", "at most"):
        table.add_column(column, justify="right")
    for row in report["batches"]:
        for who, spread in row["host_us"].items():
            low, high = spread["quartiles_us"]
            target = row["dims"]["target_us"] if who == "fast" else None
            table.add_row(str(row["dims"]["decodes"]), str(row["dims"]["prefills"]), who, f"{spread['median_us']:.1f}",
                          f"{low:.1f} - {high:.1f}", "" if target is None else f"{target:.0f}")  # fmt: skip
    console.print(table)
    for row in report.get("schedule", ()):
        times = ", ".join(f"{who} {spread['median_us']:.2f} us" for who, spread in row["replayed"].items())
        console.print(f"B {row['B']}: {times}", markup=False)
    for name, step in report.get("step", {}).items():
        if name not in ("dims", "programs"):
            span, gaps = step["span_us"]["median_us"], step["gaps_us"]["median_us"]
            said = f"{len(step['kernels'])} kernels in {span:.1f} us, of which {gaps:.1f} us are gaps between kernels"
            console.print(f"step, {name}: {said}", markup=False)
            for label, duration in step["kernels"]:
                console.print(f"    {duration:8.2f}  {label}", markup=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the measurements, print and write them, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.planning", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="device of the plans (default: cpu)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="file for hardware, versions and times")
    parser.add_argument("--time", type=float, default=1.0, metavar="S", help="seconds of timing for each batch "
                        "and function (default: 1)")  # fmt: skip
    return run(_run, argv, parser)


def _run(argv: Sequence[str], arguments: argparse.Namespace) -> int:
    check_device(arguments.device)
    with one_thread():
        report = {**provenance("planning", argv, device=arguments.device),
                  "batches": time_batches(arguments.device, arguments.time)}  # fmt: skip
    if arguments.device == "cuda":
        report |= {"schedule": time_schedule(), "step": profile_step()}
    show(report, wide_console(120))
    if arguments.json is not None:
        write_report(arguments.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
