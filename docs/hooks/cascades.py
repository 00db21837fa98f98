"""Make the table of the benchmark that compares decodes with and without a cascade."""

from __future__ import annotations

from typing import Any

from markdown_tables import table

LIMIT = 0.10  # the text counts the points whose choice loses more


def cascade_table(report: dict[str, Any]) -> str:
    """Return a table with a line for each number of requests and each length of the prefix, and a text about losses.

    A line covers all heads and suffixes of the grid: the speed of a cascade / the speed of an ordinary decode, the
    points at which the builder chooses a cascade, and the largest loss of a choice.
    """
    groups: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for point in report["points"]:
        groups.setdefault((point["dims"]["B"], point["dims"]["prefix"]), []).append(point)
    lines = []
    for (requests, prefix), points in groups.items():
        speeds = [point["times_us"]["whole"] / point["times_us"]["cascade"] for point in points]
        chosen = sum(point["chosen"] == "cascade" for point in points)
        lost = max(point["loss"] for point in points)
        lines.append([str(requests), str(prefix), f"{min(speeds):.2f} to {max(speeds):.2f}",
                      f"{chosen} of {len(points)}", f"{lost:.1%}"])  # fmt: skip
    head = ["requests", "tokens of the prefix", "x the speed of an ordinary decode", "cascades chosen", "largest loss"]
    over = sum(point["loss"] > LIMIT for point in report["points"])
    text = (
        f"Of {len(report['points'])} points, {over} {'has' if over == 1 else 'have'} a choice that is more than "
        f"{LIMIT:.0%} slower than the faster way. The largest loss is {100 * report['largest_loss']:.2f} %."
    )
    if "choices" in report:
        text += f" The choices are those of the sources of {report['choices']['date']}; the times are older."
    return f"{table(head, lines, 2)}\n\n{text}"
