"""Write products with one weight for each head into given memory, all rows at once or in blocks of equal size.

A library for matrix products chooses its kernel, and with it the rounding, by the number of rows. In a batch-invariant
prefill, this number must not depend on other requests, so the rows are multiplied in blocks of `INVARIANT_ROWS` rows.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

INVARIANT_ROWS = 256  # rows of a block; more rows need fewer launches, but the last block has more rows of zeros


def bmm_into(
    a: Float[Tensor, "N T K"], b: Float[Tensor, "N K M"], out: Float[Tensor, "N T M"], block_rows: int = 0
) -> None:
    """Write the batched product of `a` and `b` into `out`, which may have any strides.

    `torch.compile` cannot trace `torch.bmm(out=)` into a tensor that is not contiguous, so compiled code calls a custom
    op.

    Args:
        a: [N, T, K].
        b: [N, K, M].
        out: [N, T, M], written in place.
        block_rows: number of rows that one product multiplies; rows of zeros fill up the last block. All products then
            have the same shape, so the bits of a row depend on this row alone. 0 means all rows in one product.
    """
    if torch.compiler.is_compiling():
        torch.ops.mla_twins.bmm_out(a, b, out, block_rows)
    elif torch.is_grad_enabled():
        with torch.no_grad():
            _multiply(a, b, out, block_rows)
    else:
        _multiply(a, b, out, block_rows)


def _multiply(a: Tensor, b: Tensor, out: Tensor, block_rows: int) -> None:
    if block_rows == 0:
        torch.bmm(a, b, out=out)
        return
    rows = a.shape[1]
    whole = rows - rows % block_rows
    for first in range(0, whole, block_rows):
        torch.bmm(a[:, first : first + block_rows], b, out=out[:, first : first + block_rows])
    if whole < rows:
        out[:, whole:] = torch.bmm(_filled_up(a[:, whole:], block_rows), b)[:, : rows - whole]


def _filled_up(a: Tensor, rows: int) -> Tensor:
    """Return a copy of [N, T, K] with rows of zeros after the last row, and with the strides of `a`.

    A library may also choose its kernel by the strides.
    """
    shape, strides = (a.shape[0], rows, a.shape[2]), a.stride()
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))  # offset of the last element
    filled = a.new_zeros(last + 1).as_strided(shape, strides)
    if strides[0] == 0:  # all heads share their rows
        filled[0, : a.shape[1]] = a[0]
    else:
        filled[:, : a.shape[1]] = a
    return filled


@torch.library.custom_op(
    "mla_twins::bmm_out", mutates_args=("out",), schema="(Tensor a, Tensor b, Tensor(a!) out, SymInt block_rows) -> ()"
)
def _bmm_out(a, b, out, block_rows):
    _multiply(a, b, out, block_rows)


@_bmm_out.register_fake
def _(a, b, out, block_rows):
    return None
