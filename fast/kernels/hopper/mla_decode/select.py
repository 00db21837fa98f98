"""Choose the kernel of a decode and the number of rows of its row blocks, and assign requests to programs.

A row is one (query token, head) pair. A row block is the rows of one request that a program processes together. A tile
is 64 keys. A split is consecutive tiles of one request that are attended independently of the request's other tiles.
"""

from __future__ import annotations

from typing import NamedTuple

from reference.interfaces import DECODE_TILE, InvariantSplitRule, most_invariant_splits

from ...combine import whole_tiles
from ...integers import cdiv
from .main_loops.epilogue_16_32 import SHARED_VALUES
from .main_loops.row_blocks_16_or_64 import MOST_RANGES
from .main_loops.tile_scores import ROWS
from .split_cost import best_num_programs, best_num_splits
from .two_phases.column_blocks import COLUMN_BLOCKS

FEW_ROWS = (16, 32)  # rows of a row block of `row_blocks_16_32` and `row_blocks_16_32_e4m3`
MANY_ROWS = ROWS.value  # rows of a row block of `row_blocks_64`: 64
WIDE_LATENT = 512  # slices and two phases are used only with this latent width Lkv
SLICES = 2  # programs that share a split, with different output columns, if multiprocessors would otherwise be idle
FEW_TILES = 4  # tiles that `_rows_where_alone` gives each program of a single request


class Assignment(NamedTuple):
    """How requests are assigned to programs.

    Attributes:
        programs: number of programs of the launch.
        num_splits: see the table below.
        num_partials: number of partial indices.
        partial_rows: number of rows of all partial outputs.
        most_splits: upper bound of the splits of a request, if the decode is batch-invariant and has one phase;
            otherwise 0.
        slices: number of programs that share each split; each program computes its own columns of the output.
        pairs: upper bound of the pairs of tiles of a request, if the decode has two phases (`two_phases`); otherwise 0.

    | decode | `num_splits` |
    |---|---|
    | with a schedule | 1, unused |
    | without a schedule, not batch-invariant | number of splits of each request |
    | without a schedule, batch-invariant, one phase | number of programs that share the splits of a request |
    | without a schedule, batch-invariant, two phases | upper bound of the splits of a request |
    """

    programs: int
    num_splits: int
    num_partials: int
    partial_rows: int
    most_splits: int = 0
    slices: int = 1
    pairs: int = 0


