"""Measured times of decodes over caches in e4m3 with many rows, from which `explain` says what the fp8 mode costs.

A row is one (query token, head) pair. The backend "hopper" serves the mode `converted` with row blocks of 32 rows, and
each row block reads and converts all keys of its request. So a request with 64 rows or more can take longer over
`fp8_e4m3` than over a cache in 16 bits. `python -m tests.benchmarks.fp8_mode_times` writes the times from the results
of the benchmark of decodes.
"""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any

from reference.interfaces import CONVERTED, FP8_E4M3, CacheFormat

TIMES = Path(__file__).parents[1] / "assets" / "fp8_decode_times.json"
PLAIN = "compute_dtype"  # name of the times over a cache in 16 bits
MANY_ROWS = 64  # rows of a request from which `converted` can be slower than a decode over a cache in 16 bits
FEW_ROWS = 32  # most rows of a request that were timed below `MANY_ROWS`


@functools.cache
def recorded_times() -> dict[str, Any]:
    """Return the contents of `TIMES`.

    "runs" has the results file, the date and the sources of the times over 16 bits (`PLAIN`) and of the times over
    "fp8_e4m3". "rows" has an entry for each measured number of rows of a request, with all measured shapes. The
    "times_us" of a shape map `PLAIN` and every fp8 mode to times in microseconds; its "invariant_us" have the times of
    batch-invariant decodes.
    """
    return json.loads(TIMES.read_text())


def cost_of_conversion(cache_format: CacheFormat, fp8_mode: str, num_heads: int) -> str | None:
    """Return in words how much longer a decode in the mode `converted` takes than over a cache in 16 bits.

    The text has the range over all measured shapes, and the range of batch-invariant decodes. It also names the other
    mode with the smallest geometric mean of the times, and the shape in which this mode is slowest, if this mode is
    slower there than a decode over 16 bits. The result is None if the mode is not `converted`, if the format is not
    `fp8_e4m3`, or if `converted` was slower in no shape.

    Args:
        cache_format: format of the cache.
        fp8_mode: fp8 mode of the decode (`mla_decode`).
        num_heads: N. A request with N heads has at least `MANY_ROWS` rows from `MANY_ROWS` / N query tokens on.
    """
    if (cache_format.name, fp8_mode) != (FP8_E4M3.name, CONVERTED):
        return None
    recorded = recorded_times()
    reached = [row for row in recorded["rows"] if row["rows"] <= max(num_heads, MANY_ROWS)]
    if not reached:
        return None
    row = max(reached, key=lambda row: row["rows"])
    shapes = row["shapes"]
    ratios = ratios_of(shapes, CONVERTED)
    if max(ratios) <= 1:
        return None
    tokens = -(-row["rows"] // num_heads)
    since = f"from {tokens} query tokens of a request on, " if tokens > 1 else ""
    invariant = ratios_of(shapes, CONVERTED, "invariant_us")
    batch_invariant = f" ({in_words(invariant)} x if batch-invariant)" if invariant else ""
    others = {mode: ratios_of(shapes, mode) for mode in shapes[0]["times_us"] if mode not in (PLAIN, CONVERTED)}
    fastest = min(others, key=lambda mode: math.prod(others[mode]))
    most = max(others[fastest])
    at = f" (most with {shapes[others[fastest].index(most)]['shape']})" if most > 1 else ""
    return (
        f"{since}fp8_mode {CONVERTED} takes {in_words(ratios)} x the time of a decode over a cache in 16 bits"
        f"{batch_invariant}, and fp8_mode {fastest} takes {in_words(others[fastest])} x{at}. "
        f"{origin(recorded, row, tokens)}"
    )


def ratios_of(shapes: list[dict[str, Any]], mode: str, which: str = "times_us") -> list[float]:
    """Return for each shape the time of a mode divided by the time over a cache in 16 bits."""
    return [shape[which][mode] / shape[which][PLAIN] for shape in shapes if mode in shape.get(which, {})]


def in_words(ratios: list[float]) -> str:
    """Return the range of ratios with two digits behind the point."""
    low, high = (f"{pick(ratios):.2f}" for pick in (min, max))
    return low if low == high else f"{low} to {high}"


def origin(recorded: dict[str, Any], row: dict[str, Any], tokens: int) -> str:
    """Return one sentence: what was measured, where and when, and whether all times are from the same sources."""
    plain, e4m3 = (recorded["runs"][name] for name in (PLAIN, FP8_E4M3.name))
    count = len(row["shapes"])
    text = (
        f"Measured in {count} shape{'s' * (count > 1)} with {row['rows']} rows for each request on {recorded['gpu']} "
        f"on {e4m3['date']}"
    )
    if plain["fast_sha256"] != e4m3["fast_sha256"]:
        text += f"; the times over 16 bits are from another run on {plain['date']}, with other sources of fast"
    return text + (f"; {FEW_ROWS + 1} to {MANY_ROWS - 1} rows were not measured" if tokens > 1 else "")
