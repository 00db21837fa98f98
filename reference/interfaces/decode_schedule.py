"""The schedule of a decode (which program of a kernel attends which keys), and the choice whether to use one.

A tile is `DECODE_TILE` consecutive keys of one request. A split is a group of consecutive tiles of a request that
are attended together. If a request has several splits, a combine kernel adds their partial outputs.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields

import torch
from jaxtyping import Int32
from torch import Tensor

from .checks import check, check_flag, check_int, check_not_negative, check_tensor, check_type

DECODE_TILE = 64  # keys in a tile, for every block size of the cache


@dataclass(frozen=True)
class InvariantSplitRule:
    """Four numbers that determine the splits of each request in a `batch_invariant` decode.

    In such a decode a request gets the same bits in every batch, so its splits must depend on its own length alone. For
    longer requests, either the number of splits or their size grows:

    | length of the request | tiles of a split | number of splits |
    |---|---|---|
    | short | `small_tiles` | up to `small_splits` |
    | longer | grows up to `large_tiles` | `small_splits` |
    | longer still | `large_tiles` | up to `max_splits` |
    | longest | grows without limit | `max_splits` |

    `invariant_split_tiles` computes the size of a split from these numbers.

    Attributes:
        small_tiles: number of tiles in the smallest split; an even number, because kernels process tiles in pairs.
        small_splits: largest number of splits of `small_tiles` tiles. Longer requests get larger splits.
        large_tiles: number of tiles up to which the splits then grow, an even number. Longer requests get more splits.
        max_splits: largest number of splits of a request. The longest requests get larger splits again.

    Raises:
        ValueError: a number is below 1; `small_tiles` or `large_tiles` is odd; `large_tiles` is below `small_tiles`;
            `max_splits` is below `small_splits`.
    """

    small_tiles: int
    small_splits: int
    large_tiles: int
    max_splits: int

    def __post_init__(self):
        for field in fields(self):
            check_int(field.name, getattr(self, field.name))
        for field in ("small_tiles", "large_tiles"):  # kernels process tiles in pairs
            check(getattr(self, field) % 2 == 0, field, "an even number", getattr(self, field))
        check(self.small_tiles <= self.large_tiles, "large_tiles", f"at least {self.small_tiles}", self.large_tiles)
        check(self.small_splits <= self.max_splits, "max_splits", f"at least {self.small_splits}", self.max_splits)

    @property
    def numbers(self) -> tuple[int, int, int, int]:
        """Return the four numbers in the order of the fields, as kernels take them."""
        return self.small_tiles, self.small_splits, self.large_tiles, self.max_splits


@functools.lru_cache(maxsize=64)
def invariant_split_rule(small_tiles: int, small_splits: int, large_tiles: int, max_splits: int) -> InvariantSplitRule:
    """Return the `InvariantSplitRule` of four numbers; a later call with the same numbers returns the same object.

    Raises:
        ValueError: for the same reasons as `InvariantSplitRule`.
    """
    return InvariantSplitRule(small_tiles, small_splits, large_tiles, max_splits)


NEUTRAL_SPLIT_RULE = InvariantSplitRule(small_tiles=8, small_splits=16, large_tiles=32, max_splits=64)  # powers of two
ONE_SPLIT_RULE = InvariantSplitRule(small_tiles=2, small_splits=1, large_tiles=2, max_splits=1)  # divides no request


def invariant_split_tiles(num_tiles: int, split_rule: InvariantSplitRule) -> int:
    """Return the number of tiles in each split of a request in a `batch_invariant` decode; an even number.

    Args:
        num_tiles: tiles of the request.
        split_rule: the numbers that determine the splits.

    Raises:
        ValueError: `num_tiles` is below 0.
    """
    check(num_tiles >= 0, "num_tiles", "an int >= 0", num_tiles)
    grown = min(split_rule.large_tiles, -(-num_tiles // split_rule.small_splits))
    tiles = max(split_rule.small_tiles, grown, -(-num_tiles // split_rule.max_splits))
    return tiles + tiles % 2  # kernels process tiles in pairs


def most_invariant_splits(num_tiles: int, split_rule: InvariantSplitRule) -> int:
    """Return the largest number of splits of a request of at most `num_tiles` tiles in a `batch_invariant` decode.

    The result is at least 1. Kernels allocate the buffers of their partial outputs for this number of splits.
    """
    small = min(split_rule.small_splits, -(-num_tiles // split_rule.small_tiles))
    return max(1, small, min(split_rule.max_splits, -(-num_tiles // split_rule.large_tiles)))


@dataclass(frozen=True)
class ScheduleCosts:
    """Costs of a decode kernel from which `plan_decode` and `choose_schedule` estimate times.

    The unit of every cost is the time that the kernel takes for one tile (`DECODE_TILE` keys of a request). The
    defaults are round numbers that were not measured on any hardware. Each backend of `fast` has measured numbers
    (`fast.schedule_costs`), which depend on the number of heads.

    Attributes:
        request_cost: time to start a request: load its queries, fill the pipeline of the kernel and write its output.
        split_cost: time to start another split of the same request in a `batch_invariant` decode. (`request_cost`
            includes the first split.)
        split_rule: rule that divides a request into splits in a `batch_invariant` decode.
        invariant_starts: factor by which `choose_schedule` multiplies `request_cost` for a `batch_invariant` decode. In
            such a decode a program attends whole splits, so the times of the programs differ more.
        splits_per_tile: number of splits of one request that the combine kernel adds in the time of one tile; below
            2^20. `plan_decode` estimates the time of the combine kernel from this number.

    Raises:
        TypeError: `split_rule` is not an `InvariantSplitRule`.
        ValueError: a cost is below 0, `invariant_starts` or `splits_per_tile` is below 1, or
            `splits_per_tile` is not below 2^20.
    """

    request_cost: int = 4
    split_cost: int = 2
    split_rule: InvariantSplitRule = NEUTRAL_SPLIT_RULE
    invariant_starts: int = 2
    splits_per_tile: int = 8

    def __post_init__(self):
        check_int("request_cost", self.request_cost, 0)
        check_int("split_cost", self.split_cost, 0)
        check_type("split_rule", self.split_rule, InvariantSplitRule)
        check_int("invariant_starts", self.invariant_starts)
        check_int("splits_per_tile", self.splits_per_tile, below=2**20)


NEUTRAL_COSTS = ScheduleCosts()


def check_schedule_costs(costs: ScheduleCosts | None, name: str = "costs") -> ScheduleCosts:
    """Return `costs`, or `NEUTRAL_COSTS` (the defaults of `ScheduleCosts`) if `costs` is None.

    Raises:
        TypeError: `costs` is neither a `ScheduleCosts` nor None.
    """
    check_type(name, costs, (ScheduleCosts, type(None)), "a ScheduleCosts or None")
    return NEUTRAL_COSTS if costs is None else costs


@dataclass(frozen=True, eq=False)
class DecodeSchedule:
    """The assignment of a decode's tiles to programs, chosen so that all programs take about the same time.

    A schedule is optional. Without a schedule, a kernel divides every request into the same number of splits. If the
    requests have very different lengths, the programs of short requests then finish early and wait for the programs of
    the longest request. A schedule changes the results by rounding alone. FlashMLA calls a schedule the tile scheduler
    metadata.

    A program attends consecutive tiles: the end of one request, then whole requests, then the beginning of another
    request. The tiles that a program attends in one request are one split of the request. With `batch_invariant` these
    tiles may be several splits.

    A schedule with `batch_invariant=True` may have no tensors. The kernel then divides each request into splits by the
    length of the request (`split_rule`), and distributes the splits evenly over programs.

    Attributes:
        tile_ranges: [programs, 5], the tiles of each program, in these columns: first request, last request
            (inclusive), first tile in the first request, last tile in the last request (exclusive), index of the first
            split in the first request. A program without work has (B, B - 1, 0, 0, 0). If two programs share a request,
            a kernel may move one tile from one program to the other. `tile_ranges` is None if the kernel itself
            distributes the splits over programs (see above).
        split_offsets: [B + 1], prefix sum of the number of splits of each request; a request without keys has no split.
            None if `tile_ranges` is None.
        batch_invariant: whether the splits of a request depend on its own length alone (`invariant_split_tiles`) and
            not on the programs. If True, a request gets the same bits in every batch.
        split_rule: rule that divides a request into splits, for `batch_invariant`.
    """

    tile_ranges: Int32[Tensor, "programs 5"] | None = None
    split_offsets: Int32[Tensor, " offsets"] | None = None
    batch_invariant: bool = False
    split_rule: InvariantSplitRule = NEUTRAL_SPLIT_RULE


# for batch-invariant prefills: no request is divided, so a kernel can choose the rows of a program that are fastest
UNDIVIDED = DecodeSchedule(batch_invariant=True, split_rule=ONE_SPLIT_RULE)


@dataclass(frozen=True)
class ScheduleChoice:
    """The decision whether the decode of a step gets a schedule, and the numbers behind this decision.

    Attributes:
        num_programs: number of programs of the schedule. It is 0 if the caller asked for no schedule, if the step has a
            cascade, or if a query is longer than the builder's `reorder_batch_threshold`.
        requests: number of requests that have keys.
        longest_tiles: tiles of the longest request.
        total_tiles: tiles of all requests together.
        planned: True if the decode has a schedule that assigns tiles to programs. If False, the kernel divides the
            requests into splits itself.
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
    """Decide from the lengths of the requests whether a decode is faster with a schedule.

    Without a schedule the kernel divides every request into the same number of splits. The decode then takes about as
    long as if all requests had the length of the longest request. A schedule therefore saves the time of this number of
    tiles:

        (number of requests that have keys) * (tiles of the longest request) - (tiles of all requests together)

    A schedule costs the time of about `request_cost` tiles for each request and for each program. A batch-invariant
    schedule costs `invariant_starts` times as much. The decode gets a schedule if the schedule saves more than it
    costs. (`docs/log.md` has the measurement of the cost.)

    Args:
        seq_lens: [B], keys of each request, on the CPU.
        num_programs: number of programs of the schedule; 0 or 1 means no schedule.
        costs: costs of the decode kernel; None means the defaults of `ScheduleCosts`.
        batch_invariant: whether a request must get the same bits in every batch.

    Returns:
        The decision and the numbers behind this decision.

    Raises:
        TypeError: `costs` has another type.
        ValueError: `seq_lens` has a wrong shape, dtype or device, or a negative length; `num_programs` is negative.
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
