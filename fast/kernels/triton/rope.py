"""Rotary embedding of the rope parts of queries and keys; a fused kernel also norms the latents and writes the cache.

All heads share the rope part of a key. Each token has one program that rotates the key (and, in the fused kernels,
writes the cache entry). Every further program of the token rotates the queries of HEADS heads. In the fused kernel for
a format with scales, the first program also rotates the queries of the first HEADS heads. A token then has one program
fewer, and its first program has more loads in flight.
"""

from __future__ import annotations

from typing import Any, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from reference.interfaces import COMPUTE_FORMAT, E4M3, CacheFormat

from ...backends import launch
from ..device import device_of
from ..integers import cdiv, next_power_of_2
from .cache_formats import entry_constants, store_keys, store_latents
from .cache_rows import as_integers, slot_offsets
from .fp8 import converts_natively, float32_to_e4m3

WARP_ELEMENTS = 2048  # largest number of elements of `q_pe` that a warp rotates
ROPE_WARPS = 4  # warps of a program of `apply_rope`
# Warps of a program of the fused kernels. One warp computes the sum of the RMS norm without shared memory, and more
# programs of one warp run at the same time, so that more loads are in flight.
WRITE_WARPS = 1  # a cache in the dtype of the latents
QUANTIZE_WARPS = 1  # a cache in a format with scales


class TokenValues(NamedTuple):
    """Inputs of `rope_norm_and_cache` that have one row for each token, and the cache."""

    q_pe: Any
    kv_c: Any
    k_pe: Any
    kv_cache: Any


class Tables(NamedTuple):
    """The weight of the RMS norm and the frequencies of the rotation."""

    norm_weight: Any
    frequencies: Any


class RotatedAndNormed(NamedTuple):
    """Outputs of `rope_norm_and_cache`."""

    q_pe: Any
    normed: Any
    k_pe: Any


class StoredQueries(NamedTuple):
    """How a kernel writes rotated queries.

    Attributes:
        memory: the tensor that the kernel writes: queries in e4m3 as bytes.
        scale_head: stride of the scale from head to head. Without a scale, it is None, so that the compiled kernel has
            no parameter for the stride.
        native: True if the GPU's own instructions round the queries to e4m3.
    """

    memory: Tensor
    scale_head: int | None
    native: bool


class TokenStrides(NamedTuple):
    """Strides of the inputs of `rope_norm_and_cache` and of the cache, in elements."""

    position: Any
    q_token: Any
    q_head: Any
    q_column: Any
    kv_c_token: Any
    kv_c_column: Any
    k_token: Any
    k_column: Any
    block: Any
    entry: Any
    element: Any
    slot: Any
    weight: Any
    frequency: Any


