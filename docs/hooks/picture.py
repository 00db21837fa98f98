"""Draw the chart of the README and of the home page: `python docs/hooks/picture.py`.

The chart shows results of docs/results. Each SVG file stores a digest of these results, and a test compares the
digest with docs/results. The test fails if the results changed after the chart was drawn.
"""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from contenders import OURS, PEERS, decode_times
from figures import themed
from matplotlib.axes import Axes

from fast.demo.report import COLOURS

DOCS = Path(__file__).resolve().parents[1]
DRAWINGS = {  # file: width and height in inches
    DOCS / "assets" / "gain.svg": (7.6, 4.4),
    DOCS / "assets" / "gain-narrow.svg": (4.4, 5.2),
}
SOURCE = DOCS / "results" / "h200-decode.json"
SHOWN = ("FlashMLA", "FA3", "FlashInfer")  # peers of the chart
SHAPES = {  # label: (requests, keys of the longest request, new tokens of each request, heads, distribution of lengths)
    "128 x 4096, 128 heads": (128, 4096, 1, 128, "equal"),
    "128 x 4096, 16 heads": (128, 4096, 1, 16, "equal"),
    "96 x 256 to 32768, 128 heads": (96, 32768, 1, 128, "ragged"),
    "16 x 4096, 128 heads": (16, 4096, 1, 128, "equal"),
    "1 x 131072, 16 heads": (1, 131072, 1, 16, "equal"),
    "1 x 8192, 128 heads": (1, 8192, 1, 128, "equal"),
    "1 x 8192, 16 heads": (1, 8192, 1, 16, "equal"),
}


def results_digest() -> str:
    """Return the sha256 of the results file that the chart shows."""
    return hashlib.sha256(SOURCE.read_bytes()).hexdigest()


def times_of(report: dict) -> dict[str, dict[str, float]]:
    """Return for each shape the ratios (time of an implementation) / (time of `fast`).

    Times are medians of decodes that a CUDA graph replays. `decode_times` chooses the faster way of an implementation.
    """
    found = {}
    for label, dims in SHAPES.items():
        (row,) = (row for row in report["rows"] if tuple(row["dims"].values()) == dims)
        times = decode_times(row["times"]["replayed"])
        found[label] = {who: times[who] / times[OURS] for who in (OURS, *SHOWN)}
    return found


def draw_decode(axes: Axes, report: dict) -> None:
    """Draw the times of the attention of one layer on a GPU, for `fast` and three peers."""
    rows = times_of(report)
    for place, times in enumerate(rows.values()):
        for order, (who, time) in enumerate(times.items()):
            y = place + 0.21 * (order - 1.5)
            axes.barh(y, time, 0.19, color=COLOURS[who], label=PEERS.get(who, who) if place == 0 else None)
            if who != "fast":
                axes.text(time + 0.02, y, f"{time:.2f}", va="center", fontsize=7)
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.set_ylabel("requests x tokens of context, heads")
    axes.set_xlabel("time, fast = 1 (shorter is faster)")
    axes.set_title(f"Attention of one layer in a decode step, {report['gpu']}, bfloat16", fontsize=9, loc="right")
    axes.legend(frameon=False, fontsize=8, ncols=4, handlelength=1, loc="upper right", bbox_to_anchor=(1, -0.11))


def draw() -> None:
    """Write the drawing of the README and of a wide screen, and the drawing of a narrow screen."""
    report, css = (path.read_text(encoding="utf-8") for path in (SOURCE, DOCS / "assets" / "site.css"))
    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "gain"})
    for path, size in DRAWINGS.items():
        figure, axes = plt.subplots(figsize=size, layout="constrained")
        draw_decode(axes, json.loads(report))
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Source": results_digest()})
        path.write_text(themed(file.getvalue(), css), encoding="utf-8")


if __name__ == "__main__":
    draw()
