"""Groups of kernel arguments, in the order in which the portable decode kernels take them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


class DecodeInputs(NamedTuple):
    """Queries, the cache and its descriptors (None where the copy engine cannot read it), and the batch."""

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
