"""Records (named tuples) that functions of the Hopper kernels pass to each other.

A record costs nothing at run time: the compiler sees only its fields, and generates the same PTX as for separate
variables. The fields are values inside a kernel (pointers, scalars, tensors, shared memory), which no Python type
describes. No field is called `values`, because Triton's tuples have an attribute of this name.

A reference score is the number that is subtracted from the scores of a row before exp2: about the largest score.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton import constexpr_function


class Inputs(NamedTuple):
    """Pointers to the queries and to the tensors that describe the batch; `mla_decode` documents their shapes."""

    ql_nope: Any
    q_pe: Any
    block_table: Any
    seq_lens: Any
    query_start_loc: Any
    visible_lens: Any


class Sizes(NamedTuple):
    """Sizes of the batch, and the factor of the scores.

    Attributes:
        num_tokens: T, packed query tokens.
        num_blocks: number of blocks in the cache.
        num_requests: B.
        max_keys: upper bound of the keys of a request.
        row_blocks: number of row blocks of a request.
        request_rows: upper bound of the rows of a request.
        scale_log2: softmax scale divided by ln 2, because the kernels use exp2 in place of exp.
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
    """The four numbers of `reference.interfaces.InvariantSplitRule`, for the splits of a batch-invariant decode."""

    small_tiles: Any
    small_splits: Any
    large_tiles: Any
    max_splits: Any


class SplitPlan(NamedTuple):
    """How requests are split over programs.

    Attributes:
        tile_ranges: pointer to the tile ranges [programs, 5] of a schedule; None in a kernel without schedules.
        split_offsets: pointer to the split offsets [B + 1] of a schedule; None in a kernel without schedules.
        num_splits: without a schedule, number of work items per (request, row block) pair. A work item is one split;
            in a batch-invariant decode, a work item may also be several consecutive splits. In the kernel of
            `mla_decode/two_phases`, this field is the upper bound of the splits of a request.
        num_partials: number of partial indices.
        progress: pointer to [B, 2] int32: for each request, the number of splits that the decode kernel has already
            combined, and the number of all splits (`fast.kernels.combine`).
        rule: `SplitRule`; only a batch-invariant decode uses the rule.
    """

    tile_ranges: Any
    split_offsets: Any
    num_splits: Any
    num_partials: Any
    progress: Any
    rule: Any


class Outputs(NamedTuple):
    """Pointers to outputs and partial outputs, and `out_rows`, a TMA descriptor of `out`.

    TMA is the GPU's bulk copy engine. If `out_rows` is None, plain stores write the output.
    """

    out: Any
    lse: Any
    partial_out: Any
    partial_lse: Any
    out_rows: Any


class Constants(NamedTuple):
    """Compile-time constants of a kernel, which takes this record as one `constexpr`.

    Attributes:
        CONSUMER: index of this consumer: 0 or 1.
        ROWS: rows of a row block.
        HEADS: N.
        LATENT: Lkv.
        ROPE: R.
        BLOCK_SIZE: tokens of a cache block.
        BY_LENGTH: True if the decode is batch-invariant: the splits of a request depend on its length alone.
        SCHEDULED: True if a schedule assigns work to programs.
        SPLIT: True if every request has the same number of splits, more than one.
        SLICES: number of programs that process the same tiles; each program computes other columns of the output.
    """

    CONSUMER: Any
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
def of_consumer(c, index):
    """Return the constants `c` with CONSUMER = `index`, for another consumer of the same kernel."""
    return c._replace(CONSUMER=index)


class Context(NamedTuple):
    """Arguments that all functions of a consumer take: kernel arguments, shared memory and barriers."""

    inputs: Any
    plan: Any
    outputs: Any
    sizes: Any
    strides: Any
    shared: Any
    bars: Any


class WorkPosition(NamedTuple):
    """Position of a program among its candidates.

    The candidates of a program are the work items that the program may have to process, in order. A candidate without
    tiles or without a query token is no work item; `seek_item` skips such candidates.

    Attributes:
        candidate: with a schedule, index of a request; otherwise, index of a (request, split, row block) triple.
        first_tile: with a schedule, tile of the request at which the program begins.
        split: with a schedule, split of the request at which the program begins.
        more: True if the program still has candidates: `candidate` is not behind the last candidate.
    """

    candidate: Any
    first_tile: Any
    split: Any
    more: Any


