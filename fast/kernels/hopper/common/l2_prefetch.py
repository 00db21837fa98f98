"""Prefetch a program's first queries and first keys into the L2 cache, while the previous kernel may still run.

The previous kernel may still write the queries, the cache, the lengths and the block table. The prefetch is safe for
three reasons:

- Prefetched data cannot become outdated, because the writes of the previous kernel go to the L2 too.
- The lengths and block numbers that this module reads may be outdated. They only choose the addresses to prefetch, and
  they are clamped or masked, so that all addresses are valid.
- Lengths and block numbers are loaded with `.cg`, which bypasses the L1. Later loads therefore find no outdated value
  in the L1.
"""

from __future__ import annotations

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

THREADS = gl.constexpr(128)  # two threads for each of 64 rows of queries, and then two for each of 64 keys


@gluon.jit
@no_type_check
def _prefetch(pointers, mask, BYTES: gl.constexpr):
    """Prefetch into the L2: BYTES bytes (a multiple of 16) from each pointer whose `mask` is true."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0; }",
        "=r,l,r", [pointers.to(gl.int64), mask.to(gl.int32) * BYTES], gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
@no_type_check
def _load_past_l1(pointer):
    """Load the value at a pointer from the L2, past the L1."""
    return gl.load(pointer, cache_modifier=".cg")


@gluon.jit
@no_type_check
def prefetch_first_item(
    inputs, cache, sizes, strides, ROWS: gl.constexpr, HEADS: gl.constexpr, LATENT: gl.constexpr, ROPE: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """Prefetch the first 64 rows of queries and the first 64 keys of a program into the L2.

    The decode must have no schedule, and must not divide requests into splits. The first work item of program i is then
    row block i % row_blocks of request i // row_blocks, with all keys of the request.

    Args:
        inputs: `Inputs`.
        cache: `PagedCache`.
        sizes: `Sizes`.
        strides: `Strides`.
        ROWS: rows of a row block.
        HEADS: N.
        LATENT: Lkv.
        ROPE: R.
        BLOCK_SIZE: tokens of a cache block.
    """
    thread = gl.arange(0, THREADS, gl.BlockedLayout([1], [32], [THREADS // 32], [0]))
    half = thread % 2
    request = gl.program_id(0) // sizes.row_blocks
    row = gl.program_id(0) % sizes.row_blocks * ROWS + thread // 2
    query_start = gl.minimum(gl.maximum(_load_past_l1(inputs.query_start_loc + request), 0), sizes.num_tokens)
    query_end = gl.minimum(_load_past_l1(inputs.query_start_loc + request + 1), sizes.num_tokens)
    token, head = (query_start + row // HEADS).to(gl.int64), (row % HEADS).to(gl.int64)
    real = (token < query_end) & (row < sizes.request_rows)
    pointers = inputs.ql_nope + token * strides.latent_token + head * strides.latent_head
    _prefetch(pointers + half * (LATENT // 2), real, LATENT)
    if ROPE > 0:
        _prefetch(inputs.q_pe + token * strides.rope_token + head * strides.rope_head, real & (half == 0), 2 * ROPE)
    key = thread // 2
    length = gl.minimum(_load_past_l1(inputs.seq_lens + request), sizes.max_keys)
    table_row = inputs.block_table + request.to(gl.int64) * strides.table_row
    entry = table_row + (key // BLOCK_SIZE).to(gl.int64) * strides.table_entry
    cache_block = gl.load(entry, mask=key < length, other=-1, cache_modifier=".cg")
    pointers = cache.entries + cache_block.to(gl.int64) * cache.block_stride
    pointers += (key % BLOCK_SIZE).to(gl.int64) * cache.key_stride
    _prefetch(
        pointers + half * ((LATENT + ROPE) // 2), (cache_block >= 0) & (cache_block < sizes.num_blocks), LATENT + ROPE
    )
