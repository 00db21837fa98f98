"""How the keys of a decode are cut over programs: the schedule, its costs, and the choice whether one pays."""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields

import torch
from jaxtyping import Int32
from torch import Tensor

from .checks import check, check_flag, check_int, check_not_negative, check_tensor, check_type

DECODE_TILE = 64  # keys in a tile of the decode schedule, whatever the page


@dataclass(frozen=True)
class InvariantCut:
    """How requests are cut under `batch_invariant`: into small splits, then larger ones, then more of those.

    Attributes:
        small_tiles: tiles of a small split, an even number.
        small_splits: of a request at most; a longer one has as many, of more tiles each,
        large_tiles: up to so many, an even number; a longer one has more splits of that size,
        max_splits: up to so many, beyond which their size grows again.

    Raises:
        ValueError: a number below 1; tiles that are odd, or fewer in a large split than in a small one; fewer splits at
            most than small ones.
    """

    small_tiles: int
    small_splits: int
    large_tiles: int
    max_splits: int

    def __post_init__(self):
        for field in fields(self):
            check_int(field.name, getattr(self, field.name))
        for field in ("small_tiles", "large_tiles"):  # kernels take tiles in pairs
            check(getattr(self, field) % 2 == 0, field, "an even number", getattr(self, field))
        check(self.small_tiles <= self.large_tiles, "large_tiles", f"at least {self.small_tiles}", self.large_tiles)
        check(self.small_splits <= self.max_splits, "max_splits", f"at least {self.small_splits}", self.max_splits)

    @property
    def numbers(self) -> tuple[int, int, int, int]:
        """The four numbers in the order of the fields, as kernels and ops take them."""
        return self.small_tiles, self.small_splits, self.large_tiles, self.max_splits


@functools.lru_cache(maxsize=64)
def invariant_cut(small_tiles: int, small_splits: int, large_tiles: int, max_splits: int) -> InvariantCut:
    """Return `InvariantCut` of the four numbers, checked at the first call with these numbers only.

    Ops receive a cut as four numbers at every call.

    Raises:
        ValueError: as `InvariantCut`.
    """
    return InvariantCut(small_tiles, small_splits, large_tiles, max_splits)


NEUTRAL_CUT = InvariantCut(small_tiles=8, small_splits=16, large_tiles=32, max_splits=64)  # powers of two


