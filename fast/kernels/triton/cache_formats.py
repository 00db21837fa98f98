"""Kernels that write and read cache entries of the formats with scales (`CacheFormat.scaled`).

An entry begins with the latent in e4m3, one byte (code) for each element. Its scales and its rope part depend on the
format:

| format | scales | rope part |
|---|---|---|
| one scale for the layer (SCALE_TILE is 0) | `kv_scale`, outside the cache | e4m3, with the scale of the layer |
| one scale for every SCALE_TILE elements of the latent | float32, at byte SCALES of the entry | bfloat16, at byte KEY |

The kernels get the cache as bytes. Slots and blocks outside the cache are skipped, as in the module `cache`.
"""

from __future__ import annotations

import functools
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from reference.interfaces import CacheFormat

from ...backends import launch
from ..device import device_of
from ..integers import cdiv, next_power_of_2
from .cache_rows import (
    WARPS,
    as_integers,
    gathered_entries,
    row_pointers,
    rows_per_program,
    slot_offsets,
    tiles_of,
    write_entries,
)
from .fp8 import E4M3_MAX, converts_natively, e4m3_to_float32, float32_to_e4m3

FLOAT32_MAX = tl.constexpr(torch.finfo(torch.float32).max)
FLOAT32_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)  # smallest normal number
BFLOAT16_NAN = tl.constexpr(0x7FC0)


def write_quantized(
    kv_c_normed: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    cache_format: CacheFormat,
    kv_scale: Tensor | None,
) -> None:
    """Quantise latents [T, Lkv] and keys [T, R], and write the entries into the cache (`concat_and_cache_mla`)."""
    tokens = kv_c_normed.shape[0]
    num_blocks, block_size, _ = kv_cache.shape
    if tokens == 0 or num_blocks == 0:
        return
    (cache,) = as_integers(kv_cache)
    constants = _write_constants(kv_c_normed, k_pe, cache_format)
    with device_of(cache):
        launch(
            _write_quantized_kernel, (cdiv(tokens, constants["ROWS"]),),
            kv_c_normed, k_pe, cache, slot_mapping, kv_scale, tokens, num_blocks,
            *kv_c_normed.stride(), *k_pe.stride(), *cache.stride(), slot_mapping.stride(0),
            BLOCK_SIZE=block_size, **constants,
        )  # fmt: skip


def quantize_entries(
    kv_c_normed: Tensor, k_pe: Tensor, out: Tensor, cache_format: CacheFormat, kv_scale: Tensor | None
) -> None:
    """Write the entries of latents [T, Lkv] and keys [T, R] into `out` [T, columns], as a cache stores them."""
    if not cache_format.scaled:
        torch.cat((kv_c_normed, k_pe), -1, out=out)
        return
    tokens = out.shape[0]
    if tokens == 0:
        return
    (entries,) = as_integers(out)
    constants = _write_constants(kv_c_normed, k_pe, cache_format)
    with device_of(entries):
        launch(
            _quantize_kernel, (cdiv(tokens, constants["ROWS"]),),
            kv_c_normed, k_pe, entries, kv_scale, tokens,
            *kv_c_normed.stride(), *k_pe.stride(), *entries.stride(), **constants,
        )  # fmt: skip


def gather_dequantized(
    kv_cache: Tensor,
    block_table: Tensor,
    cu_seq_lens: Tensor,
    starts: Tensor,
    out: Tensor,
    cache_format: CacheFormat,
    kv_scale: Tensor | None,
) -> None:
    """Gather entries from the cache, dequantise them and write them into `out` [num_tokens, Lkv + R].

    See `cache.gather_and_maybe_dequant_cache` for the rows that become 0.
    """
    num_blocks, block_size, _ = kv_cache.shape
    requests, columns = block_table.shape
    if out.numel() == 0:
        return
    (cache,) = as_integers(kv_cache)
    constants = _read_constants(cache, out, cache_format)
    with device_of(cache):
        launch(
            _gather_dequantized_kernel, (cdiv(out.shape[0], constants["ROWS"]),),
            cache, block_table, cu_seq_lens, starts, kv_scale, out,
            out.shape[0], requests, requests.bit_length(), columns, num_blocks,
            *cache.stride(), *block_table.stride(), cu_seq_lens.stride(0), starts.stride(0), *out.stride(),
            BLOCK_SIZE=block_size, **constants,
        )  # fmt: skip


