"""Prefetch a program's first queries and tile into the L2 while the kernel before may still run.

A prefetch into the L2 changes no result: the kernel before writes there too. Lengths and tables that are read here may
be old, so they are read past the L1, which would keep them, and bounded like any garbage.
"""

from __future__ import annotations

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

THREADS = gl.constexpr(128)  # two for each row and each key


@gluon.jit
@no_type_check
def _prefetch(pointers, there, BYTES: gl.constexpr):
    """Prefetch BYTES, a multiple of 16, from each pointer on, where `there`."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0; }",
        "=r,l,r", [pointers.to(gl.int64), there.to(gl.int32) * BYTES], gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
@no_type_check
def _load_past_l1(pointer):
    """Load from the L2, whatever the L1 has kept."""
    return gl.load(pointer, cache_modifier=".cg")


@gluon.jit
@no_type_check
def prefetch_first_item(
    inputs, kv_cache, page_stride, key_stride, sizes, strides, ROWS: gl.constexpr, HEADS: gl.constexpr,
    LATENT: gl.constexpr, ROPE: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """Prefetch the program's first 64 rows and first 64 keys, where programs take whole requests."""
    thread = gl.arange(0, THREADS, gl.BlockedLayout([1], [32], [THREADS // 32], [0]))
    half = thread % 2
    request = gl.program_id(0) // sizes.row_blocks
    row = gl.program_id(0) % sizes.row_blocks * ROWS + thread // 2
    query_start = gl.minimum(gl.maximum(_load_past_l1(inputs.query_start_loc + request), 0), sizes.num_tokens)
    query_end = gl.minimum(_load_past_l1(inputs.query_start_loc + request + 1), sizes.num_tokens)
    token, head = (query_start + row // HEADS).to(gl.int64), (row % HEADS).to(gl.int64)
    real = (token < query_end) & (row < sizes.request_rows)
    place = inputs.ql_nope + token * strides.latent_token + head * strides.latent_head
    _prefetch(place + half * (LATENT // 2), real, LATENT)
    if ROPE > 0:
        _prefetch(inputs.q_pe + token * strides.rope_token + head * strides.rope_head, real & (half == 0), 2 * ROPE)
    key = thread // 2
    length = gl.minimum(_load_past_l1(inputs.seq_lens + request), sizes.max_keys)
    table_row = inputs.block_table + request.to(gl.int64) * strides.table_row
    entry = table_row + (key // BLOCK_SIZE).to(gl.int64) * strides.table_entry
    page = gl.load(entry, mask=key < length, other=-1, cache_modifier=".cg")
    place = kv_cache + page.to(gl.int64) * page_stride + (key % BLOCK_SIZE).to(gl.int64) * key_stride
    _prefetch(place + half * ((LATENT + ROPE) // 2), (page >= 0) & (page < sizes.num_blocks), LATENT + ROPE)
