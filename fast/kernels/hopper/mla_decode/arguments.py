"""Groups of kernel arguments, in the order of the parameters of the decode kernels.

A kernel takes a named tuple of this module as one parameter, or takes each of its fields as a separate parameter; the
first line of the class says which. `fast.kernels.triton.arguments` says which parameters cannot be fields of a named
tuple.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# Parameters that the kernels of `main_loops` have in common, and on whose values (ANY_VALUE) or alignment
# (ANY_ALIGNMENT) no kernel variant depends.
ANY_VALUE = [
    "num_tokens", "num_blocks", "num_requests", "max_keys", "num_splits", "row_blocks", "request_rows", "num_partials",
    "small_tiles", "small_splits", "large_tiles", "max_splits", "table_row_stride",
]  # fmt: skip
ANY_ALIGNMENT = ["block_table", "seq_lens", "query_start_loc", "visible_lens", "tile_ranges", "split_offsets"]


class LaunchInputs(NamedTuple):
    """Queries, TMA descriptors of the cache, and the tensors that describe the batch (separate parameters).

    `launch.mla_decode` documents the shapes. TMA is the GPU's bulk copy engine. A descriptor states the tensor and the
    shape of the box that one copy moves.
    """

    ql_nope: Tensor
    q_pe: Tensor
    latent_tma: TensorDescriptor
    rope_tma: TensorDescriptor
    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    visible_lens: Tensor


class LaunchOutputs(NamedTuple):
    """Tensors that a decode writes (one parameter). `fast.kernels.combine.SplitDecode` documents the shapes."""

    out: Tensor
    lse: Tensor
    partial_out: Tensor
    partial_lse: Tensor


class BatchSizes(NamedTuple):
    """Sizes of the batch (separate parameters).

    Attributes:
        tokens: T, packed query tokens.
        num_blocks: number of blocks in the cache.
        requests: B.
        max_keys: upper bound of the keys of a request.
    """

    tokens: int
    num_blocks: int
    requests: int
    max_keys: int


class RowSizes(NamedTuple):
    """Numbers of rows and of partial outputs (separate parameters).

    Attributes:
        row_blocks: number of row blocks of a request. A row block is 16, 32 or 64 rows, and a row is one (query token,
            head) pair.
        request_rows: upper bound of the rows of a request.
        num_partials: number of partial indices, at which partial outputs are stored.
    """

    row_blocks: int
    request_rows: int
    num_partials: int


class QueryStrides(NamedTuple):
    """Strides of `ql_nope` and `q_pe`, in elements (one parameter)."""

    latent_token: int
    latent_head: int
    rope_token: int
    rope_head: int


class Numbers(NamedTuple):
    """Fields of `InvariantSplitRule`, softmax scale divided by ln 2, and strides in elements (separate parameters)."""

    small_tiles: int
    small_splits: int
    large_tiles: int
    max_splits: int
    scale_log2: float
    query_strides: QueryStrides
    table_row_stride: int
    table_stride: int
