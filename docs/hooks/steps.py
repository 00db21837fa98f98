"""Draw the results of three benchmarks.

One benchmark times whole steps of an engine (bar chart and table). Another times the work of the host (the CPU) in a
call of each op (table). The third times `fast.warmup` (table).
"""

from __future__ import annotations

from typing import Any

from bars import Bars, Segment
from markdown_tables import table

PARTS = {  # part of the time of a step: name in the legend
    "host_plan": "plan on the host", "idle": "no kernel runs", "plan": "plan on the GPU",
    "projections": "projections", "attention": "attention", "movement": "cache write, gathers, merges, copies",
    "other": "other kernels",
}  # fmt: skip
HOST_PLAN_NOTE = (
    " In the chart, *plan on the host* is the time of `MLAMetadataBuilder.build` in an eager step. In the graph of a "
    "step of decodes it is the time of `DecodeGraph.run`, which checks the batch, updates the captured buffers and "
    "launches the replay; the column *graph* does not contain it."
)
NOT_MEASURED = {  # results file that is allowed to be missing: command that writes the file
    "h200-step.json": "python -m tests.benchmarks.step --json docs/results/h200-step.json",
    "h200-layer.json": "python -m tests.benchmarks.step --layer --peers .peers --json docs/results/h200-layer.json",
    "h200-warmup.json": "python -m tests.benchmarks.warmup --json docs/results/h200-warmup.json",
    "h200-decode-fp8-ds-mla.json": "python -m tests.benchmarks.decode --cache-format fp8_ds_mla --time 60 "
    "--json docs/results/h200-decode-fp8-ds-mla.json",
    "h200-weights.json": "python -m tests.benchmarks.weights --time 100 --json docs/results/h200-weights.json",
    "h200-gqa.json": "python -m tests.benchmarks.gqa --peers .peers --json docs/results/h200-gqa.json",
    "h200-gqa-cascade.json": "python -m tests.benchmarks.gqa_cascade --json docs/results/h200-gqa-cascade.json",
    "gqa-cpu-2-cores.json": "python -m tests.benchmarks.gqa_vs_transformers --contexts 1024 4096 --threads 2 "
    "--steps 25 --reference-steps 3 --json docs/results/gqa-cpu-2-cores.json",
}  # fmt: skip


def not_measured(command: str) -> str:
    """Return the note "Not measured yet" with the command that writes the results file."""
    return f"*Not measured yet. This command measures the figures of this section:*\n\n```sh\n{command}\n```"


def ms(spread: dict[str, Any]) -> str:
    """Return the median of measured times as text, in milliseconds."""
    return f"{spread['median_us'] / 1000:.2f}"


def step_bars(report: dict[str, Any]) -> str:
    """Return the bar chart of a results file of tests.benchmarks.step.

    Each batch has two bars: its eager step, and its step in a CUDA graph. The segments of a bar are the `PARTS` of the
    step's time. A step that was measured on a CPU has no parts and therefore no bar.
    """
    bars, used, said = [], [], []
    for row in report["rows"]:
        for way in ("eager", "graph"):
            parts = {part: time for part, time in row[way].get("parts_us", {}).items() if time > 0}
            if parts:
                label = f"{row['batch']}, {way}"
                bars.append((label, [Segment(part, time / 1000, f"{label}, {PARTS[part]}: {time / 1000:.2f} ms")
                                     for part, time in parts.items()]))  # fmt: skip
                used += parts
                said.append(f"{label} {sum(parts.values()) / 1000:.1f}")
    if not bars:
        return ""
    description = f"Milliseconds of a step of {report['layers']} layers, split into parts: {'; '.join(said)}."
    names = {part: name for part, name in PARTS.items() if part in used}
    return Bars(description, f"ms for {report['layers']} layers", bars, names).html()


