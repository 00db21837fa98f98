"""Make the Markdown tables of benchmark results.

A row of a results file has a dictionary "dims": its dimensions by name, such as B (requests) and S (tokens).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

NONE = "-"  # cell of a time or ratio that was not measured
DIMS = {  # name of a dimension in a results file: word on the page
    "B": "requests", "S": "tokens", "Sq": "new tokens", "Skv": "keys", "N": "heads", "lens": "lengths", "W": "columns",
    "mask": "mask", "op": "op", "tokens": "tokens", "T": "tokens", "decodes": "decodes", "prefills": "prefills",
    "programs": "programs", "Nkv": "KV heads", "D": "columns", "window": "keys of a window", "shared": "shared tokens",
    "kind": "kind",
}  # fmt: skip

USUAL = (f"0 {DIMS['window']}", "0 shared", "plain")  # what most shapes have, and what their names therefore omit


def table(head: Sequence[str], rows: Iterable[Sequence[str]], words: int) -> str:
    """Return a Markdown table; the first `words` columns are aligned left, and the other columns are aligned right."""
    line = "|".join([":---"] * words + ["---:"] * (len(head) - words))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, *rows]).replace("\n", f"\n|{line}|\n", 1)


def dims_table(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[str], list[list[str]]]:
    """Make a table column of each dimension that differs between rows, and a text of every other one.

    If no dimension differs, the first dimension gets the column.

    Args:
        rows: dictionary "dims" of each row.

    Returns:
        Three lists: the heads of the columns, the texts, such as "heads 128", and the list of cells of each row.
    """
    keys = list(dict.fromkeys(key for row in rows for key in row))
    shown = [key for key in keys if len({str(row.get(key)) for row in rows}) > 1] or keys[:1]
    said = [f"{DIMS.get(key, key)} {rows[0][key]}" for key in keys if key not in shown]
    return [DIMS.get(key, key) for key in shown], said, [[str(row.get(key, "")) for key in shown] for row in rows]


def shapes_table(rows: Sequence[dict[str, Any]]) -> tuple[str, list[str], list[str]]:
    """Join the columns of `dims_table` into one; return its head, the texts of `dims_table`, and the joined cells."""
    heads, said, cells = dims_table(rows)
    first = 2 if heads[:2] == [DIMS["B"], DIMS["S"]] else 1
    bare = {DIMS["lens"], DIMS["mask"], DIMS["op"], DIMS["kind"]}  # dimensions whose values are words, not numbers

    def joined(values: Sequence[str]) -> str:
        together = [" x ".join(values[:first]), *(value for value in values[first:] if value not in USUAL)]
        return ", ".join(value.replace(" ", "&nbsp;") if value[0].isdigit() else value for value in together)

    named = [[value if at < first or head in bare else f"{value} {head.removesuffix(' tokens')}"
              for at, (head, value) in enumerate(zip(heads, row, strict=True))] for row in cells]  # fmt: skip
    return joined(heads), said, [joined(row) for row in named]
