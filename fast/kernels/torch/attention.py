"""Grouped-query attention of all requests at once, padded to the longest request, in PyTorch.

The queries of all requests are padded to `max_query_len`, and the keys to `max_seq_len`. A loop attends one tile of
keys of all requests after another, so that the padded keys need little memory. The number of iterations follows from
`max_query_len` and `max_seq_len`, which the host knows. The largest tensors are:

| tensor | elements, in float32 | at most |
|---|---|---|
| keys of a tile, and values of a tile | B x keys x Nkv x Dh | TILE_BYTES each, or one block of each request |
| scores | B x N x queries x keys | SCORE_BYTES, or one query token of each request |

A row of a request attends keys that the row's own numbers name. Keys that no row of the request attends are replaced by
zeros, because a cache may hold NaN where no request has a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from reference.interfaces import COMPUTE_FORMAT, CacheFormat, InvariantSplitRule, to_e4m3, wide_dtype

from ..cpu.softmax import OnlineSoftmax
from ..gqa_scores import ScoreRule, kept_slopes, visible_range

TILE_BYTES = 256 << 20
SCORE_BYTES = 256 << 20


class _Rows(NamedTuple):
    """All query tokens, and the keys that each of them attends.

    Attributes:
        q: [T, N, Dh], in the dtype of the scores.
        first: [T], first key of each query token.
        end: [T], index after the last key of each query token.
        position: [T], index of the key from which ALiBi measures distances.
        starts: [B + 1], first query token of each request.
        key_lens: [B], number of keys of each request that may be read.
        max_query_len: upper bound of the query lengths.
        max_keys: upper bound of `key_lens`.
    """

    q: Tensor
    first: Tensor
    end: Tensor
    position: Tensor
    starts: Tensor
    key_lens: Tensor
    max_query_len: int
    max_keys: int


class _Tile(NamedTuple):
    """Keys and values of one tile of all requests.

    Attributes:
        keys: [B, keys, Nkv, Dh], in the dtype of the scores.
        values: [B, keys, Nkv, Dh], in the dtype of the scores.
        readable: [B, keys], whether the key is in memory that the request may read.
    """

    keys: Tensor
    values: Tensor
    readable: Tensor


_Reader = Callable[[int, int], _Tile]  # function from (first key, index after the last key) to a tile


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

    A length is clamped to [0, min(max_seq_len, W * block_size)], and the tokens of a block outside the cache are
    masked. See `fast.kernels.cpu.gqa.gqa_paged_attention` for the arguments. `max_visible_len`, `tile_ranges`,
    `split_offsets`, `batch_invariant` and `split_rule` are not used.

    Returns:
        out [T, N, Dh] and lse [N, T]. Padding tokens get output 0 and LSE -inf.
    """
    wide, (num_blocks, block_size, kv_heads) = wide_dtype(q.dtype), kv_cache.shape[1:4]
    rounded = q.to(wide) if q_scale is None else to_e4m3(q, q_scale).to(wide) * q_scale.to(wide)
    if cache_format.scaled:  # multiply queries and outputs by the scales, in place of keys and values
        rounded = rounded * k_scale.to(wide)
    max_keys = min(max_seq_len, block_table.shape[1] * block_size) if num_blocks else 0
    halves = (kv_cache.view(torch.uint8) if cache_format.scaled else kv_cache).unbind(0)

    def read(start: int, stop: int) -> _Tile:
        blocks = block_table[:, start // block_size : -(-stop // block_size)]
        inside = (blocks >= 0) & (blocks < num_blocks)
        ids = torch.where(inside, blocks, 0).long()
        stored = [half[ids].flatten(1, 2)[:, : stop - start] for half in halves]
        entries = [each.view(kv_cache.dtype).to(wide) for each in stored]
        readable = inside[..., None].expand(-1, -1, block_size).flatten(1)[:, : stop - start]
        return _Tile(*entries, readable)

    first = torch.zeros_like(visible_lens) if first_visible is None else first_visible
    rows = _Rows(rounded, first, visible_lens, visible_lens - 1, query_start_loc, seq_lens, max_query_len, max_keys)
    rule = _rule(softmax_scale, soft_cap, alibi_slopes, sinks, kv_heads, rounded)
    state, lse = _attend(rows, read, rule, kv_heads, block_size)
    if cache_format.scaled:
        state = state * v_scale.to(wide)
    return _finished(state, lse, out_dtype, out)


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

    See `fast.kernels.cpu.gqa.gqa_varlen_attention` for the arguments.

    Returns:
        out [T, N, Dh] and lse [N, T]. Tokens behind the last request get output 0 and LSE -inf.
    """
    wide, (keys, kv_heads, _) = wide_dtype(q.dtype), k.shape
    key_lens, query_lens = cu_seqlens_k.diff(), cu_seqlens_q.diff()

    def read(start: int, stop: int) -> _Tile:
        token = cu_seqlens_k[:-1, None].long() + torch.arange(start, stop, device=q.device)
        inside = (token >= 0) & (token < keys)
        token = torch.where(inside, token, 0)
        return _Tile(k[token].to(wide), v[token].to(wide), inside)

    index = torch.arange(q.shape[0], device=q.device)
    request = torch.searchsorted(cu_seqlens_q[1:].long(), index, right=True).clamp_(max=max(0, len(query_lens) - 1))
    if len(query_lens):
        index = index - cu_seqlens_q[request]
        lens = query_lens[request], key_lens[request]
    else:
        lens = 0, 0
    visible = visible_range(index, *lens, attention_type, sliding_window, attention_chunk_size)
    rows = _Rows(q.to(wide), *visible, cu_seqlens_q, key_lens, max_seqlen_q, max_seqlen_k if keys else 0)
    rule = _rule(softmax_scale, soft_cap, alibi_slopes, sinks, kv_heads, rows.q)
    return _finished(*_attend(rows, read, rule, kv_heads, 1), out_dtype, out)


def _rule(
    scale: float, soft_cap: float | None, slopes: Sequence[float] | None, sinks: Tensor | None, kv_heads: int, q: Tensor
) -> ScoreRule:
    """Return the rule for the scores of queries `q`."""
    found = None if slopes is None else kept_slopes(q.device, tuple(slopes))
    return ScoreRule.of(scale, soft_cap, found, sinks, kv_heads, q.dtype)


def _finished(state: Tensor, lse: Tensor, out_dtype: torch.dtype, out: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the output in `out_dtype`, in `out` if it is given, and the LSE in the dtype of an attention state."""
    out = state.to(out_dtype) if out is None else out.copy_(state)
    return out, lse.to(wide_dtype(out_dtype))


def _attend(rows: _Rows, read: _Reader, rule: ScoreRule, kv_heads: int, unit: int) -> tuple[Tensor, Tensor]:
    """Return the output [T, N, Dh] and the LSE [N, T] of all query tokens; a tile has a multiple of `unit` keys."""
    tokens, heads, width = rows.q.shape
    requests, wide, device = rows.key_lens.shape[0], rows.q.dtype, rows.q.device
    # tokens behind the last request keep these values; the last row takes the results of padded query tokens
    out = torch.zeros(tokens + 1, heads, width, dtype=wide, device=device)
    lse = torch.full((tokens + 1, heads), -torch.inf, dtype=wide, device=device)
    if tokens == 0 or requests == 0 or rows.max_query_len == 0:
        return out[:tokens], lse[:tokens].T.contiguous()
    tile = max(1, min(TILE_BYTES // (requests * kv_heads * width * wide.itemsize), rows.max_keys) // unit) * unit
    queries = max(1, min(SCORE_BYTES // (requests * heads * tile * wide.itemsize), rows.max_query_len))
    key_lens, starts = rows.key_lens.clamp(0, rows.max_keys)[:, None], rows.starts.long()
    for low in range(0, rows.max_query_len, queries):
        index = torch.arange(low, min(low + queries, rows.max_query_len), device=device)
        token = starts[:-1, None] + index  # [B, Sq]
        inside = (token < starts[1:, None]) & (token >= 0) & (token < tokens)
        read_token = torch.where(inside, token, 0)
        first = rows.first[read_token].clamp(min=0)
        end = torch.where(inside, torch.minimum(rows.end[read_token], key_lens), 0)
        part = rows._replace(q=rows.q[read_token], first=first, end=end, position=rows.position[read_token])
        part_out, part_lse = _attend_queries(part, read, rule, kv_heads, tile)
        written = torch.where(inside, token, tokens)
        out[written], lse[written] = part_out, part_lse
    return out[:tokens], lse[:tokens].T.contiguous()


def _attend_queries(rows: _Rows, read: _Reader, rule: ScoreRule, kv_heads: int, tile: int) -> tuple[Tensor, Tensor]:
    """Return the output [B, Sq, N, Dh] and the LSE [B, Sq, N] of query tokens, whose tensors are [B, Sq, ..]."""
    requests, query_len, heads, width = rows.q.shape
    grouped = requests, kv_heads, query_len, heads // kv_heads
    matrix = requests * kv_heads, query_len * grouped[3]
    q = rows.q.unflatten(2, (kv_heads, -1)).transpose(1, 2).reshape(*matrix, width)
    sinks = rule.sinks_of(*grouped)
    sinks = None if sinks is None else sinks.reshape(matrix)
    softmax = OnlineSoftmax(matrix, width, q.dtype, q.device, sinks=sinks)
    attends = rows.first < rows.end
    # a request owns the keys [low, high): those that its query tokens attend, and those between them
    low = rows.first.masked_fill(~attends, 2**31 - 1).amin(1, keepdim=True)
    high = rows.end.masked_fill(~attends, 0).amax(1, keepdim=True)
    first, end, position = (each[:, None, :, None, None] for each in (rows.first, rows.end, rows.position))
    for start in range(0, rows.max_keys, tile):
        index = torch.arange(start, min(start + tile, rows.max_keys), device=q.device)
        stored = read(start, start + index.shape[0])
        unowned = ~(stored.readable & (index >= low) & (index < high))  # [B, keys]
        owned = stored.values.masked_fill(unowned[..., None, None], 0)
        keys, values = (each.transpose(1, 2).reshape(matrix[0], -1, width) for each in (stored.keys, owned))
        scores = torch.empty(*matrix, index.shape[0], dtype=q.dtype, device=q.device)
        scores.baddbmm_(q, keys.transpose(1, 2), beta=0, alpha=rule.factor)
        by_token = scores.view(*grouped, -1)
        rule.finish(by_token, position, index)
        by_token.masked_fill_((index < first) | (index >= end) | unowned[:, None, None, None], -torch.inf)
        softmax.add(scores, values)
    out, lse = softmax.finish()
    out = out.view(*grouped, width).transpose(1, 2).reshape(rows.q.shape)
    return out, lse.view(grouped).transpose(1, 2).reshape(requests, query_len, heads)
