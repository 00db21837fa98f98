"""Make the table of the benchmark that divides a decode among several GPUs (decode context parallelism).

A *merge* is one way to merge the outputs of the GPUs, such as "a2a".
"""

from __future__ import annotations

from typing import Any

from markdown_tables import DIMS, table

ONE = "one GPU"  # contender without context parallelism


def ranks_table(part: dict[str, Any]) -> str:
    """Return a table; its columns are GPUs and shape, (speed of the fastest merge) / (speed of one GPU), and the times.

    The last column has the MB that a rank receives with the first merge of the results file.

    Args:
        part: part "between_gpus" of a results file.
    """
    lines, merges = [], []
    for gpus in sorted(key for key in part if key.endswith(" GPUs")):
        for row in part[gpus]["rows"]:
            merges = merges or [who for who in row["times"] if who != ONE]
            first = min(merges, key=lambda who: row["times"][who]["median_us"])
            wire = sum(row["received_bytes"][merges[0]].values()) / 1e6
            shown = [f"{row['times'][who]['median_us']:.1f}" for who in merges]
            shown = [f"**{text}**" if who == first else text for who, text in zip(merges, shown, strict=True)]
            gain = f"{row['speedup'][first]:.2f} ({first})" if row["passed"] else "parity failed"
            one = f"{row['times'][ONE]['median_us']:.1f}"
            lines.append([gpus, *(str(row[key]) for key in "BSN"), gain, one, *shown, f"{wire:.1f}"])
    names = [f"`{who}`" if "," not in who else who for who in merges]
    head = ["GPUs", *(DIMS[key] for key in "BSN"), f"x the speed of {ONE}", ONE, *names, "MB received by each rank"]
    return table(head, lines, 4)
