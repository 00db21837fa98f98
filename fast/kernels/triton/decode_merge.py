"""The merge of a decode's parts: what several programs found about a row's keys becomes its output and its LSE.

A part of a row is a sum of values by exp2(score - largest), not divided yet, in float32, with `largest`, in base 2, and
the sum of those weights; `largest` may lie a little below the largest score. Where every request is cut into equally
many parts, they lie as [splits, T, N, Lkv] and [2, splits, T, N]; where a schedule cuts, as [slots, rows of a request,
Lkv] and [2, slots, rows], those of a request from its place in `split_offsets` on.

A request that is cut by its own length has as many slots as any. The program with its first split folds those that
follow, as far as it has them, into the first slot; each other split lies in the slot of its number. Behind all parts of
the LSE, [B, 2] says how many are folded, and how many there are.
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from reference.interfaces import DECODE_TILE

from .decode_tiles import LN_2
from .device import device_facts

FOLD_GROWTH = tl.constexpr(64.0)  # binary orders of magnitude, far from where float32 ends
MANY_PARTS = 16  # of a row, on average
# rows and columns of a program, parts at a time, and warps
FOR_FEW_PARTS = ((2, 512, 4, 4), (1, 512, 4, 2))  # of few heads, and of more
MANY_HEADS = 64
FOR_MANY_PARTS = (1, 32, 128, 4)
MANY_ROWS = 128  # of one request: enough programs also with larger tiles
FOR_MANY_ROWS = (1, 64, 64, 2)
FOR_FEW_ROWS = (1, 32, 64, 2)
# of requests that are cut by their own length: one, of few rows and of more; several, all of which have parts, of few
# heads and of more; and planned ones, of which few do
FOR_ONE_FOLD, FOR_FOLDS = ((1, 32, 32, 1), (1, 64, 16, 1)), ((1, 128, 16, 1), (1, 512, 4, 2))
FOR_PLANNED_FOLDS = (4, 512, 2, 4)


@triton.jit
@no_type_check  # the interpreter needs the source and globals of the kernels themselves
def _merge_slots(
    part_out, part_lse, splits, first_slot, num_slots, slot_rows, part_row, real, columns,
    LATENT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Maximum, sum and sum of values of ROWS rows over their parts from `first_slot` on, SPLITS at a time."""
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    values = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, splits, SPLITS):
        split = first + tl.arange(0, SPLITS)
        slot = first_slot + split
        used = (split < splits) & (slot >= 0) & (slot < num_slots)
        row = slot.to(tl.int64)[:, None] * slot_rows + part_row[None, :]  # [SPLITS, ROWS]
        held = used[:, None] & real[None, :]
        part = tl.load(part_lse + row, mask=held, other=float("-inf"))
        weight = tl.load(part_lse + num_slots.to(tl.int64) * slot_rows + row, mask=held, other=0.0)
        # a part without keys was written too, as zeros, so that nothing here waits for its weight
        where = (row * LATENT)[:, :, None] + columns[None, None, :]
        piece = tl.load(part_out + where, mask=held[:, :, None] & (columns < LATENT)[None, None, :], other=0.0)
        new_largest = tl.maximum(largest, tl.max(part, 0))
        shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        decay, share = tl.exp2(largest - shift), tl.exp2(part - shift[None, :])
        values = values * decay[:, None] + tl.sum(piece * share[:, :, None], 0)
        total = total * decay + tl.sum(weight * share, 0)
        largest = new_largest
    return largest, total, values


@triton.jit
@no_type_check
def load_part(part_out, part_lse, slot, held, num_slots, slot_rows, part_row, columns, LATENT: tl.constexpr):
    """Maximum, sum and sum of values of ROWS rows in one slot; of rows that it does not hold, of nothing seen."""
    row = slot.to(tl.int64) * slot_rows + part_row
    largest = tl.load(part_lse + row, mask=held, other=float("-inf"))
    total = tl.load(part_lse + num_slots.to(tl.int64) * slot_rows + row, mask=held, other=0.0)
    where = (row * LATENT)[:, None] + columns[None, :]
    values = tl.load(part_out + where, mask=held[:, None] & (columns < LATENT)[None, :], other=0.0)
    return largest, total, values


