"""Measured times of backends for the attention of prefills, from which an automatic choice takes the fastest backend.

`python -m tests.benchmarks.backends` measures the times. `fast/assets/backends` has one file for each compute
capability on which they were measured, such as "9.0.json". A row of a file has the sizes of a call and a time for each
backend. A call takes the times of the row with the nearest sizes and the same mask.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from .kernel_request import AttentionSizes, KernelRequest

TABLES = Path(__file__).parents[1] / "assets" / "backends"


class MeasuredRow(NamedTuple):
    """The times of all backends for one call of `flash_attn_varlen`.

    Attributes:
        causal: whether the call has a causal mask.
        sizes: sizes of the call.
        times_us: mapping from the name of a backend to its time in microseconds.
    """

    causal: bool
    sizes: AttentionSizes
    times_us: Mapping[str, float]


def read_table(path: Path) -> tuple[MeasuredRow, ...]:
    """Return the rows of a file that `python -m tests.benchmarks.backends --json` wrote."""
    rows = []
    for row in json.loads(path.read_text())["rows"]:
        dims = row["dims"]
        sizes = AttentionSizes.rounded(dims["B"], dims["N"], dims["T"], dims["C"] or dims["T"])
        times = {name: found["median_us"] for name, found in row["backends"].items()}
        rows.append(MeasuredRow(not dims["C"], sizes, times))
    return tuple(rows)


@functools.cache
def _table_of(device: torch.device) -> tuple[MeasuredRow, ...]:
    """Return the rows for the compute capability of a device; no row for other devices."""
    if device.type != "cuda" or torch.version.hip is not None:
        return ()
    path = TABLES / "{}.{}.json".format(*torch.cuda.get_device_capability(device))
    return read_table(path) if path.exists() else ()


def fastest(names: Sequence[str], requests: Sequence[KernelRequest]) -> str:
    """Return the backend that is expected to serve all requests in the least time.

    Args:
        names: names of backends that can serve the requests, the highest priority first; at least one.
        requests: the requests.

    Returns:
        The name with the smallest sum of expected times. If the first backend has no measured time for a request, or
        if a request has no sizes, the first name.
    """
    if len(names) == 1 or any(request.sizes is None for request in requests):
        return names[0]
    times = {name: [_expected_us(name, request) for request in requests] for name in names}
    known = {name: sum(found) for name, found in times.items() if None not in found}
    return min(known, key=known.get) if names[0] in known else names[0]


def _expected_us(name: str, request: KernelRequest) -> float | None:
    """Return the time of the nearest row with the same mask, scaled by the work; None if the backend has no time."""
    causal = request.mask == "causal"
    rows = [row for row in _table_of(request.device) if row.causal == causal]
    if not rows:
        return None
    nearest = min(rows, key=lambda row: _distance(row.sizes, request.sizes))
    time = nearest.times_us.get(name)
    return None if time is None else time * math.prod(request.sizes) / math.prod(nearest.sizes)


def _distance(one: AttentionSizes, other: AttentionSizes) -> float:
    """Return the sum of the distances of all sizes, in powers of two."""
    return sum(abs(math.log2(a / b)) for a, b in zip(one, other, strict=True))
