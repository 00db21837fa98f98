"""Named records of the attention kernels of grouped-query attention.

A row is one query head of one query token. The query heads that share a KV head are a group. A program processes a row
block: ROWS rows of one request and one group, so that it reads each key and value once for the whole group. Row r of a
request and a group is head r % G of token r // G, for G heads in a group. A tile is TILE consecutive keys.

The fields of most records are values inside a kernel. They have the annotation `Any`, because no Python type describes
such values.

A kernel takes the records `Sources`, `ScoreFactors`, `Outputs`, `Strides` and `Constants` as one argument each. Numbers
and pointers that change from call to call, and TMA descriptors, cannot be in a record (`..arguments`). The launcher
passes each of them as an argument of its own, and the kernel puts them into the other records.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Constants(NamedTuple):
    """Compile-time constants of a kernel, which takes this named tuple as one `constexpr` argument.

    Attributes:
        DIM: Dh, columns of a query, a key and a value.
        COLUMNS: Dh, padded to a power of two.
        GROUP: G, query heads of a KV head.
        KV_HEADS: Nkv, KV heads.
        ROWS: rows of a program.
        TILE: keys of a tile.
        BLOCK_SIZE: tokens of a cache block; 0 if the keys are packed, not cached.
        WINDOW: True if a row may have keys before its first key.
        SOFT_CAP: True if scores have a soft cap.
        WHOLE_TILES: True if tiles in which every row attends every key are attended in a loop without a mask.
        BULK_COPY: True if TMA, the GPU's bulk copy engine, loads the tiles.
        SUM_COLUMNS: columns of each partial sum of a float32 dot product (`decode_tiles.products`); 0 for other dtypes.
        E4M3: True if the keys and values are e4m3 numbers, which are read as bytes.
        NATIVE: True if the GPU has instructions for e4m3.
        PINNED_KEYS: True if keys converted from e4m3 stay in the layout of their load (`fp8.pinned`).
        PINNED_VALUES: the same for values.
        HALF: True if bfloat16 queries are converted to float16, the dtype of the products with e4m3 numbers.
        Q_E4M3: True if the queries are rounded to e4m3 first.
    """

    DIM: Any
    COLUMNS: Any
    GROUP: Any
    KV_HEADS: Any
    ROWS: Any
    TILE: Any
    BLOCK_SIZE: Any
    WINDOW: Any
    SOFT_CAP: Any
    WHOLE_TILES: Any
    BULK_COPY: Any
    SUM_COLUMNS: Any
    E4M3: Any
    NATIVE: Any
    PINNED_KEYS: Any
    PINNED_VALUES: Any
    HALF: Any
    Q_E4M3: Any


class Sources(NamedTuple):
    """Queries, keys and values, which a kernel takes as one argument.

    Attributes:
        q: pointer to the queries [T, N, Dh].
        k: pointer to the keys, of a cache [num_blocks, block_size, Nkv, Dh] or packed [K, Nkv, Dh].
        v: pointer to the values, like `k`.
    """

    q: Any
    k: Any
    v: Any


class Outputs(NamedTuple):
    """Outputs and partial outputs, which a kernel takes as one argument.

    Attributes:
        out: pointer to the output [T, N, Dh].
        lse: pointer to the LSE [N, T].
        partial_out: pointer to the partial outputs [rows, Dh], or None. `fast.kernels.combine.kernels` defines what
            the rows are.
        partial_lse: pointer to the partial LSEs [2, rows], or None.
    """

    out: Any
    lse: Any
    partial_out: Any
    partial_lse: Any


class ScoreFactors(NamedTuple):
    """Factors with which scores are computed from dot products; a kernel takes them as one argument.

    Attributes:
        factor: factor of a dot product. Without a soft cap, it is scale / ln 2, so that exp2 can replace exp. With a
            soft cap, it is scale / cap.
        cap: soft cap divided by ln 2; not used without a soft cap.
    """

    factor: Any
    cap: Any


class Scores(NamedTuple):
    """How the score of a query and a key is computed from their dot product, and what scales the numbers.

    Attributes:
        factors: the `ScoreFactors`.
        slopes: pointer to the ALiBi slopes [N], float32, or None.
        sinks: pointer to the attention sinks [N], or None.
        k_scale: pointer to the scale of the keys, or None.
        v_scale: pointer to the scale of the values, or None.
        q_scale: pointer to the scale with which queries are rounded to e4m3, or None.
    """

    factors: Any
    slopes: Any
    sinks: Any
    k_scale: Any
    v_scale: Any
    q_scale: Any


class Strides(NamedTuple):
    """Strides in elements. Packed keys and values have no blocks; their block strides are 0."""

    q_token: Any
    q_head: Any
    q_column: Any
    k_block: Any
    k_token: Any
    k_head: Any
    k_column: Any
    v_block: Any
    v_token: Any
    v_head: Any
    v_column: Any
    out_token: Any
    out_head: Any
    out_column: Any


class RowBlock(NamedTuple):
    """Rows of one request and one group.

    Attributes:
        token: [ROWS], query token of each row.
        head: [ROWS], query head of each row.
        real: [ROWS], False for rows behind the last row of the request.
        kv_head: KV head of the group.
    """

    token: Any
    head: Any
    real: Any
    kv_head: Any


class Queries(NamedTuple):
    """Queries of a row block, and what their scores need.

    Attributes:
        numbers: [ROWS, COLUMNS], in the dtype of the products.
        factor: factor of the dot products: a scalar, or [ROWS, 1] if each row has its own factor (HALF).
        slopes: [ROWS, 1], ALiBi slopes divided by ln 2; not used without ALiBi.
    """

    numbers: Any
    factor: Any
    slopes: Any


class RowKeys(NamedTuple):
    """Keys that the rows of a row block attend.

    Attributes:
        first: [ROWS, 1], first key of each row.
        end: [ROWS, 1], index after the last key of each row.
        position: [ROWS, 1], key from which ALiBi measures distances.
        low: first key that a row attends.
        high: index after the last key that a row attends; at most `low` if no row attends a key.
        whole_first: first tile of which every row attends every key.
        whole_end: index after the last such tile; at most `whole_first` if there is none.
    """

    first: Any
    end: Any
    position: Any
    low: Any
    high: Any
    whole_first: Any
    whole_end: Any


class KeySource(NamedTuple):
    """Where a program reads the keys and values of its request and its KV head.

    Attributes:
        k: pointer to the keys of the KV head.
        v: pointer to the values of the KV head. (Triton's tuples have an attribute `values`, so no field has this
            name.)
        table_row: pointer to the row of the block table; not used for packed keys.
        table_stride: elements from one entry of the row to the next.
        num_blocks: blocks of the cache.
        first_token: first packed key of the request; not used for a cache.
        kv_head: the KV head; used for TMA alone.
    """

    k: Any
    v: Any
    table_row: Any
    table_stride: Any
    num_blocks: Any
    first_token: Any
    kv_head: Any


class Boxes(NamedTuple):
    """Descriptors with which TMA, the GPU's bulk copy engine, loads tiles of all KV heads.

    Attributes:
        k: TMA descriptor of the keys, or None.
        v: TMA descriptor of the values, or None.
    """

    k: Any
    v: Any


class TileKeys(NamedTuple):
    """Keys of a tile, and where they are stored.

    Attributes:
        keys: [TILE], index of each key in its request.
        held: [TILE], whether the program reads the key.
        block: number of the block as a 64-bit integer: a scalar, or [TILE] if a tile may have several blocks.
        place: [TILE], index of the token in its block, or in the packed tensor, as a 64-bit integer.
        first_place: index of the first token of the tile, as a 32-bit integer; used for TMA alone.
    """

    keys: Any
    held: Any
    block: Any
    place: Any
    first_place: Any
