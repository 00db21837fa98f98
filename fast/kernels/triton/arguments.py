"""Groups of arguments, in the order of the parameters of the decode kernels of the backend "triton".

A record is a named tuple that a kernel takes as one parameter. Triton limits what a record can hold:

- Triton's launcher does not find a tensor descriptor inside a record.
- `do_not_specialize` has no effect on the fields of a record. Triton compiles a variant of the kernel for each field
  that is 1, a multiple of 16 or an aligned pointer.

Arguments that must not cause further variants are therefore separate parameters: sizes of the batch and of the cache,
numbers of splits, and pointers of any alignment.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


class DecodeSources(NamedTuple):
    """Queries and the cache, in one record."""

    ql_nope: Tensor
    q_pe: Tensor
    kv_cache: Tensor


class DecodeInputs(NamedTuple):
    """Queries, cache and the tensors that describe the batch, as separate parameters.

    `latent_pages` and `rope_pages` are descriptors of the cache for TMA (the GPU's bulk copy engine). They are None
    where TMA cannot read the cache.
    """

    sources: DecodeSources
    latent_pages: TensorDescriptor | None
    rope_pages: TensorDescriptor | None
    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    visible_lens: Tensor


class DecodeOutputs(NamedTuple):
    """Outputs and partial outputs of a scheduled decode, in one record."""

    out: Tensor
    lse: Tensor
    partial_out: Tensor
    partial_lse: Tensor


class SourceStrides(NamedTuple):
    """Strides of queries and cache, in elements, in one record."""

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
    """Strides of queries, cache and block table, in elements, as separate parameters."""

    sources: SourceStrides
    table_row: int
    table: int
