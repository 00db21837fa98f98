"""Measured times of backends for the attention of prefills, from which an automatic choice takes the fastest backend.

`python -m tests.benchmarks.backends` measures the times. `fast/assets/backends` has one file for each compute
capability on which they were measured, such as "9.0.json". A row of a file has the sizes of a call and a time for each
backend. A call takes the times of the row with the nearest sizes among the rows with the same mask, dtype and head
dims. All files were measured with the head dims of DeepSeek-V3. For other head dims and dtypes, priority decides.
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
# head dims with which `python -m tests.benchmarks.backends` measures every row
MEASURED_DIMS = (("qk_head_dim", 192), ("v_head_dim", 128))


class MeasuredRow(NamedTuple):
    """The times of all backends for one call of `flash_attn_varlen`.

    Attributes:
        causal: whether the call has a causal mask.
        sizes: sizes of the call.
        times_us: mapping from the name of a backend to its time in microseconds.
        dtype: dtype of the queries and keys.
        head_dims: head dims of the call (`KernelRequest.head_dims`).
    """

    causal: bool
    sizes: AttentionSizes
    times_us: Mapping[str, float]
    dtype: torch.dtype = torch.bfloat16
    head_dims: tuple[tuple[str, int], ...] = MEASURED_DIMS

    @property
    def shape(self) -> str:
        """Return the sizes in words, such as "4 x 2048 new tokens, 128 heads"; 4 is the number of requests."""
        context = "" if self.causal else f" over {self.sizes.key_len} tokens of context"
        return f"{self.sizes.requests} x {self.sizes.query_len} new tokens{context}, {self.sizes.heads} heads"

    def serves(self, request: KernelRequest) -> bool:
        """Return whether the times hold for a call: the mask, the dtype and the head dims are those of the row."""
        causal = request.mask == "causal"
        return (self.causal, self.dtype, dict(self.head_dims)) == (causal, request.dtype, dict(request.head_dims))


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
    dtype = getattr(torch, found["dtype"])
    for row in found["rows"]:
        dims = row["dims"]
        sizes = AttentionSizes.rounded(dims["B"], dims["N"], dims["T"], dims["C"] or dims["T"])
        times = {name: found["median_us"] for name, found in row["backends"].items()}
        rows.append(MeasuredRow(not dims["C"], sizes, times, dtype))
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
        The name with the smallest sum of expected times. The first name if the first backend has no measured time for a
        request, if a request has no sizes, or if a request has a dtype or head dims that were not measured.
    """
    known = expected_times(names, requests)
    return min(known, key=known.get) if known else names[0]


def expected_times(names: Sequence[str], requests: Sequence[KernelRequest]) -> dict[str, float]:
    """Return the sums of expected times from which `fastest` chooses, in microseconds by the name of the backend.

    The result is empty if priority decides: there is only one name, a request has no sizes, or the first backend has no
    time for a request, for example because the dtype or the head dims were not measured.
    """
    if len(names) == 1 or any(request.sizes is None for request in requests):
        return {}
    times = {name: [_expected_us(name, request) for request in requests] for name in names}
    known = {name: sum(found) for name, found in times.items() if None not in found}
    return known if names[0] in known else {}


def _expected_us(name: str, request: KernelRequest) -> float | None:
    """Return the time of the nearest row that serves a request, scaled by the work; None if there is no such time."""
    table = table_of(request.device)
    rows = [] if table is None else [row for row in table.rows if row.serves(request)]
    if not rows:
        return None
    nearest = min(rows, key=lambda row: _distance(row.sizes, request.sizes))
    time = nearest.times_us.get(name)
    return None if time is None else time * math.prod(request.sizes) / math.prod(nearest.sizes)


def _distance(one: AttentionSizes, other: AttentionSizes) -> float:
    """Return the sum of the distances of all sizes, in powers of two."""
    return sum(abs(math.log2(a / b)) for a, b in zip(one, other, strict=True))
