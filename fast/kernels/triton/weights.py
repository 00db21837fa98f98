"""Multiply the rows of each head by the weight matrix of this head; the weight or the result may be in e4m3 (8 bits).

A program computes a tile of the product of one head: some rows (tokens) and some columns. It converts each tile of an
e4m3 weight to the dtype of the rows; this conversion is exact. It multiplies in the dtype of the rows, sums in float32,
and multiplies the sum by the scale of the weight. For a result in e4m3, it divides the float32 sum by the scale of the
result and rounds once.
"""

from __future__ import annotations

from typing import NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...backends import launch
from ..device import device_facts, device_of
from ..integers import cdiv, next_power_of_2
from .fp8 import converts_natively, e4m3_to_float32, float32_to_e4m3

LEAST = 16  # smallest size of a tile in `tl.dot`
MOST_ROWS, MOST_COLUMNS, MOST_DEPTH = 64, 128, 64


class ProductTile(NamedTuple):
    """Sizes of the tiles of one program, and options of its launch.

    Attributes:
        ROWS: tokens.
        COLUMNS: columns of the product.
        DEPTH: terms of a sum that are multiplied at once.
        num_warps: warps of a program.
        num_stages: tiles that are loaded ahead.
    """

    ROWS: int
    COLUMNS: int
    DEPTH: int
    num_warps: int
    num_stages: int


def product_tile(tokens: int, heads: int, inner: int, width: int, dtype: torch.dtype, processors: int) -> ProductTile:
    """Return the tile for products of [T, N, K] and [N, K, M].

    The number of rows is the smallest power of two that is not below the number of tokens, but at most `MOST_ROWS`.
    With all tokens in one tile, each part of the weight is read once. If possible, the number of columns is so small
    that every multiprocessor gets a program.

    Args:
        tokens: T.
        heads: N.
        inner: K.
        width: M.
        dtype: dtype of the rows.
        processors: number of multiprocessors of the GPU.
    """
    rows = min(MOST_ROWS, max(LEAST, next_power_of_2(tokens)))
    columns = min(MOST_COLUMNS, max(LEAST, next_power_of_2(width)))
    while columns > 2 * LEAST and heads * cdiv(width, columns) < processors:
        columns //= 2
    depth = min(MOST_DEPTH, max(LEAST, next_power_of_2(inner)))
    return ProductTile(rows, columns, depth, num_warps=4, num_stages=2 if dtype == torch.float32 else 3)


def variant_tokens(most_tokens: int) -> list[int]:
    """Return one number of tokens for every kernel variant that batches of 1 to `most_tokens` tokens can need.

    A variant is the kernel compiled for one `ProductTile`, of which only the number of rows depends on the number of
    tokens. For example, batches of 1 to 256 tokens need only the variants for 1, 17 and 33 tokens, which have tiles of
    16, 32 and 64 rows.
    """
    found, rows = [1], LEAST
    while rows < min(most_tokens, MOST_ROWS):
        found.append(rows + 1)
        rows *= 2
    return found


def multiply_heads(
    x: Tensor, weight: Tensor, weight_scale: Tensor | None, output_scale: Tensor | None, out: Tensor
) -> None:
    """Write the products of `x` [T, N, K] and `weight` [N, K, M] into `out`; apply the scales of weight and result.

    Args:
        x: [T, N, K]; float32, bfloat16 or float16.
        weight: [N, K, M] in e4m3, or in the dtype of `x`.
        weight_scale: float32, [] or [N]; None if the weight has the dtype of `x`.
        output_scale: float32, [] or [N], the scale of a result in e4m3; None for a result in the dtype of `x`.
        out: [T, N, M], any strides.
    """
    tokens, heads, inner = x.shape
    width = weight.shape[2]
    if out.numel() == 0:
        return
    tile = product_tile(tokens, heads, inner, width, x.dtype, device_facts(x.device).processors)
    row_blocks, column_blocks = cdiv(tokens, tile.ROWS), cdiv(width, tile.COLUMNS)
    if weight_scale is not None:
        weight = weight.view(torch.uint8)
    if output_scale is not None:
        out = out.view(torch.uint8)
    with device_of(x):
        launch(
            _multiply_heads_kernel, (heads * column_blocks * row_blocks,),
            x, weight, weight_scale, output_scale, out, tokens, row_blocks, column_blocks,
            *x.stride(), *weight.stride(), *out.stride(), _head_stride(weight_scale), _head_stride(output_scale),
            INNER=inner, WIDTH=width, NATIVE=converts_natively(x.device), **tile._asdict(),
        )  # fmt: skip


def _head_stride(scale: Tensor | None) -> int:
    """Return the stride of a scale [N]; 0 for a scale [], which all heads share."""
    return 0 if scale is None or scale.dim() == 0 else scale.stride(0)


@triton.jit(
    do_not_specialize=["num_tokens", "row_blocks"], do_not_specialize_on_alignment=["weight_scale", "output_scale"]
)
@no_type_check  # the tests' type checker must not wrap a kernel: Triton's interpreter reads its source
def _multiply_heads_kernel(
    x, weight, weight_scale, output_scale, out, num_tokens, row_blocks, column_blocks,
    x_token, x_head, x_column, weight_head, weight_row, weight_column, out_token, out_head, out_column,
    weight_scale_head, output_scale_head,
    INNER: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """Write ROWS rows and COLUMNS columns of the product of one head.

    Programs with the same part of the weight follow each other, so that the part is still in the L2 cache.
    """
    program = tl.program_id(0)
    head = (program // row_blocks // column_blocks).to(tl.int64)
    token = (program % row_blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (program // row_blocks % column_blocks).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside, held = (token < num_tokens)[:, None], (column < WIDTH)[None, :]
    rows = x + head * x_head + token[:, None] * x_token
    columns = weight + head * weight_head + column[None, :] * weight_column
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in tl.range(0, INNER, DEPTH):
        term = first + tl.arange(0, DEPTH).to(tl.int64)
        row_mask, column_mask = inside, held
        if INNER % DEPTH != 0:
            row_mask, column_mask = inside & (term < INNER)[None, :], held & (term < INNER)[:, None]
        left = tl.load(rows + term[None, :] * x_column, row_mask, 0.0)
        right = tl.load(columns + term[:, None] * weight_row, column_mask, 0)
        if weight_scale is not None:
            right = _e4m3_to(right, left.dtype, NATIVE)
        if left.dtype == tl.float32:
            # Each `tl.dot` sums DEPTH terms, and `tl.fma` adds this sum. This rounds less than adding every term to
            # `sums`, which is what Triton would make of `sums + tl.dot(...)`. Triton does not change `tl.fma`.
            sums = tl.fma(tl.dot(left, right, input_precision="ieee"), 1.0, sums)
        else:
            sums = tl.dot(left, right, acc=sums)
    if weight_scale is not None:
        sums = sums * tl.load(weight_scale + head * weight_scale_head)
    if output_scale is not None:
        quotients = tl.div_rn(sums, tl.load(output_scale + head * output_scale_head))
        sums = float32_to_e4m3(quotients, NATIVE)
    target = out + head * out_head + token[:, None] * out_token + column[None, :] * out_column
    tl.store(target, sums.to(out.dtype.element_ty), inside & held)


@triton.jit
@no_type_check
def _e4m3_to(codes, dtype: tl.constexpr, NATIVE: tl.constexpr):
    """Return the values of e4m3 codes (uint8) in float32, bfloat16 or float16; all three conversions are exact."""
    values = codes.to(tl.float8e4nv, bitcast=True) if NATIVE else e4m3_to_float32(codes, False)
    return values.to(dtype)
