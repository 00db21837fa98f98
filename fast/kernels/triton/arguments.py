"""Groups of arguments, in the order of the parameters of the portable decode kernels.

Triton limits what a kernel can take as a record. Its launcher finds no tensor descriptor inside a record. It also
compiles a variant of the kernel for each field that is 1, a multiple of 16 or an aligned pointer, because
`do_not_specialize` does not reach the fields of a record. Parameters that must not give further variants are
therefore no fields of a record: sizes of the batch and of the cache, numbers of splits, and pointers of any alignment.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


class DecodeSources(NamedTuple):
    """Queries and the cache. The kernels take this record as one parameter."""

    ql_nope: Tensor
    q_pe: Tensor
    kv_cache: Tensor


class DecodeInputs(NamedTuple):
    """Queries, cache and batch; the two descriptors of the cache are None where TMA cannot read it."""

    sources: DecodeSources
    latent_pages: TensorDescriptor | None
    rope_pages: TensorDescriptor | None
    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    visible_lens: Tensor


class DecodeOutputs(NamedTuple):
    """Outputs and partial outputs of a scheduled decode. The kernel takes this record as one parameter."""

    out: Tensor
    lse: Tensor
    partial_out: Tensor
    partial_lse: Tensor


class SourceStrides(NamedTuple):
    """Strides of queries and cache, in elements. The kernels take this record as one parameter."""

    latent_token: int
    latent_head: int
    latent_element: int
    rope_token: int
    rope_head: int
    rope_element: int
    block: int
    entry: int
    element: int


class DecodeStrides(NamedTuple):
    """Strides, in elements, of queries, cache and block table."""

    sources: SourceStrides
    table_row: int
    table: int