def dequantize_entries(entries: Tensor, out: Tensor, cache_format: CacheFormat, kv_scale: Tensor | None) -> None:
    """Write stored entries [S, columns] into `out` [S, Lkv + R]; dequantise them if the format has scales."""
    if not cache_format.scaled:
        out.copy_(entries)
        return
    if out.numel() == 0:
        return
    stored = _aligned(as_integers(entries)[0], cache_format)
    constants = _read_constants(stored, out, cache_format)
    with device_of(stored):
        launch(
            _dequantize_kernel, (cdiv(out.shape[0], constants["ROWS"]),),
            stored, kv_scale, out, out.shape[0], *stored.stride(), *out.stride(), **constants,
        )  # fmt: skip


def _aligned(entries: Tensor, cache_format: CacheFormat) -> Tensor:
    """Return the entries [S, columns], or a copy if their alignment does not fit the format."""
    unit, (row, column) = cache_format.alignment, entries.stride()
    if unit == 1 or (column == 1 and row % unit == 0 and entries.data_ptr() % unit == 0):
        return entries
    return entries.clone(memory_format=torch.contiguous_format)


@functools.cache  # no caller changes the result
def entry_constants(cache_format: CacheFormat, latent: int, rope: int) -> dict[str, int]:
    """Return the constants that say at which bytes of an entry its parts begin, for a format with 1-byte elements."""
    layout = cache_format.layout(latent, rope)
    return {"SCALES": layout.scales, "KEY": layout.rope, "SCALE_TILE": cache_format.scale_tile}


def _write_constants(kv_c: Tensor, k_pe: Tensor, cache_format: CacheFormat) -> dict[str, int]:
    """Return the constants and options of a kernel that writes entries."""
    latent, rope = kv_c.shape[1], k_pe.shape[1]
    return entry_constants(cache_format, latent, rope) | {
        "LATENT": latent, "ROPE": rope,
        "LATENT_TILE": next_power_of_2(latent), "ROPE_TILE": next_power_of_2(rope),
        "ROWS": rows_per_program((latent + rope) * kv_c.element_size()), "NATIVE": converts_natively(kv_c.device),
        "num_warps": WARPS,
    }  # fmt: skip


def _read_constants(entries: Tensor, out: Tensor, cache_format: CacheFormat) -> dict[str, int]:
    """Return the constants and options of a kernel that reads entries; `entries` has columns of one byte.

    If the latent and the rope part have the same dtype, the entry is divided into two tiles, such as 576 = 512 + 64.
    Otherwise the tiles are the latent and the rope part.
    """
    width = out.shape[1]
    if cache_format.scale_tile:
        latent, rope = cache_format.dims
        tiles = {"WIDTH": width, "HEAD": latent, "TAIL": next_power_of_2(rope)}
    else:
        tiles = tiles_of(width)
    return entry_constants(cache_format, tiles["HEAD"], width - tiles["HEAD"]) | tiles | {
        "ROWS": rows_per_program(entries.shape[-1] * entries.element_size()),
        "NATIVE": converts_natively(entries.device), "num_warps": WARPS,
    }  # fmt: skip


@triton.jit
@no_type_check
def float32_to_bfloat16_bits(values):
    """Return the bits (uint16) of float32 values rounded to bfloat16, to nearest, ties to even.

    Triton's interpreter rounds towards 0 if it converts to bfloat16, so the function computes with integers.
    """
    bits = values.to(tl.uint32, bitcast=True)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.uint16)
    return tl.where(values != values, BFLOAT16_NAN, rounded).to(tl.uint16)


