"""Kernels that combine the splits of a decode: they add the partial outputs of each row, and write output and LSE.

A row is one (query token, head) pair. A decode may divide the keys of a request into splits, which are attended
independently. The decode kernel then writes two results for each row and split:

- The partial output is the sum of exp2(score - reference) * value over the keys of the split. It is not normalised. It
  is in float32. If all requests have the same number of splits, it can be in bfloat16 instead.
- The partial LSE consists of two float32 numbers: the reference score, and the sum of exp2(score - reference).

The reference score of a row is the number that is subtracted from all scores of the row before exp2. It is the largest
score of the row or somewhat smaller; the code calls it `largest`. Scores and reference scores are in base 2: they are
divided by ln 2, because the kernels use exp2 in place of exp.

In the layouts below, T, N and B are the numbers of query tokens, heads and requests, and Lkv is the number of latent
columns. A schedule assigns the keys of all requests to programs, in tiles of 64 keys.

| how the decode splits requests | layout of partial outputs | layout of partial LSEs |
|---|---|---|
| all requests into the same number of splits | [splits, T, N, Lkv] | [2, splits, T, N] |
| by a schedule | [partial indices, rows of a request, Lkv] | [2, partial indices, rows of a request] |
| by the length of the request alone (batch-invariant) | as with a schedule | as with a schedule, then [B, 2] int32 |

The Hopper prefill (`fast.kernels.hopper.varlen`) uses the first layout too, and combines with the
functions `combine_partials` and `write_rows`.

Each split of a request has its own partial index. With a schedule, the partial indices of request b begin at
`split_offsets[b]`. In a batch-invariant decode, every request has the same number n of partial indices, and split s of
request b has the partial index b * n + s.

A batch-invariant decode may have combined the first splits of a request already, which saves memory traffic. It then
stores the sum of these splits at the first partial index of the request. For each request, the [B, 2] integers are the
number of splits in this sum and the number of all splits.

A combine tile is some rows and some latent columns of the output of one request. In a decode with a schedule, often
most requests have exactly one split and need no combining. The host does not know which requests these are. With one
program for each combine tile of the batch, most programs would find no work. The kernel for a schedule therefore has a
limited number of programs, and two variants:

- If there are fewer programs than combine tiles, each program reads `split_offsets` to find the requests to combine. It
  processes every P-th combine tile of these requests, where P is the number of programs.
- Otherwise (`ONE_TILE`) each program has one combine tile, and reads only the number of splits of its own request. This
  is faster. A kernel that chose between the two at run time was up to 3 % slower (docs/log.md).

The kernel for a schedule may begin while the decode kernel still runs. If the batch has one request, the `ONE_TILE`
variant reads `split_offsets` and `query_start_loc` before it waits for the decode, so that these loads do not delay the
loads of the partial outputs. After the wait, these loads made planned decodes of one request 2 to 3 % slower. Both
tensors are complete before the wait: the decode lets the combine kernel begin only after all kernels before the decode
have finished (`hopper.common.dependent_launch`). The early loads bypass the L1 cache (".cg"), because the L1 cache of a
multiprocessor may still hold the schedule of an earlier step.

With several requests, most programs begin when the decode ends, so early loads would save little. All programs then
wait first. Their loads go through the L1 cache, so that the programs of a multiprocessor share them.
"""

from __future__ import annotations

from typing import Any, NamedTuple, no_type_check

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .states import LN_2, REFERENCE_GROWTH, Partials, RowState, add_partial, add_rounded, add_sinks, load_partial


class Rows(NamedTuple):
    """Rows of one request.

    Attributes:
        number: [ROWS], index of each row in the request.
        token: [ROWS], query token of each row.
        real: [ROWS], False for rows behind the last row of the request.
    """

    number: Any
    token: Any
    real: Any


class TilePlace(NamedTuple):
    """Position of one combine tile.

    Attributes:
        request: index of the request.
        row_tile: the first row of the tile is row_tile * ROWS.
        column_tile: the first column of the tile is column_tile * COLUMNS.
    """

    request: Any
    row_tile: Any
    column_tile: Any


class RequestSplits(NamedTuple):
    """Splits and query tokens of one request in a decode with a schedule.

    Attributes:
        first_partial: first partial index of the request.
        splits: number of its splits.
        query_start: its first query token.
        query_end: end of its query tokens, exclusive.
    """

    first_partial: Any
    splits: Any
    query_start: Any
    query_end: Any


class CombineTile(NamedTuple):
    """Sizes of a combine tile, and of the program that processes it.

    Attributes:
        rows: rows of the tile.
        columns: latent columns of the tile.
        splits: splits that the program loads at a time.
        warps: warps of the program.
    """

    rows: int
    columns: int
    splits: int
    warps: int


