"""Measured times of decodes over caches in e4m3 with many rows, from which `explain` says what the fp8 mode costs.

A row is one (query token, head) pair. The backend "hopper" serves the mode `converted` with row blocks of 32 rows, and
each row block reads and converts all keys of its request. So a request with 64 rows or more can take longer over
`fp8_e4m3` than over a cache in 16 bits. `python -m tests.benchmarks.fp8_mode_times` writes the times from the results
of the benchmark of decodes.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from reference.interfaces import CONVERTED, FP8_E4M3, CacheFormat

TIMES = Path(__file__).parents[1] / "assets" / "fp8_decode_times.json"
PLAIN = "compute_dtype"  # name of the times over a cache in 16 bits
MANY_ROWS = 64  # rows of a request from which `converted` can be slower than a decode over a cache in 16 bits


@functools.cache
def recorded_times() -> dict[str, Any]:
    """Return the contents of `TIMES`.

    "rows" has an entry for each measured number of rows of a request. Its "times_us" maps `PLAIN` and every fp8 mode to
    times in microseconds.
    """
    return json.loads(TIMES.read_text())


def cost_of_conversion(cache_format: CacheFormat, fp8_mode: str, num_heads: int) -> str | None:
    """Return in words how much longer a decode in the mode `converted` takes than over a cache in 16 bits.

    The text also names the fastest other mode. The result is None if the mode is not
    `converted`, if the format is not `fp8_e4m3`, or if `converted` was not measured to be slower.

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
    times = row["times_us"]
    ratio = times[CONVERTED] / times[PLAIN]
    if ratio <= 1:
        return None
    tokens = -(-row["rows"] // num_heads)
    since = f"from {tokens} query tokens of a request on, " if tokens > 1 else ""
    others = {mode: time for mode, time in times.items() if mode not in (PLAIN, CONVERTED)}
    fastest = min(others, key=others.get)
    return (
        f"{since}fp8_mode {CONVERTED} takes {ratio:.2f} x the time of a decode over a cache in 16 bits, and fp8_mode "
        f"{fastest} takes {others[fastest] / times[PLAIN]:.2f} x "
        f"(measured with {row['rows']} rows for each of {recorded['shape']} on {recorded['gpu']})"
    )
