"""Kernels of context parallelism: reorder gathered cache entries, and merge the attention states of all ranks.

D ranks divide the tokens of every request among themselves, and each rank attends its own tokens. The attention states
(output and LSE) of the ranks are then merged. The owner rank of a head is the rank that keeps the head's merged output;
rank r owns the heads [r N / D, (r + 1) N / D).
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl
from torch import Tensor

from ...backends import launch
from ..device import device_of
from ..integers import cdiv, next_power_of_2
from .cache_rows import WARPS, as_integers, copy_rows, rows_per_program, tiles_of
from .token_requests import request_of

TILE_ELEMENTS = 4096  # elements of an output that one program processes


def reorg_kvcache(
    gathered: Tensor, cu_seq_lens: Tensor, local_cu_seq_lens: Tensor, interleave: int, out: Tensor
) -> None:
    """Copy the gathered cache entries of all ranks to `out`, in the order of the tokens of each request.

    A row of `out` becomes 0 if no request owns the row, or if the offsets point outside `gathered`.

    Args:
        gathered: [D, padded, columns], entries of the tokens of each rank, one request after another, in any dtype.
        cu_seq_lens: [B + 1], first row of each request in `out`.
        local_cu_seq_lens: [D, B + 1], first row of each request in `gathered`, for each rank.
        interleave: number of consecutive tokens that one rank gets before the next rank gets tokens.
        out: [num_tokens, columns], written in place.
    """
    size, padded, width = gathered.shape
    requests = cu_seq_lens.shape[0] - 1
    if out.numel() == 0:
        return
    source, target = as_integers(gathered, out)
    rows = rows_per_program(width * out.element_size())
    with device_of(out):
        launch(
            _reorg_kernel, (cdiv(out.shape[0], rows),),
            source, cu_seq_lens, local_cu_seq_lens, target, out.shape[0], requests, requests.bit_length(), padded,
            *source.stride(), cu_seq_lens.stride(0), *local_cu_seq_lens.stride(), *target.stride(),
            SIZE=size, INTERLEAVE=interleave, **tiles_of(width), ROWS=rows, num_warps=WARPS,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=["num_tokens", "num_requests", "search_steps", "padded", "local_rank"],
    do_not_specialize_on_alignment=["cu_seq_lens", "local_cu_seq_lens"],
)
@no_type_check
def _reorg_kernel(
    gathered, cu_seq_lens, local_cu_seq_lens, out, num_tokens, num_requests, search_steps, padded,
    source_rank, source_row, source_column, cu_stride, local_rank, local_request, out_row, out_column,
    SIZE: tl.constexpr, INTERLEAVE: tl.constexpr,
    WIDTH: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Copy the cache entries of ROWS tokens from the rank that owns each token."""
    tokens = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # 32-bit: token numbers and offsets are below 2^31
    written = tokens < num_tokens
    request = request_of(tokens, cu_seq_lens, cu_stride, num_requests, search_steps)
    owned = written & (request < num_requests)
    position = tokens - tl.load(cu_seq_lens + request * cu_stride, owned, 0)
    owned = owned & (position >= 0)
    group = position // INTERLEAVE
    rank = group % SIZE
    first = tl.load(local_cu_seq_lens + rank.to(tl.int64) * local_rank + request * local_request, owned, -1)
    row = first + group // SIZE * INTERLEAVE + position % INTERLEAVE
    owned = owned & (first >= 0) & (row >= 0) & (row < padded)
    rows = rank.to(tl.int64) * source_rank + row.to(tl.int64) * source_row
    out_rows = tokens.to(tl.int64) * out_row
    copy_rows(gathered, rows, source_column, owned, out, out_rows, out_column, written, WIDTH, HEAD, TAIL)


