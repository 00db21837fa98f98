"""Absorbed decode: attention of all heads over the cached latents, one chunk of cache entries at a time.

In this module a chunk is consecutive cache blocks of one request. (A prefill has another kind of chunks.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from reference.interfaces import (
    COMPUTE_FORMAT,
    CONVERTED,
    NEUTRAL_COSTS,
    CacheFormat,
    InvariantSplitRule,
    ScheduleCosts,
    wide_dtype,
)

from .cache import dequantize_entries
from .softmax import OnlineSoftmax

# Bytes of a chunk. Two matrix products read each chunk, so a chunk should fit into the last-level cache of the CPU.
# Larger chunks need fewer iterations.
CHUNK_BYTES = 4 << 20


def mla_decode(
    ql_nope: Tensor,
    q_pe: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    visible_lens: Tensor,
    max_query_len: int,
    max_seq_len: int,
    softmax_scale: float,
    out_dtype: torch.dtype,
    tile_ranges: Tensor | None,
    split_offsets: Tensor | None,
    batch_invariant: bool,
    split_rule: InvariantSplitRule,
    cache_format: CacheFormat = COMPUTE_FORMAT,
    kv_scale: Tensor | None = None,
    out: Tensor | None = None,
    fp8_mode: str = CONVERTED,
    q_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute absorbed attention of the query tokens of each request over its cached latents.

    This backend attends one request after another and splits no request. A schedule therefore has no effect, and a
    request gets the same bits in every batch.

    Args:
        ql_nope: [T, N, Lkv], absorbed queries.
        q_pe: [T, N, R], rope part of the queries.
        kv_cache: [num_blocks, block_size, columns] in the storage dtype of the format.
        block_table: [B, W].
        seq_lens: [B], keys of each request.
        query_start_loc: [B + 1], first query token of each request.
        visible_lens: [T], number of keys that each query token sees.
        max_query_len: not used by this backend.
        max_seq_len: not used by this backend.
        softmax_scale: factor of the scores.
        out_dtype: dtype of the output.
        tile_ranges: not used by this backend.
        split_offsets: not used by this backend.
        batch_invariant: not used by this backend.
        split_rule: not used by this backend.
        cache_format: format of the cache.
        kv_scale: float32 scale of the layer, []; None if the format has no such scale.
        out: [T, N, Lkv] in `out_dtype`, contiguous, written in place; None allocates a tensor.
        fp8_mode: one of `FP8_MODES`. With "fp8_product", probabilities are rounded to e4m3 (`OnlineSoftmax`).
        q_scale: float32 scale of queries in e4m3, [] or [N]; None for "converted".

    Returns:
        out [T, N, Lkv] and lse [N, T].
    """
    wide = wide_dtype(ql_nope.dtype if q_scale is None else out_dtype)
    tokens, heads, latent = ql_nope.shape
    block_size, width = kv_cache.shape[1], latent + q_pe.shape[2]
    if out is None:
        out = torch.empty_like(ql_nope, dtype=out_dtype, memory_format=torch.contiguous_format)
    lse = torch.empty(heads, tokens, dtype=wide_dtype(out_dtype), device=ql_nope.device)
    if q_scale is None:
        q = torch.cat((ql_nope, q_pe), dim=-1).to(wide)
    else:
        q = torch.cat((ql_nope.to(wide), q_pe.to(wide)), dim=-1).mul_(q_scale.to(wide).view(-1, 1))

    offsets, visible, lengths = query_start_loc.tolist(), visible_lens.tolist(), seq_lens.tolist()
    out[offsets[-1] :], lse[:, offsets[-1] :] = 0, -torch.inf  # padding tokens
    longest_blocks = -(-max(lengths, default=0) // block_size)
    chunk_blocks = max(1, min(longest_blocks, CHUNK_BYTES // (wide.itemsize * block_size * width)))
    if cache_format.scaled:
        reader = _StoredBlockReader(kv_cache, chunk_blocks, wide, width, cache_format, kv_scale)
    else:
        reader = _BlockReader(kv_cache, chunk_blocks, wide)
    for request, length in enumerate(lengths):
        start, end = offsets[request], offsets[request + 1]
        if start == end:
            continue
        queries = q[start:end].reshape(-1, width).T.contiguous()  # [Lkv + R, Sq N]
        softmax = OnlineSoftmax((queries.shape[1],), latent, wide, q.device, fp8_mode == "fp8_product")
        shortest, longest = min(visible[start:end]), max(visible[start:end])
        blocks = block_table[request, : -(-length // block_size)]
        for first in range(0, longest, chunk_blocks * block_size):
            count = min(chunk_blocks * block_size, longest - first)
            entries = reader.read(blocks[first // block_size :], count)
            # compute entries x queries and transpose, because queries x entries^T takes 1.5 x as long on the CPU
            scores = torch.mm(entries, queries).T.contiguous().mul_(softmax_scale)  # [Sq N, count]
            if shortest < first + count:
                keys = torch.arange(first, first + count, device=q.device)
                hidden = keys >= visible_lens[start:end, None]  # [Sq, count]
                scores.view(end - start, heads, count).masked_fill_(hidden[:, None], -torch.inf)
            softmax.add(scores, entries[:, :latent])
        row_out, row_lse = softmax.finish()
        out[start:end] = row_out.view(end - start, heads, latent).to(out.dtype)
        lse[:, start:end] = row_lse.view(end - start, heads).T
    return out, lse


def decode_programs(
    device: torch.device,
    dtype: torch.dtype,
    num_heads: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_size: int,
    query_len: int,
    cache_format: CacheFormat = COMPUTE_FORMAT,
    fp8_mode: str = CONVERTED,
) -> int:
    """Return 1: this backend splits no request, so a schedule needs one program."""
    return 1


def schedule_costs(
    device: torch.device,
    dtype: torch.dtype,
    num_heads: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_size: int,
    cache_format: CacheFormat = COMPUTE_FORMAT,
    fp8_mode: str = CONVERTED,
) -> ScheduleCosts:
    """Return default costs: this backend splits no request, so a schedule does not change the time of a decode."""
    return NEUTRAL_COSTS


class _BlockReader:
    """Reader of the cache blocks of a request; it converts them to `wide`, the dtype in which attention is computed.

    Blocks that are adjacent in the cache, and already have the dtype `wide`, are not copied. Other blocks are copied
    into one buffer, which every read overwrites.
    """

    def __init__(self, kv_cache: Tensor, chunk_blocks: int, wide: torch.dtype):
        self.kv_cache, self.chunk_blocks, self.wide = kv_cache, chunk_blocks, wide
        self.buffer = self.wide_buffer = None

    def read(self, blocks: Tensor, count: int) -> Tensor:
        """Return the first `count` entries of the blocks, [count, Lkv + R]; the next call may overwrite the tensor."""
        block_size, width = self.kv_cache.shape[1:]
        blocks = blocks[: -(-count // block_size)]
        first, used = int(blocks[0]), blocks.shape[0]
        in_wide = self.kv_cache.dtype == self.wide
        if in_wide and self.kv_cache.is_contiguous() and bool((blocks.diff() == 1).all()):
            return self.kv_cache[first : first + used].view(-1, width)[:count]
        if self.buffer is None:
            self.buffer = self.kv_cache.new_empty(self.chunk_blocks, block_size, width)
            if not in_wide:
                self.wide_buffer = torch.empty_like(self.buffer, dtype=self.wide)
        torch.index_select(self.kv_cache, 0, blocks, out=self.buffer[:used])
        entries = self.buffer.view(-1, width)[:count]
        return entries if in_wide else self.wide_buffer.view(-1, width)[:count].copy_(entries)


class _StoredBlockReader:
    """Reader for a cache format with scales; like `_BlockReader`, it has a method `read`."""

    def __init__(
        self,
        kv_cache: Tensor,
        chunk_blocks: int,
        wide: torch.dtype,
        width: int,
        cache_format: CacheFormat,
        kv_scale: Tensor | None,
    ):
        self.codes, self.dtype = kv_cache.view(torch.uint8), kv_cache.dtype  # index_select refuses e4m3
        self.cache_format, self.kv_scale = cache_format, kv_scale
        self.buffer = self.codes.new_empty(chunk_blocks, *kv_cache.shape[1:])
        self.entries = torch.empty(chunk_blocks * kv_cache.shape[1], width, dtype=wide, device=kv_cache.device)

    def read(self, blocks: Tensor, count: int) -> Tensor:
        """Return the first `count` entries of the blocks, [count, Lkv + R]; the next call overwrites the tensor."""
        used = -(-count // self.codes.shape[1])
        torch.index_select(self.codes, 0, blocks[:used], out=self.buffer[:used])
        stored = self.buffer.view(-1, self.buffer.shape[2])[:count].view(self.dtype)
        dequantize_entries(stored, self.entries[:count], self.cache_format, self.kv_scale)
        return self.entries[:count]
