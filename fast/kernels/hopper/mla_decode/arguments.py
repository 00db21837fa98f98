"""Groups of arguments, in the order in which the decode kernels take them.

Triton limits what a kernel can take as a record. Its launcher does not look for tensor descriptors inside a record, and
`do_not_specialize` does not reach the fields of one: a number that changes from step to step would compile the kernel
again. Descriptors, such numbers, and pointers of any alignment are therefore parameters of their own.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


class LaunchInputs(NamedTuple):
    """Queries, descriptors of the cache, and the lists that describe the batch."""

    ql_nope: Tensor
    q_pe: Tensor
    latent_pages: TensorDescriptor
    rope_pages: TensorDescriptor
    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    visible_lens: Tensor


class LaunchResults(NamedTuple):
    """Outputs and partial outputs; kernels take the record as one parameter."""

    out: Tensor
    lse: Tensor
    partial_out: Tensor
    partial_lse: Tensor


class BatchSizes(NamedTuple):
    """Tokens, blocks of the cache, requests, and the most keys of a request."""

    tokens: int
    num_blocks: int
    requests: int
    max_keys: int


class RowSizes(NamedTuple):
    """Row blocks of a request, rows of a request, and partial indices."""

    row_blocks: int
    request_rows: int
    num_partials: int


class QueryStrides(NamedTuple):
    """Strides of `ql_nope` and `q_pe`, in elements; kernels take the record as one parameter."""

    latent_token: int
    latent_head: int
    rope_token: int
    rope_head: int


class Numbers(NamedTuple):
    """The numbers of `InvariantCut`, the scale in base 2, and strides of queries and block table."""

    small_tiles: int
    small_splits: int
    large_tiles: int
    max_splits: int
    scale_log2: float
    query_strides: QueryStrides
    table_row_stride: int
    table_stride: int
