"""Records (named tuples) and sizes that the functions of the prefill kernel pass to each other.

A record costs nothing at run time. Its fields are values inside a kernel (pointers, scalars, tensors, shared memory),
for which no Python type exists. No field is called `values`, because Triton's tuples have an attribute of this name.

A *query tile* is 128 consecutive query tokens of one request, for one head. A *key tile* is 128 consecutive keys of one
request. The first part of a query or key is its first FIRST columns, and the second part is its other SECOND columns.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton import constexpr_function
from triton.experimental.gluon import language as gl

CONSUMERS = gl.constexpr(2)
ROWS = gl.constexpr(64)  # query tokens of a consumer; a matrix product of one warp group has 64 rows
QUERY_TILE = gl.constexpr(128)  # CONSUMERS * ROWS


class Constants(NamedTuple):
    """Compile-time constants; the kernel takes the whole record as one `constexpr`.

    Attributes:
        CONSUMER: index of the consumer (warps that multiply) that runs the function: 0 or 1.
        FIRST: columns of the first part of queries and keys.
        SECOND: columns of the second part; 0 if there is no second part.
        SHARED: True if all heads share the second part of a key (the rope part of MLA).
        VALUE: columns of a value.
        KEYS: keys of a key tile.
        STAGES: number of key tiles, and of value tiles, that shared memory holds.
        SPLIT: True if the key tiles of a query tile are divided into splits. The kernel then writes partial outputs.
        WIDE_STORES: True if 16 bytes of a row of the output can be stored at once (`launch.rows_of_16_bytes`).
    """

    CONSUMER: Any
    FIRST: Any
    SECOND: Any
    SHARED: Any
    VALUE: Any
    KEYS: Any
    STAGES: Any
    SPLIT: Any
    WIDE_STORES: Any


@constexpr_function
def of_consumer(c, index):
    """Return a copy of the constants `c` with CONSUMER = `index`."""
    return c._replace(CONSUMER=index)


class Sizes(NamedTuple):
    """Sizes of the batch, and the factor by which scores are multiplied.

    Attributes:
        num_tokens: T, packed query tokens.
        num_keys: S, packed keys.
        num_requests: B.
        num_heads: N.
        num_candidates: candidates of one head (see `work_items`); with SPLIT, an upper bound.
        group_heads: number of heads whose query tiles are attended before those of the next heads.
        num_splits: number of splits of each query tile; None without SPLIT.
        causal: 1 with a causal mask, otherwise 0.
        scale_log2: softmax scale divided by ln 2, because the kernel uses exp2 in place of exp.
    """

    num_tokens: Any
    num_keys: Any
    num_requests: Any
    num_heads: Any
    num_candidates: Any
    group_heads: Any
    num_splits: Any
    causal: Any
    scale_log2: Any


class Tensors(NamedTuple):
    """TMA descriptors of queries, keys and values. The second parts are the first parts again if SECOND is 0."""

    q_first: Any
    q_second: Any
    k_first: Any
    k_second: Any
    v: Any


class OutStrides(NamedTuple):
    """Strides of `out`, in elements."""

    token: Any
    head: Any
    column: Any


class Outputs(NamedTuple):
    """Pointers to the results, and the strides of the output.

    `fast.kernels.combine.kernels` defines the layouts of partial outputs and partial LSEs.

    Attributes:
        out: output [T, N, VALUE]; with SPLIT, partial outputs [num_splits, T, N, VALUE], contiguous.
        lse: LSE [N, T], or None to store no LSE; with SPLIT, partial LSEs [2, num_splits, T, N].
        strides: `OutStrides` of `out`; None with SPLIT.
    """

    out: Any
    lse: Any
    strides: Any


class Item(NamedTuple):
    """Work item: one query tile of one request and one head, with the keys that its rows see, or one split of them.

    The key tiles of a work item are the tiles [end - steps, end) of the request.

    Attributes:
        steps: number of key tiles; 0 if no row sees a key or the split is empty, -1 if there is no work item left.
        token: first query token of the tile.
        rows: number of query tokens of the tile, 1 to 128.
        head: head.
        keys: number of keys of the request.
        visible: number of keys that row 0 of the tile sees, before it is limited to [0, keys]. With a causal mask, row
            i sees i keys more. Without a mask, `visible` is `keys`, and the limit removes the surplus.
        end: number of key tiles before the end of the work item; `steps` without SPLIT.
        split: index of the split; 0 without SPLIT.
        key_start: first key of the request in the packed keys.
    """

    steps: Any
    token: Any
    rows: Any
    head: Any
    keys: Any
    visible: Any
    end: Any
    split: Any
    key_start: Any


class Shared(NamedTuple):
    """Shared memory of a program.

    Attributes:
        q_first: [CONSUMERS, 1, ROWS, FIRST], first parts of the queries.
        q_second: [CONSUMERS, 1, ROWS, SECOND].
        k_first: [STAGES, 1, KEYS, FIRST], first parts of the keys.
        k_second: [STAGES, 1, KEYS, SECOND].
        v: [STAGES, 1, KEYS, VALUE].
        items: the current and the next work item.
    """

    q_first: Any
    q_second: Any
    k_first: Any
    k_second: Any
    v: Any
    items: Any


class Bars(NamedTuple):
    """Barriers of a program; the README of `varlen` says who arrives and who waits."""

    q_full: Any
    q_empty: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any
    tail_loaded: Any
    item_written: Any
    item_begun: Any


class Context(NamedTuple):
    """Kernel arguments, shared memory and barriers.

    Attributes:
        cu_seqlens_q: [B + 1], first query token of each request.
        cu_seqlens_k: [B + 1], first key of each request.
        taken: [1], number of work items that programs have taken, besides their first ones; 0 before the launch. The
            kernel does not read it if there are at most as many work items as programs.
        outputs: `Outputs`.
        sizes: `Sizes`.
        shared: `Shared`.
        bars: `Bars`.
    """

    cu_seqlens_q: Any
    cu_seqlens_k: Any
    taken: Any
    outputs: Any
    sizes: Any
    shared: Any
    bars: Any


class SoftmaxState(NamedTuple):
    """State of the online softmax of the rows of a consumer.

    Attributes:
        largest: [ROWS], largest score so far, not multiplied by the softmax scale; `LEAST` before the first key.
        total: [ROWS], sum of the probabilities exp2((score - largest) * scale_log2).
        weighted: [ROWS, VALUE], sum of probability * value, without the last key tile.
        packed: [ROWS, KEYS // 2] int32, probabilities of the last key tile in the dtype of the values, two in each
            element.
    """

    largest: Any
    total: Any
    weighted: Any
    packed: Any
