"""Time whole steps of DeepSeek-V3's attention, 61 layers, and divide the time into the parts of a step.

    python -m tests.benchmarks.step
    python -m tests.benchmarks.step --batches decodes mixed --json step.json
    python -m tests.benchmarks.step --layer --peers .peers --json layer.json

With `--layer`, the benchmark times one layer of DeepSeek-V3 and one of DeepSeek-V2-Lite instead (`layer_stages`).

A step plans its batch once and then runs all attention layers: projections, rotation and norm, cache write, attention
on the absorbed and the expanded path, output projection. The MLPs of the model do not run. Every layer has its own
cache. Layers share weights if the memory does not hold the weights of all layers. Each batch runs in two ways:

- *eager*: the builder plans the step on the host (the CPU), and the host launches every kernel.
- *graph*: a replayed CUDA graph. A batch of decodes runs in a `DecodeGraph`, which plans inside the graph from lengths
  on the device. For a batch with prompts, the graph repeats the kernels of one eager step. Such a graph shows the time
  of the step without the host's work. An engine cannot use it, because the lengths of its next step differ.

The table divides the time of a step into parts, such as "attention". The time of a part is the time in which a kernel
of the part runs; it is taken from a trace of the same step. Further columns of the table:

- "host plan": the time of the host's planning before the first layer, in which no kernel of a layer runs. For an eager
  step it is the time of `MLAMetadataBuilder.build`. For a `DecodeGraph` it is the time of `DecodeGraph.run`, which
  checks the batch, updates the captured buffers and launches the replay; the time of a replay does not contain it. A
  graph of a batch with prompts repeats one plan and has no such time.
- "idle": the rest of the step's wall time, in which no kernel runs because the GPU waits for the host.
- "busy": from the end of the first layer to the end of the eager step, the fraction of the time in which a kernel runs.
  The times of the kernels are taken from a CUDA graph that repeats the kernels of the eager step. A trace of the eager
  step itself slows the host, so the GPU waits more and its clock rises: the kernels then take less time.
- "ops": the sum of the times of all ops of the step; each op is replayed alone.

On a CPU (`--device cpu`) the dimensions are small, the steps have no parts, and the times only show that the benchmark
runs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import Tensor

import fast
from reference.interfaces import CommonAttentionMetadata, MLAConfig, MLAMetadata

from . import command_line
from .command_line import CannotRun, check_at_least_one, check_device, check_peers, wide_console, write_report
from .contest import load_peers
from .kernel_times import LAYER_MARK, PARTS, Kernel, Marker, busy_time, cut_at_marks, time_of_parts, traced_steps
from .layers import (
    BLOCK_SIZE,
    Batch,
    config_for,
    dtype_for,
    host_threads,
    make_batch,
    make_layer,
    num_blocks,
    positions_of,
)
from .recorded_ops import record, time_ops
from .report import provenance
from .timing import LAYERS, Clock, Spread, measure_ceilings

RESERVED_BYTES = 20 << 30  # memory for activations, recorded tensors and workspaces of a step
TRACED_STEPS = 5
FEW_TOKENS = 512  # a batch of at most 512 tokens has small activations, so the ops of more layers are recorded
RECORDED_LAYERS = {True: 8, False: 3}  # number of layers whose ops are recorded; True: the batch has few tokens
HOST_PLAN = "host_plan"  # part of a step: time of the host's planning
MOST_OVER_OPS = ("decodes", 1.02)  # batch, and largest acceptable ratio: time of its graph / sum over its ops
LEAST_BUSY = ("mixed", 0.95)  # batch, and smallest acceptable "busy" of its eager step


BATCHES = {
    "cuda": {
        "decodes": Batch(128, 4096, 0, 0),
        "mixed": Batch(128, 4096, 2, 1024),
        "prompts": Batch(0, 0, 4, 1024),
        "prompts with context": Batch(0, 0, 2, 1024, 8192),
    },
    "cpu": {
        "decodes": Batch(2, 20, 0, 0),
        "mixed": Batch(2, 20, 1, 70),
        "prompts": Batch(0, 0, 2, 70),
        "prompts with context": Batch(0, 0, 1, 70, 64),
    },
}


class CapturedStep(NamedTuple):
    """A captured step.

    Attributes:
        replay: replays the captured kernels.
        run: runs the step as an engine does: the host checks the batch, updates the captured buffers, and launches the
            replay. None for a graph that repeats one plan.
    """

    replay: Callable[[], object]
    run: Callable[[], object] | None


class Model:
    """Attention layers, each with its own cache, and with as many different sets of weights as fit into memory.

    Args:
        config: config of every layer.
        batches: batches that the model will run.
        layers: largest number of layers; the model has fewer layers if their caches do not fit into memory.
        device: "cuda" or "cpu".
        backend: backend of the layers.

    Raises:
        CannotRun: the memory does not hold one layer.
    """

    def __init__(self, config: MLAConfig, batches: Sequence[Batch], layers: int, device: str, backend):
        self.device, self.dtype = device, dtype_for(device)
        blocks = max(num_blocks(batch.seq_lens) for batch in batches)
        cache_bytes = blocks * BLOCK_SIZE * config.head_size * self.dtype.itemsize
        self.layers = [make_layer(config, self.dtype, device, backend=backend)]
        weight_bytes = sum(weight.numel() * weight.element_size() for weight in self.layers[0].parameters())
        if device == "cuda":
            free = torch.cuda.mem_get_info()[0] - RESERVED_BYTES
            layers, sets = fit(free, cache_bytes, weight_bytes, layers)
        else:
            sets = 2
        self.layers += [make_layer(config, self.dtype, device, backend=backend) for _ in range(sets - 1)]
        kind = {"dtype": self.dtype, "device": device}
        self.caches = [torch.randn(blocks, BLOCK_SIZE, config.head_size, **kind) for _ in range(layers)]

    def layer(self, number: int, hidden_states: Tensor, positions: Tensor, plan: MLAMetadata) -> Tensor:
        """Run layer `number` over its cache."""
        return self.layers[number % len(self.layers)](hidden_states, positions, self.caches[number], plan)

    def __call__(self, hidden_states: Tensor, positions: Tensor, plan: MLAMetadata) -> Tensor:
        """Run all layers; the output of a layer is the input of the next."""
        for number in range(len(self.caches)):
            hidden_states = self.layer(number, hidden_states, positions, plan)
        return hidden_states


def fit(free: int, cache_bytes: int, weight_bytes: int, layers: int) -> tuple[int, int]:
    """Return the number of layers and the number of sets of weights that fit into memory.

    Caches get memory first: each layer needs its own cache, but layers can share weights.

    Args:
        free: bytes that are still free after the first set of weights was allocated.
        cache_bytes: bytes of the cache of one layer.
        weight_bytes: bytes of one set of weights.
        layers: wanted number of layers.

    Returns:
        The number of layers, and the number of sets of weights. The second number includes the first set, and is not
        larger than the number of layers.

    Raises:
        CannotRun: the memory does not hold one layer.
    """
    layers = min(layers, free // cache_bytes)
    if layers < 1:
        raise CannotRun(f"expected {cache_bytes / 2**30:.1f} GiB of free memory for one cache, got {free / 2**30:.1f}")
    return layers, min(layers, 1 + (free - layers * cache_bytes) // weight_bytes)


class Step:
    """One batch, ready to run through a model.

    Args:
        model: model that runs the batch.
        config: config of the model's layers.
        batch: requests of the step.
        backend: backend of the builder.
    """

    def __init__(self, model: Model, config: MLAConfig, batch: Batch, backend):
        self.model, self.config, self.batch, device = model, config, batch, model.device
        self.common: CommonAttentionMetadata = make_batch(batch.query_lens, batch.seq_lens, device)
        self.positions = positions_of(batch.query_lens, batch.seq_lens, device)
        shape = sum(batch.query_lens), config.hidden_size
        self.hidden_states = torch.randn(shape, dtype=model.dtype, device=device)
        longest, requests = max(batch.seq_lens), len(batch.seq_lens)
        self.builder = fast.MLAMetadataBuilder(
            config, BLOCK_SIZE, longest, requests, dtype=model.dtype, backend=backend
        )

    def eager(
        self, after_first: Callable[[], object] = lambda: None, after_plan: Callable[[], object] = lambda: None
    ) -> Tensor:
        """Plan the step on the host and run all layers.

        `after_first` is called after the first layer, and `after_plan` after the planning.
        """
        plan = self.builder.build(0, self.common)
        after_plan()
        return self._run_layers(plan, after_first)

    def _run_layers(self, plan: MLAMetadata, after_first: Callable[[], object]) -> Tensor:
        """Run all layers with a plan; `after_first` is called after the first layer."""
        hidden_states = self.hidden_states
        for number in range(len(self.model.caches)):
            hidden_states = self.model.layer(number, hidden_states, self.positions, plan)
            if number == 0:
                after_first()
        return hidden_states

    def captured(self) -> CapturedStep:
        """Capture the step in a CUDA graph; on a CPU, the replay runs the step again."""
        if self.batch.prompts == 0:
            requests, columns = self.common.block_table.shape
            graph = fast.DecodeGraph(
                self.model, self.builder, [requests], columns, self.config.hidden_size, self.model.dtype,
                self.model.device,
            )  # fmt: skip
            batch = self.hidden_states, self.positions, self.common
            graph.run(*batch)
            return CapturedStep(lambda: graph.replay(requests), lambda: graph.run(*batch))
        return CapturedStep(self.repeated(), None)

    def repeated(self, after_first: Callable[[], object] = lambda: None) -> Callable[[], object]:
        """Return a function that repeats the kernels of an eager step from a CUDA graph; on a CPU, it runs them again.

        The graph has no kernel of the planning. `after_first` is called after the first layer: its kernels are in the
        graph too.
        """
        plan = self.builder.build(0, self.common)
        if self.model.device == "cpu":
            return lambda: self._run_layers(plan, after_first)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            self._run_layers(plan, after_first)
        return captured.replay

    def recorded(self):
        """Return the recorded ops of the plan, and the recorded ops of some layers."""
        plans: list[MLAMetadata] = []

        def plan() -> None:
            if self.batch.prompts == 0:
                plans.append(self.builder.build_for_cudagraph_capture(self.common))
            else:
                plans.append(self.builder.build(0, self.common))

        ops = record(plan, self.model.device)
        if self.batch.prompts:
            ops = [op for op in ops if op.name == "mla_twins::plan_decode"]  # the host makes the rest of the plan
        count = min(RECORDED_LAYERS[self.hidden_states.shape[0] <= FEW_TOKENS], len(self.model.caches))
        layers = [
            record(
                lambda n=number: self.model.layer(n, self.hidden_states, self.positions, plans[0]), self.model.device
            )
            for number in range(count)
        ]
        return ops, layers


def time_eager(step: Step, runs: int) -> dict[str, Any]:
    """Time eager steps.

    Returns:
        A dictionary of spreads in microseconds:

        - "wall_us": from the start of the planning to the end of the last kernel
        - "host_us": from the start of the planning until the host has launched the last kernel. This time includes
          waiting of the host while the queue of launched kernels is full
        - "host_plan_us": the planning, from its start until the host continues with the first layer
        - "rest_us", only on a GPU: from the end of the first layer to the end of the last kernel
    """
    on_gpu = step.model.device == "cuda"
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2)) if on_gpu else (None, None)
    found: dict[str, list[float]] = {"wall_us": [], "host_us": [], "host_plan_us": [], "rest_us": []}
    planned: list[float] = []  # end of the planning of each step
    for number in range(runs + 1):
        if on_gpu:
            torch.cuda.synchronize()
        start = time.perf_counter()
        step.eager(first.record if on_gpu else lambda: None, lambda: planned.append(time.perf_counter()))
        if on_gpu:
            last.record()
        launched = time.perf_counter()
        if on_gpu:
            torch.cuda.synchronize()
        end = time.perf_counter()
        if number == 0:
            continue  # the first step compiles kernels and fills the allocator
        found["wall_us"].append(1e6 * (end - start))
        found["host_us"].append(1e6 * (launched - start))
        found["host_plan_us"].append(1e6 * (planned[-1] - start))
        if on_gpu:
            found["rest_us"].append(1e3 * first.elapsed_time(last))
    return {name: asdict(Spread.of(times)) for name, times in found.items() if times}


def time_replays(replay: Callable[[], object], device: str, runs: int) -> dict[str, Any]:
    """Return the spread of the time of a replay in microseconds; the replays follow each other without a pause."""
    times = []
    replay()
    for _ in range(runs):
        if device == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            replay()
            end.record()
            times.append((start, end))
        else:
            begun = time.perf_counter()
            replay()
            times.append(1e6 * (time.perf_counter() - begun))
    if device == "cuda":
        torch.cuda.synchronize()
        times = [1e3 * start.elapsed_time(end) for start, end in times]
    return {"wall_us": asdict(Spread.of(times))}


def time_runs(run: Callable[[], object], device: str, runs: int) -> dict[str, Any]:
    """Return the spread of the host's time in a call of `run`, in microseconds; the GPU is idle when a call starts."""
    times = []
    for number in range(runs + 1):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if number > 0:  # the first call comes after replays and other work, and is not counted
            times.append(1e6 * (time.perf_counter() - start))
    return asdict(Spread.of(times))


