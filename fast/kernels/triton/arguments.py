"""Groups of arguments, in the order of the parameters of the decode kernels of the backend "triton".

A record is a named tuple that a kernel takes as one parameter. Two kinds of arguments cannot be in a record:

- A tensor descriptor: Triton's launcher does not find a descriptor inside a record.
- A number or pointer that changes from call to call, such as the number of requests. Triton compiles another variant of
  a kernel if a number is 1 or a multiple of 16, or if a pointer is aligned to 16 bytes. The option `do_not_specialize`
  prevents these variants for parameters, but not for fields of a record.

A group with such arguments is unpacked by the launcher: each field is one parameter of the kernel.
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
    """Queries, cache and the tensors that describe the batch; each field is one parameter.

    `latent_pages` and `rope_pages` are descriptors with which TMA (the GPU's bulk copy engine) reads the cache. Both
    are None if TMA cannot read the cache. `kv_scale` is the scale of the layer's cache, [], or None. `q_scale` is the
    scale of queries in e4m3, [] or [N], or None; `q_scale_stride` is its stride from head to head, 0 for [].
    """

    sources: DecodeSources
    latent_pages: TensorDescriptor | None
    rope_pages: TensorDescriptor | None
    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    visible_lens: Tensor
    kv_scale: Tensor | None
    q_scale: Tensor | None
    q_scale_stride: int | None


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
    """Strides of queries, cache and block table, in elements; each field is one parameter."""

    sources: SourceStrides
    table_row: int
    table: int
