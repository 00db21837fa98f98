"""Make the tables of the benchmark that times the planning of a step."""

from __future__ import annotations

from typing import Any

from contenders import OURS
from markdown_tables import NONE, dims_table, table


def planning_table(batches: list[dict[str, Any]]) -> str:
    """Return a table of the time that the CPU needs to plan a step."""
    heads, _, cells = dims_table([{key: row["dims"][key] for key in ("decodes", "prefills")} for row in batches])
    who = list(dict.fromkeys(name for row in batches for name in row["host_us"]))
    lines = [
        [*dims, *(f"{row['host_us'][name]['median_us']:.1f}" if name in row["host_us"] else NONE for name in who)]
        for row, dims in zip(batches, cells, strict=True)
    ]
    names = {OURS: "`build_mla_metadata`", "builder": "`MLAMetadataBuilder`", "reference": "`reference`"}
    shown = table([*heads, *(names.get(name, name) for name in who)], lines, len(heads))
    return f"{shown}\n\nTimes are medians in us on the host."


def schedules_table(rows: list[dict[str, Any]]) -> str:
    """Return a table of GPU times: how long a CUDA graph needs to plan the schedule of a decode."""
    who = list(rows[0]["replayed"])
    heads, said, cells = dims_table([{key: row[key] for key in ("B", "programs")} for row in rows])
    lines = [
        [*dims, *(f"{row['replayed'][name]['median_us']:.1f}" for name in who)]
        for row, dims in zip(rows, cells, strict=True)
    ]
    names = [f"`{name}`" if name.isidentifier() else name for name in who]
    return f"{table([*heads, *names], lines, len(heads))}\n\nTimes are medians in us, replayed; {', '.join(said)}."
