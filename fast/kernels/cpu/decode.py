"""Absorbed decode: per request, one product of all its heads with a piece of its latents at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from reference.interfaces import NEUTRAL_COSTS, InvariantCut, ScheduleCosts, wide_dtype

from .softmax import OnlineSoftmax

PIECE_BYTES = 4 << 20  # of latents between their two products: in the last-level cache, and few turns of the loop


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
    cut: InvariantCut,
) -> tuple[Tensor, Tensor]:
    """Attention of a few query tokens a request over its cached latents.

    Args:
        ql_nope: [T, N, Lkv].
        q_pe: [T, N, R].
        kv_cache: [num_blocks, block_size, Lkv + R].
        block_table: [B, W].
        seq_lens: [B].
        query_start_loc: [B + 1].
        visible_lens: [T].
        max_query_len: a bound for launches; not looked at here.
        max_seq_len: likewise.
        softmax_scale: multiplies the scores.
        out_dtype: of out.
        tile_ranges: of a schedule; nothing is cut here, so this and what follows are not looked at.
        split_offsets: likewise.
        batch_invariant: likewise; requests are attended one by one.
        cut: likewise.

    Returns:
        out [T, N, Lkv] and lse [N, T].
    """
    wide = wide_dtype(ql_nope.dtype)
    tokens, heads, latent = ql_nope.shape
    block_size, width = kv_cache.shape[1:]
    out = torch.empty_like(ql_nope, dtype=out_dtype, memory_format=torch.contiguous_format)
    lse = torch.empty(heads, tokens, dtype=wide_dtype(out_dtype), device=ql_nope.device)
    q = torch.cat((ql_nope, q_pe), dim=-1).to(wide)

    offsets, visible, lengths = query_start_loc.tolist(), visible_lens.tolist(), seq_lens.tolist()
    longest_blocks = -(-max(lengths, default=0) // block_size)
    piece_blocks = max(1, min(longest_blocks, PIECE_BYTES // (wide.itemsize * block_size * width)))
    pages = _PageReader(kv_cache, piece_blocks, wide)
    for request, length in enumerate(lengths):
        start, end = offsets[request], offsets[request + 1]
        if start == end:
            continue
        queries = q[start:end].reshape(-1, width).T.contiguous()  # [Lkv + R, Sq N]
        softmax = OnlineSoftmax((queries.shape[1],), latent, wide, q.device)
        shortest, longest = min(visible[start:end]), max(visible[start:end])
        blocks = block_table[request, : -(-length // block_size)]
        for first in range(0, longest, piece_blocks * block_size):
            count = min(piece_blocks * block_size, longest - first)
            entries = pages.read(blocks[first // block_size :], count)
            # the wide operand first: BLAS runs this shape half again as fast as queries x entries^T
            scores = torch.mm(entries, queries).T.contiguous().mul_(softmax_scale)  # [Sq N, count]
            if shortest < first + count:
                keys = torch.arange(first, first + count, device=q.device)
                beyond = keys >= visible_lens[start:end, None]  # [Sq, count]
                scores.view(end - start, heads, count).masked_fill_(beyond[:, None], -torch.inf)
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
) -> int:
    """How many programs of a schedule run at once: one, for nothing is cut here."""
    return 1


def schedule_costs(
    device: torch.device, dtype: torch.dtype, num_heads: int, kv_lora_rank: int, qk_rope_head_dim: int, block_size: int
) -> ScheduleCosts:
    """What schedules reckon with: the neutral costs, for nothing is cut here."""
    return NEUTRAL_COSTS


class _PageReader:
    """Reads runs of pages in the wide type: in place where they lie side by side, else through one reused buffer."""

    def __init__(self, kv_cache: Tensor, piece_blocks: int, wide: torch.dtype):
        self.kv_cache, self.piece_blocks, self.wide = kv_cache, piece_blocks, wide
        self.buffer = self.wide_buffer = None

    def read(self, blocks: Tensor, count: int) -> Tensor:
        """The first `count` entries [count, Lkv + R] of the blocks; valid until the next call."""
        block_size, width = self.kv_cache.shape[1:]
        blocks = blocks[: -(-count // block_size)]
        first, used = int(blocks[0]), blocks.shape[0]
        in_wide = self.kv_cache.dtype == self.wide
        if in_wide and self.kv_cache.is_contiguous() and bool((blocks.diff() == 1).all()):
            return self.kv_cache[first : first + used].view(-1, width)[:count]
        if self.buffer is None:
            self.buffer = self.kv_cache.new_empty(self.piece_blocks, block_size, width)
            if not in_wide:
                self.wide_buffer = torch.empty_like(self.buffer, dtype=self.wide)
        torch.index_select(self.kv_cache, 0, blocks, out=self.buffer[:used])
        entries = self.buffer.view(-1, width)[:count]
        return entries if in_wide else self.wide_buffer.view(-1, width)[:count].copy_(entries)
