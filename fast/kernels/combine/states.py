"""Records and functions of Triton kernels for the softmax states of rows: load, add, and add attention sinks.

The docstring of `fast.kernels.combine.kernels` explains partial outputs, partial LSEs and reference scores.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, no_type_check

import triton
import triton.language as tl

LN_2 = tl.constexpr(math.log(2))
# `add_partial` replaces a reference score only if the new reference score is larger by more than this number. Otherwise
# exp2(new reference score - old one) is at most 2^64, far below the largest float32, which is almost 2^128.
REFERENCE_GROWTH = tl.constexpr(64.0)


class Partials(NamedTuple):
    """Pointers to partial outputs and partial LSEs.

    The fields are Triton values inside a kernel, for which no Python type exists.

    Attributes:
        out: pointer to all partial outputs.
        lse: pointer to all partial LSEs: reference scores of all partial indices, then sums of all partial indices.
        indices: number of partial indices.
        rows: number of rows at each partial index.
    """

    out: Any
    lse: Any
    indices: Any
    rows: Any


class RowState(NamedTuple):
    """State of the online softmax of ROWS rows over some keys.

    Attributes:
        largest: [ROWS], reference score of each row, in base 2.
        total: [ROWS], sum of exp2(score - largest).
        weighted: [ROWS, columns], sum of exp2(score - largest) * value. The name `values` is taken: Triton's
            tuples have an attribute of this name.
    """

    largest: Any
    total: Any
    weighted: Any


@triton.jit
@no_type_check  # otherwise the tests' type checker wraps the kernel, and Triton's interpreter finds no module globals
def load_partial(partials, index, held, partial_row, columns, LATENT: tl.constexpr):
    """Load the `RowState` of ROWS rows at one partial index.

    A row whose `held` is False gets the state of a row without keys.
    """
    row = index.to(tl.int64) * partials.rows + partial_row
    largest = tl.load(partials.lse + row, mask=held, other=float("-inf"))
    total = tl.load(partials.lse + partials.indices.to(tl.int64) * partials.rows + row, mask=held, other=0.0)
    offsets = (row * LATENT)[:, None] + columns[None, :]
    values = tl.load(partials.out + offsets, mask=held[:, None] & (columns < LATENT)[None, :], other=0.0)
    return RowState(largest, total, values)


@triton.jit
@no_type_check
def add_partial(before, split):
    """Combine two states of the same rows: `before` over the earlier splits, and `split` over the next split.

    A row keeps the reference score of `before`, unless the reference score of `split` is larger by more than
    REFERENCE_GROWTH.

    The `fma` calls fix the rounding: the product of `split` and its weight is rounded before it is added. Without
    `fma`, the compiler could fuse this product and the sum in one kernel but not in another, with different bits.
    """
    grown = split.largest > before.largest + REFERENCE_GROWTH
    reference = tl.where(grown, split.largest, before.largest)
    old = tl.where(grown, tl.exp2(before.largest - tl.where(grown, split.largest, 0.0)), 1.0)
    new = tl.where(grown, 1.0, tl.exp2(split.largest - tl.where(before.largest == float("-inf"), 0.0, before.largest)))
    total = tl.fma(before.total, old, split.total * new)
    weight = tl.broadcast_to(old[:, None], before.weighted.shape)
    values = tl.fma(before.weighted, weight, split.weighted * new[:, None])
    return RowState(reference, total, values)


@triton.jit
@no_type_check
def add_rounded(before, split, shift, one, held):
    """Add one split to rows whose reference score does not change; return the same bits as `add_partial`.

    Args:
        before: state of the earlier splits.
        split: state of the split to add.
        shift: [ROWS], reference score of `before`, or 0 for a row without keys so far.
        one: 1.0, computed at run time. With a constant, the compiler would fuse the product and the sum.
        held: [ROWS], False for rows that keep the state `before`.
    """
    new = tl.exp2(split.largest - shift)
    added = tl.fma(before.total, tl.broadcast_to(one, before.total.shape), split.total * new)
    total = tl.where(held, added, before.total)
    added = tl.fma(before.weighted, tl.broadcast_to(one, before.weighted.shape), split.weighted * new[:, None])
    return RowState(before.largest, total, tl.where(held[:, None], added, before.weighted))


@triton.jit
@no_type_check
def add_sinks(state, sinks, head, real):
    """Add to each row one more key with value 0, whose score is the attention sink of the row's head.

    Args:
        state: `RowState` of all keys of the rows.
        sinks: [N], natural scores; contiguous.
        head: [ROWS], head of each row.
        real: [ROWS], False for rows that get no sink.
    """
    sink = tl.load(sinks + head, mask=real, other=float("-inf")).to(tl.float32) / LN_2
    largest = tl.maximum(state.largest, sink)
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    decay = tl.exp2(state.largest - shift)
    return RowState(largest, state.total * decay + tl.exp2(sink - shift), state.weighted * decay[:, None])