@triton.jit
@no_type_check
def parts_of_entries(entries, entry_rows, FIRST: tl.constexpr, TYPE: tl.constexpr):
    """Return pointers [ROWS, 1] of the dtype TYPE to byte FIRST of each entry at `entry_rows`."""
    return (entries + entry_rows + FIRST).to(tl.pointer_type(TYPE), bitcast=True)[:, None]


@triton.jit
@no_type_check
def tile_scales(tiles):
    """Return the float32 scales [ROWS, TILES] of tiles [ROWS, TILES, SCALE_TILE]; see `reference.quantize_entries`."""
    sizes = tl.where(tiles != tiles, 0.0, tl.minimum(tl.abs(tiles), FLOAT32_MAX))
    return tl.maximum(tl.div_rn(tl.max(sizes, 2), E4M3_MAX), FLOAT32_TINY)


@triton.jit
@no_type_check
def store_latents(
    latents, kv_scale, entries, entry_rows, written, column_stride,
    LATENT: tl.constexpr, SCALES: tl.constexpr, SCALE_TILE: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Quantise latents [ROWS, LATENT_TILE] and store them, with their scales, in the entries at `entry_rows` [ROWS].

    A row with `written` [ROWS] false is not stored.
    """
    ROWS: tl.constexpr = latents.shape[0]
    LATENT_TILE: tl.constexpr = latents.shape[1]
    latents = latents.to(tl.float32)
    if SCALE_TILE > 0:
        TILES: tl.constexpr = LATENT_TILE // SCALE_TILE
        tiles = tl.reshape(latents, [ROWS, TILES, SCALE_TILE])
        scales = tile_scales(tiles)
        quotients = tl.reshape(tl.div_rn(tiles, scales[:, :, None]), [ROWS, LATENT_TILE])
        tile = tl.arange(0, TILES)[None, :]
        targets = parts_of_entries(entries, entry_rows, SCALES, tl.float32) + tile
        tl.store(targets, scales, written[:, None] & (tile * SCALE_TILE < LATENT))
    else:
        quotients = tl.div_rn(latents, tl.load(kv_scale))
    codes = float32_to_e4m3(quotients, NATIVE)
    write_entries(codes, entries, entry_rows, written, column_stride, 0, LATENT)


@triton.jit
@no_type_check
def store_keys(
    keys, columns, held, kv_scale, entries, entry_rows, written, column_stride,
    KEY: tl.constexpr, SCALE_TILE: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Store rotated keys [ROWS, TILE] in the rope parts of the entries at `entry_rows` [ROWS].

    `columns` [TILE] are indices into the rope part. `held` [TILE] is false for an index past the end of the rope part.
    A row with `written` [ROWS] false is not stored.
    """
    mask = written[:, None] & held[None, :]
    if SCALE_TILE > 0:
        if keys.dtype == tl.bfloat16:
            bits = keys.to(tl.uint16, bitcast=True)
        else:
            bits = float32_to_bfloat16_bits(keys.to(tl.float32))
        tl.store(parts_of_entries(entries, entry_rows, KEY, tl.uint16) + columns[None, :], bits, mask)
    else:
        codes = float32_to_e4m3(tl.div_rn(keys.to(tl.float32), tl.load(kv_scale)), NATIVE)
        targets = entries + entry_rows[:, None] + (KEY + columns)[None, :].to(tl.int64) * column_stride
        tl.store(targets, codes, mask)


@triton.jit
@no_type_check
def _quantize_rows(
    kv_c, k_pe, kv_scale, tokens, inside, entries, entry_rows, written,
    kv_c_row, kv_c_column, k_pe_row, k_pe_column, column_stride,
    LATENT: tl.constexpr, ROPE: tl.constexpr, SCALES: tl.constexpr, KEY: tl.constexpr, SCALE_TILE: tl.constexpr,
    LATENT_TILE: tl.constexpr, ROPE_TILE: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Quantise the latents and keys of `tokens` [ROWS], and store them in the entries at `entry_rows` [ROWS].

    Rows with `inside` false are not read, and rows with `written` false are not stored. The loads do not use `written`:
    otherwise they would begin only after the slots are loaded.
    """
    read = inside[:, None] & (tl.arange(0, LATENT_TILE) < LATENT)[None, :]
    latents = tl.load(row_pointers(kv_c, tokens, kv_c_row, kv_c_column, 0, LATENT_TILE), read, 0.0)
    if ROPE > 0:
        columns = tl.arange(0, ROPE_TILE)
        held = columns < ROPE
        pointers = row_pointers(k_pe, tokens, k_pe_row, k_pe_column, 0, ROPE_TILE)
        keys = tl.load(pointers, inside[:, None] & held[None, :], 0.0)
        store_keys(keys, columns, held, kv_scale, entries, entry_rows, written, column_stride, KEY, SCALE_TILE, NATIVE)
    store_latents(latents, kv_scale, entries, entry_rows, written, column_stride, LATENT, SCALES, SCALE_TILE, NATIVE)


@triton.jit(do_not_specialize=["num_tokens", "num_blocks"], do_not_specialize_on_alignment=["slot_mapping"])
@no_type_check
def _write_quantized_kernel(
    kv_c, k_pe, kv_cache, slot_mapping, kv_scale, num_tokens, num_blocks,
    kv_c_row, kv_c_column, k_pe_row, k_pe_column, block_stride, entry_stride, column_stride, slot_stride,
    BLOCK_SIZE: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, SCALES: tl.constexpr, KEY: tl.constexpr,
    SCALE_TILE: tl.constexpr, LATENT_TILE: tl.constexpr, ROPE_TILE: tl.constexpr, NATIVE: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Quantise the latents and keys of ROWS tokens, and write them into the slots of these tokens."""
    tokens = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = tokens < num_tokens
    slots = tl.load(slot_mapping + tokens * slot_stride, inside, -1)
    written = (slots >= 0) & (slots // BLOCK_SIZE < num_blocks)
    entry_rows = slot_offsets(slots, block_stride, entry_stride, BLOCK_SIZE)
    _quantize_rows(
        kv_c, k_pe, kv_scale, tokens, inside, kv_cache, entry_rows, written,
        kv_c_row, kv_c_column, k_pe_row, k_pe_column, column_stride,
        LATENT, ROPE, SCALES, KEY, SCALE_TILE, LATENT_TILE, ROPE_TILE, NATIVE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens"])
@no_type_check
def _quantize_kernel(
    kv_c, k_pe, out, kv_scale, num_tokens,
    kv_c_row, kv_c_column, k_pe_row, k_pe_column, out_row, column_stride,
    LATENT: tl.constexpr, ROPE: tl.constexpr, SCALES: tl.constexpr, KEY: tl.constexpr, SCALE_TILE: tl.constexpr,
    LATENT_TILE: tl.constexpr, ROPE_TILE: tl.constexpr, NATIVE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Quantise the latents and keys of ROWS tokens, and write them to the rows of these tokens in `out`."""
    tokens = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = tokens < num_tokens
    _quantize_rows(
        kv_c, k_pe, kv_scale, tokens, inside, out, tokens * out_row, inside,
        kv_c_row, kv_c_column, k_pe_row, k_pe_column, column_stride,
        LATENT, ROPE, SCALES, KEY, SCALE_TILE, LATENT_TILE, ROPE_TILE, NATIVE,
    )  # fmt: skip


@triton.jit
@no_type_check
def _dequantize_rows(
    entries, entry_rows, column_stride, read, kv_scale, out, out_rows, out_column, written,
    SCALES: tl.constexpr, KEY: tl.constexpr, SCALE_TILE: tl.constexpr,
    WIDTH: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Dequantise the entries at `entry_rows` [ROWS], and write them into rows of WIDTH columns of `out`.

    Rows that are `written` but not `read` become 0.
    """
    codes = tl.load(row_pointers(entries, entry_rows, 1, column_stride, 0, HEAD), read[:, None], 0)
    head = e4m3_to_float32(codes, NATIVE)
    if HEAD < WIDTH:
        rest = read[:, None] & (HEAD + tl.arange(0, TAIL) < WIDTH)[None, :]
    if SCALE_TILE > 0:
        ROWS: tl.constexpr = head.shape[0]
        TILES: tl.constexpr = HEAD // SCALE_TILE
        pointers = parts_of_entries(entries, entry_rows, SCALES, tl.float32) + tl.arange(0, TILES)[None, :]
        scales = tl.load(pointers, read[:, None], 0.0)[:, :, None]
        head = tl.reshape(tl.reshape(head, [ROWS, TILES, SCALE_TILE]) * scales, [ROWS, HEAD])
        pointers = parts_of_entries(entries, entry_rows, KEY, tl.uint16) + tl.arange(0, TAIL)[None, :]
        bits = tl.load(pointers, rest, 0)
        if out.dtype.element_ty == tl.bfloat16:
            tail = bits.to(tl.bfloat16, bitcast=True)
        else:
            tail = (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        scale = tl.where(read, tl.load(kv_scale), 0.0)[:, None]  # rows that are not read: 0, even for a NaN scale
        head = head * scale
        if HEAD < WIDTH:
            codes = tl.load(row_pointers(entries, entry_rows, 1, column_stride, KEY, TAIL), rest, 0)
            tail = e4m3_to_float32(codes, NATIVE) * scale
    tl.store(row_pointers(out, out_rows, 1, out_column, 0, HEAD), head.to(out.dtype.element_ty), written[:, None])
    if HEAD < WIDTH:
        stored = written[:, None] & (HEAD + tl.arange(0, TAIL) < WIDTH)[None, :]
        tl.store(row_pointers(out, out_rows, 1, out_column, HEAD, TAIL), tail.to(out.dtype.element_ty), stored)


@triton.jit(
    do_not_specialize=["num_tokens", "num_requests", "search_steps", "num_columns", "num_blocks", "table_row"],
    do_not_specialize_on_alignment=["block_table", "cu_seq_lens", "starts"],
)
@no_type_check
def _gather_dequantized_kernel(
    kv_cache, block_table, cu_seq_lens, starts, kv_scale, out,
    num_tokens, num_requests, search_steps, num_columns, num_blocks,
    block_stride, entry_stride, cache_column, table_row, table_column, cu_stride, starts_stride, out_row, out_column,
    BLOCK_SIZE: tl.constexpr, SCALES: tl.constexpr, KEY: tl.constexpr, SCALE_TILE: tl.constexpr,
    WIDTH: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr, NATIVE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Dequantise the cache entries of ROWS tokens, and write them to ROWS consecutive rows of `out`."""
    tokens = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    written = tokens < num_tokens
    entry_rows, owned = gathered_entries(
        tokens, written, block_table, cu_seq_lens, starts, num_requests, search_steps, num_columns, num_blocks,
        block_stride, entry_stride, table_row, table_column, cu_stride, starts_stride, BLOCK_SIZE,
    )  # fmt: skip
    _dequantize_rows(
        kv_cache, entry_rows, cache_column, owned, kv_scale, out, tokens * out_row, out_column, written,
        SCALES, KEY, SCALE_TILE, WIDTH, HEAD, TAIL, NATIVE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens"])
@no_type_check
def _dequantize_kernel(
    entries, kv_scale, out, num_tokens, entry_stride, column_stride, out_row, out_column,
    SCALES: tl.constexpr, KEY: tl.constexpr, SCALE_TILE: tl.constexpr,
    WIDTH: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr, NATIVE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Dequantise ROWS stored entries, and write them to the rows of `out` with the same indices."""
    tokens = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    written = tokens < num_tokens
    _dequantize_rows(
        entries, tokens * entry_stride, column_stride, written, kv_scale, out, tokens * out_row, out_column, written,
        SCALES, KEY, SCALE_TILE, WIDTH, HEAD, TAIL, NATIVE,
    )  # fmt: skip