@triton.jit
@no_type_check  # otherwise the tests' type checker wraps the kernel, and Triton's interpreter finds no module globals
def combine_partials(
    partials, splits, first_partial, partial_row, real, columns,
    LATENT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Combine `splits` partial outputs of ROWS rows, from partial index `first_partial` on; return the `RowState`.

    The partial outputs are in float32 or bfloat16; all sums are in float32.
    """
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
        # A split without keys has weight 0, and the decode wrote zeros as its partial output, so 0 * NaN cannot occur.
        # The loads below therefore need no mask for splits of weight 0, and can begin before the weights are known.
        offsets = (row * LATENT)[:, :, None] + columns[None, None, :]
        split_values = tl.load(
            partials.out + offsets, mask=held[:, :, None] & (columns < LATENT)[None, None, :], other=0.0
        ).to(tl.float32)
        new_largest = tl.maximum(largest, tl.max(split_largest, 0))
        shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        decay, weight = tl.exp2(largest - shift), tl.exp2(split_largest - shift[None, :])
        values = values * decay[:, None] + tl.sum(split_values * weight[:, :, None], 0)
        total = total * decay + tl.sum(split_total * weight, 0)
        largest = new_largest
    return RowState(largest, total, values)


@triton.jit
@no_type_check
def _place_of_tile(number, rank, first_request, row_tiles, column_tiles):
    """Return the `TilePlace` of one combine tile in a chunk of CHUNK consecutive requests.

    Args:
        number: index of the combine tile, counted over those requests of the chunk that are to be combined.
        rank: [CHUNK], for each request of the chunk: how many requests up to and including this one are to be combined.
        first_request: first request of the chunk.
        row_tiles: number of row tiles of a request.
        column_tiles: number of column tiles of a row.
    """
    request_tiles = row_tiles * column_tiles
    # Let i = number // request_tiles. Among the requests that are to be combined, the tile belongs to the request whose
    # rank is i + 1. Exactly the requests before this request have a rank of at most i, so their number is the index of
    # this request in the chunk.
    request = first_request + tl.sum((rank <= number // request_tiles).to(tl.int32), 0)
    return TilePlace(request, number // column_tiles % row_tiles, number % column_tiles)


@triton.jit
@no_type_check
def _rows_of(place, row_tile, num_tokens, request_rows, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """Return the `Rows` of one row tile of a request; `place` is its `RequestSplits`, whose numbers may be invalid."""
    query_start = tl.minimum(tl.maximum(place.query_start, 0), num_tokens)
    query_end = tl.minimum(place.query_end, num_tokens)
    row = row_tile * ROWS + tl.arange(0, ROWS)
    token = query_start + row // HEADS
    # compare tokens and not rows: for an invalid `query_end`, the number of rows could overflow
    return Rows(row, token, (row < request_rows) & (token < query_end))


@triton.jit
@no_type_check
def write_rows(
    state, token, head, real, columns, column_tile, num_tokens, out, lse, sinks, HEADS: tl.constexpr,
    LATENT: tl.constexpr, strides=None,
):  # fmt: skip
    """Write COLUMNS columns of the output of ROWS rows, and for column tile 0 also the LSE of these rows.

    Unless `sinks` is None, add the attention sinks first. If `lse` is None, write no LSE. If `strides` is None, the
    output is contiguous; otherwise `strides` has the fields `token`, `head` and `column`, and HEADS has no meaning.
    """
    if sinks is not None:
        state = add_sinks(state, sinks, head, real)
    divisor = tl.where(state.total == 0, 1.0, state.total)  # a row without keys gets output 0 and LSE -inf
    if strides is None:
        offsets, places = (token.to(tl.int64) * HEADS + head) * LATENT, columns
    else:
        offsets = token.to(tl.int64) * strides.token + head.to(tl.int64) * strides.head
        places = columns.to(tl.int64) * strides.column
    combined = (state.weighted * (1.0 / divisor)[:, None]).to(out.dtype.element_ty)
    held = real[:, None] & (columns < LATENT)[None, :]
    tl.store(out + offsets[:, None] + places[None, :], combined, mask=held)
    if lse is not None:  # noqa: SIM102  Triton decides this condition when it compiles the kernel
        if column_tile == 0:
            lse_row = lse + head.to(tl.int64) * num_tokens + token
            tl.store(lse_row, (state.largest + tl.log2(divisor)) * LN_2, mask=real)


@triton.jit(
    do_not_specialize=["num_tokens", "num_splits", "num_requests"],
    do_not_specialize_on_alignment=["sinks", "query_start_loc"],
)  # fmt: skip
@no_type_check
def _combine_splits_kernel(
    partial_out, partial_lse, out, lse, sinks, query_start_loc, num_tokens, num_splits, num_requests,
    HEADS: tl.constexpr, LATENT: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Combine COLUMNS columns of ROWS rows, if all requests have the same number of splits.

    Unless `query_start_loc` is None, tokens behind the last request get output 0 and LSE -inf.
    """
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
    held = real
    if query_start_loc is not None:  # the decode has written no partial outputs of padding tokens
        held = real & (row // HEADS < tl.load(query_start_loc + num_requests))
    state = combine_partials(partials, num_splits, 0, row, held, columns, LATENT, ROWS, COLUMNS, SPLITS)
    if sinks is not None:
        state = add_sinks(state, sinks, row % HEADS, held)
    write_rows(state, row // HEADS, row % HEADS, real, columns, column_tile, num_tokens, out, lse, None, HEADS, LATENT)


@triton.jit
@no_type_check
def _splits_of_request(split_offsets, query_start_loc, request, CACHE: tl.constexpr):
    """Load the `RequestSplits` of a request, with the cache modifier CACHE ("" allows the L1 cache)."""
    first_partial = tl.load(split_offsets + request, cache_modifier=CACHE)
    splits = tl.load(split_offsets + request + 1, cache_modifier=CACHE) - first_partial
    query_start = tl.load(query_start_loc + request, cache_modifier=CACHE)
    query_end = tl.load(query_start_loc + request + 1, cache_modifier=CACHE)
    return RequestSplits(first_partial, splits, query_start, query_end)


@triton.jit
@no_type_check
def _combine_tile(
    tile, place, partials, num_tokens, out, lse, sinks,
    HEADS: tl.constexpr, LATENT: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Process one combine tile in a decode with a schedule; do nothing if its request has one split."""
    first_partial, splits = place.first_partial, place.splits
    rows = _rows_of(place, tile.row_tile, num_tokens, partials.rows, HEADS, ROWS)
    if splits != 1:
        columns = tile.column_tile * COLUMNS + tl.arange(0, COLUMNS)
        state = combine_partials(
            partials, tl.minimum(splits, partials.indices), first_partial, rows.number, rows.real, columns, LATENT,
            ROWS, COLUMNS, SPLITS,
        )  # fmt: skip
        write_rows(
            state, rows.token, rows.number % HEADS, rows.real, columns, tile.column_tile, num_tokens, out, lse, sinks,
            HEADS, LATENT,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=["num_tokens", "request_rows", "num_partials", "num_requests", "row_tiles"],
    do_not_specialize_on_alignment=["sinks"],
)  # fmt: skip
@no_type_check
def _combine_scheduled_kernel(
    split_offsets, query_start_loc, partial_out, partial_lse, out, lse, sinks,
    num_tokens, request_rows, num_partials, num_requests, row_tiles,
    HEADS: tl.constexpr, LATENT: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr,
    CHUNK: tl.constexpr, ONE_TILE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Combine the requests that a schedule has split, in combine tiles of ROWS rows and COLUMNS columns.

    ONE_TILE is true only if there is one program for each combine tile; the module docstring explains both variants.
    The decode kernel has already written the output of a request with one split. A request without keys has no split;
    this kernel writes its output 0 and LSE -inf.
    """
    if DEPENDENT:
        gdc_launch_dependents()
    column_tiles: tl.constexpr = (LATENT + COLUMNS - 1) // COLUMNS
    partials = Partials(partial_out, partial_lse, num_partials, request_rows)
    if ONE_TILE:
        tile_number = tl.program_id(0)
        tile = TilePlace(
            tile_number // (row_tiles * column_tiles), tile_number // column_tiles % row_tiles,
            tile_number % column_tiles,
        )  # fmt: skip
        if DEPENDENT:
            if num_requests > 1:
                gdc_wait()
                place = _splits_of_request(split_offsets, query_start_loc, tile.request, "")
            else:
                place = _splits_of_request(split_offsets, query_start_loc, tile.request, ".cg")
                gdc_wait()
        else:
            place = _splits_of_request(split_offsets, query_start_loc, tile.request, "")
        _combine_tile(tile, place, partials, num_tokens, out, lse, sinks, HEADS, LATENT, COLUMNS, ROWS, SPLITS)
    else:
        if DEPENDENT:
            gdc_wait()
        number = tl.program_id(0).to(tl.int64)  # the next tile of this program
        chunk_start = tl.full([], 0, tl.int64)  # index of the first combine tile of the chunk
        for first_request in range(0, num_requests, CHUNK):
            chunk = first_request + tl.arange(0, CHUNK)
            exists = chunk < num_requests
            # indices behind the last request get 1 split (1 - 0), so that nothing is combined for them
            chunk_splits = tl.load(split_offsets + chunk + 1, mask=exists, other=1)
            chunk_splits -= tl.load(split_offsets + chunk, mask=exists, other=0)
            combined = (chunk_splits != 1).to(tl.int32)
            chunk_end = chunk_start + tl.sum(combined, 0).to(tl.int64) * row_tiles * column_tiles
            if number < chunk_end:
                rank = tl.cumsum(combined, 0)
                while number < chunk_end:
                    # 32 bits suffice: the partial outputs of 2^31 tiles would not fit into memory
                    tile = _place_of_tile(
                        (number - chunk_start).to(tl.int32), rank, first_request, row_tiles, column_tiles
                    )
                    place = _splits_of_request(split_offsets, query_start_loc, tile.request, "")
                    _combine_tile(tile, place, partials, num_tokens, out, lse, sinks, HEADS, LATENT, COLUMNS, ROWS,
                                  SPLITS)  # fmt: skip
                    number += tl.num_programs(0)
            chunk_start = chunk_end


@triton.jit(
    do_not_specialize=["num_tokens", "request_rows", "num_partials", "num_requests", "row_tiles"],
    do_not_specialize_on_alignment=["sinks"],
)  # fmt: skip
@no_type_check
def _combine_invariant_kernel(
    split_offsets, query_start_loc, partial_out, partial_lse, out, lse, sinks,
    num_tokens, request_rows, num_partials, num_requests, row_tiles,
    HEADS: tl.constexpr, LATENT: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr,
    SCHEDULED: tl.constexpr, AHEAD: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Combine COLUMNS columns of ROWS rows of one request in a batch-invariant decode.

    The program loads the state at the request's first partial index. This state may be the sum of several splits. Then
    the program adds the remaining splits in order. With AHEAD, the program begins to load SPLITS further splits before
    it knows the number of splits, which is faster for a single request.
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
    has_splits = True
    if SCHEDULED:  # with a schedule, this kernel writes output 0 and LSE -inf of a request without keys
        has_splits = tl.load(split_offsets + request + 1) > tl.load(split_offsets + request)
    remaining = (combined < splits) | (not has_splits)
    if remaining | AHEAD:
        # `_rows_of` reads only the query tokens; splits of batch-invariant decodes are in `progress`
        query_start, query_end = tl.load(query_start_loc + request), tl.load(query_start_loc + request + 1)
        place = RequestSplits(0, 0, query_start, query_end)
        rows = _rows_of(place, row_tile, num_tokens, request_rows, HEADS, ROWS)
        columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
        first_partial = request * request_partials
        readable = rows.number < request_rows if AHEAD else rows.real & has_splits
        partials = Partials(partial_out, partial_lse, num_partials, request_rows)
        state = load_partial(partials, first_partial, readable, rows.number, columns, LATENT)
        if has_splits:
            one = tl.where(num_requests > 0, 1.0, 0.0)  # 1.0, but unknown to the compiler: see `add_rounded`
            first, end = (request * 0 + 1, request_partials) if AHEAD else (combined, splits)
            more = (first > 0) if AHEAD else (first < splits)
            while more:
                # Issue all loads before the first split is added. Each field has its own tuple, because a tuple of
                # `RowState` would lose the field names in Triton 3.6.
                largests, totals, weighteds = (), (), ()
                for offset in tl.static_range(SPLITS):
                    index, held = first_partial + first + offset, readable & (first + offset < end)
                    loaded = load_partial(partials, index, held, rows.number, columns, LATENT)
                    largests = largests + (loaded.largest,)  # noqa: RUF005  Triton does not support unpacking here
                    totals = totals + (loaded.total,)  # noqa: RUF005
                    weighteds = weighteds + (loaded.weighted,)  # noqa: RUF005
                highest = tl.full([ROWS], float("-inf"), tl.float32)
                for offset in tl.static_range(SPLITS):
                    is_split = (first + offset >= combined) & (first + offset < splits)
                    highest = tl.maximum(highest, tl.where(is_split, largests[offset], float("-inf")))
                if tl.max((highest > state.largest + REFERENCE_GROWTH).to(tl.int32), 0) == 0:
                    shift = tl.where(state.largest == float("-inf"), 0.0, state.largest)
                    for offset in tl.static_range(SPLITS):
                        is_split = (first + offset >= combined) & (first + offset < splits)
                        split_state = RowState(largests[offset], totals[offset], weighteds[offset])
                        state = add_rounded(state, split_state, shift, one, rows.real & is_split)
                else:  # the rare case that a reference score changes; this loop need not be fast
                    for split in range(tl.maximum(first, combined), tl.minimum(first + SPLITS, splits)):
                        one_split = load_partial(
                            partials, first_partial + split, rows.real, rows.number, columns, LATENT
                        )
                        state = add_partial(state, one_split)
                first += SPLITS
                more = first < splits
        write_rows(
            state, rows.token, rows.number % HEADS, rows.real & remaining, columns, column_tile, num_tokens, out, lse,
            sinks, HEADS, LATENT,
        )  # fmt: skip
