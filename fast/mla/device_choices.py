"""What a device's backends say of a decode, asked once and kept: programs of a schedule, and what it reckons with."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from reference.interfaces import NEUTRAL_COSTS, CacheFormat, MLAConfig, ScheduleCosts, UnsupportedConfiguration

from ..backends import BackendChoice, on_change
from .decode import decode_programs, schedule_costs


class ProgramsAndCosts(NamedTuple):
    """Programs that a schedule cuts a decode over, 0 for none, and what it reckons with."""

    num_programs: int
    costs: ScheduleCosts


class DecodeLayer(NamedTuple):
    """What decides which decode kernel serves a builder's layers, besides the query length.

    Attributes:
        config: the layer, with as many heads as its decode has.
        device: where it runs.
        dtype: of queries.
        block_size: tokens a block.
        cache_format: of the cache.
    """

    config: MLAConfig
    device: torch.device
    dtype: torch.dtype
    block_size: int
    cache_format: CacheFormat

    def programs_and_costs(
        self, query_len: int, num_programs: int | None, costs: ScheduleCosts | None, backend: BackendChoice
    ) -> ProgramsAndCosts:
        """What is given, and the device's own (`decode_programs`, `schedule_costs`) where that is None.

        No backend has to serve these two ops. Where none does, nothing is planned by default, and costs are neutral.
        """
        named = None if backend is None else tuple(sorted(backend.items()))
        if num_programs is None:
            num_programs = _kept_programs(self, query_len, named)
        return ProgramsAndCosts(num_programs, _kept_costs(self, named) if costs is None else costs)


@functools.lru_cache(maxsize=1024)
def _kept_programs(layer: DecodeLayer, query_len: int, named) -> int:
    """`decode_programs`, kept, for every step of a builder asks for it; 0 where no backend serves it."""
    try:
        return decode_programs(**_asked(layer, named), query_len=query_len)
    except UnsupportedConfiguration:
        if _is_named("decode_programs", named):
            raise
        return 0


@functools.lru_cache(maxsize=1024)
def _kept_costs(layer: DecodeLayer, named) -> ScheduleCosts:
    """`schedule_costs`, kept likewise; the neutral ones where no backend serves it."""
    try:
        return schedule_costs(**_asked(layer, named))
    except UnsupportedConfiguration:
        if _is_named("schedule_costs", named):
            raise
        return NEUTRAL_COSTS


def _is_named(op: str, named: tuple[tuple[str, str], ...] | None) -> bool:
    """Whether the user bound the op to a backend: then a refusal is the user's to see."""
    return named is not None and op in dict(named)


def _asked(layer: DecodeLayer, named: tuple[tuple[str, str], ...] | None) -> dict[str, Any]:
    return {**layer._asdict(), "backend": None if named is None else dict(named)}


on_change(_kept_programs.cache_clear)
on_change(_kept_costs.cache_clear)
