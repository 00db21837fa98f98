"""Compare the figures of a run with the targets of the project: a verdict has a bound and "met" or "missed".

A target is a bound of a ratio of two times, such as (time of the fastest peer) / (time of `fast`). The functions read
the rows of a results file, so that a test can call them without a GPU. A row that lacks a time has no verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
Verdicts = Callable[[Sequence[Row]], list[dict[str, Any]]]


def named(row: Row) -> str:
    """Return the dims of a row in words: "B 1, S 8192, N 16, causal"; a word stands without the name of its dim."""
    return ", ".join(f"{dim} {size}" if isinstance(size, int) else str(size) for dim, size in row["dims"].items())


def judged(what: str, figure: float, *, least: float | None = None, most: float | None = None, **about: Any) -> dict:
    """Return a verdict: `about`, the figure, its bound ("at_least" or "at_most"), "met", and "text" with all in words.

    Args:
        what: subject of the text.
        figure: measured number.
        least: smallest figure that meets the target; None if the target has a largest figure.
        most: largest figure that meets the target; None if the target has a smallest figure.
        about: further entries, such as the dims of the row.
    """
    key, bound = ("at_least", least) if least is not None else ("at_most", most)
    met = figure >= bound if least is not None else figure <= bound
    text = f"{what}: {figure:.3f}, {key.replace('_', ' ')} {bound}: {'met' if met else 'missed'}"
    return {**about, "figure": figure, key: bound, "met": met, "text": text}


def median(row: Row, way: str, who: Sequence[str]) -> float | None:
    """Return the shortest median of some contenders in microseconds; None if none of them was timed in this way."""
    times = row.get("times", {}).get(way, {})
    return min((times[name]["median_us"] for name in who if name in times), default=None)


def peers_of(row: Row, way: str, left_out: Sequence[str] = ()) -> dict[str, float]:
    """Return the medians of the peers of a row in microseconds; `left_out` has the peers that do not count."""
    times = row.get("times", {}).get(way, {})
    return {who: found["median_us"] for who, found in times.items()
            if who.split(",")[0] != "fast" and who not in left_out}  # fmt: skip


def peer_ratio(row: Row, way: str, ours: Sequence[str], left_out: Sequence[str] = ()) -> tuple[str, float] | None:
    """Return the name of the fastest peer of a row, and (its time) / (time of `ours`); None without such times.

    Args:
        row: row of a results file.
        way: way of timing, such as "flushed".
        ours: contenders of `fast`; the fastest counts.
        left_out: peers that do not count.
    """
    mine, times = median(row, way, ours), peers_of(row, way, left_out)
    if mine is None or not times:
        return None
    peer = min(times, key=lambda who: times[who])
    return peer, times[peer] / mine