class RequestLens(NamedTuple):
    """Lengths of one request.

    Attributes:
        query_start: first query token.
        query_end: end of the query tokens, exclusive.
        length: keys of the request.
        readable: the smaller of `length` and `max_keys`.
    """

    query_start: Any
    query_end: Any
    length: Any
    readable: Any


class WorkItem(NamedTuple):
    """Consecutive tiles of one request and row block that a program processes next.

    After the last work item of a program comes an item with request -1 and zeros in the other fields.

    Attributes:
        request: index of the request, or -1.
        row_block: index of the row block in the request.
        query_start: first query token of the request.
        query_end: end of the request's query tokens, exclusive.
        length: readable keys of the request.
        begin: first tile.
        stop: end of the tiles, exclusive.
        partial: partial index of the item's first split, or -1 if the program writes the output of the rows.
        split_tiles: tiles of a split. Only a batch-invariant decode reads this field.
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


class BlockTableRow(NamedTuple):
    """One request's row of the block table.

    Attributes:
        entries: pointer to the first entry of the row.
        stride: stride of the entries, in elements.
        end_key: end of the keys to load, exclusive.
    """

    entries: Any
    stride: Any
    end_key: Any


class CandidateItem(NamedTuple):
    """A candidate, as a `WorkItem` whose rows are not checked yet, and `exists`, whether the candidate is a work item.

    `exists` is False if the request has a negative index, or if the program gets no tiles of the request.
    """

    item: Any
    exists: Any


class RowBlock(NamedTuple):
    """Arguments of `rows_at`: query tokens of the request, index of the row block, and sizes of the batch."""

    query_start: Any
    query_end: Any
    number: Any
    request_rows: Any
    num_tokens: Any
    num_heads: Any


class Rows(NamedTuple):
    """Rows of a request.

    Attributes:
        number: index of each row in the request.
        token: query token of each row.
        head: head of each row.
        real: False for padding rows.
    """

    number: Any
    token: Any
    head: Any
    real: Any


class PartialRows(NamedTuple):
    """Rows of a partial output.

    Attributes:
        partial_row: index of each row among the rows of all partial outputs.
        index_rows: number of rows that are stored at one partial index.
        real: False for padding rows.
    """

    partial_row: Any
    index_rows: Any
    real: Any


class Queries(NamedTuple):
    """Pointers to the queries, the shared memory to which the queries are copied, and the strides of the queries."""

    ql_nope: Any
    q_pe: Any
    q_latent: Any
    q_rope: Any
    strides: Any


class Visibility(NamedTuple):
    """Which keys the rows of a work item see.

    Attributes:
        visible: number of keys that each row sees.
        length: readable keys of the request.
        table_row: pointer to the request's row of the block table.
        table_stride: stride of the entries in the request's row.
        num_blocks: number of blocks in the cache.
        checked_keys: number of keys whose blocks the mask looks up, because some of these blocks may lie outside the
            cache; 0 if all blocks of the work item lie in the cache.
        first_masked: first tile whose scores must be masked: some row does not see all keys of the tile, or some block
            may lie outside the cache.
    """

    visible: Any
    length: Any
    table_row: Any
    table_stride: Any
    num_blocks: Any
    checked_keys: Any
    first_masked: Any


class RowState(NamedTuple):
    """Softmax state of some rows over some keys.

    Attributes:
        largest: reference score of each row: the largest score, or the number that `tile_scores.reference_of` chose.
        total: sum of the softmax weights of each row, relative to `largest`.
        weighted: sum of the values times these weights; not divided by `total` yet.
    """

    largest: Any
    total: Any
    weighted: Any


class HalfState(NamedTuple):
    """Like `RowState`, for one half of the latent columns.

    `left` and `right` are the weighted sums of the first and of the second part of this half. Each part is a quarter of
    all latent columns.
    """

    largest: Any
    total: Any
    left: Any
    right: Any


class CombineWeights(NamedTuple):
    """Reference scores of two combined states, in base 2, and the factors of the old and of the new state."""

    reference: Any
    old: Any
    new: Any
