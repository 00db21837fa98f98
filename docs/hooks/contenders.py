"""Compare the contenders of a decode row: `fast`, its variants and the peers of docs/results/h200-decode.json.

A *contender* is an implementation that a benchmark measures: `fast`, a variant of `fast` such as "fast, planned", or a
*peer*, which is the implementation of another project. A peer may be measured in several ways, which are contenders
too: "FA3" makes its schedule in every call, and "FA3, schedule ahead" keeps a schedule that was made before.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable
from typing import Any

from markdown_tables import NONE

OURS = "fast"
SCHEDULES = (OURS, f"{OURS}, planned")  # a decode of `fast` without and with a schedule
PEERS = {"FlashMLA": "FlashMLA", "FA3": "FlashAttention-3", "FlashInfer": "FlashInfer",
         "vLLM Triton": "vLLM's Triton kernel"}  # fmt: skip
SHORTEST = {"ragged": 128, "mixed": 16}  # longest length of a batch / shortest length


def is_ours(who: str) -> bool:
    """Return True for `fast` and its variants, such as "fast, planned"."""
    return who == OURS or who.startswith(OURS + ", ")


def code(text: str) -> str:
    """Return the name of a contender, formatted as code if the contender is `fast` or one of its variants."""
    return f"`{text}`" if is_ours(text) else text


def style_of(who: str) -> str:
    """Return the CSS classes of the lines and marks of a contender; each contender has its own colour."""
    name = OURS if is_ours(who) else who.split(",")[0]
    return f"{'ours' if is_ours(who) else 'peer'} {re.sub(r'[^A-Za-z0-9]+', '-', name).strip('-')}"


def in_order(names: Iterable[str]) -> list[str]:
    """Return each name once, `fast` and its variants first."""
    return sorted(dict.fromkeys(names), key=lambda name: not is_ours(name))


def best(times: dict[str, Any], ours: bool) -> str | None:
    """Return the variant of `fast` (if `ours`) or the peer (if not) with the smallest median; None if there is none."""
    who = [name for name in times if is_ours(name) == ours]
    return min(who, key=lambda name: times[name]["median_us"], default=None)


def gain(times: dict[str, Any]) -> str:
    """Return (best time of the peers) / (best time of `fast`), and the best variant of `fast`: "1.10 (planned)"."""
    ours, peer = best(times, True), best(times, False)
    if ours is None or peer is None:
        return NONE
    way = "" if ours == OURS else f" ({ours.removeprefix(OURS + ', ')})"
    return f"{times[peer]['median_us'] / times[ours]['median_us']:.2f}{way}"


def decode_times(times: dict[str, Any]) -> dict[str, float]:
    """Return the medians of `fast` and of each peer in microseconds; of several ways of one peer, the fastest counts.

    The time of `fast` is the shorter of two times: with and without a schedule.
    """
    found = {OURS: min(times[who]["median_us"] for who in SCHEDULES)}
    for who, time in times.items():
        name = who.split(",")[0]
        if not is_ours(who):
            found[name] = min(found.get(name, time["median_us"]), time["median_us"])
    return found


def best_peer(times: dict[str, float]) -> tuple[str, float]:
    """Return the name of the fastest peer in the result of `decode_times`, and (its time) / (time of `fast`)."""
    peer = min((who for who in times if who != OURS), key=lambda who: times[who])
    return peer, times[peer] / times[OURS]


def in_words(dims: dict[str, Any]) -> str:
    """Return the dimensions of a decode row in words: "16 requests of 4096 tokens, 128 heads"."""
    requests, tokens, lens = dims["B"], dims["S"], dims["lens"]
    span = f"{tokens // SHORTEST[lens]} to {tokens}" if lens in SHORTEST else f"{tokens}"
    new = f", each with {dims['Sq']} new tokens" if dims["Sq"] > 1 else ""
    return f"{requests} request{'s' * (requests > 1)} of {span} tokens{new}, {dims['N']} heads"


def listed(words: Iterable[str]) -> str:
    """Return words as a list in a sentence: "a, b and c"."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def decode_summary(report: dict[str, Any]) -> str:
    """Return sentences about all shapes of a results file of tests.benchmarks.decode, replayed and flushed.

    The sentences have the geometric means of the speeds relative to the fastest peer of each shape, and the shapes in
    which `fast` is behind this peer.
    """
    rows, means, behind, peers = [row for row in report["rows"] if row["passed"]], [], [], set()
    for way in ("replayed", "flushed"):
        times = [decode_times(row["times"][way]) for row in rows]
        best = [best_peer(found) for found in times]
        peers |= {who for found in times for who in found if who != OURS}
        means.append(f"{statistics.geometric_mean(ratio for _, ratio in best):.2f} x ({way})")
        behind += [f"{in_words(row['dims'])}, {way}: {ratio:.2f} x {PEERS.get(peer, peer)}'s speed"
                   for row, (peer, ratio) in zip(rows, best, strict=True) if ratio < 1]  # fmt: skip
    names = listed([*(name for who, name in PEERS.items() if who in peers), *sorted(peers - PEERS.keys())])
    lost = f" ({'; '.join(behind)})" if behind else ""
    return (
        f"Over {len(rows)} shapes, the geometric mean of the speed of `fast` is {listed(means)} the speed of the "
        f"fastest peer of each shape. The peers are {names}. `fast` is behind the fastest peer in {len(behind)} of "
        f"{2 * len(rows)} comparisons{lost}."
    )
