"""Conversions between float32 and e4m3 (8 bits, `torch.float8_e4m3fn` in PyTorch) inside Triton kernels.

Kernels read and write e4m3 as bytes (uint8). From compute capability 8.9 on, the GPU has instructions for both
conversions (NATIVE is True). On older GPUs Triton has no e4m3 type, and the functions compute with integers.

| sign | exponent | mantissa | value |
|---|---|---|---|
| 1 bit | 4 bits, e > 0 | 3 bits, m | 2^(e - 7) * (1 + m / 8) |
| 1 bit | 4 bits, 0 | 3 bits, m | 2^-9 * m |
| 1 bit | 1111 | 111 | NaN; there is no infinity |
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl

from ..device import device_facts

NATIVE_CAPABILITY = (8, 9)  # lowest compute capability with instructions for e4m3
E4M3_MAX = tl.constexpr(448.0)
E4M3_NAN = tl.constexpr(0x7F)
LEAST_NORMAL = tl.constexpr(2.0**-6)
# float32 numbers from 2^14 to 2^15 are multiples of 2^-9, so a sum with 2^14 is rounded to such a multiple
ROUNDING_STEP = tl.constexpr(2.0**14)
LEAST_REORDERED = tl.constexpr(128)  # columns from which `even_groups_first` changes the order
EXPONENT_SHIFT = tl.constexpr(
    120 << 3
)  # 120, the difference of the exponent biases of float32 and e4m3, to the left of the 3 mantissa bits


def converts_natively(device: torch.device) -> bool:
    """Return whether kernels on a device may convert with the GPU's instructions for e4m3 (NATIVE).

    Triton's interpreter rounds differently in its own conversions, so its kernels convert with integers.
    """
    facts = device_facts(device)
    return facts.capability >= NATIVE_CAPABILITY and not facts.interpreted


@triton.jit
@no_type_check  # the tests' type checker must not wrap a kernel: Triton's interpreter reads its source
def e4m3_to_float32(codes, NATIVE: tl.constexpr):
    """Return the float32 values of e4m3 codes (uint8)."""
    if NATIVE:
        values = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        values = _float16_bits(codes).to(tl.float32) * 256.0
        values = tl.where((codes & 0x7F) == E4M3_NAN, float("nan"), values)
    return values


@triton.jit
@no_type_check
def e4m3_to(codes, dtype: tl.constexpr, NATIVE: tl.constexpr):
    """Return the values of e4m3 codes (uint8) in a float dtype that holds them exactly.

    The dtype has at least 16 bits, or is Triton's dtype for e4m3, which needs NATIVE.
    """
    if dtype == tl.float8e4nv:
        values = codes.to(tl.float8e4nv, bitcast=True)
    elif NATIVE:
        values = codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)
        if dtype == tl.bfloat16:
            values = values.to(tl.float32)
        values = values.to(dtype)
    elif dtype == tl.float16:
        values = tl.where((codes & 0x7F) == E4M3_NAN, float("nan"), _float16_bits(codes) * 256.0)
    else:
        values = e4m3_to_float32(codes, False).to(dtype)
    return values


@triton.jit
@no_type_check
def float16_of_words(words, NATIVE: tl.constexpr, PINNED: tl.constexpr):
    """Return the values [ROWS, 4 * columns], in float16, of words [ROWS, columns] (int32) of four e4m3 codes each.

    The first code of a word is in its lowest byte. Words stay packed in registers, while Triton would unpack loaded
    bytes and pack them again for the conversion. The columns have the order of `even_groups_first`. With PINNED, the
    values keep the layout of the load (`pinned`).
    """
    if NATIVE:
        a, b, c, d = tl.inline_asm_elementwise(
            """
            {
                .reg .b16 low, high;
                .reg .b32 first, second;
                mov.b32 {low, high}, $4;
                cvt.rn.f16x2.e4m3x2 first, low;
                cvt.rn.f16x2.e4m3x2 second, high;
                mov.b32 {$0, $1}, first;
                mov.b32 {$2, $3}, second;
            }
            """,
            "=h,=h,=h,=h,r", [words], dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=False, pack=1,
        )  # fmt: skip
    else:
        a = e4m3_to(words.to(tl.uint8), tl.float16, False)
        b = e4m3_to((words >> 8).to(tl.uint8), tl.float16, False)
        c = e4m3_to((words >> 16).to(tl.uint8), tl.float16, False)
        d = e4m3_to((words >> 24).to(tl.uint8), tl.float16, False)
    values = tl.join(tl.join(a, c), tl.join(b, d))  # [ROWS, columns, 2, 2]
    values = even_groups_first(tl.reshape(values, [words.shape[0], 4 * words.shape[1]]))
    if PINNED:
        values = pinned(values)
    return values


@triton.jit
@no_type_check
def pinned(x):
    """Return 16-bit numbers `x` as they are, and keep them in the layout (elements of each thread) of their load.

    A kernel converts each tile from e4m3 bytes to 16-bit numbers, and two products read these numbers. Without the
    instruction below, which only copies `x`, the compiler moves the bytes to the layout of each product before it
    converts them. The compiled kernel then converts the tile twice, loads single bytes from shared memory, and does not
    prefetch the next tile. If both operands of a product are converted from bytes, the compiler would also arrange both
    operands as if they were bytes.
    """
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)


@triton.jit
@no_type_check
def even_groups_first(x):
    """Return `x` [ROWS, columns] with its columns in another order: the even groups of 8 columns, then the odd groups.

    A thread loads 16 e4m3 codes in one word of 16 bytes, and stores their values in 16 bits, as two words, in shared
    memory. In the order of the columns, the first words of 8 threads would lie in every second word of a row, and
    threads would wait for each other's memory banks. In the new order these words are consecutive. Rows of fewer than
    LEAST_REORDERED columns have no such conflict and keep their order.

    A product over the columns does not depend on their order, if both operands have the same order. `in_order` restores
    the order of a result.
    """
    ROWS: tl.constexpr = x.shape[0]
    COLUMNS: tl.constexpr = x.shape[1]
    if COLUMNS >= LEAST_REORDERED:
        x = tl.permute(tl.reshape(x, [ROWS, COLUMNS // 16, 2, 8]), (0, 2, 1, 3))
        x = tl.reshape(x, [ROWS, COLUMNS])
    return x


@triton.jit
@no_type_check
def in_order(x):
    """Return the columns of `x` [ROWS, columns], which are in the order of `even_groups_first`, in their own order."""
    ROWS: tl.constexpr = x.shape[0]
    COLUMNS: tl.constexpr = x.shape[1]
    if COLUMNS >= LEAST_REORDERED:
        x = tl.permute(tl.reshape(x, [ROWS, 2, COLUMNS // 16, 8]), (0, 2, 1, 3))
        x = tl.reshape(x, [ROWS, COLUMNS])
    return x


@triton.jit
@no_type_check
def _float16_bits(codes):
    """Return float16 numbers that are 2^-8 times the values of e4m3 codes; a NaN becomes a finite number."""
    bits = codes.to(tl.uint16)  # 2^-8, because the exponent biases of float16 and e4m3 are 15 and 7
    bits = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    return bits.to(tl.float16, bitcast=True)


@triton.jit
@no_type_check
def float32_to_e4m3(values, NATIVE: tl.constexpr):
    """Return the e4m3 codes (uint8) of float32 values.

    The rounding is to nearest, ties to even. A value beyond 448 gets the code of 448 with its sign, and NaN gets 0x7F.
    """
    limited = tl.minimum(tl.maximum(values, -E4M3_MAX), E4M3_MAX)  # NaN is treated below
    if NATIVE:
        codes = limited.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        size = tl.abs(limited)
        bits = size.to(tl.uint32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - EXPONENT_SHIFT
        step_bits = (size + ROUNDING_STEP).to(tl.uint32, bitcast=True)
        small = step_bits - tl.full(step_bits.shape, ROUNDING_STEP, tl.float32).to(tl.uint32, bitcast=True)
        sign = (limited.to(tl.uint32, bitcast=True) >> 24) & 0x80
        codes = (tl.where(size < LEAST_NORMAL, small, normal) | sign).to(tl.uint8)
    return tl.where(values != values, E4M3_NAN, codes).to(tl.uint8)