@triton.jit
@no_type_check
def fold_part(before, part):
    """Two parts of rows as one, relative to the first's largest score unless the second's is 2^64 times as large.

    So a long chain waits for additions alone. The new products are rounded before they are added, whatever a compiler
    would rather fuse: parts of a request that is cut by its own length are folded so, in turn, by whoever has them.
    """
    largest, total, values = before
    part_largest, part_total, part_values = part
    grown = part_largest > largest + FOLD_GROWTH
    reference = tl.where(grown, part_largest, largest)
    old = tl.where(grown, tl.exp2(largest - tl.where(grown, part_largest, 0.0)), 1.0)
    new = tl.where(grown, 1.0, tl.exp2(part_largest - tl.where(largest == float("-inf"), 0.0, largest)))
    total = tl.fma(total, old, part_total * new)
    values = tl.fma(values, tl.broadcast_to(old[:, None], values.shape), part_values * new[:, None])
    return reference, total, values


@triton.jit
@no_type_check
def _add_part(before, part, shift, one, held):
    """As `fold_part` of rows that are held, where the reference does not move: an addition of rounded products.

    Args:
        before: largest, total, values.
        part: likewise.
        shift: the reference, 0 where nothing was seen.
        one: 1.0, which the compiler must not know: it would fuse the product into the sum.
        held: rows.
    """
    largest, total, values = before
    part_largest, part_total, part_values = part
    new = tl.exp2(part_largest - shift)
    total = tl.where(held, tl.fma(total, tl.broadcast_to(one, total.shape), part_total * new), total)
    added = tl.fma(values, tl.broadcast_to(one, values.shape), part_values * new[:, None])
    return largest, total, tl.where(held[:, None], added, values)


@triton.jit
@no_type_check
def _rows_of_request(
    query_start_loc, request, row_tile, num_tokens, request_rows, HEADS: tl.constexpr, ROWS: tl.constexpr
):
    """Rows of a request [ROWS], their tokens, and which are real."""
    query_start = tl.minimum(tl.maximum(tl.load(query_start_loc + request), 0), num_tokens)
    query_end = tl.minimum(tl.load(query_start_loc + request + 1), num_tokens)
    row = row_tile * ROWS + tl.arange(0, ROWS)
    token = query_start + row // HEADS
    return row, token, (row < request_rows) & (token < query_end)  # tokens, for rows of a hostile end would wrap


@triton.jit
@no_type_check
def _write_rows(
    largest, total, values, token, head, real, columns, column_tile, num_tokens, out, lse,
    HEADS: tl.constexpr, LATENT: tl.constexpr,
):  # fmt: skip
    """Write the output of ROWS rows by COLUMNS; the programs of the first columns also write the LSE."""
    divisor = tl.where(total == 0, 1.0, total)  # nothing seen at all: values 0, largest -inf
    offsets = (token.to(tl.int64) * HEADS + head) * LATENT
    merged = (values * (1.0 / divisor)[:, None]).to(out.dtype.element_ty)
    held = real[:, None] & (columns < LATENT)[None, :]
    tl.store(out + offsets[:, None] + columns[None, :], merged, mask=held)
    if column_tile == 0:
        lse_row = lse + head.to(tl.int64) * num_tokens + token
        tl.store(lse_row, (largest + tl.log2(divisor)) * LN_2, mask=real)


