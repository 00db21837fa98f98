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

    @property
    def shape(self) -> str:
        """Return the sizes in words, such as "4 x 2048 new tokens, 128 heads"; 4 is the number of requests."""
        context = "" if self.causal else f" over {self.sizes.key_len} tokens of context"
        return f"{self.sizes.requests} x {self.sizes.query_len} new tokens{context}, {self.sizes.heads} heads"


class MeasuredTable(NamedTuple):
    """The measured times for one compute capability.

    Attributes:
        gpu: name of the GPU on which the times were measured.
        rows: one row for each measured call.
    """

    gpu: str
    rows: tuple[MeasuredRow, ...]


def read_table(path: Path) -> MeasuredTable:
    """Return the contents of a file that `python -m tests.benchmarks.backends --json` wrote."""
    found, rows = json.loads(path.read_text()), []
    for row in found["rows"]:
        dims = row["dims"]
        sizes = AttentionSizes.rounded(dims["B"], dims["N"], dims["T"], dims["C"] or dims["T"])
        times = {name: found["median_us"] for name, found in row["backends"].items()}
        rows.append(MeasuredRow(not dims["C"], sizes, times))
    return MeasuredTable(found["gpu"], tuple(rows))


@functools.cache
def table_of(device: torch.device) -> MeasuredTable | None:
    """Return the measured times for the compute capability of a device; None if there are none."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    path = TABLES / "{}.{}.json".format(*torch.cuda.get_device_capability(device))
    return read_table(path) if path.exists() else None


def fastest(names: Sequence[str], requests: Sequence[KernelRequest]) -> str:
    """Return the backend that is expected to serve all requests in the least time.

    Args:
        names: names of backends that can serve the requests, the highest priority first; at least one.
        requests: the requests.

    Returns:
        The name with the smallest sum of expected times. If the first backend has no measured time for a request, or
        if a request has no sizes, the first name.
    """
    known = expected_times(names, requests)
    return min(known, key=known.get) if known else names[0]


def expected_times(names: Sequence[str], requests: Sequence[KernelRequest]) -> dict[str, float]:
    """Return the sums of expected times from which `fastest` chooses, in microseconds by the name of the backend.

    The result is empty if priority decides: there is only one name, the first backend has no measured time for a
    request, or a request has no sizes.
    """
    if len(names) == 1 or any(request.sizes is None for request in requests):
        return {}
    times = {name: [_expected_us(name, request) for request in requests] for name in names}
    known = {name: sum(found) for name, found in times.items() if None not in found}
    return known if names[0] in known else {}


def _expected_us(name: str, request: KernelRequest) -> float | None:
    """Return the time of the nearest row with the same mask, scaled by the work; None if the backend has no time."""
    causal = request.mask == "causal"
    table = table_of(request.device)
    rows = [] if table is None else [row for row in table.rows if row.causal == causal]
    if not rows:
        return None
    nearest = min(rows, key=lambda row: _distance(row.sizes, request.sizes))
    time = nearest.times_us.get(name)
    return None if time is None else time * math.prod(request.sizes) / math.prod(nearest.sizes)


def _distance(one: AttentionSizes, other: AttentionSizes) -> float:
    """Return the sum of the distances of all sizes, in powers of two."""
    return sum(abs(math.log2(a / b)) for a, b in zip(one, other, strict=True))
