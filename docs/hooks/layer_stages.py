"""Draw a results file of `tests.benchmarks.step --layer`: the stages of one layer, as bar charts and tables."""

from __future__ import annotations

from typing import Any

from bars import Bars, Segment
from markdown_tables import NONE, table

STAGES = {  # stage of a layer: name in the legend and in the table
    "projections": "projections", "write": "rope, norm, cache write", "query_to_latent": "query_to_latent",
    "expansion": "gather and expansion", "attention": "attention", "latent_to_value": "latent_to_value",
    "merge": "merge", "output": "output projection",
}  # fmt: skip
WHO = {"fast": "fast", "peers": "best kernels of others", "floor": "floor"}


def _sum(row: dict[str, Any], who: str) -> float | None:
    """Return the sum of the times of all stages in microseconds; None if a stage has no time."""
    times = [stage.get(f"{who}_us") for stage in row["stages"].values()]
    return None if None in times else sum(times)


def _us(time: float | None) -> str:
    return NONE if time is None else f"{time:.1f}"


def layer_bars(report: dict[str, Any]) -> str:
    """Return a bar chart for each kind of batch; a layer has a bar for `fast`, for the best kernels and for the floor.

    A bar has one segment for each stage. A bar that lacks the time of a stage is left out.
    """
    charts = []
    for batch in dict.fromkeys(row["batch"] for row in report["rows"]):
        bars, said, used = [], [], []
        for row in (row for row in report["rows"] if row["batch"] == batch):
            for who, name in WHO.items():
                total = _sum(row, who)
                if total is None:
                    continue
                label = f"{row['layer']}, {name}"
                times = {stage: found[f"{who}_us"] for stage, found in row["stages"].items()}
                bars.append((label, [Segment(stage, time, f"{label}, {STAGES[stage]}: {time:.1f} us")
                                     for stage, time in times.items()]))  # fmt: skip
                used += times
                said.append(f"{label} {total:.0f}")
        if bars:
            description = f"Microseconds of one layer, {batch}, split into stages: {'; '.join(said)}."
            names = {stage: name for stage, name in STAGES.items() if stage in used}
            charts.append(f"**One layer, {batch}**\n\n{Bars(description, 'us for one layer', bars, names).html()}")
    return "\n\n".join(charts)


def absences(report: dict[str, Any]) -> str:
    """Return a list of the implementations that were not timed in some rows, with the reasons; "" if there are none."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in report["rows"]:
        for who, why in {**row["absent"], **row["not_captured"]}.items():
            found.setdefault((who, why), []).append(f"{row['layer']}, {row['batch']}")
    items = [f"- {who}: {why} ({'; '.join(rows)})" for (who, why), rows in sorted(found.items())]
    return "\n".join(["\n\nThese implementations were not timed:\n", *items]) if items else ""


def stages_table(report: dict[str, Any]) -> str:
    """Return the table of the stages: times of `fast`, of the best kernels of others, and the floor."""
    lines = []
    for row in report["rows"]:
        named = [row["layer"], row["batch"]]
        for stage, found in row["stages"].items():
            share = f"{found['share_of_floor']:.0%}" if "share_of_floor" in found else NONE
            times = [_us(found.get(f"{who}_us")) for who in WHO]
            lines.append([*named, STAGES[stage], *times, share])
            named = ["", ""]
        fast, floor = _sum(row, "fast"), _sum(row, "floor")
        share = NONE if floor is None else f"{floor / fast:.0%}"
        lines.append(["", "", "**all stages**", *(_us(_sum(row, who)) for who in WHO), share])
    head = ["layer", "batch", "stage", "`fast`", "best kernels of others", "floor", "floor / `fast`"]
    peers = sorted({row["attention_peer"] for row in report["rows"] if row["attention_peer"]})
    attention = f" The best attention of others is that of {'; '.join(peers)}." if peers else ""
    return (
        f"{table(head, lines, 3)}\n\nTimes are medians in us; every op is replayed alone. *Floor* is the time that the "
        "least bytes or the FLOPs of a stage need at the measured rates of the GPU, whichever is longer."
        f"{attention}{absences(report)}"
    )


def layers_table(report: dict[str, Any]) -> str:
    """Return the table of whole layers: `fast` and transformers in CUDA graphs, and the number of kernels."""
    lines = []
    for row in report["rows"]:
        whole = {who: spread["median_us"] for who, spread in row["whole_us"].items()}
        fast, stock, peers = whole["fast"], whole.get("transformers"), _sum(row, "peers")
        dims = row["dims"]
        prompts = f"{dims['prompts']} prompt{'s' * (dims['prompts'] > 1)}"
        shape = (
            f"{dims['decodes']} decodes over {dims['keys']} tokens"
            if dims["decodes"]
            else f"{prompts} of {dims['new_tokens']} tokens behind {dims['context']}"
        )
        lines.append([
            row["layer"], shape, NONE if stock is None else f"{stock / fast:.1f}", f"{fast:.1f}", _us(stock),
            NONE if peers is None else f"{peers / fast:.2f}", NONE if row["kernels"] is None else str(
                len(row["kernels"])),
        ])  # fmt: skip
    head = ["layer", "batch", "x transformers' speed", "`fast`", "transformers", "best kernels of others / `fast`",
            "kernels"]  # fmt: skip
    count = report["layers_in_a_graph"]
    over = sorted({who for row in report["rows"] for who, found in row["parity"].items() if not found["passed"]})
    said = f" The error of {' and '.join(over)} exceeds the budget." if over else ""
    shares = [f"{row['product_share']:.0%} ({row['layer']}, {row['batch']})" for row in report["rows"]
              if row.get("product_share") is not None]  # fmt: skip
    if shares:  # older results files have no shares
        said += f" Share of attention and the expansion product in the time of `forward_prefill`: {', '.join(shares)}."
    return (
        f"{table(head, lines, 2)}\n\nTimes are medians in us for one layer, in a CUDA graph; the graph of `fast` has "
        f"{count} layers with weights and a cache each. *Kernels* counts the kernels between the last projection and "
        f"the output projection.{said}"
    )
