"""Conversions for the adapters to other libraries, one launch each: whole keys, padded columns, and the state law.

The values are those of the formulas in PyTorch in `fast.backends.adapters.conversion`, which CPU tensors take.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl
from torch import Tensor

from ...backends.kept_launches import KeptLaunch, KeptLaunches
from ..combine.states import LN_2
from ..device import device_of
from ..integers import cdiv, next_power_of_2

JOINED_ELEMENTS = 4096  # elements of `left` that one program copies
STATE_ELEMENTS, STATE_TOKENS = 2048, 8  # elements of the output and tokens of one program, as in `merge`


def join_columns(left: Tensor, right: Tensor | None, out: Tensor) -> KeptLaunch | None:
    """Write `left` into the first columns of `out`, and `right` into the columns after them, the same for each head.

    The launch reads each input once and writes `out` once.

    Args:
        left: [S, N, P], any strides. If `left` is `out[..., :P]` itself, only the columns after it are written.
        right: [S, D - P] in the dtype of `left`, any strides; None writes zeros.
        out: [S, N, D] in the dtype of `left`, any strides.

    Returns:
        The launch of (left, right, out), or (left, left, out) without `right`, for later calls with equal shapes,
        strides, dtypes and alignments; None if there was no launch or if it cannot be repeated.
    """
    tokens, heads, columns = left.shape
    rest = out.shape[2] - columns
    in_place = left.data_ptr() == out.data_ptr() and left.stride() == out.stride()
    if tokens == 0 or heads == 0 or rest + columns == 0:
        return None
    given = left if right is None else right
    key = (
        left.shape, left.stride(), out.stride(), None if right is None else right.stride(), rest, in_place, left.dtype,
        left.get_device(), left.data_ptr() % 16, out.data_ptr() % 16, given.data_ptr() % 16,
    )  # fmt: skip
    tensors = left, given, out
    with device_of(out):
        if _JOINS.again(key, tensors):
            return _JOINS.kept(key)
        left_tile, right_tile = next_power_of_2(max(1, columns)), next_power_of_2(max(1, rest))
        rows = max(1, JOINED_ELEMENTS // max(left_tile, right_tile))
        head_tile = min(next_power_of_2(heads), rows)
        token_tile, head_tiles = rows // head_tile, cdiv(heads, head_tile)
        right_strides = (0, 0) if right is None else right.stride()
        _JOINS.run(
            key, (cdiv(tokens, token_tile) * head_tiles,), tensors,
            (tokens, heads, head_tiles, *left.stride(), *right_strides, *out.stride()),
            LEFT=columns, LEFT_TILE=left_tile, RIGHT=rest, RIGHT_TILE=right_tile, TOKENS=token_tile, HEADS=head_tile,
            COPIES_LEFT=columns > 0 and not in_place, HAS_RIGHT=right is not None, num_warps=4,
        )  # fmt: skip
    return _JOINS.kept(key)


@triton.jit(do_not_specialize=["num_tokens"])
@no_type_check
def _join_columns_kernel(
    left, right, out, num_tokens, num_heads, head_tiles, left_token, left_head, left_column, right_token, right_column,
    out_token, out_head, out_column,
    LEFT: tl.constexpr, LEFT_TILE: tl.constexpr, RIGHT: tl.constexpr, RIGHT_TILE: tl.constexpr, TOKENS: tl.constexpr,
    HEADS: tl.constexpr, COPIES_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    """Write the columns of TOKENS tokens and HEADS heads."""
    program = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, TOKENS * HEADS)  # the head varies fastest, as in memory
    token = program // head_tiles * TOKENS + row // HEADS
    head = program % head_tiles * HEADS + row % HEADS
    inside = (token < num_tokens) & (head < num_heads)
    target = out + token * out_token + head * out_head
    if COPIES_LEFT:
        column = tl.arange(0, LEFT_TILE).to(tl.int64)
        held = inside[:, None] & (column < LEFT)[None, :]
        source = left + token * left_token + head * left_head
        values = tl.load(source[:, None] + column[None, :] * left_column, held)
        tl.store(target[:, None] + column[None, :] * out_column, values, held)
    if RIGHT > 0:
        column = tl.arange(0, RIGHT_TILE).to(tl.int64)
        held = inside[:, None] & (column < RIGHT)[None, :]
        if HAS_RIGHT:
            shared = (right + token * right_token)[:, None] + column[None, :] * right_column
            values = tl.load(shared, held)
        else:
            values = tl.zeros([TOKENS * HEADS, RIGHT_TILE], out.dtype.element_ty)
        tl.store(target[:, None] + (LEFT + column)[None, :] * out_column, values, held)


def convert_state(
    made: Tensor, made_lse: Tensor, out: Tensor | None, lse: Tensor, base_2: bool, poison: bool, empty_is_inf: bool,
    visible_lens: Tensor | None = None,
) -> KeptLaunch | None:  # fmt: skip
    """Convert the output and the LSE of a library in one launch.

    `fast.backends.adapters.conversion.lawful_state` explains the flags.

    Args:
        made: [T, N, V] or wider, any strides; output of the library.
        made_lse: [N, T] or [N, B, Sq] with B Sq = T, float32, any strides; LSE of the library.
        out: [T, N, V], any dtype and strides, receives the first V columns of `made`; None if only the LSE is wanted.
        lse: [N, T], float32, any strides, receives the LSE.
        base_2: whether `made_lse` is in base 2.
        poison: whether a row whose first output is NaN or infinite gets the LSE NaN.
        empty_is_inf: whether the LSE +inf means a row without keys, unless its output is NaN.
        visible_lens: [T], int32, contiguous; a token with 0 or a negative number has no keys. None for no such tokens.

    Returns:
        The launch of (made, made_lse, out, lse, visible_lens), where `made` stands for a missing `out` and `made_lse`
        for missing `visible_lens`, for later calls with equal shapes, strides, dtypes and alignments. None if there
        was no launch or if it cannot be repeated.
    """
    (tokens, heads, _), columns = made.shape, 0 if out is None else out.shape[2]
    queries = 1 if made_lse.dim() == 2 else made_lse.shape[2]
    if lse.numel() == 0:
        return None
    target, seen = made if out is None else out, made_lse if visible_lens is None else visible_lens
    key = (
        made.shape, queries, made_lse.stride(), made.stride(), target.stride(), lse.stride(), columns, made.dtype,
        target.dtype, base_2, poison, empty_is_inf, visible_lens is None, made.get_device(), made.data_ptr() % 16,
        made_lse.data_ptr() % 16, target.data_ptr() % 16, lse.data_ptr() % 16, seen.data_ptr() % 16,
    )  # fmt: skip
    tensors = made, made_lse, target, lse, seen
    with device_of(made):
        if _STATES.again(key, tensors):
            return _STATES.kept(key)
        tile = next_power_of_2(max(1, columns))
        head_tile = max(1, min(next_power_of_2(heads), 16, STATE_ELEMENTS // (STATE_TOKENS * tile)))
        head_tiles = cdiv(heads, head_tile)
        _STATES.run(
            key, (cdiv(tokens, STATE_TOKENS) * head_tiles,), tensors,
            (tokens, heads, head_tiles, queries, *made.stride(), *(*made_lse.stride(), 0)[:3], *target.stride(),
             *lse.stride()),
            COLUMNS=columns, TILE=tile, TOKENS=STATE_TOKENS, HEADS=head_tile, BASE_2=base_2, POISON=poison,
            EMPTY_IS_INF=empty_is_inf, HAS_LENS=visible_lens is not None, num_warps=4,
        )  # fmt: skip
    return _STATES.kept(key)


@triton.jit(do_not_specialize=["num_tokens", "queries", "lse_head", "lse_request", "lse_token", "to_head", "to_token"])
@no_type_check
def _convert_state_kernel(
    made, made_lse, out, lse, visible_lens, num_tokens, num_heads, head_tiles, queries, made_token, made_head,
    made_column, lse_head, lse_request, lse_token, out_token, out_head, out_column, to_head, to_token,
    COLUMNS: tl.constexpr, TILE: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, BASE_2: tl.constexpr,
    POISON: tl.constexpr, EMPTY_IS_INF: tl.constexpr, HAS_LENS: tl.constexpr,
):  # fmt: skip
    """Convert TOKENS tokens and HEADS heads."""
    program = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, TOKENS * HEADS)  # the head varies fastest, as in memory
    token = program // head_tiles * TOKENS + row // HEADS
    head = program % head_tiles * HEADS + row % HEADS
    inside = (token < num_tokens) & (head < num_heads)
    source = made + token * made_token + head * made_head
    place = head * lse_head + token // queries * lse_request + token % queries * lse_token
    value = tl.load(made_lse + place, inside, 0.0)
    if BASE_2:
        value = value * LN_2
    if POISON or EMPTY_IS_INF:
        first = tl.load(source, inside, 0.0).to(tl.float32)
        if POISON:
            value = value + first * 0.0  # NaN and infinity times 0 are NaN
        if EMPTY_IS_INF:
            value = tl.where(value == float("inf"), first - float("inf"), value)  # NaN stays NaN
    if HAS_LENS:
        empty = tl.load(visible_lens + token, inside, 1) <= 0
        value = tl.where(empty, float("-inf"), value)
    tl.store(lse + head * to_head + token * to_token, value, inside)
    if COLUMNS > 0:
        column = tl.arange(0, TILE).to(tl.int64)
        held = inside[:, None] & (column < COLUMNS)[None, :]
        values = tl.load(source[:, None] + column[None, :] * made_column, held)
        if HAS_LENS:
            values = tl.where(empty[:, None], 0.0, values)
        target = out + token * out_token + head * out_head
        tl.store(target[:, None] + column[None, :] * out_column, values.to(out.dtype.element_ty), held)


_JOINS, _STATES = KeptLaunches(_join_columns_kernel), KeptLaunches(_convert_state_kernel)
