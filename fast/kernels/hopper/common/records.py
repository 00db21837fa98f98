"""Records (named tuples) that functions of the Hopper kernels pass to each other.

A record costs nothing at run time: the compiler generates the same PTX as for separate variables. The fields are
values inside a kernel (pointers, scalars, tensors, shared memory), for which no Python type exists. No field is called
`values`, because Triton's tuples have an attribute of this name.

A row is one (query token, head) pair, and a row block is 16, 32 or 64 rows of one request. A tile is 64 consecutive
keys of one request. A split is consecutive tiles of one request that are attended independently of the request's other
tiles. The reference score of a row is about the largest score of the row; it is subtracted from the scores of the row
before exp2. A score *in base 2* is the score times `Sizes.scale_log2`.
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
    """Sizes of the batch, and the factor by which scores are multiplied.

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
    """The four numbers of `reference.interfaces.InvariantSplitRule`, by which a batch-invariant decode makes splits."""

    small_tiles: Any
    small_splits: Any
    large_tiles: Any
    max_splits: Any


class SplitPlan(NamedTuple):
    """How the keys of a request are divided into splits and work items.

    Attributes:
        tile_ranges: pointer to `tile_ranges` [programs, 5] of a schedule; None in a kernel that takes no schedule.
        split_offsets: pointer to `split_offsets` [B + 1] of a schedule; None in a kernel that takes no schedule.
        num_splits: without a schedule, number of work items per (request, row block) pair. A work item is one split,
            or several consecutive splits if the decode is batch-invariant. In the kernel of `mla_decode/two_phases`,
            this field is the upper bound of the splits of a request instead.
        num_partials: number of partial indices, at which partial outputs are stored.
        progress: pointer to [B, 2] int32: for each request, the number of splits that the decode kernel has already
            combined, and the number of all splits.
        rule: `SplitRule`; used only if the decode is batch-invariant.
    """

    tile_ranges: Any
    split_offsets: Any
    num_splits: Any
    num_partials: Any
    progress: Any
    rule: Any


class Outputs(NamedTuple):
    """Pointers to outputs and partial outputs, and a descriptor for output stores.

    `out_rows` is a descriptor of `out` for TMA, the GPU's bulk copy engine. If `out_rows` is None, plain stores write
    the output.
    """

    out: Any
    lse: Any
    partial_out: Any
    partial_lse: Any
    out_rows: Any


class Constants(NamedTuple):
    """Compile-time constants; a kernel takes the whole record as one `constexpr`.

    Attributes:
        CONSUMER: index of the consumer (warps that multiply) that runs the function: 0 or 1.
        ROWS: rows of a row block.
        HEADS: N.
        LATENT: Lkv.
        ROPE: R.
        BLOCK_SIZE: tokens of a cache block.
        BY_LENGTH: True if the decode is batch-invariant: the splits of a request depend on its length alone.
        SCHEDULED: True if a schedule assigns work to programs.
        SPLIT: True if all requests have the same number of splits, and this number is at least 2.
        SLICES: number of programs that share each work item; each program computes its own columns of the output.
        WEIGHTS_E4M3: True if the probabilities are rounded to e4m3 (the fp8 mode `fp8_product`).
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
    WEIGHTS_E4M3: Any = False


@constexpr_function
def of_consumer(c, index):
    """Return a copy of the constants `c` with CONSUMER = `index`."""
    return c._replace(CONSUMER=index)


@constexpr_function
def of_rows(c, rows):
    """Return a copy of the constants `c` with ROWS = `rows`."""
    return c._replace(ROWS=rows)


class PagedCache(NamedTuple):
    """Pointer to the cache and its strides in elements, for accesses that do not go through a TMA descriptor."""

    entries: Any
    block_stride: Any
    key_stride: Any


class Context(NamedTuple):
    """Kernel arguments, shared memory and barriers, which all functions of a consumer take as one argument."""

    inputs: Any
    plan: Any
    outputs: Any
    sizes: Any
    strides: Any
    shared: Any
    bars: Any


class WorkPosition(NamedTuple):
    """Position of a program in the list of its candidates.

    A candidate is a possible work item. A program goes through its candidates in order, and `seek_item` skips the
    candidates that turn out to have no work.

    Attributes:
        candidate: with a schedule, index of a request; otherwise, index of a (request, split, row block) triple.
        first_tile: with a schedule, the first tile of the request that this program attends.
        split: with a schedule, the index of this program's split in the request.
        more: False if `candidate` is behind the last candidate.
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

    An item with request -1 and zeros in the other fields marks the end of a program's work items.

    Attributes:
        request: index of the request, or -1.
        row_block: index of the row block in the request.
        query_start: first query token of the request.
        query_end: end of the request's query tokens, exclusive.
        length: readable keys of the request.
        begin: first tile.
        stop: end of the tiles, exclusive.
        partial: partial index of the item's first split, or -1 if the program writes the output and no partial output.
        split_tiles: tiles of a split; used only if the decode is batch-invariant.
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
    """A candidate (see `WorkPosition`) as a `WorkItem`, and a flag.

    `exists` is False if the index of the request is negative, or if the program gets no tiles of the request.
    """

    item: Any
    exists: Any


class RowBlock(NamedTuple):
    """A row block: query tokens of the request, index `number` of the row block in the request, sizes of the batch."""

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
        real: False for rows behind the last row of the request.
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
        real: False for rows behind the last row of the request, which are not stored.
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
    """Which keys the rows of a work item see. Keys of an invalid block (with a number outside the cache) are masked.

    Attributes:
        visible: number of keys that each row sees.
        length: readable keys of the request.
        table_row: pointer to the request's row of the block table.
        table_stride: stride of the entries in the request's row, in elements.
        num_blocks: number of blocks in the cache.
        checked_keys: number of keys for which the mask loads and checks block numbers; 0 if all block numbers of the
            work item are valid.
        first_masked: first tile whose scores must be masked, because a row does not see all keys of the tile, or
            because some block number of the work item is invalid.
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
        largest: reference score of each row. Before two states are combined, it is converted to base 2 (`in_base_two`).
        total: sum of the probabilities of each row. The probability of a key is exp2(its score - reference score), with
            both scores in base 2.
        weighted: sum of the values times these probabilities; not divided by `total` yet.
    """

    largest: Any
    total: Any
    weighted: Any


class HalfState(NamedTuple):
    """Like `RowState`, but with the weighted sums of only half of the latent columns.

    `left` has the first half of these columns, and `right` has the second half: each has a quarter of all columns.
    """

    largest: Any
    total: Any
    left: Any
    right: Any


class CombineWeights(NamedTuple):
    """What is needed to add the state of the next split of a request to the state of its earlier splits.

    Attributes:
        reference: reference score of each row after the addition, in base 2.
        old: factor of each row for the sums of the earlier splits.
        new: factor of each row for the sums of the next split.
    """

    reference: Any
    old: Any
    new: Any
