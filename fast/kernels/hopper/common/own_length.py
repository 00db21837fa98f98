"""Functions that compute the splits of a request from the length of this request alone (batch-invariant decode).

The splits of a request depend neither on other requests nor on the number of programs. The sums of a request are
therefore computed in the same order, and give the same bits, in every batch.
"""

from __future__ import annotations

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

TILE = gl.constexpr(64)  # keys of a tile


@gluon.jit
@no_type_check
def ceil_div(a, b):
    """Return a / b, rounded up."""
    return (a + b - 1) // b


@gluon.jit
@no_type_check
def planned_tiles(length):
    """Return the number of tiles of a request, as `plan_decode` counts tiles; no int32 length causes an overflow."""
    return (gl.maximum(length, 1) - 1) // TILE + (length > 0).to(gl.int32)


@gluon.jit
@no_type_check
def invariant_split_tiles(tiles, rule):
    """Return the number of tiles of a split; see `reference.interfaces.invariant_split_tiles`."""
    split_tiles = gl.maximum(gl.minimum(ceil_div(tiles, rule.small_splits), rule.large_tiles), rule.small_tiles)
    split_tiles = gl.maximum(split_tiles, ceil_div(tiles, rule.max_splits))
    split_tiles += split_tiles % 2
    return split_tiles


@gluon.jit
@no_type_check
def own_splits(lens, plan):
    """Return two numbers: the tiles of one split of a request, and the splits of the request.

    Keys beyond `max_keys` belong to no split. A request without keys has one split without tiles.
    """
    split_tiles = invariant_split_tiles(planned_tiles(lens.length), plan.rule)
    return split_tiles, gl.maximum(ceil_div(planned_tiles(lens.readable), split_tiles), 1)


@gluon.jit
@no_type_check
def record_progress(request, row_block, begin, end, exists, split_tiles, splits, plan, num_requests):
    """Record (combined, total) split counts for the combine kernel; return the partial index of this work item.

    Only the work item with the request's first split and first row block records the counts.

    | splits of the work item | partial index |
    |---|---|
    | all splits of the request | -1: the program writes the output |
    | the first split of the request, but not all splits | the first index of the request |
    | only later splits | the index of the first split of the work item |

    Args:
        request: index of the request.
        row_block: index of the row block in the request.
        begin: first tile of the work item.
        end: end of the work item's tiles, exclusive.
        exists: True if the work item exists and this program has to record its counts.
        split_tiles: tiles of a split.
        splits: splits of the request.
        plan: `SplitPlan`.
        num_requests: B.
    """
    ended = ceil_div(end, split_tiles)
    first = exists & (begin == 0) & (row_block == 0)
    gl.store(plan.progress + 2 * request, ended, mask=first)
    gl.store(plan.progress + 2 * request + 1, splits, mask=first)
    partial = request * (plan.num_partials // num_requests) + begin // split_tiles
    return gl.where((begin == 0) & (ended >= splits), -1, partial)