def apply_rope(
    positions: Tensor,
    q_pe: Tensor,
    k_pe: Tensor,
    frequencies: Tensor,
    magnitude: float,
    interleaved: bool,
    q_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `q_pe` [T, N, R] and `k_pe` [T, R], rotated by the angles `positions` [T] * `frequencies` [R/2].

    Both results are contiguous and multiplied by `magnitude`. `interleaved` says which elements form a pair
    (`rope_norm_and_cache`). If `q_scale`, [] or [N], is given, the rotated queries are divided by this scale and
    rounded to e4m3.
    """
    q_out = _new_queries(q_pe, q_scale)
    k_out = torch.empty_like(k_pe, memory_format=torch.contiguous_format)
    tokens, heads, rope = q_pe.shape
    if tokens == 0 or rope == 0:
        return q_out, k_out
    head_tile, head_tiles = _head_tiles(heads, rope, ROPE_WARPS)
    stored = _stored_queries(q_out, q_scale)
    with device_of(q_pe):
        launch(
            _rope_kernel, (tokens * (1 + head_tiles),),
            positions, q_pe, k_pe, frequencies, stored.memory, k_out, heads, 1 + head_tiles, magnitude,
            positions.stride(0), *q_pe.stride(), *k_pe.stride(), frequencies.stride(0), q_scale,
            stored.scale_head, ROPE=rope, PAIRS=next_power_of_2(rope // 2), HEADS=head_tile, INTERLEAVED=interleaved,
            NATIVE=stored.native, num_warps=ROPE_WARPS,
        )  # fmt: skip
    return q_out, k_out


def rope_norm_and_cache(
    positions: Tensor,
    q_pe: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    norm_weight: Tensor,
    eps: float,
    frequencies: Tensor,
    magnitude: float,
    interleaved: bool,
    cache_format: CacheFormat = COMPUTE_FORMAT,
    kv_scale: Tensor | None = None,
    q_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate `q_pe` and `k_pe`, RMS-norm the latents, and write normed latents and rotated keys into the cache.

    Args:
        positions: [T], position of each token in its request.
        q_pe: [T, N, R], rope part of the queries.
        kv_c: [T, Lkv], latents before the norm.
        k_pe: [T, R], rope part of the keys, which all heads share.
        kv_cache: [num_blocks, block_size, columns], written in place.
        slot_mapping: [slots], slot of each token. A token with a slot outside the cache, such as -1, is not written.
            If there are fewer slots than tokens, the last tokens are not written.
        norm_weight: [Lkv], weight of the RMS norm.
        eps: epsilon of the RMS norm.
        frequencies: [R/2] float32, radians per position.
        magnitude: factor by which cosines and sines are multiplied.
        interleaved: rotate the pairs (0, 1), (2, 3), .. if True, and (0, R/2), (1, R/2 + 1), .. if False.
        cache_format: format of the cache.
        kv_scale: float32 scale of the layer's cache; None if the format has no such scale.
        q_scale: float32 scale, [] or [N], with which the rotated `q_pe` is quantised to e4m3; only for a format with
            scales. None keeps the dtype of `q_pe`.

    Returns:
        Rotated `q_pe` [T, N, R], normed latents [T, Lkv] and rotated `k_pe` [T, R], all contiguous. In a format without
        scales, the cache entries have the bits of these latents and of this `k_pe`. In a format with scales, the cache
        entries have the bits that `quantize_entries` writes for these latents and this `k_pe`.
    """
    q_out = _new_queries(q_pe, q_scale)
    normed, k_out = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (kv_c, k_pe))
    tokens, heads, rope = q_pe.shape
    num_blocks, block_size, _ = kv_cache.shape
    if tokens == 0:
        return q_out, normed, k_out
    warps = QUANTIZE_WARPS if cache_format.scaled else WRITE_WARPS
    head_tile, head_tiles = _head_tiles(heads, rope, warps)
    token_programs = 1 + head_tiles
    kernel, scales, more, stored = _rope_norm_cache_kernel, (), {}, q_out
    if cache_format.scaled:
        token_programs = max(1, head_tiles)
        queries = _stored_queries(q_out, q_scale)
        stored, scales = queries.memory, (kv_scale, q_scale, queries.scale_head)
        kernel, kv_cache = _rope_norm_quantize_kernel, as_integers(kv_cache)[0]
        more = entry_constants(cache_format, kv_c.shape[1], rope) | {"NATIVE": converts_natively(kv_c.device)}
    with device_of(q_pe):
        launch(
            kernel, (tokens * token_programs,),
            positions, TokenValues(q_pe, kv_c, k_pe, kv_cache), slot_mapping,
            Tables(norm_weight, frequencies), RotatedAndNormed(stored, normed, k_out),
            heads, token_programs, num_blocks, slot_mapping.shape[0], magnitude, eps,
            TokenStrides(
                positions.stride(0), *q_pe.stride(), *kv_c.stride(), *k_pe.stride(), *kv_cache.stride(),
                slot_mapping.stride(0), norm_weight.stride(0), frequencies.stride(0),
            ),
            *scales,
            BLOCK_SIZE=block_size, LATENT=kv_c.shape[1], LATENT_TILE=next_power_of_2(kv_c.shape[1]),
            ROPE=rope, PAIRS=next_power_of_2(max(1, rope // 2)), HEADS=head_tile, INTERLEAVED=interleaved, **more,
            num_warps=warps,
        )  # fmt: skip
    return q_out, normed, k_out


def _new_queries(q_pe: Tensor, q_scale: Tensor | None) -> Tensor:
    """Return memory for the rotated queries: contiguous, in the dtype of `q_pe`, or in e4m3 if `q_scale` is given."""
    return torch.empty_like(q_pe, dtype=q_pe.dtype if q_scale is None else E4M3, memory_format=torch.contiguous_format)


def _stored_queries(q_out: Tensor, q_scale: Tensor | None) -> StoredQueries:
    """Return how a kernel writes the rotated queries `q_out`."""
    if q_scale is None:
        return StoredQueries(q_out, None, False)
    stride = q_scale.stride(0) if q_scale.dim() else 0
    return StoredQueries(q_out.view(torch.uint8), stride, converts_natively(q_out.device))


def _head_tiles(heads: int, rope: int, warps: int) -> tuple[int, int]:
    """Return the number of heads that a program of `warps` warps rotates, and the number of such tiles for each token.

    If there is no rope part (R = 0), the second number is 0.
    """
    tile = max(1, min(next_power_of_2(heads), warps * WARP_ELEMENTS // next_power_of_2(max(1, rope))))
    return tile, cdiv(heads, tile) if rope else 0


@triton.jit
@no_type_check
def _cos_sin(positions, frequencies, token, magnitude, position_stride, frequency_stride, PAIRS: tl.constexpr,
             ROPE: tl.constexpr):  # fmt: skip
    """Return cosines and sines [1, PAIRS] of one token's angles; the angles are float32, as in `reference`."""
    pair = tl.arange(0, PAIRS)
    frequency = tl.load(frequencies + pair * frequency_stride, pair < ROPE // 2, 0.0)
    angle = tl.load(positions + token * position_stride).to(tl.float32) * frequency
    return (tl.cos(angle) * magnitude)[None, :], (tl.sin(angle) * magnitude)[None, :]


@triton.jit
@no_type_check
def _rotate_pairs(a, b, cos, sin):
    """Return the pairs (a, b) after the rotation, in float32."""
    a, b = a.to(tl.float32), b.to(tl.float32)
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
@no_type_check
def _rotate(
    source, source_row, source_column, target, target_row, target_column, first, num_rows, cos, sin,
    ROWS: tl.constexpr, ROPE: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
    scale=None, scale_row=None, NATIVE: tl.constexpr = False,
):  # fmt: skip
    """Rotate the rows [first, first + ROWS) of the tensor [num_rows, ROPE] of one token; skip rows >= `num_rows`.

    If `scale` is given, row n is divided by the number at `scale + n * scale_row` and stored in e4m3.
    """
    row = (first + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    if INTERLEAVED:  # load whole rows with wide memory accesses, and separate the pairs in registers
        column = tl.arange(0, 2 * PAIRS)[None, :].to(tl.int64)
        held = (row < num_rows) & (column < ROPE)
        x = tl.load(source + row * source_row + column * source_column, held, 0.0)
        a, b = tl.split(tl.reshape(x, [ROWS, PAIRS, 2]))
        a, b = _rotate_pairs(a, b, cos, sin)
        rotated_row = tl.reshape(tl.join(a, b), [ROWS, 2 * PAIRS])
        if scale is not None:
            divisor = tl.load(scale + row * scale_row, row < num_rows, 1.0)
            rotated_row = float32_to_e4m3(tl.div_rn(rotated_row, divisor), NATIVE)
        tl.store(target + row * target_row + column * target_column, rotated_row, held)
    else:
        column = tl.arange(0, PAIRS)[None, :].to(tl.int64)
        held = (row < num_rows) & (column < ROPE // 2)
        source += row * source_row + column * source_column
        target += row * target_row + column * target_column
        a, b = tl.load(source, held, 0.0), tl.load(source + ROPE // 2 * source_column, held, 0.0)
        a, b = _rotate_pairs(a, b, cos, sin)
        if scale is not None:
            divisor = tl.load(scale + row * scale_row, row < num_rows, 1.0)
            a, b = float32_to_e4m3(tl.div_rn(a, divisor), NATIVE), float32_to_e4m3(tl.div_rn(b, divisor), NATIVE)
        tl.store(target, a, held)
        tl.store(target + ROPE // 2 * target_column, b, held)


@triton.jit(do_not_specialize_on_alignment=["positions", "q_scale"])
@no_type_check
def _rope_kernel(
    positions, q_pe, k_pe, frequencies, q_out, k_out, num_heads, token_programs, magnitude,
    position_stride, q_token, q_head, q_column, k_token, k_column, frequency_stride, q_scale, q_scale_head,
    ROPE: tl.constexpr, PAIRS: tl.constexpr, HEADS: tl.constexpr, INTERLEAVED: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Rotate the shared key of one token, or the queries of HEADS heads of one token."""
    token, number = tl.program_id(0).to(tl.int64) // token_programs, tl.program_id(0) % token_programs
    cos, sin = _cos_sin(positions, frequencies, token, magnitude, position_stride, frequency_stride, PAIRS, ROPE)
    if number == 0:  # the shared key is one row
        _rotate(
            k_pe + token * k_token, 0, k_column, k_out + token * ROPE, 0, 1, 0, 1, cos, sin,
            1, ROPE, PAIRS, INTERLEAVED,
        )  # fmt: skip
    else:
        _rotate(
            q_pe + token * q_token, q_head, q_column, q_out + token * num_heads * ROPE, ROPE, 1,
            (number - 1) * HEADS, num_heads, cos, sin, HEADS, ROPE, PAIRS, INTERLEAVED, q_scale, q_scale_head, NATIVE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_blocks", "num_slots"], do_not_specialize_on_alignment=["positions", "slot_mapping"])
@no_type_check
def _rope_norm_cache_kernel(
    positions, values, slot_mapping, tables, outputs,
    num_heads, token_programs, num_blocks, num_slots, magnitude, eps, strides,
    BLOCK_SIZE: tl.constexpr, LATENT: tl.constexpr, LATENT_TILE: tl.constexpr,
    ROPE: tl.constexpr, PAIRS: tl.constexpr, HEADS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Write the cache entry of one token, or rotate the queries of HEADS heads of one token."""
    token, number = tl.program_id(0).to(tl.int64) // token_programs, tl.program_id(0) % token_programs
    if number == 0:  # the cache entry: latent and shared key
        slot = tl.load(slot_mapping + token * strides.slot, token < num_slots, -1)
        written = (slot >= 0) & (slot // BLOCK_SIZE < num_blocks)
        entry = values.kv_cache + slot_offsets(slot, strides.block, strides.entry, BLOCK_SIZE)
        column = tl.arange(0, LATENT_TILE).to(tl.int64)
        held = column < LATENT
        normed = _normed_latent(values, tables, token, column, held, eps, strides, LATENT)
        tl.store(outputs.normed + token * LATENT + column, normed, held)
        tl.store(entry + column * strides.element, normed, held & written)
        if ROPE > 0:
            cos, sin = _cos_sin(
                positions, tables.frequencies, token, magnitude, strides.position, strides.frequency, PAIRS, ROPE
            )
            key = values.k_pe + token * strides.k_token
            _rotate(
                key, 0, strides.k_column, outputs.k_pe + token * ROPE, 0, 1, 0, 1, cos, sin, 1, ROPE, PAIRS, INTERLEAVED
            )
            _rotate(  # rotate again, into the cache; a slot outside the cache gives `num_rows` 0, so no row is written
                key, 0, strides.k_column, entry + LATENT * strides.element, 0, strides.element, 0,
                written.to(tl.int32), cos, sin, 1, ROPE, PAIRS, INTERLEAVED,
            )  # fmt: skip
    elif ROPE > 0:
        _rotate_queries(
            positions, values, tables, outputs, token, number - 1, num_heads, magnitude, strides,
            ROPE, PAIRS, HEADS, INTERLEAVED,
        )  # fmt: skip


@triton.jit
@no_type_check
def _normed_latent(values, tables, token, column, held, eps, strides, LATENT: tl.constexpr):
    """Return the normed latent of one token [LATENT_TILE], in float32; columns with `held` false become 0."""
    x = tl.load(values.kv_c + token * strides.kv_c_token + column * strides.kv_c_column, held, 0.0).to(tl.float32)
    weight = tl.load(tables.norm_weight + column * strides.weight, held, 0.0).to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, 0) / LATENT + eps) * weight


@triton.jit
@no_type_check
def _rotate_queries(
    positions, values, tables, outputs, token, head_tile, num_heads, magnitude, strides,
    ROPE: tl.constexpr, PAIRS: tl.constexpr, HEADS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Rotate the queries of one token, for the HEADS heads of tile number `head_tile`."""
    cos, sin = _cos_sin(
        positions, tables.frequencies, token, magnitude, strides.position, strides.frequency, PAIRS, ROPE
    )
    _rotate(
        values.q_pe + token * strides.q_token, strides.q_head, strides.q_column,
        outputs.q_pe + token * num_heads * ROPE, ROPE, 1,
        head_tile * HEADS, num_heads, cos, sin, HEADS, ROPE, PAIRS, INTERLEAVED,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["num_blocks", "num_slots"],
    do_not_specialize_on_alignment=["positions", "slot_mapping", "q_scale"],
)
@no_type_check
def _rope_norm_quantize_kernel(
    positions, values, slot_mapping, tables, outputs,
    num_heads, token_programs, num_blocks, num_slots, magnitude, eps, strides, kv_scale, q_scale, q_scale_head,
    BLOCK_SIZE: tl.constexpr, LATENT: tl.constexpr, LATENT_TILE: tl.constexpr,
    ROPE: tl.constexpr, PAIRS: tl.constexpr, HEADS: tl.constexpr, INTERLEAVED: tl.constexpr,
    SCALES: tl.constexpr, KEY: tl.constexpr, SCALE_TILE: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Do the work of `_rope_norm_cache_kernel` for a format with scales: quantise the cache entries.

    Program 0 of a token also rotates the queries of the first HEADS heads.
    """
    token, number = tl.program_id(0).to(tl.int64) // token_programs, tl.program_id(0) % token_programs
    if ROPE > 0:
        cos, sin = _cos_sin(
            positions, tables.frequencies, token, magnitude, strides.position, strides.frequency, PAIRS, ROPE
        )
    if number == 0:  # the cache entry (latent and shared key), as one row, because `cache_formats` stores rows
        row = token + tl.arange(0, 1)
        slots = tl.load(slot_mapping + row * strides.slot, row < num_slots, -1)
        written = (slots >= 0) & (slots // BLOCK_SIZE < num_blocks)
        entry_rows = slot_offsets(slots, strides.block, strides.entry, BLOCK_SIZE)
        column = tl.arange(0, LATENT_TILE).to(tl.int64)
        held = column < LATENT
        if ROPE > 0:  # load the key before the norm, which waits for the whole latent
            pair = tl.arange(0, PAIRS)
            half = pair < ROPE // 2
            a_column = 2 * pair if INTERLEAVED else pair
            b_column = a_column + (1 if INTERLEAVED else ROPE // 2)
            key = values.k_pe + token * strides.k_token
            a = tl.load(key + a_column.to(tl.int64) * strides.k_column, half, 0.0)[None, :]
            b = tl.load(key + b_column.to(tl.int64) * strides.k_column, half, 0.0)[None, :]
        normed = _normed_latent(values, tables, token, column, held, eps, strides, LATENT)
        normed = normed.to(outputs.normed.dtype.element_ty)  # quantise the rounded output
        tl.store(outputs.normed + token * LATENT + column, normed, held)
        store_latents(
            normed[None, :], kv_scale, values.kv_cache, entry_rows, written, strides.element,
            LATENT, SCALES, SCALE_TILE, NATIVE,
        )  # fmt: skip
        if ROPE > 0:
            a, b = _rotate_pairs(a, b, cos, sin)
            a, b = a.to(outputs.k_pe.dtype.element_ty), b.to(outputs.k_pe.dtype.element_ty)
            target = outputs.k_pe + token * ROPE
            tl.store(target + a_column[None, :], a, half[None, :])
            tl.store(target + b_column[None, :], b, half[None, :])
            store_keys(
                a, a_column, half, kv_scale, values.kv_cache, entry_rows, written, strides.element,
                KEY, SCALE_TILE, NATIVE,
            )  # fmt: skip
            store_keys(
                b, b_column, half, kv_scale, values.kv_cache, entry_rows, written, strides.element,
                KEY, SCALE_TILE, NATIVE,
            )  # fmt: skip
    if ROPE > 0:
        _rotate(
            values.q_pe + token * strides.q_token, strides.q_head, strides.q_column,
            outputs.q_pe + token * num_heads * ROPE, ROPE, 1,
            number * HEADS, num_heads, cos, sin, HEADS, ROPE, PAIRS, INTERLEAVED, q_scale, q_scale_head, NATIVE,
        )  # fmt: skip
