"""Make tables of the results of `tests.benchmarks.fp8_errors`: errors of decodes over e4m3, and of absorbed weights."""

from __future__ import annotations

from typing import Any

from markdown_tables import table

QUERIES = ("own queries", "exact queries")  # the queries from which the exact output is computed
NAMES = {"none": "-", "tensor": "one", "head": "one for each head"}


def modes_table(report: dict[str, Any]) -> str:
    """Return the table of the errors of each fp8 mode, with two columns for each length, and a text of the inputs."""
    lengths = list(dict.fromkeys(row["length"] for row in report["decodes"]))
    cells: dict[tuple[str, str, str], dict[int, dict[str, Any]]] = {}
    for row in report["decodes"]:
        cells.setdefault((row["mode"], row["scale"], row["heads"]), {})[row["length"]] = row
    lines = [
        [f"`{mode}`", NAMES[scale], heads, *(f"{rows[length][kind]:.1e}" for length in lengths for kind in QUERIES)]
        for (mode, scale, heads), rows in cells.items()
    ]
    head = ["mode", "scale of the queries", "queries of the heads",
            *(f"{length} tokens, {kind}" for length in lengths for kind in QUERIES)]  # fmt: skip
    text = f"The scores have the standard deviation {report['deviation']:g}; {report['heads']} heads."
    return f"{table(head, lines, 3)}\n\n{text}"


def weights_table(report: dict[str, Any]) -> str:
    """Return the table of the errors of absorbed weights in which one head has larger numbers than the others."""
    lines = [[f"{row['factor']:g}", f"{row['tensor']:.1e}", f"{row['head']:.1e}"] for row in report["weights"]]
    return table(["factor of the first head", "one scale", "one scale for each head"], lines, 1)