def weight_attn_out(out: Tensor, lses: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Multiply `out` [T, N, Dv] by this rank's softmax weights, which follow from `lses` [D, N, T] of all ranks.

    Returns:
        The weighted outputs, sorted by owner rank [D, T, N / D, Dv], and the merged LSE [N / D, T] of the heads that
        this rank owns.
    """
    size, heads, tokens = lses.shape
    own, value = heads // size, out.shape[2]
    by_owner = out.new_empty(size, tokens, own, value)
    lse = lses.new_empty(own, tokens)
    if lse.numel():
        lses = lses.contiguous()
        _sort_by_owner(out, lses, by_owner, lse, size, 0, by_owner.stride(0), rank=rank)
    return by_owner, lse


def pack_attn_state(out: Tensor, lse: Tensor, message: Tensor, lse_bytes: int) -> None:
    """Write `out` [T, N, Dv] and `lse` [N, T] into `message` [D, bytes], one row for each owner rank.

    A row begins with the LSE of the heads of its owner rank. The output of these heads begins at byte `lse_bytes`.
    """
    size = message.shape[0]
    if lse.numel():
        outs, lses = message.view(out.dtype), message.view(lse.dtype)
        outs = outs[:, lse_bytes // out.element_size() :]
        _sort_by_owner(out, lse.contiguous(), outs, lses, size, lses.stride(0), outs.stride(0), rank=None)


def _sort_by_owner(out, lses, outs_by_owner, lses_by_owner, size, lse_owner_stride, out_owner_stride, rank) -> None:
    """Launch the kernel that sorts the output `out` [T, N, Dv] by owner rank, as [D, T, N / D, Dv].

    If `rank` is a number, the kernel multiplies the outputs by the softmax weights of this rank, and writes the merged
    LSE of the heads that this rank owns. If `rank` is None, the kernel copies outputs and LSE unchanged.
    """
    tokens, heads, value = out.shape
    value_tile = next_power_of_2(value)
    rows = max(1, TILE_ELEMENTS // value_tile)
    with device_of(out):
        launch(
            _sort_by_owner_kernel, (cdiv(tokens * heads, rows),),
            out, lses, outs_by_owner, lses_by_owner, tokens, heads, heads // size, -1 if rank is None else rank,
            *out.stride(), lse_owner_stride, out_owner_stride,
            SIZE=size, SCALED=rank is not None, VALUE=value, VALUE_TILE=value_tile, ROWS=rows, num_warps=4,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=["num_tokens", "num_heads", "own_heads", "rank", "lse_owner_stride", "out_owner_stride"],
    do_not_specialize_on_alignment=["lses", "lses_by_owner"],
)
@no_type_check
def _sort_by_owner_kernel(
    out, lses, outs_by_owner, lses_by_owner, num_tokens, num_heads, own_heads, rank,
    token_stride, head_stride, column_stride, lse_owner_stride, out_owner_stride,
    SIZE: tl.constexpr, SCALED: tl.constexpr, VALUE: tl.constexpr, VALUE_TILE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write ROWS rows (token, head) of `out`, sorted by owner rank; if SCALED, multiply the rows by softmax weights."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # the head varies fastest, as in memory
    token, head = row // num_heads, row % num_heads
    inside = token < num_tokens
    column = tl.arange(0, VALUE_TILE).to(tl.int64)
    held = inside[:, None] & (column < VALUE)[None, :]
    values = tl.load(out + (token * token_stride + head * head_stride)[:, None] + column * column_stride, held, 0.0)
    owner, own_head = head // own_heads, head % own_heads
    lse_row = head * num_tokens + token
    all_rows = num_heads.to(tl.int64) * num_tokens
    if SCALED:
        largest = tl.full([ROWS], float("-inf"), lses.dtype.element_ty)
        for other in tl.static_range(SIZE):
            rank_lse = tl.load(lses + other * all_rows + lse_row, inside, 0.0)
            largest = tl.maximum(largest, rank_lse, propagate_nan=tl.PropagateNan.ALL)
        shift = tl.where(largest == float("-inf"), 0.0, largest)
        total = tl.zeros([ROWS], lses.dtype.element_ty)
        for other in tl.static_range(SIZE):
            total += tl.exp(tl.load(lses + other * all_rows + lse_row, inside, 0.0) - shift)
        own = tl.load(lses + rank * all_rows + lse_row, inside, 0.0)
        weight = tl.exp(own - shift) / tl.where(total == 0, 1.0, total)
        weighted = tl.where((own == float("-inf"))[:, None], 0.0, values.to(weight.dtype) * weight[:, None])
        values = weighted.to(outs_by_owner.dtype.element_ty)
        on_owner = inside & (owner == rank)
        tl.store(lses_by_owner + own_head * num_tokens + token, shift + tl.log(total), on_owner)
    else:
        lse = tl.load(lses + lse_row, inside, 0.0)
        tl.store(lses_by_owner + owner * lse_owner_stride + own_head * num_tokens + token, lse, inside)
    target = owner * out_owner_stride + (token * own_heads + own_head) * VALUE
    tl.store(outs_by_owner + target[:, None] + column[None, :], values, held)


def merge_packed_attn_states(message: Tensor, lse_bytes: int, out: Tensor, lse: Tensor) -> None:
    """Merge the states that `pack_attn_state` wrote on all ranks into `out` [T, N / D, Dv] and `lse` [N / D, T]."""
    tokens, own, value = out.shape
    if lse.numel() == 0:
        return
    outs, lses = message.view(out.dtype), message.view(lse.dtype)
    outs = outs[:, lse_bytes // out.element_size() :]
    value_tile = next_power_of_2(value)
    rows = max(1, TILE_ELEMENTS // value_tile)
    with device_of(out):
        launch(
            _merge_packed_kernel, (cdiv(tokens * own, rows),),
            outs, lses, out, lse, tokens, own, outs.stride(0), lses.stride(0),
            SIZE=message.shape[0], VALUE=value, VALUE_TILE=value_tile, ROWS=rows, num_warps=4,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=["num_tokens", "own_heads", "out_rank_stride", "lse_rank_stride"],
    do_not_specialize_on_alignment=["lses", "lse"],
)
@no_type_check
def _merge_packed_kernel(
    outs, lses, out, lse, num_tokens, own_heads, out_rank_stride, lse_rank_stride,
    SIZE: tl.constexpr, VALUE: tl.constexpr, VALUE_TILE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Merge the states of SIZE ranks, for ROWS rows (token, head)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token, head = row // own_heads, row % own_heads
    inside = token < num_tokens
    column = tl.arange(0, VALUE_TILE).to(tl.int64)
    held = inside[:, None] & (column < VALUE)[None, :]
    lse_row = head * num_tokens + token
    largest = tl.full([ROWS], float("-inf"), lse.dtype.element_ty)
    for rank in tl.static_range(SIZE):
        rank_lse = tl.load(lses + rank * lse_rank_stride.to(tl.int64) + lse_row, inside, 0.0)
        largest = tl.maximum(largest, rank_lse, propagate_nan=tl.PropagateNan.ALL)
    shift = tl.where(largest == float("-inf"), 0.0, largest)  # if no rank has a key, -inf - (-inf) would be NaN
    total = tl.zeros([ROWS], lse.dtype.element_ty)
    merged = tl.zeros([ROWS, VALUE_TILE], lse.dtype.element_ty)
    for rank in tl.static_range(SIZE):
        rank_lse = tl.load(lses + rank * lse_rank_stride.to(tl.int64) + lse_row, inside, 0.0)
        weight = tl.exp(rank_lse - shift)
        pointers = outs + rank * out_rank_stride.to(tl.int64) + (row * VALUE)[:, None] + column[None, :]
        read = held & (rank_lse != float("-inf"))[:, None]  # skip the output of a rank without keys
        merged += weight[:, None] * tl.load(pointers, read, 0.0).to(merged.dtype)
        total += weight
    merged = merged / tl.where(total == 0, 1.0, total)[:, None]
    tl.store(out + (row * VALUE)[:, None] + column[None, :], merged.to(out.dtype.element_ty), held)
    tl.store(lse + lse_row, shift + tl.log(total), inside)
