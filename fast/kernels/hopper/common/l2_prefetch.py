"""What a program asks for while the kernel before may still run: queries and first tile of its first request.

Only into the L2, where a prefetch changes no result: what the kernel before has yet to write it writes there too. What
is read of lengths and tables may be old, so it is read past the L1, which would keep it, and bounded like any garbage.
"""

from __future__ import annotations

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

THREADS = gl.constexpr(128)  # two for each row and each key


@gluon.jit
@no_type_check
def _prefetch(pointers, there, BYTES: gl.constexpr):
    """Ask for BYTES from each pointer on, a multiple of 16, where `there`."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0; }",
        "=r,l,r", [pointers.to(gl.int64), there.to(gl.int32) * BYTES], gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
@no_type_check
def _now(pointer):
    """What stands in memory, whatever the L1 has kept."""
    return gl.load(pointer, cache_modifier=".cg")


@gluon.jit
@no_type_check
def ask_ahead(
    inputs, cache, sizes, strides, ROWS: gl.constexpr, HEADS: gl.constexpr, LATENT: gl.constexpr, ROPE: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """Ask for the program's first 64 rows and first 64 keys, where requests are whole."""
    ql_nope, q_pe, block_table, seq_lens, query_start_loc, _ = inputs
    kv_cache, page_stride, key_stride = cache
    num_tokens, num_blocks, _, max_keys, row_blocks, request_rows, _ = sizes
    latent_token_stride, latent_head_stride, rope_token_stride, rope_head_stride, table_row_stride, table_stride = (
        strides
    )
    number = gl.arange(0, THREADS, gl.BlockedLayout([1], [32], [THREADS // 32], [0]))
    half = number % 2
    request = gl.program_id(0) // row_blocks
    row = gl.program_id(0) % row_blocks * ROWS + number // 2
    query_start = gl.minimum(gl.maximum(_now(query_start_loc + request), 0), num_tokens)
    query_end = gl.minimum(_now(query_start_loc + request + 1), num_tokens)
    token, head = (query_start + row // HEADS).to(gl.int64), (row % HEADS).to(gl.int64)
    real = (token < query_end) & (row < request_rows)
    place = ql_nope + token * latent_token_stride + head * latent_head_stride
    _prefetch(place + half * (LATENT // 2), real, LATENT)
    if ROPE > 0:
        _prefetch(q_pe + token * rope_token_stride + head * rope_head_stride, real & (half == 0), 2 * ROPE)
    key = number // 2
    length = gl.minimum(_now(seq_lens + request), max_keys)
    entry = block_table + request.to(gl.int64) * table_row_stride + (key // BLOCK_SIZE).to(gl.int64) * table_stride
    page = gl.load(entry, mask=key < length, other=-1, cache_modifier=".cg")
    place = kv_cache + page.to(gl.int64) * page_stride + (key % BLOCK_SIZE).to(gl.int64) * key_stride
    _prefetch(place + half * ((LATENT + ROPE) // 2), (page >= 0) & (page < num_blocks), LATENT + ROPE)
