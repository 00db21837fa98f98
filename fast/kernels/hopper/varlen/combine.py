"""Combine the partial outputs of a prefill that divides the keys of its query tiles into splits.

The partial outputs have the layout of a decode that divides all requests into the same number of splits
(`fast.kernels.combine.kernels`). This kernel adds them as the kernel of such a decode does, but writes an output with
any strides, and does not write the rows of padding tokens.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl
from torch import Tensor

from ....backends import launch
from ...combine.kernels import combine_partials, write_rows
from ...combine.states import Partials
from ...device import device_of
from ...integers import cdiv
from .records import OutStrides

ELEMENTS = 1024  # of an output tile: rows * columns; a program has 128 threads
SPLITS = 4  # splits that a program loads at a time


@triton.jit(
    do_not_specialize=["num_tokens", "num_requests", "num_heads", "num_splits"],
    do_not_specialize_on_alignment=["cu_seqlens_q", "lse"],
)  # fmt: skip
@no_type_check
def _combine_varlen_kernel(
    partial_out, partial_lse, cu_seqlens_q, out, lse, out_strides,
    num_tokens, num_requests, num_heads, num_splits,
    VALUE: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Combine the splits of ROWS query tokens of one head; store no LSE if `lse` is None."""
    head = tl.program_id(0) % num_heads
    token = (tl.program_id(0) // num_heads).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, VALUE)
    real = token < tl.minimum(tl.load(cu_seqlens_q + num_requests), num_tokens)  # False for padding tokens
    partials = Partials(partial_out, partial_lse, num_splits, num_tokens.to(tl.int64) * num_heads)
    row = token * num_heads + head
    state = combine_partials(partials, num_splits, 0, row, real, columns, VALUE, ROWS, VALUE, SPLITS)
    write_rows(state, token, head, real, columns, 0, num_tokens, out, lse, None, 0, VALUE, out_strides)


def combine_splits(
    partial_out: Tensor, partial_lse: Tensor, cu_seqlens_q: Tensor, num_splits: int, out: Tensor, lse: Tensor | None
) -> None:
    """Combine the partial outputs of a prefill into `out` and `lse`.

    Args:
        partial_out: [num_splits, T, N, V], float32, flat.
        partial_lse: [2, num_splits, T, N], float32, flat.
        cu_seqlens_q: [B + 1], first query token of each request; tokens behind the last request are not written.
        num_splits: number of splits of each query tile.
        out: [T, N, V], any strides, written in place; V is a power of two.
        lse: [N, T], contiguous, written in place; None stores no LSE.
    """
    tokens, heads, value = out.shape
    rows = ELEMENTS // value
    with device_of(out):
        launch(
            _combine_varlen_kernel, (cdiv(tokens, rows) * heads,),
            partial_out, partial_lse, cu_seqlens_q, out, lse, OutStrides(*out.stride()),
            tokens, cu_seqlens_q.shape[0] - 1, heads, num_splits, VALUE=value, ROWS=rows, SPLITS=SPLITS, num_warps=4,
        )  # fmt: skip