def parts_of(steps: Sequence[Sequence[Kernel]], wall_us: float, host_plan_us: float) -> dict[str, float]:
    """Return the median time of each part over the traced steps, in microseconds.

    HOST_PLAN is `host_plan_us`, and "idle" is the rest of `wall_us`. For an eager step `wall_us` contains
    `host_plan_us`; for a graph it is the time of the replay and of the host's planning before.
    """
    found = [time_of_parts(kernel for kernel in step if LAYER_MARK not in kernel.name) for step in steps]
    parts = {part: statistics.median(each.get(part, 0.0) for each in found) for part in {**found[0], **found[-1]}}
    idle = max(0.0, wall_us - host_plan_us - sum(parts.values()))
    return {HOST_PLAN: host_plan_us, "idle": idle, **parts}


def busy_shares(
    repeated: Sequence[Sequence[Kernel]], eager: Sequence[Sequence[Kernel]], rest_us: float
) -> dict[str, float]:
    """Return the time in which a kernel runs, divided by the time of the same layers; both leave out the first layer.

    Args:
        repeated: kernels of traced replays of the step (`Step.repeated`), each with a mark at the end of its first
            layer.
        eager: kernels of traced eager steps, with the same mark.
        rest_us: time of the eager step after the first layer, in microseconds, measured without a trace.

    Returns:
        "busy": time of the kernels of `repeated`, divided by `rest_us`. "busy_traced": time of the kernels of `eager`,
        divided by the time that the layers take in this trace. Tracing slows the host, so "busy_traced" is a lower
        bound.
    """
    times = [busy_time(_after_first_layer(kernels)) for kernels in repeated]
    traced = [_after_first_layer(kernels) for kernels in eager]
    spans = [max(kernel.end for kernel in kernels) - min(kernel.start for kernel in kernels) for kernels in traced]
    shares = [busy_time(kernels) / span for kernels, span in zip(traced, spans, strict=True)]
    return {"busy": statistics.median(times) / rest_us, "busy_traced": statistics.median(shares)}


