"""Records that functions of the Hopper kernels pass to each other.

A compiled kernel knows only their fields: the PTX is that of loose values. The fields are values of a kernel (pointers,
scalars, tensors, shared memory), which no type of Python describes. Triton's own tuples have an attribute `values`, so
no field may have that name.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton import constexpr_function


class Inputs(NamedTuple):
    """Queries and the lists that describe the batch."""

    ql_nope: Any
    q_pe: Any
    block_table: Any
    seq_lens: Any
    query_start_loc: Any
    visible_lens: Any


class Sizes(NamedTuple):
    """Sizes of the batch, and the scale of its scores.

    Attributes:
        num_tokens: T.
        num_blocks: pages of the cache.
        num_requests: B.
        max_keys: keys of a request at most.
        row_blocks: row blocks of a request.
        request_rows: rows of a request at most.
        scale_log2: what scores are multiplied by, in base 2.
    """

    num_tokens: Any
    num_blocks: Any
    num_requests: Any
    max_keys: Any
    row_blocks: Any
    request_rows: Any
    scale_log2: Any


class Strides(NamedTuple):
    """Strides of `ql_nope`, `q_pe` and `block_table`, in elements."""

    latent_token: Any
    latent_head: Any
    rope_token: Any
    rope_head: Any
    table_row: Any
    table_entry: Any


class SplitRule(NamedTuple):
    """The numbers of `InvariantCut`: how a request is split by its own length."""

    small_tiles: Any
    small_splits: Any
    large_tiles: Any
    max_splits: Any


class SplitPlan(NamedTuple):
    """How requests are split over programs.

    Attributes:
        tile_ranges: [programs, 5] of a schedule.
        split_offsets: [B + 1] of a schedule.
        num_splits: without a schedule, splits of each request (or programs that take its splits, where requests are
            split by their own length).
        num_partials: partial indices.
        progress: [B, 2]: splits that a program has combined, and all splits (`fast.kernels.combine`).
        rule: of requests that are split by their own length.
    """

    tile_ranges: Any
    split_offsets: Any
    num_splits: Any
    num_partials: Any
    progress: Any
    rule: Any


class Results(NamedTuple):
    """Outputs, partial outputs, and the descriptor by which the copy engine writes outputs (None: it does not)."""

    out: Any
    lse: Any
    partial_out: Any
    partial_lse: Any
    out_rows: Any


class Constants(NamedTuple):
    """What a kernel is compiled for; every field is a `constexpr`.

    Attributes:
        GROUP: number of this consumer.
        ROWS: of a row block.
        HEADS: N.
        LATENT: Lkv.
        ROPE: R.
        BLOCK_SIZE: keys a page.
        BY_LENGTH: requests are split by their own length.
        SCHEDULED: a schedule says what each program takes.
        SPLIT: every request has several splits, equally many.
        SLICES: programs that score the same tiles, each for some columns of the output.
    """

    GROUP: Any
    ROWS: Any
    HEADS: Any
    LATENT: Any
    ROPE: Any
    BLOCK_SIZE: Any
    BY_LENGTH: Any
    SCHEDULED: Any
    SPLIT: Any
    SLICES: Any


@constexpr_function
def of_group(c, group):
    """Return the constants of another consumer."""
    return c._replace(GROUP=group)


class Context(NamedTuple):
    """What every function of a consumer may need: arguments of the kernel, shared memory and barriers."""

    inputs: Any
    plan: Any
    results: Any
    sizes: Any
    strides: Any
    shared: Any
    bars: Any


class Walk(NamedTuple):
    """Where a program stands in its work: place (`start_walk`), first tile, split, and whether there is more."""

    place: Any
    first_tile: Any
    split: Any
    more: Any


class RequestLens(NamedTuple):
    """A request's query tokens [start, end), its length, and how many of its keys are readable."""

    query_start: Any
    query_end: Any
    length: Any
    readable: Any


class WorkItem(NamedTuple):
    """Consecutive tiles of one request and row block. The last item of a program has request -1 and zeros.

    Attributes:
        request: index, or -1.
        row_block: of the request.
        query_start: first query token.
        query_end: behind the last query token.
        length: readable keys of the request.
        begin: first tile.
        stop: behind the last tile.
        partial: partial index of the first split, or -1 where the rows are whole.
        split_tiles: tiles of a split, where requests are split by their own length.
    """

    request: Any
    row_block: Any
    query_start: Any
    query_end: Any
    length: Any
    begin: Any
    stop: Any
    partial: Any
    split_tiles: Any


class PageWalk(NamedTuple):
    """Where the pages of a request stand in the block table, and the key behind the last one to load."""

    table_row: Any
    table_stride: Any
    end_key: Any


class FoundItem(NamedTuple):
    """A work item before it is known whether it has rows, and whether it has tiles at all (`there`)."""

    item: Any
    there: Any


class RowBlock(NamedTuple):
    """What `rows_at` needs to find the rows of a work item."""

    query_start: Any
    query_end: Any
    number: Any
    request_rows: Any
    num_tokens: Any
    num_heads: Any


class Rows(NamedTuple):
    """Rows of a request: number in it, token, head, and whether each is real (no padding row)."""

    number: Any
    token: Any
    head: Any
    real: Any


class PartialRows(NamedTuple):
    """Rows of a partial output: place among all of them, rows of one partial index, and which rows are real."""

    place: Any
    index_rows: Any
    real: Any


class Queries(NamedTuple):
    """Queries in memory, where they go in shared memory, and their strides."""

    ql_nope: Any
    q_pe: Any
    q_latent: Any
    q_rope: Any
    strides: Any


class Visibility(NamedTuple):
    """Which keys the rows of a work item see.

    Attributes:
        visible: keys that each row sees.
        length: readable keys.
        table_row: the request's row of the block table.
        table_stride: of its entries.
        num_blocks: pages of the cache.
        unsure: keys up to which pages may lie outside the cache; 0 where none does.
        plain: first tile that some row does not see whole, or that may have pages outside the cache.
    """

    visible: Any
    length: Any
    table_row: Any
    table_stride: Any
    num_blocks: Any
    unsure: Any
    plain: Any


class RowState(NamedTuple):
    """The softmax of some rows over some keys: largest score, sum of weights, and weighted sum of values."""

    largest: Any
    total: Any
    weighted: Any


class HalfState(NamedTuple):
    """As `RowState`, for half of the latent columns: two quarters of the weighted sum."""

    largest: Any
    total: Any
    left: Any
    right: Any


class CombineWeights(NamedTuple):
    """Of two states, one after the other: the new reference in base 2, and the weight of either."""

    reference: Any
    old: Any
    new: Any
