"""Draw the results of `tests.benchmarks.backends` as a table: one row for each shape, one column for each backend."""

from __future__ import annotations

from typing import Any

from markdown_tables import table


def prefill_backends_table(report: dict[str, Any]) -> str:
    """Return the table of a results file: times of the default backend, and the speed of each other backend."""
    rows = report["rows"]
    names = list(dict.fromkeys(name for row in rows for name in row["backends"]))
    default = names[0]
    lines = []
    for row in rows:
        dims, found = row["dims"], row["backends"]
        others = [
            f"{found[name]['times_faster_than_default']:.2f}" if name in found else "not served" for name in names[1:]
        ]
        shape = f"{dims['B']} x {dims['T']}, {dims['N']} heads"
        lines.append([shape, *others, f"{found[default]['median_us'] / 1000:.1f}"])
    head = ["prompts x tokens", *(f"`{name}`, x the speed of `{default}`" for name in names[1:]), f"`{default}`, ms"]
    return table(head, lines, 1)