def _after_first_layer(kernels: Sequence[Kernel]) -> list[Kernel]:
    """Return the kernels of a traced step that start after the mark at the end of its first layer."""
    return cut_at_marks(kernels, LAYER_MARK)[-1]


def measure(name: str, step: Step, clock: Clock | None, runs: int) -> dict[str, Any]:
    """Return the row of one batch: times of its eager steps, of its CUDA graph, and of its ops, each replayed alone.

    Raises:
        AssertionError: the output of a step is not finite.
    """
    output = step.eager()
    if not bool(output.isfinite().all()):
        raise AssertionError(f"{name}: the output of the step is not finite")
    eager = time_eager(step, runs)
    captured = step.captured()
    graph = time_replays(captured.replay, step.model.device, runs)
    if captured.run is not None:
        graph["host_plan_us"] = time_runs(captured.run, step.model.device, runs)
    if clock is not None:
        marker = Marker()
        steps = traced_steps(lambda: step.eager(marker.layer), TRACED_STEPS, marker)
        eager["parts_us"] = parts_of(steps, eager["wall_us"]["median_us"], eager["host_plan_us"]["median_us"])
        repeated = traced_steps(step.repeated(marker.layer), TRACED_STEPS, marker)
        eager |= busy_shares(repeated, steps, eager["rest_us"]["median_us"])
        plan_us = graph["host_plan_us"]["median_us"] if captured.run is not None else 0.0
        replays = traced_steps(captured.replay, TRACED_STEPS, marker)
        graph["parts_us"] = parts_of(replays, graph["wall_us"]["median_us"] + plan_us, plan_us)
    del captured
    total, ops = time_ops(clock, *step.recorded(), len(step.model.caches))
    return {
        "batch": name, "dims": asdict(step.batch), "eager": eager, "graph": graph, "ops_us": total, "ops": ops,
        "graph_over_ops": graph["wall_us"]["median_us"] / total,
    }  # fmt: skip


