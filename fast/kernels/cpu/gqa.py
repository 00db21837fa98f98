"""Grouped-query attention over a paged key/value cache or over packed keys, one tile of keys at a time.

A tile is consecutive keys of one request. The query heads that share a KV head are a group. All query tokens and heads
of a group are rows of one matrix, so that a product reads each key or value once for the whole group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from reference.interfaces import COMPUTE_FORMAT, E4M3, CacheFormat, InvariantSplitRule, to_e4m3, wide_dtype

from ..gqa_scores import ScoreRule, slopes_on, visible_range
from .softmax import OnlineSoftmax

# Bytes of the keys of a tile. A tile that must be copied or converted is written and then read, so its keys and values
# should fit into the last-level cache of the CPU. Larger tiles need fewer iterations.
TILE_BYTES = 2 << 20
SCORE_BYTES = 8 << 20  # bytes of the scores of one block of queries and one tile of keys
LEAST_QUERIES = 16  # smallest number of query tokens of a block
E4M3_FACTOR = 256.0  # an e4m3 number divided by the number that `_from_e4m3` returns


class _Rows(NamedTuple):
    """Query tokens of one request, and the keys that each of them attends.

    Attributes:
        q: [Sq, N, Dh], in the dtype of the scores.
        first: [Sq], first key of each query token.
        end: [Sq], index after the last key of each query token.
        position: [Sq], index of the key from which ALiBi measures distances.
    """

    q: Tensor
    first: Tensor
    end: Tensor
    position: Tensor

    def part(self, start: int, stop: int) -> _Rows:
        """Return the rows of the query tokens [start, stop)."""
        return _Rows(*[each[start:stop] for each in self])


# Function from (first key, index after the last key) to keys and values, both [Nkv, keys, Dh] in the dtype of the
# scores. The next call may overwrite the result.
_Reader = Callable[[int, int], tuple[Tensor, Tensor]]


class _Sizes(NamedTuple):
    """Largest sizes of a tile of keys and of a block of query tokens; they depend on no request."""

    tile: int
    queries: int

    @classmethod
    def of(cls, heads: int, kv_heads: int, width: int, wide: torch.dtype, block_size: int) -> _Sizes:
        """Return the sizes for N and Nkv heads of `width` elements; a tile is a multiple of `block_size` keys."""
        blocks = max(1, TILE_BYTES // (wide.itemsize * kv_heads * width * block_size))
        tile = blocks * block_size
        return cls(tile, max(LEAST_QUERIES, SCORE_BYTES // (wide.itemsize * heads * tile)))


def gqa_paged_attention(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    visible_lens: Tensor,
    first_visible: Tensor | None,
    max_query_len: int,
    max_seq_len: int,
    max_visible_len: int,
    softmax_scale: float,
    soft_cap: float | None,
    alibi_slopes: Sequence[float] | None,
    sinks: Tensor | None,
    out_dtype: torch.dtype,
    tile_ranges: Tensor | None,
    split_offsets: Tensor | None,
    batch_invariant: bool,
    split_rule: InvariantSplitRule,
    cache_format: CacheFormat = COMPUTE_FORMAT,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    q_scale: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend the cached keys of each request with its query tokens.

    This backend attends one request after another and splits no request. A schedule therefore has no effect, and a
    request gets the same bits in every batch. Only the keys between the first and the last visible key of the query
    tokens are read, and only the table entries of their blocks.

    Args:
        q: [T, N, Dh].
        kv_cache: [2, num_blocks, block_size, Nkv, Dh] in the storage dtype of the format, any strides.
        block_table: [B, W].
        seq_lens: not used by this backend: `visible_lens` bounds the keys of every query token.
        query_start_loc: [B + 1], first query token of each request.
        visible_lens: [T], index after the last key of each query token.
        first_visible: [T], first key of each query token; None means 0.
        max_query_len: not used by this backend.
        max_seq_len: not used by this backend.
        max_visible_len: not used by this backend.
        softmax_scale: factor of the scores.
        soft_cap: soft cap of the scores, or None.
        alibi_slopes: N slopes, or None.
        sinks: [N], or None.
        out_dtype: dtype of the output.
        tile_ranges: not used by this backend.
        split_offsets: not used by this backend.
        batch_invariant: not used by this backend.
        split_rule: not used by this backend.
        cache_format: format of the cache.
        k_scale: float32 scale of the keys, []; None if the format has no scales.
        v_scale: float32 scale of the values, []; None if the format has no scales.
        q_scale: float32 scale with which the queries are rounded to e4m3, []; None leaves the queries as they are.
        out: [T, N, Dh] in `out_dtype`, any strides, written in place; None allocates a tensor.

    Returns:
        out [T, N, Dh] and lse [N, T].
    """
    wide, (_, heads, width) = wide_dtype(q.dtype), q.shape
    block_size, kv_heads = kv_cache.shape[2:4]
    out, lse = _new_state(q, out_dtype, out)
    q = q.to(wide) if q_scale is None else to_e4m3(q, q_scale).to(wide).mul_(q_scale.to(wide))
    value_scale = None
    if cache_format.scaled:  # multiply scores and outputs by the scales, in place of keys and values
        softmax_scale, value_scale = softmax_scale * (E4M3_FACTOR * float(k_scale)), E4M3_FACTOR * float(v_scale)
    slopes = slopes_on(q.device, alibi_slopes)
    rule = ScoreRule.of(softmax_scale, soft_cap, slopes, sinks, kv_heads, wide)
    sizes = _Sizes.of(heads, kv_heads, width, wide, block_size)
    reader = _PagedReader(kv_cache, sizes.tile, wide)
    first = torch.zeros_like(visible_lens) if first_visible is None else first_visible
    rows, offsets = _Rows(q, first, visible_lens, visible_lens - 1), query_start_loc.tolist()
    for request in range(len(offsets) - 1):
        reader.table = block_table[request]
        for start in range(offsets[request], offsets[request + 1], sizes.queries):
            part = slice(start, min(start + sizes.queries, offsets[request + 1]))
            row_out, row_lse = _attend(rows.part(part.start, part.stop), reader.read, rule, sizes.tile, kv_heads)
            out[part], lse[:, part] = row_out if value_scale is None else row_out.mul_(value_scale), row_lse
    out[offsets[-1] :], lse[:, offsets[-1] :] = 0, -torch.inf  # padding tokens
    return out, lse


