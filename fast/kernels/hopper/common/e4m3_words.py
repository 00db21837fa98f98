"""Convert e4m3 codes to float16 in registers. A word is two e4m3 codes of consecutive columns of a cache entry (int16).

The conversion is exact: float16 holds every value of e4m3. A register holds two words, and one instruction converts two
codes. Both functions therefore return two tensors: the first two codes of the four in a register, and the last two.
The words must be in the layout of the left operand of a product, in which a register holds neighbours along the axis of
the sum.
"""

from __future__ import annotations

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
@no_type_check
def halves_of_columns(words):
    """Convert words [keys, words of a key], of which a register holds two consecutive words of one key.

    In both results, columns 2i and 2i + 1 are consecutive columns of the key. In the first result, they are columns 4i
    and 4i + 1 of the key; in the second result, they are columns 4i + 2 and 4i + 3.
    """
    return gl.inline_asm_elementwise(
        """
        {
            .reg .b16 low, high;
            mov.b32 {low, high}, $2;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
        }
        """,
        "=r,=r,r", [words], (gl.float16, gl.float16), is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
@no_type_check
def halves_of_keys(words):
    """Convert words [words of a key, keys], of which a register holds the same word of two consecutive keys.

    The first result has the even columns of all keys, and the second result has the odd columns.
    """
    return gl.inline_asm_elementwise(
        """
        {
            .reg .b16 low, high;
            .reg .b32 sorted;
            prmt.b32 sorted, $2, $2, 0x3120;
            mov.b32 {low, high}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
        }
        """,
        "=r,=r,r", [words], (gl.float16, gl.float16), is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
@no_type_check
def halves_of_queries(queries):
    """Return two tensors with the columns of `queries` in the order of the two results of `halves_of_columns`."""
    ROWS: gl.constexpr = queries.shape[0]
    COLUMNS: gl.constexpr = queries.shape[1]
    quads = gl.permute(gl.reshape(queries, [ROWS, COLUMNS // 4, 2, 2]), [0, 1, 3, 2])
    first, second = gl.split(quads)
    return gl.reshape(first, [ROWS, COLUMNS // 2]), gl.reshape(second, [ROWS, COLUMNS // 2])


@gluon.jit
@no_type_check
def sorted_keys(words):
    """Return even and odd columns of words [words of a key, keys] in e4m3, with the keys of each 16 in another order.

    A thread has two words of keys 2j and 2j + 1, and then two words of keys 2j + 8 and 2j + 9, in consecutive
    registers. In both results, position 4j + i of 16 keys is key 2j, 2j + 1, 2j + 8 or 2j + 9, for i = 0, 1, 2, 3.
    """
    even, odd = gl.inline_asm_elementwise(
        "prmt.b32 $0, $2, $3, 0x6420; prmt.b32 $1, $2, $3, 0x7531;",
        "=r,=r,r,r", [words], (gl.float8e4nv, gl.float8e4nv), is_pure=True, pack=4,
    )  # fmt: skip
    ROWS: gl.constexpr = words.shape[0]
    KEYS: gl.constexpr = words.shape[1]
    even = gl.permute(gl.reshape(even, [ROWS, KEYS // 16, 2, 4, 2]), [0, 1, 3, 2, 4])
    odd = gl.permute(gl.reshape(odd, [ROWS, KEYS // 16, 2, 4, 2]), [0, 1, 3, 2, 4])
    return gl.reshape(even, [ROWS, KEYS]), gl.reshape(odd, [ROWS, KEYS])
