"""Combine the partial outputs of a decode: the splits of a row's keys become its output and its LSE.

A partial output of a row is a sum of values weighted by exp2(score - largest), not divided yet, in float32. Its partial
LSE is `largest`, in base 2, and the sum of those weights; `largest` may lie a little below the largest score.

| how requests are split | layout of partial outputs | layout of partial LSEs |
|---|---|---|
| into equally many splits | [splits, T, N, Lkv] | [2, splits, T, N] |
| by a schedule | [partial indices, rows of a request, Lkv] | [2, partial indices, rows] |
| by their own length | the same, and equally many indices for every request | the same, then [B, 2] int32 |

With a schedule, the partial indices of a request begin at its entry of `split_offsets`. A request that is split by its
own length has the indices of its number. The program with its first split combines the splits that follow, as far as it
has them, into the first index; each other split lies at the index of its number. The [B, 2] behind the partial LSEs say
how many splits are combined there, and how many there are.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, no_type_check

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LN_2 = tl.constexpr(math.log(2))
REFERENCE_GROWTH = tl.constexpr(64.0)  # binary orders of magnitude, far from where float32 ends


class Partials(NamedTuple):
    """Where partial outputs lie. The fields are values of a kernel, which no type of Python describes.

    Attributes:
        out: pointer to all partial outputs.
        lse: pointer to all partial LSEs: first `largest`, then the sums.
        indices: how many partial indices there are.
        rows: rows of each.
    """

    out: Any
    lse: Any
    indices: Any
    rows: Any


class RowState(NamedTuple):
    """The softmax of some rows over some keys: largest score in base 2, sum of weights, and weighted sum of values."""

    largest: Any
    total: Any
    weighted: Any  # Triton's tuples have an attribute `values`


class Rows(NamedTuple):
    """Rows of one request: their numbers in it, their tokens, and which of them are no padding rows."""

    number: Any
    token: Any
    real: Any


class CombineTile(NamedTuple):
    """What a program of a combine kernel takes at a time."""

    rows: int
    columns: int
    splits: int
    warps: int


@triton.jit
@no_type_check  # the interpreter needs the source and globals of the kernels themselves
def _combine_partials(
    partials, splits, first_partial, partial_row, real, columns,
    LATENT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Return the state of ROWS rows over their partial outputs from index `first_partial` on, SPLITS at a time."""
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    values = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, splits, SPLITS):
        split = first + tl.arange(0, SPLITS)
        index = first_partial + split
        used = (split < splits) & (index >= 0) & (index < partials.indices)
        row = index.to(tl.int64)[:, None] * partials.rows + partial_row[None, :]  # [SPLITS, ROWS]
        held = used[:, None] & real[None, :]
        split_largest = tl.load(partials.lse + row, mask=held, other=float("-inf"))
        split_total = tl.load(partials.lse + partials.indices.to(tl.int64) * partials.rows + row, mask=held, other=0.0)
        # a split without keys was written too, as zeros, so that no load here waits for its weight
        offsets = (row * LATENT)[:, :, None] + columns[None, None, :]
        split_values = tl.load(
            partials.out + offsets, mask=held[:, :, None] & (columns < LATENT)[None, None, :], other=0.0
        )
        new_largest = tl.maximum(largest, tl.max(split_largest, 0))
        shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        decay, weight = tl.exp2(largest - shift), tl.exp2(split_largest - shift[None, :])
        values = values * decay[:, None] + tl.sum(split_values * weight[:, :, None], 0)
        total = total * decay + tl.sum(split_total * weight, 0)
        largest = new_largest
    return RowState(largest, total, values)


@triton.jit
@no_type_check
def load_partial(partials, index, held, partial_row, columns, LATENT: tl.constexpr):
    """Load the state of ROWS rows at one partial index; rows that are not `held` have seen no key."""
    row = index.to(tl.int64) * partials.rows + partial_row
    largest = tl.load(partials.lse + row, mask=held, other=float("-inf"))
    total = tl.load(partials.lse + partials.indices.to(tl.int64) * partials.rows + row, mask=held, other=0.0)
    offsets = (row * LATENT)[:, None] + columns[None, :]
    values = tl.load(partials.out + offsets, mask=held[:, None] & (columns < LATENT)[None, :], other=0.0)
    return RowState(largest, total, values)