def gqa_varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    attention_type: str,
    sliding_window: int | None,
    attention_chunk_size: int | None,
    soft_cap: float | None,
    alibi_slopes: Sequence[float] | None,
    sinks: Tensor | None,
    out_dtype: torch.dtype,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend packed keys, which are in no cache, with the query tokens of the same request.

    Args:
        q: [T, N, Dh].
        k: [S, Nkv, Dh].
        v: [S, Nkv, Dh].
        cu_seqlens_q: [B + 1], first query token of each request.
        cu_seqlens_k: [B + 1], first key of each request.
        max_seqlen_q: not used by this backend.
        max_seqlen_k: not used by this backend.
        softmax_scale: factor of the scores.
        attention_type: value of an `AttentionType`, which determines the visible keys (`visible_range`).
        sliding_window: number of keys of a window, or None.
        attention_chunk_size: positions of an attention chunk, or None.
        soft_cap: soft cap of the scores, or None.
        alibi_slopes: N slopes, or None.
        sinks: [N], or None.
        out_dtype: dtype of the output.
        out: [T, N, Dh] in `out_dtype`, any strides, written in place; None allocates a tensor.

    Returns:
        out [T, N, Dh] and lse [N, T].
    """
    wide, (_, heads, width), kv_heads = wide_dtype(q.dtype), q.shape, k.shape[1]
    out, lse = _new_state(q, out_dtype, out)
    q = q.to(wide)
    rule = ScoreRule.of(softmax_scale, soft_cap, slopes_on(q.device, alibi_slopes), sinks, kv_heads, wide)
    sizes = _Sizes.of(heads, kv_heads, width, wide, 1)
    query_offsets, key_offsets = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for request in range(len(query_offsets) - 1):
        start, query_len = query_offsets[request], query_offsets[request + 1] - query_offsets[request]
        own = slice(key_offsets[request], key_offsets[request + 1])
        reader = _PackedReader(k[own].transpose(0, 1), v[own].transpose(0, 1), wide)
        index = torch.arange(query_len, device=q.device)
        given = query_len, own.stop - own.start, attention_type, sliding_window, attention_chunk_size
        rows = _Rows(q[start : start + query_len], *visible_range(index, *given))
        for low in range(0, query_len, sizes.queries):
            high = min(low + sizes.queries, query_len)
            part = slice(start + low, start + high)
            out[part], lse[:, part] = _attend(rows.part(low, high), reader.read, rule, sizes.tile, kv_heads)
    return out, lse


def _new_state(q: Tensor, out_dtype: torch.dtype, out: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the tensors of an attention state: `out` if it is given, and new tensors otherwise."""
    if out is None:
        out = torch.empty(q.shape, dtype=out_dtype, device=q.device)
    return out, torch.empty(q.shape[1], q.shape[0], dtype=wide_dtype(out_dtype), device=q.device)