@triton.jit(do_not_specialize=["num_tokens", "num_splits"])
@no_type_check
def _merge_splits_kernel(
    part_out, part_lse, out, lse, num_tokens, num_splits,
    HEADS: tl.constexpr, LATENT: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Merge the equally many parts of ROWS rows of the batch by COLUMNS of their latents."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    column_tiles: tl.constexpr = (LATENT + COLUMNS - 1) // COLUMNS
    column_tile = tl.program_id(0) % column_tiles
    row = (tl.program_id(0) // column_tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    num_rows = num_tokens.to(tl.int64) * HEADS
    real = row < num_rows
    largest, total, values = _merge_slots(
        part_out, part_lse, num_splits, 0, num_splits, num_rows, row, real, columns, LATENT, ROWS, COLUMNS, SPLITS
    )  # fmt: skip
    _write_rows(
        largest, total, values, row // HEADS, row % HEADS, real, columns, column_tile, num_tokens, out, lse, HEADS,
        LATENT,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens", "request_rows", "num_slots", "row_tiles"])
@no_type_check
def _merge_scheduled_kernel(
    split_offsets, query_start_loc, part_out, part_lse, out, lse,
    num_tokens, request_rows, num_slots, row_tiles,
    HEADS: tl.constexpr, LATENT: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Merge the parts of a request, ROWS of its rows by COLUMNS; of one without keys, write the empty rows."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    column_tiles: tl.constexpr = (LATENT + COLUMNS - 1) // COLUMNS
    number = tl.program_id(0)
    request = number // (row_tiles * column_tiles)
    row_tile, column_tile = number // column_tiles % row_tiles, number % column_tiles
    first_slot = tl.load(split_offsets + request)
    splits = tl.load(split_offsets + request + 1) - first_slot
    if splits != 1:
        row, token, real = _rows_of_request(query_start_loc, request, row_tile, num_tokens, request_rows, HEADS, ROWS)
        splits = tl.minimum(splits, num_slots)
        columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
        largest, total, values = _merge_slots(
            part_out, part_lse, splits, first_slot, num_slots, request_rows, row, real, columns, LATENT, ROWS,
            COLUMNS, SPLITS,
        )  # fmt: skip
        _write_rows(
            largest, total, values, token, row % HEADS, real, columns, column_tile, num_tokens, out, lse, HEADS, LATENT,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens", "request_rows", "num_slots", "num_requests", "row_tiles"])
@no_type_check
def _merge_folded_kernel(
    split_offsets, query_start_loc, part_out, part_lse, out, lse,
    num_tokens, request_rows, num_slots, num_requests, row_tiles,
    HEADS: tl.constexpr, LATENT: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr,
    SCHEDULED: tl.constexpr, AHEAD: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Fold what is left of a request that is cut by its own length: its first slot, then split by split.

    AHEAD: slots are read before it is known which of them are parts, for one request waits for nothing else then.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    column_tiles: tl.constexpr = (LATENT + COLUMNS - 1) // COLUMNS
    number = tl.program_id(0)
    request = number // (row_tiles * column_tiles)
    row_tile, column_tile = number // column_tiles % row_tiles, number % column_tiles
    request_slots = num_slots // num_requests
    progress = (part_lse + 2 * num_slots.to(tl.int64) * request_rows).to(tl.pointer_type(tl.int32), bitcast=True)
    folded, splits = tl.load(progress + 2 * request), tl.load(progress + 2 * request + 1)
    folded, splits = tl.maximum(folded, 1), tl.minimum(splits, request_slots)
    begun = True
    if SCHEDULED:  # a request without keys has no program, and its rows are written here
        begun = tl.load(split_offsets + request + 1) > tl.load(split_offsets + request)
    left = (folded < splits) | (not begun)
    if left | AHEAD:
        row, token, real = _rows_of_request(query_start_loc, request, row_tile, num_tokens, request_rows, HEADS, ROWS)
        columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
        first_slot = request * request_slots
        in_slots = row < request_rows if AHEAD else real & begun
        state = load_part(part_out, part_lse, first_slot, in_slots, num_slots, request_rows, row, columns, LATENT)
        if begun:
            one = tl.where(num_requests > 0, 1.0, 0.0)  # as `_add_part` wants it
            first, end = (request * 0 + 1, request_slots) if AHEAD else (folded, splits)
            more = (first > 0) if AHEAD else (first < splits)
            while more:
                parts = ()  # all on their way before the first is folded
                for place in tl.static_range(SPLITS):
                    part = load_part(
                        part_out, part_lse, first_slot + first + place, in_slots & (first + place < end), num_slots,
                        request_rows, row, columns, LATENT,
                    )  # fmt: skip
                    parts = parts + (part,)  # noqa: RUF005  the compiler knows no unpacking here
                highest = tl.full([ROWS], float("-inf"), tl.float32)
                for place in tl.static_range(SPLITS):
                    is_part = (first + place >= folded) & (first + place < splits)
                    highest = tl.maximum(highest, tl.where(is_part, parts[place][0], float("-inf")))
                if tl.max((highest > state[0] + FOLD_GROWTH).to(tl.int32), 0) == 0:
                    shift = tl.where(state[0] == float("-inf"), 0.0, state[0])
                    for place in tl.static_range(SPLITS):
                        is_part = (first + place >= folded) & (first + place < splits)
                        state = _add_part(state, parts[place], shift, one, real & is_part)
                else:  # seldom: a loop, for it need not be fast
                    for split in range(tl.maximum(first, folded), tl.minimum(first + SPLITS, splits)):
                        part = load_part(
                            part_out, part_lse, first_slot + split, real, num_slots, request_rows, row, columns, LATENT,
                        )  # fmt: skip
                        state = fold_part(state, part)
                first += SPLITS
                more = first < splits
        largest, total, values = state
        _write_rows(
            largest, total, values, token, row % HEADS, real & left, columns, column_tile, num_tokens, out, lse, HEADS,
            LATENT,
        )  # fmt: skip


def merge_parts(
    part_out: Tensor,
    part_lse: Tensor,
    query_start_loc: Tensor,
    max_query_len: int,
    tile_ranges: Tensor | None,
    split_offsets: Tensor | None,
    batch_invariant: bool,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Merge the parts of a decode, where it has any.

    Args:
        part_out: flat; no element where no row has parts. What Hopper's programs kept lies behind, and is not read.
        part_lse: flat; where requests are cut by their own length, [B, 2] int32 behind.
        query_start_loc: [B + 1].
        max_query_len: bounds the rows of a request.
        tile_ranges: [programs, 5] of a schedule, or None.
        split_offsets: [B + 1] of that schedule.
        batch_invariant: requests are cut by their own length; else, without a schedule, into equally many parts.
        out: [T, N, Lkv], contiguous.
        lse: [N, T], contiguous.
    """
    if part_out.numel() == 0:
        return
    tokens, heads, latent = out.shape
    requests = query_start_loc.shape[0] - 1
    following = device_facts(out.device).following
    written = {"HEADS": heads, "LATENT": latent}
    whole = triton.next_power_of_2(latent)
    # few rows have many parts each and leave most of the device idle: then small tiles, many parts at a time
    if tile_ranges is None and not batch_invariant:
        splits = part_out.numel() // out.numel()
        rows, columns, at_once, warps = _tile_for(splits, tokens * heads, heads, requests)
        columns = min(columns, whole)
        with torch.cuda.device_of(out):
            _merge_splits_kernel[(triton.cdiv(tokens * heads, rows) * triton.cdiv(latent, columns),)](
                part_out, part_lse, out, lse, tokens, splits,
                COLUMNS=columns, ROWS=rows, SPLITS=at_once, num_warps=warps, **written, **following,
            )  # fmt: skip
        return
    request_rows = rows_of_a_request(tokens, heads, max_query_len)
    slots = part_out.numel() // (request_rows * latent)
    if batch_invariant:
        slots = (part_lse.numel() - 2 * requests) // (2 * request_rows)
        if tile_ranges is None and slots <= requests:  # each request was one program's, which wrote whole rows
            return
        rows, columns, at_once, warps = FOR_PLANNED_FOLDS
        if requests == 1:
            rows, columns, at_once, warps = FOR_ONE_FOLD[request_rows >= MANY_ROWS]
        elif tile_ranges is None:
            rows, columns, at_once, warps = FOR_FOLDS[heads >= MANY_HEADS]
    else:
        many = tile_ranges.shape[0] > MANY_PARTS * requests
        rows, columns, at_once, warps = FOR_MANY_PARTS if many else FOR_FEW_PARTS[heads >= MANY_HEADS]
    columns = min(columns, whole)
    row_tiles = triton.cdiv(request_rows, rows)
    grid = (requests * row_tiles * triton.cdiv(latent, columns),)
    tiles = {"COLUMNS": columns, "ROWS": rows, "SPLITS": at_once, "num_warps": warps}
    query_start_loc = query_start_loc.contiguous()
    offsets = query_start_loc if split_offsets is None else split_offsets.contiguous()
    with torch.cuda.device_of(out):
        if batch_invariant:
            _merge_folded_kernel[grid](
                offsets, query_start_loc, part_out, part_lse, out, lse, tokens, request_rows, slots, requests,
                row_tiles, SCHEDULED=tile_ranges is not None, AHEAD=requests == 1 and tile_ranges is None, **tiles,
                **written, **following,
            )  # fmt: skip
        else:
            _merge_scheduled_kernel[grid](
                offsets, query_start_loc, part_out, part_lse, out, lse, tokens, request_rows, slots, row_tiles,
                **tiles, **written, **following,
            )  # fmt: skip


def _tile_for(parts: int, rows: int, heads: int, requests: int) -> tuple[int, int, int, int]:
    """Rows and columns of a program, parts at a time, and warps, for equally many parts of each row."""
    if parts <= MANY_PARTS:
        return FOR_FEW_PARTS[heads >= MANY_HEADS]
    if requests > 1:
        return FOR_MANY_PARTS
    return FOR_MANY_ROWS if rows >= MANY_ROWS else FOR_FEW_ROWS


def rows_of_a_request(tokens: int, heads: int, max_query_len: int) -> int:
    """Most rows of a request, from bounds that the host knows."""
    return max(1, min(max_query_len, tokens)) * heads


def readable_keys(max_seq_len: int, table_width: int, block_size: int) -> int:
    """Most keys of a request that kernels read, from bounds that the host knows; no sum of it and a tile overflows."""
    return min(max_seq_len, table_width * block_size, 2**31 - 2 * DECODE_TILE)


def whole_tiles(keys: int) -> int:
    """Keys rounded up to whole tiles, so that choices that are kept by keys are made once in a tile's steps."""
    return -(-keys // DECODE_TILE) * DECODE_TILE