def step_table(report: dict[str, Any]) -> str:
    """Return the table of a results file of tests.benchmarks.step, and the sentences that explain its columns."""
    lines, planned = [], False
    for row in report["rows"]:
        planned |= "host_plan_us" in row["eager"]
        dims = row["dims"]
        decodes = f"{dims['decodes']} decodes over {dims['keys']} tokens" if dims["decodes"] else ""
        behind = f" behind {dims['context']}" if dims["context"] else ""
        prompts = f"{dims['prompts']} prompts of {dims['new_tokens']} tokens{behind}" if dims["prompts"] else ""
        busy = f"{100 * row['eager']['busy']:.1f} %" if "busy" in row["eager"] else "-"
        lines.append([
            " and ".join(filter(None, (decodes, prompts))), ms(row["eager"]["wall_us"]), ms(row["eager"]["host_us"]),
            busy, ms(row["graph"]["wall_us"]), f"{row['ops_us'] / 1000:.2f}", f"{row['graph_over_ops']:.3f}",
        ])  # fmt: skip
    head = ["step", "eager", "eager, host", "GPU busy", "graph", "ops, each alone", "graph / ops"]
    sets = report["weight_sets"]
    return (
        f"{table(head, lines, 1)}\n\nTimes are medians in ms for {report['layers']} layers with a cache each; "
        f"the layers share {sets} sets of weights. *Eager, host* is the time until the host has launched the last "
        "kernel of an eager step. *GPU busy* is the fraction of an eager step in which a kernel runs, from the end of "
        "the first layer to the end of the step. The times of the kernels come from a graph that repeats them. A trace "
        "of the eager step itself slows the host, so it gives a smaller fraction, `busy_traced` in the results file. "
        "*Ops, each alone* is the sum of the times of all ops of the step, each timed alone."
        f"{HOST_PLAN_NOTE if planned else ''}"
    )


def host_table(report: dict[str, Any]) -> str:
    """Return the table of a results file of tests.benchmarks.host.

    The columns are the op, the time of `fast`, the longest acceptable time, and the times of other projects (peers).
    """
    lines = []
    for row in report["rows"]:
        times = {who: f"{spread['median_us']:.0f}" for who, spread in row["host_us"].items()}
        peers = "; ".join(f"{who} {time}" for who, time in times.items() if who != "fast")
        target = row["target_us"]
        lines.append([f"`{row['op']}`", times["fast"], "" if target is None else f"{target:.0f}", peers])
    dims = report["dims"]
    processor = report.get("processor", report["hardware"])
    head = ["op", "`fast`", "limit that was set", "peers"]
    return (
        f"{table(head, lines, 1)}\n\nTimes are medians of {report['calls']} calls in "
        f"us on an {processor}; the GPU is idle when a call starts. An op of a decode has {dims['decodes']} decodes "
        f"over {dims['keys']} tokens. An op of a prefill has {dims['prompts']} prompts of {dims['new_tokens']} new "
        "tokens. In the ops whose names contain *one chunk*, in `gather_context` and in `MLAMetadataBuilder.build, "
        f"prefills`, each prompt also has a context of {dims['context']} tokens."
    )


def warmup_table(report: dict[str, Any]) -> str:
    """Return the table of a results file of tests.benchmarks.warmup."""
    kinds = ("cold", "warm")
    lines = [
        [f"`{row['cache_format']}`", str(row["threads"]), str(row["cold"]["variants"]),
         *(f"{row[kind]['seconds']:.1f}{'' if row['met'][kind] else ' (missed)'}" for kind in kinds)]
        for row in report["rows"]
    ]  # fmt: skip
    limits = report["most_seconds"]
    head = ["cache format", "threads", "kernel variants", *(f"{kind} (limit {limits[kind]:g})" for kind in kinds)]
    return (
        f"{table(head, lines, 2)}\n\nTimes are in seconds, on {report['cores']} cores. A *cold* warm-up begins with an "
        "empty folder of compiled kernels; a *warm* one finds the kernels that the cold one stored. The limits are for "
        "16 cores. The times do not contain the import of the packages."
    )
