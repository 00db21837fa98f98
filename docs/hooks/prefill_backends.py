"""Draw the results of `tests.benchmarks.backends` as a table: one row for each shape, one column for each backend."""

from __future__ import annotations

from typing import Any

from markdown_tables import table


def prefill_backends_table(report: dict[str, Any]) -> str:
    """Return the table of a results file: times of the default backend, and the speed of each other backend.

    If rows have the dimension C (tokens of context), the table has the median of each backend in microseconds.
    """
    rows = report["rows"]
    names = list(dict.fromkeys(name for row in rows for name in row["backends"]))
    if any("C" in row["dims"] for row in rows):
        return _medians(rows, sorted(names, key=lambda name: name != "triton"))
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


def _medians(rows: list[dict[str, Any]], names: list[str]) -> str:
    """Return a table of the medians of all backends in microseconds; the fastest backend of a row is bold."""
    lines = []
    for row in rows:
        dims, found = row["dims"], row["backends"]
        shape = f"{dims['B']} x {dims['T']}, {dims['N']} heads" + (f", over {dims['C']}" if dims["C"] else "")
        fastest = min(found, key=lambda name: found[name]["median_us"])
        times = [f"{found[name]['median_us']:.0f}" if name in found else "not served" for name in names]
        times[names.index(fastest)] = f"**{times[names.index(fastest)]}**"
        lines.append([shape, *times])
    return f"{table(['requests x tokens', *(f'`{name}`' for name in names)], lines, 1)}\n\nTimes are medians in us."
