"""Make the table of the results of `tests.recorded_bits compare --json`: recorded results, and which changed."""

from __future__ import annotations

from typing import Any

from markdown_tables import table


def changes_table(report: dict[str, Any]) -> str:
    """Return a table with one line for the unchanged results, and one for each change on purpose."""
    lines = [["the same bits", "", str(report["same"]), "0"]]
    for change in report["changes"]:
        value = change["largest_relative_difference"]
        difference = "unknown" if value is None else f"{value:.1e}" if value else "0"
        lines.append([change["reason"], f"`{change['commit']}`", str(change["cases"]), difference])
    if report["unexplained"]:
        lines.append(["changed without a known reason", "", str(len(report["unexplained"])), "unknown"])
    said = f"Compared with commit `{report['before']['commit']}`, sources of `fast/` with sha256 " + (
        f"`{report['before']['fast_sha256'][:12]}`, {report['cases']} results in all."
    )
    return f"{table(['results', 'commit', 'number', 'largest relative difference'], lines, 2)}\n\n{said}"