def invariant_split_tiles(num_tiles: int, cut: InvariantCut) -> int:
    """Tiles of a split under `batch_invariant`, from the request's own length and the cut alone; an even number.

    Raises:
        ValueError: a number of tiles below 0.
    """
    check(num_tiles >= 0, "num_tiles", "an int >= 0", num_tiles)
    grown = min(cut.large_tiles, -(-num_tiles // cut.small_splits))
    tiles = max(cut.small_tiles, grown, -(-num_tiles // cut.max_splits))
    return tiles + tiles % 2  # kernels take them in pairs


def most_invariant_splits(num_tiles: int, cut: InvariantCut) -> int:
    """Most splits of any request of at most so many tiles under `batch_invariant`; at least 1."""
    small = min(cut.small_splits, -(-num_tiles // cut.small_tiles))
    return max(1, small, min(cut.max_splits, -(-num_tiles // cut.large_tiles)))


@dataclass(frozen=True)
class ScheduleCosts:
    """What a decode kernel's work costs besides its tiles: what a schedule reckons with.

    The unit is the time that the kernel takes for one tile (`DECODE_TILE` keys of a request). The defaults are round
    numbers that were measured on no chip. A backend has a record of its own, measured beside its kernels
    (`fast.schedule_costs`); it depends on the number of heads.

    Attributes:
        request_cost: of starting on a request: its queries, its results and the way into the kernel's loop.
        split_cost: of one split under `batch_invariant`; the first split of a request is part of `request_cost`.
        cut: how requests are cut under `batch_invariant`.
        invariant_starts: how many times `request_cost` a request and a program are counted under `batch_invariant` by
            `choose_schedule`, since such a schedule starts on splits.

    Raises:
        TypeError: a cut that is no `InvariantCut`.
        ValueError: a cost below 0, or `invariant_starts` below 1.
    """

    request_cost: int = 4
    split_cost: int = 2
    cut: InvariantCut = NEUTRAL_CUT
    invariant_starts: int = 2

    def __post_init__(self):
        check_int("request_cost", self.request_cost, 0)
        check_int("split_cost", self.split_cost, 0)
        check_type("cut", self.cut, InvariantCut)
        check_int("invariant_starts", self.invariant_starts)


NEUTRAL_COSTS = ScheduleCosts()


def check_schedule_costs(costs: ScheduleCosts | None, name: str = "costs") -> ScheduleCosts:
    """Check costs of a schedule; the neutral ones where None is given.

    Raises:
        TypeError: neither a `ScheduleCosts` nor None.
    """
    check_type(name, costs, (ScheduleCosts, type(None)), "a ScheduleCosts or None")
    return NEUTRAL_COSTS if costs is None else costs


@dataclass(frozen=True, eq=False)
class DecodeSchedule:
    """How decode work is cut over programs: a plan of time, never of values (FlashMLA's tile schedule).

    A tile is `DECODE_TILE` keys of one request, whatever the page. A program takes the tiles from its first to its
    last, request after request; what it takes of one request is one split of it, or, with `batch_invariant`, several.

    `DecodeSchedule(batch_invariant=True)` plans nothing: requests are cut by their own length, and the kernel spreads
    them evenly, as it does without a schedule.

    Attributes:
        tile_ranges: [programs, 5]; first request, last request (inclusive), first tile in the first request, last tile
            in the last one (exclusive), first split in the first one. A program without work has (B, B - 1, 0, 0, 0).
            A kernel may move a cut within a request by a tile, on both sides alike. None: nothing is planned.
        split_offsets: [B + 1], prefix sum of the splits of each request; a request without keys has none. None as well.
        batch_invariant: requests are cut every `invariant_split_tiles` tiles, not where programs change.
        cut: the numbers of `invariant_split_tiles`, for the kernel too; nothing asks for them without
            `batch_invariant`.
    """

    tile_ranges: Int32[Tensor, "programs 5"] | None = None
    split_offsets: Int32[Tensor, " offsets"] | None = None
    batch_invariant: bool = False
    cut: InvariantCut = NEUTRAL_CUT


@dataclass(frozen=True)
class ScheduleChoice:
    """Whether a step's decode is planned over programs, and the numbers that decide it.

    Attributes:
        num_programs: programs that a schedule has; 0 where none was considered: nobody asked for one, a shared prefix
            is attended apart, or the queries are longer than the threshold.
        requests: requests that have keys.
        longest_tiles: tiles of the longest request.
        total_tiles: tiles of all requests together.
        planned: the decode has a schedule; otherwise the kernel cuts every request into equally many splits.
    """

    num_programs: int
    requests: int
    longest_tiles: int
    total_tiles: int
    planned: bool


NEVER_PLANNED = ScheduleChoice(num_programs=0, requests=0, longest_tiles=0, total_tiles=0, planned=False)


def choose_schedule(
    seq_lens: Int32[Tensor, " B"],
    num_programs: int,
    costs: ScheduleCosts | None = None,
    batch_invariant: bool = False,
) -> ScheduleChoice:
    """Choose between a schedule and the kernel's own cut, from lengths that the host knows.

    Without a schedule a kernel cuts every request into equally many splits, so the decode takes about as long as if
    every request were the longest: a schedule saves B * longest - total tiles. It costs about one more start
    (`request_cost`) for each request and each program, and `invariant_starts` times as much where it is
    batch-invariant. The decode is planned where the schedule saves more than it costs (`docs/log.md` has the
    measurement).

    Args:
        seq_lens: [B], keys of each request, on the CPU.
        num_programs: programs of a schedule; 0 never plans, and with 1 there is nothing to share out.
        costs: of the kernel that decodes; None for the neutral ones.
        batch_invariant: of the schedule.

    Returns:
        The choice and its numbers.

    Raises:
        TypeError: costs of another type.
        ValueError: a tensor that does not fit; a number below its least value.
    """
    check_tensor("seq_lens", seq_lens, ("B",), (torch.int32,), torch.device("cpu"))
    check_int("num_programs", num_programs, 0)
    check_flag("batch_invariant", batch_invariant)
    costs = check_schedule_costs(costs)
    start = costs.request_cost * (costs.invariant_starts if batch_invariant else 1)
    if num_programs == 0 or seq_lens.numel() == 0:
        return NEVER_PLANNED
    check_not_negative("seq_lens", seq_lens)
    tiles = seq_lens.long().add_(DECODE_TILE - 1).div_(DECODE_TILE, rounding_mode="floor")
    longest, total, requests = int(tiles.max()), int(tiles.sum()), int(tiles.count_nonzero())
    pays = requests * longest - total > start * (requests + num_programs)
    return ScheduleChoice(num_programs, requests, longest, total, num_programs > 1 and pays)