def draw(rows: Sequence[dict[str, Any]], layers: int) -> Table:
    """Return the table of the rows, in milliseconds."""
    table = Table(title=f"Steps of {layers} layers, in ms")
    for column in (
        "batch",
        "",
        "wall",
        "quartiles",
        "host",
        "host plan",
        "idle",
        *PARTS,
        "other",
        "busy",
        "ops",
        "graph / ops",
    ):
        table.add_column(column, justify="left" if column in ("batch", "") else "right", no_wrap=True)
    for row in rows:
        for way in ("eager", "graph"):
            found, parts = row[way], row[way].get("parts_us", {})
            low, high = found["wall_us"]["quartiles_us"]
            host = f"{found['host_us']['median_us'] / 1e3:.2f}" if "host_us" in found else ""
            drawn = (HOST_PLAN, "idle", *PARTS, "other")
            times = [f"{parts[part] / 1e3:.2f}" if part in parts else "" for part in drawn]
            busy = f"{found['busy']:.1%}" if "busy" in found else ""
            ops = [f"{row['ops_us'] / 1e3:.2f}", f"{row['graph_over_ops']:.3f}"] if way == "graph" else ["", ""]
            table.add_row(
                row["batch"] if way == "eager" else "", way, f"{found['wall_us']['median_us'] / 1e3:.2f}",
                f"{low / 1e3:.2f} - {high / 1e3:.2f}", host, *times, busy, *ops, end_section=way == "graph",
            )  # fmt: skip
    return table


