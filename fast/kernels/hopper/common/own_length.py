"""Requests that are split by their own length: neither neighbours nor programs then change the order of their sums."""

from __future__ import annotations

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

TILE = gl.constexpr(64)  # keys


@gluon.jit
@no_type_check
def ceil_div(a, b):
    """Return the quotient, rounded up."""
    return (a + b - 1) // b


@gluon.jit
@no_type_check
def planned_tiles(length):
    """Return the tiles of a length, as `plan_decode` counts them; the longest length does not overflow."""
    return (gl.maximum(length, 1) - 1) // TILE + (length > 0).to(gl.int32)


@gluon.jit
@no_type_check
def invariant_split_tiles(tiles, rule):
    """Return the tiles of a split, as the contract's function of this name counts them."""
    split_tiles = gl.maximum(gl.minimum(ceil_div(tiles, rule.small_splits), rule.large_tiles), rule.small_tiles)
    split_tiles = gl.maximum(split_tiles, ceil_div(tiles, rule.max_splits))
    split_tiles += split_tiles % 2
    return split_tiles


@gluon.jit
@no_type_check
def own_splits(lens, plan):
    """Return the tiles of a split of a request and how many splits it has.

    Keys beyond `max_keys` belong to no split; a request without keys has one split all the same.
    """
    split_tiles = invariant_split_tiles(planned_tiles(lens.length), plan.rule)
    return split_tiles, gl.maximum(ceil_div(planned_tiles(lens.readable), split_tiles), 1)


@gluon.jit
@no_type_check
def record_progress(request, row_block, begin, end, there, split_tiles, splits, plan, num_requests):
    """Record (combined, total) split counts for the combine kernel; return the partial index of this work item.

    An item that begins with the request's first split has the request's first index, or -1 where it has all splits.
    Any other has the index of its first split.
    """
    ended = ceil_div(end, split_tiles)
    first = there & (begin == 0) & (row_block == 0)
    gl.store(plan.progress + 2 * request, ended, mask=first)
    gl.store(plan.progress + 2 * request + 1, splits, mask=first)
    partial = request * (plan.num_partials // num_requests) + begin // split_tiles
    return gl.where((begin == 0) & (ended >= splits), -1, partial)
