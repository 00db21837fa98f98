"""Make tables of the results of `tests.benchmarks.weights`: times and errors of products, and errors of weights.

A *contender* is one way to compute a product. The contender "fast" multiplies by a weight in bfloat16.
"""

from __future__ import annotations

from typing import Any

from markdown_tables import table

EXPANSION = "expand_kv"
WAY = "replayed"
NONE = "-"


def products_table(report: dict[str, Any]) -> str:
    """Return the table of the products with absorbed weights."""
    return _table([row for row in report["rows"] if row["dims"]["op"] != EXPANSION], "the product in bfloat16")


def expansions_table(report: dict[str, Any]) -> str:
    """Return the table of the expansions of latents into keys and values."""
    return _table([row for row in report["rows"] if row["dims"]["op"] == EXPANSION], "the dense copy")


def _table(rows: list[dict[str, Any]], first: str) -> str:
    """Return a table with one line for each contender of each row in `rows`: speed, time, bytes, and error.

    The speed of each contender is divided by the speed of the contender "fast". The table shows the text `first` in
    place of the name "fast".
    """
    lines = []
    for row in rows:
        dims, times = row["dims"], row.get("times", {}).get(WAY)
        for place, who in enumerate(row["errors"]):
            shape = [f"`{dims['op']}`", str(dims["T"]), str(dims["N"])] if place == 0 else [""] * 3
            name = first if who == "fast" else who.removeprefix("fast, ")
            figures = [f"{row['contender_bytes'][who] / 1e6:.2f}", f"{row['held_bytes'][who] / 1e6:.2f}",
                       f"{row['errors'][who]:.1e}"]  # fmt: skip
            if not row["passed"] or times is None or who not in times:
                lines.append([*shape, name, "parity failed" if not row["passed"] else NONE, NONE, *figures])
                continue
            spread = times[who]
            speed = times["fast"]["median_us"] / spread["median_us"]
            low, high = spread["quartiles_us"]
            timed = f"{spread['median_us']:.1f} ({low:.1f} to {high:.1f})"
            lines.append([*shape, name, f"{speed:.2f}", timed, *figures])
    head = ["op", "tokens", "heads", "weight", f"x the speed of {first}", "us, replayed (quartiles)", "MB moved",
            "MB held", "error"]  # fmt: skip
    return table(head, lines, 4)


def scales_table(report: dict[str, Any]) -> str:
    """Return the table of the errors of absorbed weights, with one scale and with a scale for each head."""
    kinds = ("one scale", "one for each head")
    lines = [[row["weight"], str(row["N"]), *(f"{row[kind][part]:.2e}" for kind in kinds for part in row[kind])]
             for row in report["scales"]]  # fmt: skip
    parts = list(report["scales"][0][kinds[0]])
    head = ["weight", "heads", *(f"{kind}, {part}" for kind in kinds for part in parts)]
    return table(head, lines, 1)