def assign_planned(ranges: int, requests: int, request_rows: int, row_blocks: int, most_splits: int) -> Assignment:
    """Return the `Assignment` of a decode with a schedule.

    In a batch-invariant decode, `most_splits` is the upper bound of the splits of a request. Otherwise `most_splits` is
    0, and all tiles of a request that one program attends are one split. For each row block there are `ranges`
    programs, which attend the requests in order. Two consecutive programs share at most one request, so there are fewer
    than `requests + ranges` splits.
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
    split_rule: InvariantSplitRule,
    e4m3: bool = False,
) -> Assignment:
    """Return the `Assignment` of a batch-invariant decode without a schedule; `e4m3`: over a cache in e4m3.

    The number of programs is chosen for `keys`, the upper bound of the keys of a request.
    """
    items = requests * cdiv(request_rows, program_rows)
    most_splits = most_invariant_splits(cdiv(keys, DECODE_TILE), split_rule)
    pairs = cdiv(keys, 2 * DECODE_TILE)
    wide = program_rows == MANY_ROWS and latent == WIDE_LATENT and not e4m3  # kernels of other caches have slices
    in_two_phases = wide and _scored_at_once(items * pairs, processors)
    num_splits = most_splits
    if not in_two_phases:
        num_splits = best_num_programs(
            items, requests * request_rows, whole_tiles(keys), heads, program_rows, processors, split_rule, e4m3
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
    requests: int,
    rows: int,
    program_rows: int,
    row_blocks: int,
    keys: int,
    processors: int,
    e4m3: bool = False,
    prescribed_splits: int | None = None,
) -> Assignment:
    """Return the `Assignment` that gives every request the same number of splits; `e4m3`: over a cache in e4m3.

    The number is `prescribed_splits`. If that is None, the number is chosen for `keys`, the upper bound of the keys of
    a request.
    """
    num_splits = prescribed_splits or best_num_splits(
        requests * row_blocks, rows, whole_tiles(keys), program_rows, row_blocks, processors, e4m3
    )
    programs = min(processors, requests * num_splits * row_blocks)
    return Assignment(programs, num_splits, num_splits, num_splits * rows if num_splits > 1 else 0)


def _scored_at_once(score_blocks: int, processors: int) -> bool:
    """Return whether every score block can have its own program at the same time, as a decode in two phases needs.

    A score block is the scores of one pair of tiles for one row block.
    """
    return 0 < score_blocks <= processors


def choose_program_rows(
    ranges: int,
    batch_invariant: bool,
    requests: int,
    request_rows: int,
    heads: int,
    keys: int,
    processors: int,
    e4m3: bool = False,
) -> int:
    """Return the number of rows of a row block: 16, 32 or 64; over a cache in e4m3 (`e4m3`), 16 or 32.

    The queries are not in e4m3. (A decode with queries in e4m3 always has row blocks of 64 rows.)

    The number of rows also determines the kernel. In a batch-invariant decode, other requests must not change the
    kernel, so the number of heads decides: up to 32 heads take `row_blocks_16_32`, which computes the same bits with 16
    rows as with 32 rows. Over a cache in e4m3, there is one kernel, which also computes the same bits with both.

    `ranges` is the number of programs in the schedule, 0 without a schedule. The choice must not depend on a length:
    a CUDA graph is captured once, and replayed for other lengths.
    """
    program_rows = rows_of_a_program(request_rows, e4m3)
    if batch_invariant:
        return min(program_rows, FEW_ROWS[-1] if heads <= FEW_ROWS[-1] else MANY_ROWS)
    return _rows_where_alone(program_rows, requests, request_rows, keys, processors, ranges)


def chooses_rows_by_length(ranges: int, requests: int) -> bool:
    """Return whether a decode with row blocks of 64 rows is launched as `row_blocks_16_or_64`.

    That kernel uses row blocks of 16 rows if the request turns out to be short. `ranges` is the number of programs in
    the schedule of a decode that is not batch-invariant, and 0 for other decodes.
    """
    return requests == 1 and 0 < ranges <= MOST_RANGES.value


def kept_values_of(program_rows: int, latent: int, e4m3: bool) -> int:
    """Return how many weighted sums a program keeps in global memory from one split to the next.

    For row blocks of 64 rows, and over caches in e4m3, these are all sums. For smaller row blocks over other caches,
    they are half of the sums if the sums do not fit into shared memory; otherwise 0.
    """
    values = program_rows * latent
    if e4m3 or program_rows == MANY_ROWS:
        return values
    return 0 if values <= SHARED_VALUES.value else values // 2


def rows_of_a_program(rows: int, e4m3: bool = False) -> int:
    """Return the number of rows of a row block for a request with `rows` rows.

    The number is 16, 32 or 64; over a cache in e4m3 (`e4m3`), it is 16 or 32.
    """
    return next((few for few in FEW_ROWS if rows <= few), FEW_ROWS[-1] if e4m3 else MANY_ROWS)


def _rows_where_alone(
    program_rows: int, requests: int, request_rows: int, keys: int, processors: int, ranges: int = 0
) -> int:
    """Return the number of rows of a row block in a decode that is not batch-invariant.

    A single request may be too short to fill the device, even with only FEW_TILES tiles per program. Smaller row blocks
    then give more programs. The function chooses the smallest row blocks whose programs can all run at the same time.
    The kernel thus depends on the length of the request. To compile all kernels that may be chosen, `fast.warmup`
    launches single requests of many lengths.

    With a schedule, the number of its programs takes the place of the length. On an H200, planned decodes of 1 x 8192
    took these times (replayed, without the plan; N is the number of heads):

    | N | programs in the schedule | row blocks | us |
    |---|---|---|---|
    | 32 | 64 | 16 instead of 32 rows | 11.8 instead of 12.9 |
    | 64 | 32 | 16 instead of 32 rows | 13.6 instead of 15.7 |
    | 128 | 32 | 32 instead of 64 rows | 16.2 instead of 18.5 |

    A schedule of 33 programs for a request that can use 66 must not be made for the sake of smaller row blocks: it took
    131 instead of 78 us (1 x 131072, N 128).

    Args:
        program_rows: result if there are several requests, or if smaller row blocks would give too many programs.
        requests: number of requests.
        request_rows: upper bound of the rows of a request.
        keys: upper bound of the keys of a request.
        processors: multiprocessors of the device.
        ranges: number of programs in the schedule; 0 without a schedule.
    """
    if requests > 1:
        return program_rows
    splits = ranges if ranges > 0 else max(1, cdiv(keys, FEW_TILES * DECODE_TILE))
    fitting = (few for few in FEW_ROWS if splits * cdiv(request_rows, few) <= processors)
    return min(program_rows, next(fitting, program_rows))
