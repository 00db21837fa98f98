"""Choose the number of splits of a request from costs that were measured on an H200.

A split is consecutive tiles (64 keys each) of one request that are attended independently of the request's other tiles.
A row is one (query token, head) pair, and a row block is 16, 32 or 64 rows of one request. A work item is consecutive
tiles of one request and row block that one program processes.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from reference.interfaces import DECODE_TILE, InvariantSplitRule, invariant_split_tiles

from ...integers import cdiv
from ...schedule_costs import measured_schedule_costs
from .main_loops.tile_scores import ROWS

FEWEST_ROWS = 16  # rows of the smallest row block


class LoopCost(NamedTuple):
    """Times of a main loop in nanoseconds, measured on an H200.

    Attributes:
        tile_ns: time of one program for a tile of 64 keys.
        least_tiles: a work item with fewer tiles takes as long as a work item with `least_tiles` tiles.
        item_ns: time of a work item in addition to the time of its tiles.
        memory_tile_ns: time in which the memory of the device delivers one tile; 0 if this time never limits the loop.
        step: 2 if the loop processes tiles in pairs, otherwise 1.
    """

    tile_ns: int
    least_tiles: int
    item_ns: int
    memory_tile_ns: int
    step: int


# main loop for row blocks of 16 and 32 rows, and main loop for row blocks of 64 rows
FEW_ROWS_COST, MANY_ROWS_COST = LoopCost(1500, 1, 5000, 17, 1), LoopCost(2000, 4, 6500, 0, 2)
# Main loop over caches in e4m3: for row blocks of 16 rows, and of 32 rows. These costs are estimates from these times:
#
#   requests x keys                 | 128 x 4096 | 128 x 16384 | 128 x 4096 | 1 x 8192 | 16 x 4096
#   rows                            | 16         | 16          | 32         | 16       | 16
#   over e4m3, us                   | 80.7       | 297.5       | 106.6      | 10.7     | 23.4
#   row_blocks_16_32, bfloat16, us  | 143.2      | 547.5       | 146.6      | 9.0      | 27.3
#
# With 16 rows, 192 more tiles in each of 128 programs take 216.8 us, which are 1130 ns for a tile, or 9 ns for each
# program; the memory limits both. With 32 rows, 64 tiles take 98 us after the 8.4 us that a launch of 128 programs
# takes in addition to its tiles. A work item takes about 3000 ns more than a work item of `row_blocks_16_32`: it
# converts its queries, and the consumers add their sums.
#
# Row blocks of 64 rows over e4m3 (queries in e4m3) use the costs of row blocks of 32 rows. On an H200, these costs
# chose the fastest of all timed numbers of splits in 14 of 18 rows; the others were 1 to 6 % slower than the fastest.
E4M3_16_ROWS_COST, E4M3_32_ROWS_COST = LoopCost(1100, 2, 8000, 9, 2), LoopCost(1550, 2, 8000, 9, 2)
COMBINE_NS, COMBINED_ROW_NS = 3000, 1.5  # ns of the combine kernel, and additional ns for each row of each split


def cost_of_loop(program_rows: int, e4m3: bool) -> LoopCost:
    """Return the costs of the main loop for row blocks of `program_rows` rows; `e4m3`: over a cache in e4m3."""
    if e4m3:
        return E4M3_16_ROWS_COST if program_rows == FEWEST_ROWS else E4M3_32_ROWS_COST
    return MANY_ROWS_COST if program_rows == ROWS.value else FEW_ROWS_COST


@functools.lru_cache(maxsize=4096)
def best_num_splits(
    items: int, rows: int, keys: int, program_rows: int, row_blocks: int, processors: int, e4m3: bool = False
) -> int:
    """Return into how many splits to divide each request, so that the estimated time is lowest.

    If several numbers give the same time, the function returns the smallest of these numbers. The estimate uses upper
    bounds that the host knows. No length is read from the device.

    Args:
        items: number of (request, row block) pairs; each pair has one work item per split.
        rows: number of rows of all requests.
        keys: upper bound of the keys of a request.
        program_rows: number of rows of a row block.
        row_blocks: number of row blocks of a request. All row blocks of a request read the same tiles.
        processors: multiprocessors of the device.
        e4m3: whether the cache is in e4m3.
    """
    tiles = max(1, cdiv(keys, DECODE_TILE))
    loop = cost_of_loop(program_rows, e4m3)

    def cost(splits: int) -> int | float:
        turns = cdiv(items * splits, processors)
        split_tiles = max(loop.least_tiles, loop.step * cdiv(tiles, loop.step * splits))
        memory_ns = loop.memory_tile_ns * min(items * splits, processors) / row_blocks
        combine_ns = COMBINE_NS + COMBINED_ROW_NS * splits * rows if splits > 1 else 0
        return turns * (loop.item_ns + split_tiles * max(loop.tile_ns, memory_ns)) + combine_ns

    return min(range(1, max(1, min(cdiv(tiles, loop.step), 2 * processors)) + 1), key=cost)


@functools.lru_cache(maxsize=4096)
def best_num_programs(
    items: int,
    rows: int,
    keys: int,
    heads: int,
    program_rows: int,
    processors: int,
    split_rule: InvariantSplitRule,
    e4m3: bool = False,
) -> int:
    """Return how many programs to use for each (request, row block) pair, so that the estimated time is lowest.

    The decode is batch-invariant, so the number of splits is fixed. The programs of a pair divide the pair's splits.

    Args:
        items: number of (request, row block) pairs.
        rows: number of rows of all requests.
        keys: upper bound of the keys of a request.
        heads: N.
        program_rows: number of rows of a row block.
        processors: multiprocessors of the device.
        split_rule: rule that gives the tiles of a split from the length of a request.
        e4m3: whether the cache is in e4m3.
    """
    tiles = max(1, cdiv(keys, DECODE_TILE))
    split_tiles = invariant_split_tiles(tiles, split_rule)
    splits = cdiv(tiles, split_tiles)
    loop = cost_of_loop(program_rows, e4m3)
    split_ns = (split_tiles + measured_schedule_costs(heads, e4m3).split_cost) * loop.tile_ns

    def cost(programs: int) -> int | float:
        taken = cdiv(splits, programs)
        combine_ns = COMBINE_NS + COMBINED_ROW_NS * (splits - taken + 1) * rows if taken < splits else 0
        return cdiv(items * programs, processors) * (loop.item_ns + taken * split_ns) + combine_ns

    return min(range(1, splits + 1), key=cost)
