"""Which kernel takes a decode, with how many rows a program, and how requests are assigned to programs."""

from __future__ import annotations

from typing import NamedTuple

import triton

from reference.interfaces import DECODE_TILE, InvariantCut, most_invariant_splits

from ...combine import whole_tiles
from .main_loops.epilogue_16_32 import SHARED_VALUES
from .main_loops.tile_scores import ROWS
from .split_cost import best_num_programs, best_num_splits
from .two_phases.column_blocks import COLUMN_BLOCKS

FEW_ROWS = (16, 32)  # row blocks of `row_blocks_16_32`
MANY_ROWS = ROWS.value
WIDE_LATENT = 512  # with which several programs may compute one split's rows, where there are programs to spare
SLICES = 2  # of the output of a split, for as many programs
FEW_TILES = 4  # of a request that a program takes at least, where there are programs to spare


class Assignment(NamedTuple):
    """How requests are assigned to programs.

    Attributes:
        programs: of the launch.
        num_splits: of each request; where its own length gives the splits, programs over which they are spread, and in
            two phases a bound of the splits.
        num_partials: partial indices.
        partial_rows: rows of all partial outputs.
        most_splits: of a request whose own length gives its splits and whose program combines them; else 0.
        slices: programs that share a split, each with some columns of the output.
        pairs: of tiles of a request, each scored by a program of its own before any is multiplied; 0: in one phase.
    """

    programs: int
    num_splits: int
    num_partials: int
    partial_rows: int
    most_splits: int = 0
    slices: int = 1
    pairs: int = 0


def assign_planned(ranges: int, requests: int, request_rows: int, row_blocks: int, most_splits: int) -> Assignment:
    """Assign requests as a schedule says; each of its programs leaves at most one request unfinished.

    `most_splits` is of a request whose own length gives its splits, and 0 where programs cut requests.
    """
    num_partials = requests * most_splits if most_splits > 0 else requests + ranges
    return Assignment(ranges * row_blocks, 1, num_partials, num_partials * request_rows, most_splits)


def assign_by_length(
    requests: int,
    request_rows: int,
    program_rows: int,
    keys: int,
    heads: int,
    latent: int,
    processors: int,
    cut: InvariantCut,
) -> Assignment:
    """Assign requests that are split by their own length to as many programs as suit the longest request."""
    items = requests * triton.cdiv(request_rows, program_rows)
    most_splits = most_invariant_splits(triton.cdiv(keys, DECODE_TILE), cut)
    pairs = triton.cdiv(keys, 2 * DECODE_TILE)
    wide = program_rows == MANY_ROWS and latent == WIDE_LATENT
    in_two_phases = wide and _scored_at_once(items * pairs, processors)
    num_splits = most_splits
    if not in_two_phases:
        num_splits = best_num_programs(
            items, requests * request_rows, whole_tiles(keys), heads, program_rows, processors, cut
        )
    num_partials = requests * most_splits if num_splits > 1 else 0
    partial_rows = num_partials * request_rows
    if in_two_phases:
        programs = min(processors, items * max(pairs, most_splits * COLUMN_BLOCKS.value))
        return Assignment(programs, num_splits, num_partials, partial_rows, pairs=pairs)
    slices = SLICES if wide and SLICES * items * num_splits <= processors else 1
    programs = min(processors, slices * items * num_splits)
    return Assignment(programs, num_splits, num_partials, partial_rows, most_splits, slices)


def assign_evenly(
    requests: int, rows: int, program_rows: int, row_blocks: int, keys: int, processors: int
) -> Assignment:
    """Assign every request to equally many programs, as many as suit the longest request."""
    num_splits = best_num_splits(requests * row_blocks, rows, whole_tiles(keys), program_rows, row_blocks, processors)
    programs = min(processors, requests * num_splits * row_blocks)
    return Assignment(programs, num_splits, num_splits, num_splits * rows if num_splits > 1 else 0)


def _scored_at_once(score_blocks: int, processors: int) -> bool:
    """Return whether every score block has a program of its own, so that a decode takes two phases."""
    return 0 < score_blocks <= processors


def choose_program_rows(
    planned: bool, batch_invariant: bool, requests: int, request_rows: int, heads: int, keys: int, processors: int
) -> int:
    """Return the rows of a row block.

    Where requests are split by their own length, no neighbour's query length may change which kernel takes a request's
    rows; `row_blocks_16_32` gives a row the same bits among 16 as among 32.
    """
    program_rows = rows_of_a_program(request_rows)
    if batch_invariant:
        return min(program_rows, FEW_ROWS[-1] if heads <= FEW_ROWS[-1] else MANY_ROWS)
    return program_rows if planned else _rows_where_alone(program_rows, requests, request_rows, keys, processors)


def kept_values_of(program_rows: int, latent: int) -> int:
    """Return how many values a program keeps in memory between splits, for want of room in shared memory."""
    values = program_rows * latent
    if program_rows == MANY_ROWS:
        return values
    return 0 if values <= SHARED_VALUES.value else values // 2


def rows_of_a_program(rows: int) -> int:
    """Of a request's rows, how many a program computes at a time."""
    return next((few for few in FEW_ROWS if rows <= few), MANY_ROWS)


def _rows_where_alone(program_rows: int, requests: int, request_rows: int, keys: int, processors: int) -> int:
    """Of a request's rows, how many a program computes at a time where requests are cut into equally many parts.

    Where one request's programs of a few tiles each do not fill the device, more of them with fewer rows do, and leave
    smaller parts. `fast.warmup` launches one request of every length for it.

    Args:
        program_rows: otherwise.
        requests: how many.
        request_rows: of one request.
        keys: of the longest request.
        processors: of the device.
    """
    if requests > 1:
        return program_rows
    splits = max(1, triton.cdiv(keys, FEW_TILES * DECODE_TILE))
    fitting = (few for few in FEW_ROWS if splits * triton.cdiv(request_rows, few) <= processors)
    return min(program_rows, next(fitting, program_rows))