@triton.jit
@no_type_check
def add_partial(before, split):
    """Combine two states of the same rows, relative to the first reference unless the second is 2^64 times as large.

    A long chain therefore waits for additions alone. The new products are rounded before they are added, whatever a
    compiler would rather fuse: every program that combines splits of a request in turn does it with these bits.
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
def _add_rounded(before, split, shift, one, held):
    """Do what `add_partial` does for rows whose reference does not move: add rounded products.

    Args:
        before: state of the splits before.
        split: state of one split.
        shift: the reference, 0 where no key was seen.
        one: 1.0, which the compiler must not know: it would fuse the product into the sum.
        held: rows that have this split; the others stay as they are.
    """
    new = tl.exp2(split.largest - shift)
    added = tl.fma(before.total, tl.broadcast_to(one, before.total.shape), split.total * new)
    total = tl.where(held, added, before.total)
    added = tl.fma(before.weighted, tl.broadcast_to(one, before.weighted.shape), split.weighted * new[:, None])
    return RowState(before.largest, total, tl.where(held[:, None], added, before.weighted))


@triton.jit
@no_type_check
def _rows_of_request(
    query_start_loc, request, row_tile, num_tokens, request_rows, HEADS: tl.constexpr, ROWS: tl.constexpr
):
    """Return ROWS rows of a request."""
    query_start = tl.minimum(tl.maximum(tl.load(query_start_loc + request), 0), num_tokens)
    query_end = tl.minimum(tl.load(query_start_loc + request + 1), num_tokens)
    row = row_tile * ROWS + tl.arange(0, ROWS)
    token = query_start + row // HEADS
    return Rows(row, token, (row < request_rows) & (token < query_end))  # tokens: rows of a hostile end would wrap


@triton.jit
@no_type_check
def _write_rows(
    state, token, head, real, columns, column_tile, num_tokens, out, lse, HEADS: tl.constexpr, LATENT: tl.constexpr
):
    """Write the output of ROWS rows by COLUMNS; the programs of the first columns also write the LSE."""
    divisor = tl.where(state.total == 0, 1.0, state.total)  # a row that saw no key: values 0, largest -inf
    offsets = (token.to(tl.int64) * HEADS + head) * LATENT
    combined = (state.weighted * (1.0 / divisor)[:, None]).to(out.dtype.element_ty)
    held = real[:, None] & (columns < LATENT)[None, :]
    tl.store(out + offsets[:, None] + columns[None, :], combined, mask=held)
    if column_tile == 0:
        lse_row = lse + head.to(tl.int64) * num_tokens + token
        tl.store(lse_row, (state.largest + tl.log2(divisor)) * LN_2, mask=real)


@triton.jit(do_not_specialize=["num_tokens", "num_splits"])
@no_type_check
def _combine_splits_kernel(
    partial_out, partial_lse, out, lse, num_tokens, num_splits,
    HEADS: tl.constexpr, LATENT: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Combine the equally many splits of ROWS rows of the batch by COLUMNS of their latents."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    column_tiles: tl.constexpr = (LATENT + COLUMNS - 1) // COLUMNS
    column_tile = tl.program_id(0) % column_tiles
    row = (tl.program_id(0) // column_tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    num_rows = num_tokens.to(tl.int64) * HEADS
    real = row < num_rows
    partials = Partials(partial_out, partial_lse, num_splits, num_rows)
    state = _combine_partials(partials, num_splits, 0, row, real, columns, LATENT, ROWS, COLUMNS, SPLITS)
    _write_rows(state, row // HEADS, row % HEADS, real, columns, column_tile, num_tokens, out, lse, HEADS, LATENT)


@triton.jit(do_not_specialize=["num_tokens", "request_rows", "num_partials", "row_tiles"])
@no_type_check
def _combine_scheduled_kernel(
    split_offsets, query_start_loc, partial_out, partial_lse, out, lse,
    num_tokens, request_rows, num_partials, row_tiles,
    HEADS: tl.constexpr, LATENT: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Combine the splits of a request, ROWS of its rows by COLUMNS; write the empty rows of one without keys."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    column_tiles: tl.constexpr = (LATENT + COLUMNS - 1) // COLUMNS
    number = tl.program_id(0)
    request = number // (row_tiles * column_tiles)
    row_tile, column_tile = number // column_tiles % row_tiles, number % column_tiles
    first_partial = tl.load(split_offsets + request)
    splits = tl.load(split_offsets + request + 1) - first_partial
    if splits != 1:
        rows = _rows_of_request(query_start_loc, request, row_tile, num_tokens, request_rows, HEADS, ROWS)
        splits = tl.minimum(splits, num_partials)
        columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
        partials = Partials(partial_out, partial_lse, num_partials, request_rows)
        state = _combine_partials(
            partials, splits, first_partial, rows.number, rows.real, columns, LATENT, ROWS, COLUMNS, SPLITS
        )
        _write_rows(
            state, rows.token, rows.number % HEADS, rows.real, columns, column_tile, num_tokens, out, lse, HEADS, LATENT
        )


@triton.jit(do_not_specialize=["num_tokens", "request_rows", "num_partials", "num_requests", "row_tiles"])
@no_type_check
def _combine_invariant_kernel(
    split_offsets, query_start_loc, partial_out, partial_lse, out, lse,
    num_tokens, request_rows, num_partials, num_requests, row_tiles,
    HEADS: tl.constexpr, LATENT: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr,
    SCHEDULED: tl.constexpr, AHEAD: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Combine the remaining splits of a request that is split by its own length: its first index, then in turn.

    AHEAD reads partial outputs before it is known which of them were written: one request then waits for one load.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    column_tiles: tl.constexpr = (LATENT + COLUMNS - 1) // COLUMNS
    number = tl.program_id(0)
    request = number // (row_tiles * column_tiles)
    row_tile, column_tile = number // column_tiles % row_tiles, number % column_tiles
    request_partials = num_partials // num_requests
    progress = (partial_lse + 2 * num_partials.to(tl.int64) * request_rows).to(tl.pointer_type(tl.int32), bitcast=True)
    combined, splits = tl.load(progress + 2 * request), tl.load(progress + 2 * request + 1)
    combined, splits = tl.maximum(combined, 1), tl.minimum(splits, request_partials)
    begun = True
    if SCHEDULED:  # a request without keys has no program, and its rows are written here
        begun = tl.load(split_offsets + request + 1) > tl.load(split_offsets + request)
    left = (combined < splits) | (not begun)
    if left | AHEAD:
        rows = _rows_of_request(query_start_loc, request, row_tile, num_tokens, request_rows, HEADS, ROWS)
        columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
        first_partial = request * request_partials
        readable = rows.number < request_rows if AHEAD else rows.real & begun
        partials = Partials(partial_out, partial_lse, num_partials, request_rows)
        state = load_partial(partials, first_partial, readable, rows.number, columns, LATENT)
        if begun:
            one = tl.where(num_requests > 0, 1.0, 0.0)  # as `_add_rounded` wants it
            first, end = (request * 0 + 1, request_partials) if AHEAD else (combined, splits)
            more = (first > 0) if AHEAD else (first < splits)
            while more:
                # All loads are issued before the first split is added. A tuple of records would lose the names of its
                # fields in Triton 3.6, so each field has a tuple of its own.
                largests, totals, weighteds = (), (), ()
                for place in tl.static_range(SPLITS):
                    index, held = first_partial + first + place, readable & (first + place < end)
                    loaded = load_partial(partials, index, held, rows.number, columns, LATENT)
                    largests = largests + (loaded.largest,)  # noqa: RUF005  the compiler knows no unpacking here
                    totals = totals + (loaded.total,)  # noqa: RUF005
                    weighteds = weighteds + (loaded.weighted,)  # noqa: RUF005
                highest = tl.full([ROWS], float("-inf"), tl.float32)
                for place in tl.static_range(SPLITS):
                    is_split = (first + place >= combined) & (first + place < splits)
                    highest = tl.maximum(highest, tl.where(is_split, largests[place], float("-inf")))
                if tl.max((highest > state.largest + REFERENCE_GROWTH).to(tl.int32), 0) == 0:
                    shift = tl.where(state.largest == float("-inf"), 0.0, state.largest)
                    for place in tl.static_range(SPLITS):
                        is_split = (first + place >= combined) & (first + place < splits)
                        split_state = RowState(largests[place], totals[place], weighteds[place])
                        state = _add_rounded(state, split_state, shift, one, rows.real & is_split)
                else:  # seldom: a loop, for it need not be fast
                    for split in range(tl.maximum(first, combined), tl.minimum(first + SPLITS, splits)):
                        one_split = load_partial(
                            partials, first_partial + split, rows.real, rows.number, columns, LATENT
                        )
                        state = add_partial(state, one_split)
                first += SPLITS
                more = first < splits
        _write_rows(
            state, rows.token, rows.number % HEADS, rows.real & left, columns, column_tile, num_tokens, out, lse, HEADS,
            LATENT,
        )  # fmt: skip
