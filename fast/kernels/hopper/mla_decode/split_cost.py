"""What splits cost on an H200, and how many cost least. Figures and choices of one chip lie beside its kernels."""

from __future__ import annotations

import functools
from typing import NamedTuple

import triton

from reference.interfaces import DECODE_TILE, InvariantCut, invariant_split_tiles

from ...schedule_costs import measured_schedule_costs
from .main_loops.tile_scores import ROWS


class LoopCost(NamedTuple):
    """What a main loop costs, measured on an H200.

    Attributes:
        tile_ns: nanoseconds for a tile of keys in one program.
        least_tiles: fewest tiles that show in its time.
        item_ns: nanoseconds for a work item besides its tiles.
    """

    tile_ns: int
    least_tiles: int
    item_ns: int


FEW_ROWS_COST, MANY_ROWS_COST = LoopCost(1500, 1, 5000), LoopCost(2000, 4, 6500)  # row blocks of 16 and 32, and of 64
MEMORY_TILE_NS = 17  # a tile's bytes over the bandwidth of the whole device
COMBINE_NS, COMBINED_ROW_NS = 3000, 1.5  # a combine, and each row of a split in it


@functools.lru_cache(maxsize=4096)
def best_num_splits(items: int, rows: int, keys: int, program_rows: int, row_blocks: int, processors: int) -> int:
    """Return how many splits each request's keys get, from bounds that the host knows: the fewest that cost least.

    Args:
        items: of one split: requests by row blocks.
        rows: of all requests.
        keys: of the longest request.
        program_rows: rows that a program computes at a time.
        row_blocks: of a request, whose programs read the same tiles.
        processors: of the device.
    """
    tiles = max(1, triton.cdiv(keys, DECODE_TILE))
    many = program_rows == ROWS.value
    loop = MANY_ROWS_COST if many else FEW_ROWS_COST
    step = 2 if many else 1  # tiles are taken in pairs

    def cost(splits: int) -> int | float:
        turns = triton.cdiv(items * splits, processors)
        split_tiles = max(loop.least_tiles, step * triton.cdiv(tiles, step * splits))
        memory_ns = 0 if many else MEMORY_TILE_NS * min(items * splits, processors) / row_blocks
        combine_ns = COMBINE_NS + COMBINED_ROW_NS * splits * rows if splits > 1 else 0
        return turns * (loop.item_ns + split_tiles * max(loop.tile_ns, memory_ns)) + combine_ns

    return min(range(1, max(1, min(triton.cdiv(tiles, step), 2 * processors)) + 1), key=cost)


@functools.lru_cache(maxsize=4096)
def best_num_programs(
    items: int, rows: int, keys: int, heads: int, program_rows: int, processors: int, cut: InvariantCut
) -> int:
    """Return over how many programs to spread the splits of each request, which its own length gives: the cheapest.

    Args:
        items: of one program each: requests by row blocks.
        rows: of all requests.
        keys: of the longest request.
        heads: N.
        program_rows: rows that a program computes at a time.
        processors: of the device.
        cut: how requests are cut by their own length.
    """
    tiles = max(1, triton.cdiv(keys, DECODE_TILE))
    split_tiles = invariant_split_tiles(tiles, cut)
    splits = triton.cdiv(tiles, split_tiles)
    loop = MANY_ROWS_COST if program_rows == ROWS.value else FEW_ROWS_COST
    split_ns = (split_tiles + measured_schedule_costs(heads).split_cost) * loop.tile_ns

    def cost(programs: int) -> int | float:
        taken = triton.cdiv(splits, programs)
        combine_ns = COMBINE_NS + COMBINED_ROW_NS * (splits - taken + 1) * rows if taken < splits else 0
        return triton.cdiv(items * programs, processors) * (loop.item_ns + taken * split_ns) + combine_ns

    return min(range(1, splits + 1), key=cost)
