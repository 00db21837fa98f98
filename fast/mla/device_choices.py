"""The costs and the number of programs of a schedule on a device; both are computed once and then cached.

A schedule assigns the keys of a decode to programs (kernel instances). `plan_decode` computes a schedule from the
number of programs and the costs. The module also names the numbers of programs that warm-up must launch.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch

from reference.interfaces import (
    CONVERTED,
    DECODE_TILE,
    NEUTRAL_COSTS,
    CacheFormat,
    MLAConfig,
    ScheduleCosts,
    UnsupportedConfiguration,
)

from ..backends import BackendChoice, on_change
from .decode import decode_programs, schedule_costs

# number of requests -> numbers of programs of a schedule that `programs_of_all_variants` returns for every device
PLANNED_PROGRAMS = {1: (1, 16), 2: (4, 18, 40, 200)}
SMALL_ROW_BLOCKS = (16, 32)  # rows of the row blocks that a single request can have if its schedule has few programs


class ProgramsAndCosts(NamedTuple):
    """Number of programs of a schedule (0: no schedule), and the costs from which the schedule is computed."""

    num_programs: int
    costs: ScheduleCosts


class DecodeLayer(NamedTuple):
    """Properties of a layer that determine its decode kernel.

    Attributes:
        config: config of the layer. Under context parallelism, `num_heads` is the number of gathered heads.
        device: device of the decode.
        dtype: dtype of the queries.
        block_size: tokens per block.
        cache_format: format of the cache.
        fp8_mode: fp8 mode of the decode (`mla_decode`).
    """

    config: MLAConfig
    device: torch.device
    dtype: torch.dtype
    block_size: int
    cache_format: CacheFormat
    fp8_mode: str = CONVERTED

    def programs_and_costs(
        self,
        query_len: int,
        num_programs: int | None,
        costs: ScheduleCosts | None,
        backend: BackendChoice,
        *,
        batch_invariant: bool,
    ) -> ProgramsAndCosts:
        """Return the number of programs and the costs of a schedule; replace each None by the value of the device.

        If no backend serves the op `decode_programs`, the number of programs of the device is 0. If no backend serves
        the op `schedule_costs`, the costs of the device are the defaults of `ScheduleCosts`. If `backend` names,
        for one of these ops, a backend that cannot serve the op, the function raises
        `UnsupportedConfiguration` instead.

        Args:
            query_len: length of the longest query in the decode.
            num_programs: number of programs of a schedule; None means the number of the device.
            costs: costs of a schedule; None means the costs of the device.
            batch_invariant: whether the splits of a request depend on its own length only. Such a decode needs the
                costs even without a schedule, because the costs contain the rule of its splits.
            backend: mapping from op to backend name, or None for an automatic choice.
        """
        if num_programs is not None and costs is not None:
            return ProgramsAndCosts(num_programs, costs)
        if num_programs == 0 and not batch_invariant:
            return ProgramsAndCosts(0, NEUTRAL_COSTS)
        named = None if backend is None else tuple(sorted(backend.items()))
        if num_programs is None and costs is None:
            return _of_device(self, query_len, named)
        if num_programs is None:
            return ProgramsAndCosts(_programs_of_device(self, query_len, named), costs)
        return ProgramsAndCosts(num_programs, _costs_of_device(self, named))


@functools.lru_cache(maxsize=1024)  # each update of a captured plan asks again, with the same arguments
def programs_of_one_request(num_programs: int, max_keys: int, costs: ScheduleCosts) -> int:
    """Return how many of `num_programs` programs the schedule of a single request of at most `max_keys` keys needs.

    `plan_decode` divides a single request into equal parts that are not smaller than combining them allows, and every
    part gets one program. The result is the largest number of these parts, for any length up to `max_keys`. (The other
    line of `plan_decode`, the balanced one, could use more programs for some shorter lengths.) A schedule of more
    programs launches programs without work, and its decode cannot have smaller row blocks. Each number of programs
    gives correct results for each length, so a graph that is captured with the result serves all lengths.

    Args:
        num_programs: number of programs that run at the same time; 0 means no schedule, and the result is 0.
        max_keys: upper bound of the keys of the request.
        costs: costs from which the schedule is computed.
    """
    most = min(num_programs, 1)
    for tiles in range(1, -(-max_keys // DECODE_TILE) + 1):
        if most >= num_programs:
            break
        root = math.isqrt(-(-tiles // costs.splits_per_tile) - 1) + 1
        most = max(most, -(-tiles // (root + root % 2 if root > 1 else 1)))
    return min(most, num_programs)


def programs_of_all_variants(requests: int, rows: int, processors: int) -> set[int]:
    """Return numbers of programs of a schedule for which decodes launch all variants of decode and combine kernels.

    The caller adds the number of programs of the device. The decode of a single request may have the smallest row
    blocks whose programs all run at the same time. For 16 and for 32 rows, the result therefore has the largest number
    of programs with which such row blocks are possible.

    Args:
        requests: number of requests.
        rows: rows of each request: heads times query tokens.
        processors: multiprocessors of the device.
    """
    counts = set(PLANNED_PROGRAMS.get(requests, ()))
    if requests == 1:
        counts |= {processors // -(-rows // block) for block in SMALL_ROW_BLOCKS}
    return counts


@functools.lru_cache(maxsize=1024)
def _of_device(layer: DecodeLayer, query_len: int, named) -> ProgramsAndCosts:
    """Return the number of programs and the costs of the device with one look-up in a cache."""
    return ProgramsAndCosts(_programs_of_device(layer, query_len, named), _costs_of_device(layer, named))


@functools.lru_cache(maxsize=1024)
def _programs_of_device(layer: DecodeLayer, query_len: int, named) -> int:
    """Return `decode_programs` for the layer, or 0 if no backend serves `decode_programs`."""
    try:
        return decode_programs(**_arguments(layer, named), query_len=query_len)
    except UnsupportedConfiguration:
        if _is_named("decode_programs", named):
            raise
        return 0


@functools.lru_cache(maxsize=1024)
def _costs_of_device(layer: DecodeLayer, named) -> ScheduleCosts:
    """Return `schedule_costs` for the layer, or the default costs if no backend serves `schedule_costs`."""
    try:
        return schedule_costs(**_arguments(layer, named))
    except UnsupportedConfiguration:
        if _is_named("schedule_costs", named):
            raise
        return NEUTRAL_COSTS


def _is_named(op: str, named: tuple[tuple[str, str], ...] | None) -> bool:
    """Return whether the caller named a backend for the op; the errors of a named backend reach the caller."""
    return named is not None and op in dict(named)


def _arguments(layer: DecodeLayer, named: tuple[tuple[str, str], ...] | None) -> dict[str, Any]:
    """Return the keyword arguments that `decode_programs` and `schedule_costs` have in common."""
    return {**layer._asdict(), "backend": None if named is None else dict(named)}


def forget_choices() -> None:
    """Drop all cached values, because a backend was registered or removed."""
    for kept in (_of_device, _programs_of_device, _costs_of_device):
        kept.cache_clear()


on_change(forget_choices)
