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
        self,
        query_len: int,
        num_programs: int | None,
        costs: ScheduleCosts | None,
        batch_invariant: bool,
        backend: BackendChoice,
    ) -> ProgramsAndCosts:
        """Return the given values, and the device's own (`decode_programs`, `schedule_costs`) in place of None.

        No backend has to serve these two ops. Where none does, nothing is planned by default, and costs are neutral.

        Args:
            query_len: query tokens of the longest decode.
            num_programs: programs of a schedule; None for those of the device.
            costs: costs of a schedule; None for those of the device.
            batch_invariant: whether decodes are cut by their own length. If not, and `num_programs` is 0, nothing
                reads the costs, and neutral ones are returned without asking a backend.
            backend: name of a backend for each of the two ops, or None for the choice by capability.
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


@functools.lru_cache(maxsize=1024)
def _of_device(layer: DecodeLayer, query_len: int, named) -> ProgramsAndCosts:
    """Return both, with one lookup: every step of a builder asks."""
    return ProgramsAndCosts(_programs_of_device(layer, query_len, named), _costs_of_device(layer, named))


@functools.lru_cache(maxsize=1024)
def _programs_of_device(layer: DecodeLayer, query_len: int, named) -> int:
    """Return `decode_programs` of the layer; 0 where no backend serves that op."""
    try:
        return decode_programs(**_arguments(layer, named), query_len=query_len)
    except UnsupportedConfiguration:
        if _is_named("decode_programs", named):
            raise
        return 0


@functools.lru_cache(maxsize=1024)
def _costs_of_device(layer: DecodeLayer, named) -> ScheduleCosts:
    """Return `schedule_costs` of the layer; the neutral ones where no backend serves that op."""
    try:
        return schedule_costs(**_arguments(layer, named))
    except UnsupportedConfiguration:
        if _is_named("schedule_costs", named):
            raise
        return NEUTRAL_COSTS


def _is_named(op: str, named: tuple[tuple[str, str], ...] | None) -> bool:
    """Return whether the user bound the op to a backend; the user then sees why that backend refuses."""
    return named is not None and op in dict(named)


def _arguments(layer: DecodeLayer, named: tuple[tuple[str, str], ...] | None) -> dict[str, Any]:
    """Return the keyword arguments of the two ops."""
    return {**layer._asdict(), "backend": None if named is None else dict(named)}


def forget_choices() -> None:
    """Drop every kept answer: backends were registered or removed."""
    for kept in (_of_device, _programs_of_device, _costs_of_device):
        kept.cache_clear()


on_change(forget_choices)
