"""Groups of kernel arguments, in the order in which the decode kernels take them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


class LaunchInputs(NamedTuple):
    """Queries, descriptors of the cache, and the lists that describe the batch."""

    ql_nope: Tensor
    q_pe: Tensor
    latent_tma: TensorDescriptor
    rope_tma: TensorDescriptor
    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    visible_lens: Tensor


class LaunchOutputs(NamedTuple):
    """What a decode writes."""

    out: Tensor
    lse: Tensor
    partial_out: Tensor
    partial_lse: Tensor


class BatchSizes(NamedTuple):
    """Tokens, pages of the cache, requests, and keys of a request at most."""

    tokens: int
    num_blocks: int
    requests: int
    max_keys: int


class RowSizes(NamedTuple):
    """Row blocks of a request, rows of a request, and partial indices."""

    row_blocks: int
    request_rows: int
    num_partials: int


class Numbers(NamedTuple):
    """The numbers of `InvariantCut`, the scale in base 2, and strides of queries and block table."""

    small_tiles: int
    small_splits: int
    large_tiles: int
    max_splits: int
    scale_log2: float
    latent_token_stride: int
    latent_head_stride: int
    rope_token_stride: int
    rope_head_stride: int
    table_row_stride: int
    table_stride: int
