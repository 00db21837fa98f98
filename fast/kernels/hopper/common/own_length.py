"""Functions that compute the splits of a request from the length of this request alone (batch-invariant decode).

A split is consecutive tiles (64 keys each) of one request that are attended independently of the request's other tiles.
In a batch-invariant decode, the splits of a request depend neither on other requests nor on the number of programs. The
sums of a request are therefore computed in the same order, and give the same bits, in every batch.
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
    """Return the number of tiles of a request, computed as in `plan_decode`; no int32 length causes an overflow."""
    return (gl.maximum(length, 1) - 1) // TILE + (length > 0).to(gl.int32)


@gluon.jit
@no_type_check
def invariant_split_tiles(tiles, rule):
    """Return the number of tiles of a split; `reference.interfaces.invariant_split_tiles` explains the rule."""
    split_tiles = gl.maximum(gl.minimum(ceil_div(tiles, rule.small_splits), rule.large_tiles), rule.small_tiles)
    split_tiles = gl.maximum(split_tiles, ceil_div(tiles, rule.max_splits))
    split_tiles += split_tiles % 2
    return split_tiles


@gluon.jit
@no_type_check
def own_splits(lens, plan):
    """Return the number of tiles in a split of a request, and the number of splits of the request.

    Keys beyond `max_keys` belong to no split. A request without keys has one split with no tile.
    """
    split_tiles = invariant_split_tiles(planned_tiles(lens.length), plan.rule)
    return split_tiles, gl.maximum(ceil_div(planned_tiles(lens.readable), split_tiles), 1)


@gluon.jit
@no_type_check
def record_progress(request, row_block, begin, end, exists, split_tiles, splits, plan, num_requests):
    """Record two split counts of a request for the combine kernel; return the partial index of this work item.

    The counts are the number of splits that this program combines, and the number of all splits of the request. Only
    the work item with the first split and the first row block records them.

    | splits of the work item | partial index |
    |---|---|
    | all splits of the request | -1: the program writes the output |
    | the first split of the request, but not all splits | the first partial index of the request |
    | only later splits | the partial index of the first split of the work item |

    Args:
        request: index of the request.
        row_block: index of the row block in the request.
        begin: first tile of the work item.
        end: end of the work item's tiles, exclusive.
        exists: False if this program must not record counts.
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
