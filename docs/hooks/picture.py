"""The picture of the README and the home page, drawn from docs/results by `python docs/hooks/picture.py`.

The digest of the results that it shows is in the file, and a test compares it with theirs.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from fast.demo.report import COLOURS

DOCS = Path(__file__).resolve().parents[1]
PICTURE = DOCS / "assets" / "gain.png"
SOURCES = tuple(DOCS / "results" / name for name in ("h200-decode.json", "cpu-2-cores.json"))
NAMES = {"FA3": "FlashAttention-3"}
SHAPES = {  # requests, keys of the longest, new tokens, heads, lengths
    "128 x 4096, 128 heads": (128, 4096, 1, 128, "equal"),
    "128 x 4096, 16 heads": (128, 4096, 1, 16, "equal"),
    "96 x 256 to 32768, 128 heads": (96, 32768, 1, 128, "ragged"),
    "16 x 4096, 128 heads": (16, 4096, 1, 128, "equal"),
    "1 x 131072, 16 heads": (1, 131072, 1, 16, "equal"),
    "1 x 8192, 128 heads": (1, 8192, 1, 128, "equal"),
    "1 x 8192, 16 heads": (1, 8192, 1, 16, "equal"),
}


def results_digest() -> str:
    """Sha256 of the files that the picture shows."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in SOURCES)).hexdigest()


def shares(report: dict) -> dict[str, dict[str, float]]:
    """Of each shape, the medians of a captured graph's replays over that of the fastest of ours."""
    found = {}
    for label, dims in SHAPES.items():
        (row,) = (row for row in report["rows"] if tuple(row["dims"].values()) == dims)
        times = {who: time["median_us"] for who, time in row["times"]["replayed"].items()}
        ours = min(times["fast"], times["fast, planned"])
        found[label] = {"fast": 1.0, **{who: times[who] / ours for who in ("FlashMLA", "FA3")}}
    return found


def draw() -> None:
    """Write the picture."""
    gpu, cpu = (json.loads(path.read_text(encoding="utf-8")) for path in SOURCES)
    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure, (left, right) = plt.subplots(1, 2, figsize=(10.4, 3.9), width_ratios=(1.35, 1), layout="constrained")
    rows = shares(gpu)
    for place, times in enumerate(rows.values()):
        for order, (who, share) in enumerate(times.items()):
            y = place + 0.26 * (order - 1)
            left.barh(y, share, 0.24, color=COLOURS[who], label=NAMES.get(who, who) if place == 0 else None)
            if who != "fast":
                left.text(share + 0.02, y, f"{share:.2f}", va="center", fontsize=7.5)
    left.set_yticks(range(len(rows)), rows)
    left.invert_yaxis()
    left.set_xlabel("time of a decode, that of fast (the better of its two cuts) = 1")
    left.set_title(f"Absorbed decode, {gpu['gpu']}, bfloat16", fontsize=10, loc="left")
    left.legend(frameon=False, loc="upper right", fontsize=8)
    for who in ("transformers", "reference", "fast"):
        points = sorted((row["context"], row["ms_median"]) for row in cpu["rows"] if row["who"] == who)
        right.plot(*zip(*points, strict=True), "o-", color=COLOURS[who], label=who)
        right.annotate(f"{points[-1][1]:.0f} ms", points[-1], textcoords="offset points", xytext=(6, 0), va="center")
    right.set_xscale("log", base=2)
    right.set_yscale("log")
    contexts = sorted({row["context"] for row in cpu["rows"]})
    right.set_xticks(contexts, [str(context) for context in contexts])
    right.margins(x=0.16)
    right.set_xlabel("tokens of context")
    right.set_ylabel("ms a token")
    right.set_title(f"A layer of DeepSeek-V2-Lite, {cpu['threads']} CPU threads", fontsize=10, loc="left")
    right.legend(frameon=False, loc="upper left", fontsize=8)
    figure.savefig(PICTURE, dpi=110, facecolor="white", metadata={"Software": None, "Source": results_digest()})


if __name__ == "__main__":
    draw()