def _attend(rows: _Rows, read: _Reader, rule: ScoreRule, tile: int, kv_heads: int) -> tuple[Tensor, Tensor]:
    """Return the output [Sq, N, Dh] and the LSE [N, Sq] of some query tokens of one request."""
    query_len, heads, width = rows.q.shape
    grouped = kv_heads, query_len, heads // kv_heads  # axes of the rows of all KV heads
    matrix = kv_heads, query_len * grouped[2]
    queries = rows.q.reshape(query_len, kv_heads, -1, width).transpose(0, 1).reshape(*matrix, width)
    sinks = rule.sinks_of(*grouped)
    sinks = None if sinks is None else sinks.reshape(matrix)
    softmax = OnlineSoftmax(matrix, width, rows.q.dtype, rows.q.device, sinks=sinks)
    firsts, ends = rows.first.tolist(), rows.end.tolist()
    seen = [(first, end) for first, end in zip(firsts, ends, strict=True) if first < end]
    low, high = min((first for first, _ in seen), default=0), max((end for _, end in seen), default=0)
    for number in range(low // tile, -(-high // tile)):
        start, stop = max(low, number * tile), min(high, (number + 1) * tile)
        keys, values = read(start, stop)
        scores = torch.empty(*matrix, stop - start, dtype=queries.dtype, device=queries.device)
        scores.baddbmm_(queries, keys.transpose(1, 2), beta=0, alpha=rule.factor)
        by_token = scores.view(*grouped, stop - start)
        masked = max(firsts) > start or min(ends) < stop
        if masked or rule.slopes is not None or rule.soft_cap is not None:
            index = torch.arange(start, stop, device=queries.device)
            rule.finish(by_token, rows.position[:, None, None], index)
        if masked:
            hidden = (index < rows.first[:, None]) | (index >= rows.end[:, None])  # [Sq, keys]
            by_token.masked_fill_(hidden[:, None], -torch.inf)
        softmax.add(scores, values)
    out, lse = softmax.finish()
    out = out.view(*grouped, width).transpose(0, 1).reshape(query_len, heads, width)
    return out, lse.view(grouped).transpose(1, 2).reshape(heads, query_len)


class _PackedReader:
    """Reader of packed keys [Nkv, S, Dh] and values [Nkv, S, Dh] of one request."""

    def __init__(self, keys: Tensor, values: Tensor, wide: torch.dtype):
        self.keys, self.values, self.wide = keys, values, wide

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return keys and values [Nkv, stop - start, Dh]."""
        return self.keys[:, start:stop].to(self.wide), self.values[:, start:stop].to(self.wide)


class _PagedReader:
    """Reader of the keys and values of a request in a paged cache; it converts them to `wide`.

    Blocks that follow each other in the cache, and already have the dtype `wide`, are not copied if the layout allows
    it. Other blocks are copied into buffers, which every read overwrites.

    Attributes:
        table: [W], block ids of the request that is read.
    """

    def __init__(self, kv_cache: Tensor, tile: int, wide: torch.dtype):
        self.wide, self.dtype = wide, kv_cache.dtype
        self.in_wide = kv_cache.dtype == wide
        # index_select refuses e4m3, so such numbers are gathered as bytes
        self.halves = (kv_cache if kv_cache.dtype.itemsize > 1 else kv_cache.view(torch.uint8)).unbind(0)
        self.tile, self.block_size = tile, kv_cache.shape[2]
        _, _, self.kv_heads, self.width = self.halves[0].shape
        self.table: Tensor | None = None
        self.buffers: list[Tensor | None] = [None, None]
        self.wide_buffers: list[Tensor | None] = [None, None]

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return the keys and the values [Nkv, stop - start, Dh] of the tokens [start, stop) of the request."""
        first_column = start // self.block_size
        blocks = self.table[first_column : -(-stop // self.block_size)]
        offset = start - first_column * self.block_size
        ids = blocks.tolist()
        run = ids == list(range(ids[0], ids[0] + len(ids)))  # blocks that follow each other
        inside = slice(offset, offset + stop - start)
        keys, values = (self._entries(number, ids[0], blocks, run)[:, inside] for number in (0, 1))
        return self._converted(0, keys), self._converted(1, values)

    def _entries(self, number: int, first: int, blocks: Tensor, run: bool) -> Tensor:
        """Return the entries of whole blocks in the keys (0) or values (1), [Nkv, tokens, Dh], in the cache's dtype."""
        half, count = self.halves[number], blocks.shape[0]
        by_block, by_token, by_head, _ = half.stride()
        if run and (count == 1 or by_block == self.block_size * by_token):
            return half[first : first + count].flatten(0, 1).transpose(0, 1)
        plain = by_token == self.width * (self.kv_heads if by_head == self.width else 1) and half.stride(3) == 1
        plain &= by_block == half[0].numel() if half.shape[0] else False
        if not plain:
            return half[blocks.long()].flatten(0, 1).transpose(0, 1)
        if self.buffers[number] is None:
            self.buffers[number] = half.new_empty(self.tile * self.kv_heads * self.width)
        buffer = self.buffers[number][: count * half[0].numel()]
        if by_head == self.width:  # NHD: a block is one row
            torch.index_select(half.flatten(1), 0, blocks, out=buffer.view(count, -1))
            return buffer.view(-1, self.kv_heads, self.width).transpose(0, 1)
        by_head_first = half.transpose(1, 2).reshape(-1, self.block_size * self.width)  # HND: one head of a block
        index = blocks.long() * self.kv_heads + torch.arange(self.kv_heads, device=blocks.device)[:, None]
        torch.index_select(by_head_first, 0, index.view(-1), out=buffer.view(-1, self.block_size * self.width))
        return buffer.view(self.kv_heads, -1, self.width)

    def _converted(self, number: int, entries: Tensor) -> Tensor:
        """Return entries [Nkv, tokens, Dh] in the dtype `wide`."""
        if self.in_wide:
            return entries
        if self.wide_buffers[number] is None:
            shape = self.tile, self.kv_heads, self.width
            self.wide_buffers[number] = torch.empty(shape, dtype=self.wide, device=entries.device)
        numbers = entries if self.dtype == entries.dtype else _from_e4m3(entries)
        return self.wide_buffers[number][: entries.shape[1]].transpose(0, 1).copy_(numbers)


def _from_e4m3(codes: Tensor) -> Tensor:
    """Return e4m3 numbers, given as bytes, divided by E4M3_FACTOR; the dtype of the result converts to any float dtype.

    An e4m3 number has the bits seeeemmm (sign, exponent, mantissa). The float16 number with the bits s0eeeemmm0000000
    is 2^-8 times the e4m3 number, also if both are subnormal. PyTorch converts float16 in a fifth of the time.
    """
    if bool((codes & 0x7F).max() == 0x7F):  # NaN, which the rule above would turn into a number
        return codes.view(E4M3).to(torch.float32) / E4M3_FACTOR
    bits = codes.view(torch.int8).to(torch.int16)  # the bits sssssssss_eeeemmm: the sign is repeated
    return bits.bitwise_left_shift_(7).bitwise_and_(~0x4000).view(torch.float16)
