"""Merge two attention states over disjoint keys, in one launch that reads each output once."""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...backends import launch
from ..device import device_of
from ..integers import cdiv, next_power_of_2
from .fp8 import converts_natively, float32_to_e4m3

TILE_ELEMENTS = 2048  # elements that one program processes, of each of the two outputs
WORD = 16  # bytes of the largest memory access
TOKENS = 8  # tokens of a program: for one head, their float32 LSEs fill 32 bytes, the smallest unit of a memory access


def merge_attn_states(
    prefix_out: Tensor,
    prefix_lse: Tensor,
    suffix_out: Tensor,
    suffix_lse: Tensor,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    output_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Merge two attention states over disjoint keys; return `out` [T, N, Dv] and `lse` [N, T], contiguous.

    If `out` and `lse` are given, the result is written there. `lse` may then have any strides: a prefill merges some
    columns of a larger LSE. If the LSEs of two tokens are apart, they are copied from a contiguous tensor. `out` and
    `lse` may be the tensors of one of the states, because all threads of a program load the elements of their rows
    before one of them stores a result. If `output_scale` is given, the merged output is divided by this scale and
    rounded to e4m3, the dtype of `out`.
    """
    tokens, heads, value_dim = prefix_out.shape
    if out is None:
        out = torch.empty_like(prefix_out, memory_format=torch.contiguous_format)
        lse = torch.empty_like(prefix_lse, memory_format=torch.contiguous_format)
    if lse.numel() == 0:
        return out, lse
    made_lse = lse if lse.stride(1) == 1 else torch.empty_like(lse, memory_format=torch.contiguous_format)
    native = False
    if output_scale is not None:
        out, native = out.view(torch.uint8), converts_natively(out.device)
    value_tile = next_power_of_2(max(1, value_dim))
    head_tile = max(1, min(next_power_of_2(heads), TILE_ELEMENTS // (TOKENS * value_tile)))
    head_tiles = cdiv(heads, head_tile)
    aligned = not any(each.data_ptr() % WORD for each in (prefix_out, suffix_out, out))
    with device_of(out):
        launch(
            _merge_kernel if aligned else _unaligned_merge_kernel, (cdiv(tokens, TOKENS) * head_tiles,),
            prefix_out, prefix_lse, suffix_out, suffix_lse, out, made_lse, output_scale, tokens, heads, head_tiles,
            *prefix_out.stride(), *prefix_lse.stride(), *suffix_out.stride(), *suffix_lse.stride(), made_lse.stride(0),
            VALUE=value_dim, VALUE_TILE=value_tile, HEADS=head_tile, TOKENS=TOKENS, NATIVE=native, num_warps=4,
        )  # fmt: skip
    return out, lse if made_lse is lse else lse.copy_(made_lse)


NOT_SPECIALIZED = ["num_tokens", "prefix_lse_head", "suffix_lse_head", "lse_head"]
OF_ANY_ALIGNMENT = ["output_scale", "prefix_lse", "suffix_lse", "lse"]


@triton.jit(do_not_specialize=NOT_SPECIALIZED, do_not_specialize_on_alignment=OF_ANY_ALIGNMENT)
@no_type_check
def _merge_kernel(
    prefix_out, prefix_lse, suffix_out, suffix_lse, out, lse, output_scale, num_tokens, num_heads, head_tiles,
    prefix_token, prefix_head, prefix_column, prefix_lse_head, prefix_lse_token,
    suffix_token, suffix_head, suffix_column, suffix_lse_head, suffix_lse_token, lse_head,
    VALUE: tl.constexpr, VALUE_TILE: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """Merge two states for TOKENS tokens and HEADS heads; the output is in e4m3 if `output_scale` is given."""
    program = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, TOKENS * HEADS)  # the head varies fastest, as in memory
    token = program // head_tiles * TOKENS + row // HEADS
    head = program % head_tiles * HEADS + row % HEADS
    inside = (token < num_tokens) & (head < num_heads)
    column = tl.arange(0, VALUE_TILE).to(tl.int64)
    held = inside[:, None] & (column < VALUE)[None, :]
    prefix_rows = (token * prefix_token + head * prefix_head)[:, None] + column[None, :] * prefix_column
    suffix_rows = (token * suffix_token + head * suffix_head)[:, None] + column[None, :] * suffix_column
    a_out = tl.load(prefix_out + prefix_rows, held, 0.0)
    b_out = tl.load(suffix_out + suffix_rows, held, 0.0)
    a = tl.load(prefix_lse + head * prefix_lse_head + token * prefix_lse_token, inside, 0.0)
    b = tl.load(suffix_lse + head * suffix_lse_head + token * suffix_lse_token, inside, 0.0)

    # compute weights from the difference of the LSEs: exp(a - merged_lse) would magnify merged_lse's rounding error
    infinity = float("inf")
    a_weight, b_weight = 1 / (1 + tl.exp(b - a)), 1 / (1 + tl.exp(a - b))
    merged = a_out.to(a.dtype) * a_weight[:, None] + b_out.to(a.dtype) * b_weight[:, None]
    merged_lse = tl.maximum(a, b) + tl.log(1 + tl.exp(-tl.abs(a - b)))
    invalid = (a == infinity) | (b == infinity) | (a != a) | (b != b)
    merged = tl.where(invalid[:, None], float("nan"), merged)
    if output_scale is None:
        merged = merged.to(a_out.dtype)
    else:
        a_out, b_out = a_out.to(a.dtype), b_out.to(a.dtype)
    merged_lse = tl.where(invalid, float("nan"), merged_lse)
    # If one state has no keys (LSE -inf), return the exact bits of the other state. The formulas above would turn -0.0
    # into 0.0 and round the LSE.
    keep_a = (b == -infinity) & (a < infinity)
    keep_b = (a == -infinity) & (b < infinity)
    merged = tl.where(keep_b[:, None], b_out, tl.where(keep_a[:, None], a_out, merged))
    if output_scale is not None:
        merged = float32_to_e4m3(tl.div_rn(merged, tl.load(output_scale)), NATIVE)
    merged = merged.to(out.dtype.element_ty)
    merged_lse = tl.where(keep_b, b, tl.where(keep_a, a, merged_lse))
    # Every warp loads the LSEs of its rows, and one warp stores the merged LSEs, perhaps into the same memory. So wait
    # until all warps have loaded.
    tl.debug_barrier()
    tl.store(out + ((token * num_heads + head) * VALUE)[:, None] + column[None, :], merged, held)
    tl.store(lse + head * lse_head + token, merged_lse, inside)


# One variant for outputs at any addresses: rows of a run may begin at an address that is no multiple of WORD bytes.
_unaligned_merge_kernel = triton.jit(
    _merge_kernel.fn,
    do_not_specialize=NOT_SPECIALIZED,
    do_not_specialize_on_alignment=[*OF_ANY_ALIGNMENT, "prefix_out", "suffix_out", "out"],
)