def verdicts(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return batch, figure, target and verdict ("met") of each target (MOST_OVER_OPS, LEAST_BUSY) that was timed.

    The field "text" has the same in words.
    """
    found = []
    for row in rows:
        if row["batch"] == MOST_OVER_OPS[0]:
            over, most = row["graph_over_ops"], MOST_OVER_OPS[1]
            verdict = {"batch": row["batch"], "graph_over_ops": over, "at_most": most, "met": over <= most}
            found.append((verdict, f"graph / ops {over:.3f}, at most {most}"))
        if row["batch"] == LEAST_BUSY[0] and "busy" in row["eager"]:
            busy, least = row["eager"]["busy"], LEAST_BUSY[1]
            verdict = {"batch": row["batch"], "busy": busy, "at_least": least, "met": busy >= least}
            found.append((verdict, f"GPU busy {busy:.1%} from the second layer on, at least {least:.0%}"))
    return [
        {**verdict, "text": f"{verdict['batch']}: {text}: {'met' if verdict['met'] else 'missed'}"}
        for verdict, text in found
    ]


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = command_line.make_parser("step", __doc__.splitlines()[0])
    parser.add_argument("--batches", nargs="+", choices=tuple(BATCHES["cuda"]), default=tuple(BATCHES["cuda"]),
                        help="batches to time (default: all)")  # fmt: skip
    parser.add_argument("--layers", type=int, default=LAYERS, metavar="N", help="layers of a step (default: "
                        "%(default)s, or as many as fit)")  # fmt: skip
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="timed steps for each batch, eager "
                        "and as graph (default: %(default)s)")  # fmt: skip
    parser.add_argument("--layer", action="store_true", help="time the stages of one layer, beside transformers and "
                        "the kernels of --peers; --batches, --layers and --steps have no effect")  # fmt: skip
    parser.add_argument("--peers", type=Path, metavar="DIR", help="folder with a module peers.py, whose attention is "
                        "timed beside a layer (only with --layer)")  # fmt: skip
    return parser


def _time_layers(argv: Sequence[str], arguments: argparse.Namespace) -> int:
    """Time single layers, print and write the times, and return the exit status."""
    import transformers

    from . import layer_stages

    device = arguments.device
    torch.manual_seed(0)
    clock = Clock(100.0) if device == "cuda" else None
    ceilings = None if clock is None else measure_ceilings(clock)
    peers = None if arguments.peers is None else load_peers(arguments.peers)
    count = layer_stages.LAYERS_IN_A_GRAPH if device == "cuda" else 2
    rows = layer_stages.time_layers(device, arguments.backend, arguments.heads, clock, ceilings, peers, count)
    console = wide_console(190)
    console.print(layer_stages.draw(rows))
    for row in rows:
        for who, reason in {**row["absent"], **row["not_captured"]}.items():
            console.print(f"{row['layer']}, {row['batch']}: {who}: {reason}", markup=False)
    targets = layer_stages.verdicts(rows)
    for verdict in targets:
        console.print(verdict["text"], markup=False)
    if arguments.json is not None:
        head = provenance("step", argv, device=device, transformers=transformers.__version__)
        measured = None if ceilings is None else ceilings.as_json()
        report = {**head, "layers_in_a_graph": count, "ceilings": measured, "targets": targets, "rows": rows}
        write_report(arguments.json, report, console)
    return 0


def _run(argv: Sequence[str], arguments: argparse.Namespace) -> int:
    check_device(arguments.device)
    check_at_least_one(arguments, "layers", "heads", "steps")
    check_peers(arguments.peers)
    if arguments.peers is not None and not arguments.layer:
        raise CannotRun(f"--peers: expected together with --layer, got {arguments.peers} alone")
    with torch.no_grad(), host_threads(arguments.device):
        return (_time_layers if arguments.layer else _time_batches)(argv, arguments)


def _time_batches(argv: Sequence[str], arguments: argparse.Namespace) -> int:
    device = arguments.device
    torch.manual_seed(0)
    config, batches = config_for(device, arguments.heads), BATCHES[device]
    model = Model(config, [batches[name] for name in arguments.batches], arguments.layers, device, arguments.backend)
    clock = Clock(50.0) if device == "cuda" else None
    rows = []
    for name in arguments.batches:
        rows.append(measure(name, Step(model, config, batches[name], arguments.backend), clock, arguments.steps))
        if device == "cuda":
            torch.cuda.empty_cache()
    console = wide_console(190)
    layers, sets = len(model.caches), len(model.layers)
    console.print(draw(rows, layers))
    console.print(f"{layers} layers, each with a cache of its own; {sets} different sets of weights")
    targets = verdicts(rows) if device == "cuda" else []
    for verdict in targets:
        console.print(verdict["text"], markup=False)
    if arguments.json is not None:
        head = provenance("step", argv, device=device)
        report = {**head, "layers": layers, "weight_sets": sets, "heads": config.num_heads, "targets": targets}
        write_report(arguments.json, {**report, "rows": rows}, console)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Time the steps, print and write the times, and return the exit status."""
    return command_line.run(_run, argv, make_parser())


if __name__ == "__main__":
    sys.exit(main())
