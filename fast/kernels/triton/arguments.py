"""Groups of kernel arguments, in the order of the parameters of the portable decode kernels."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


class DecodeInputs(NamedTuple):
    """Queries, cache and batch; the two descriptors of the cache are None where TMA cannot read it."""

    ql_nope: Tensor
    q_pe: Tensor
    kv_cache: Tensor
    latent_pages: TensorDescriptor | None
    rope_pages: TensorDescriptor | None
    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    visible_lens: Tensor


class DecodeStrides(NamedTuple):
    """Strides, in elements, of queries, cache and block table."""

    latent_token: int
    latent_head: int
    latent_element: int
    rope_token: int
    rope_head: int
    rope_element: int
    block: int
    entry: int
    element: int
    table_row: int
    table: int
