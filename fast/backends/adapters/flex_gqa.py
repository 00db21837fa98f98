"""Adapter of grouped-query attention to `torch.nn.attention.flex_attention`, over a paged cache and over packed keys.

`flex` explains the layout in blocks of 128 tokens, the copies that keep a NaN inside its own request, and what PyTorch
compiles. This module differs in these points:

- Each query token has a range of keys. The block mask follows from the ranges of the tokens in a block of queries, so
  causal masks, windows, attention chunks and the masks of encoders are all served in the same way.
- Keys of a cache are copied to the layout, with room for `max_seq_len` keys of each request: B * max_seq_len * Nkv * Dh
  elements for the keys, and as many for the values. Keys that no query token of the request attends become 0.
- The score function has the soft cap and ALiBi. Attention sinks are added to the library's state, from its LSE.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple, no_type_check

import torch
from torch import Tensor

from reference.interfaces import COMPUTE_FORMAT, CacheFormat, InvariantSplitRule

from .conversion import grouped_state, grouped_state_without_keys, slopes_on_device
from .flex import BLOCK, Blocks, aligned, blocks_of

_NUMBERS = itertools.count()  # one number for each compiled combination


class Ranges(NamedTuple):
    """The keys that each query token attends.

    Attributes:
        first: [T], index of the first key in the request.
        end: [T], index after the last key.
        position: [T], index of the key from which ALiBi measures distances.
    """

    first: Tensor
    end: Tensor
    position: Tensor


class Keys(NamedTuple):
    """Keys and values of all requests, each of which begins at a new block.

    Attributes:
        keys: [1, Nkv, places, Dh].
        values: [1, Nkv, places, Dh].
        first: [B + 1], place of the first key of each request; the last element is any number.
    """

    keys: Tensor
    values: Tensor
    first: Tensor


class RowMask(NamedTuple):
    """The mask of all rows. A row is a place for a query token, and ranges are counted in places of keys.

    Attributes:
        partial: [1, 1, blocks of queries], number of blocks of keys of which some rows attend some keys.
        partial_blocks: [1, 1, blocks of queries, blocks of keys]; the first `partial` elements are these blocks.
        full: [1, 1, blocks of queries], number of blocks of keys of which all rows attend all keys.
        full_blocks: [1, 1, blocks of queries, blocks of keys]; the first `full` elements are these blocks.
        first: [rows], place of the first key of each row.
        end: [rows], place after the last key; not above `first` for a row that attends no key.
        position: [rows], place of the key from which ALiBi measures distances.
    """

    partial: Tensor
    partial_blocks: Tensor
    full: Tensor
    full_blocks: Tensor
    first: Tensor
    end: Tensor
    position: Tensor


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
    tile_ranges: Tensor | None = None,
    split_offsets: Tensor | None = None,
    batch_invariant: bool = False,
    split_rule: InvariantSplitRule | None = None,
    cache_format: CacheFormat = COMPUTE_FORMAT,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    q_scale: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend the cached keys of each request with its query tokens, without waiting for the GPU.

    Args:
        q: [T, N, Dh], bfloat16 or float16; Dh at least 16.
        kv_cache: [2, num_blocks, block_size, Nkv, Dh] in the dtype of the queries, any strides.
        block_table: [B, W]; entries of blocks that no query token can see may have any value.
        seq_lens: [B]; only its length B is used.
        query_start_loc: [B + 1], first query token of each request; no token is behind the last request.
        visible_lens: [T], index after the last key of each query token.
        first_visible: [T], first key of each query token; None means 0.
        max_query_len: not used.
        max_seq_len: upper bound of the keys of a request.
        max_visible_len: not used.
        softmax_scale: factor of the dot products.
        soft_cap: soft cap of the scores, or None.
        alibi_slopes: N slopes, or None.
        sinks: [N], or None.
        out_dtype: dtype of the output.
        tile_ranges: not used.
        split_offsets: not used.
        batch_invariant: False, because the declaration excludes True.
        split_rule: not used.
        cache_format: `compute_dtype`.
        k_scale: None, because the format has no scales.
        v_scale: None.
        q_scale: None.
        out: [T, N, Dh] in `out_dtype`, any strides, written in place; None allocates a tensor.

    Returns:
        out [T, N, Dh] and lse [N, T], natural log, float32.
    """
    most = min(max_seq_len, block_table.shape[1] * kv_cache.shape[2])
    if q.shape[0] == 0 or seq_lens.shape[0] == 0 or most == 0 or kv_cache.shape[1] == 0:
        return grouped_state_without_keys(q, sinks, out_dtype, out)
    first = torch.zeros_like(visible_lens) if first_visible is None else first_visible
    ranges = Ranges(torch.minimum(first, visible_lens), visible_lens, visible_lens - 1)
    queries = blocks_of(query_start_loc, q.shape[0])
    request = request_of_tokens(query_start_loc, q.shape[0])
    keys = keys_of_cache(kv_cache, block_table, request, ranges, most)
    return _attend(q, queries, request, query_start_loc, keys, ranges, softmax_scale, soft_cap, alibi_slopes, sinks,
                   out_dtype, out)  # fmt: skip


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
        q: [T, N, Dh], bfloat16 or float16; Dh at least 16.
        k: [S, Nkv, Dh].
        v: [S, Nkv, Dh].
        cu_seqlens_q: [B + 1], first query token of each request.
        cu_seqlens_k: [B + 1], first key of each request.
        max_seqlen_q: not used.
        max_seqlen_k: not used.
        softmax_scale: factor of the dot products.
        attention_type: value of an `AttentionType`.
        sliding_window: number of keys of a window, the query's own key included; None for no window.
        attention_chunk_size: positions of an attention chunk; None for no chunks.
        soft_cap: soft cap of the scores, or None.
        alibi_slopes: N slopes, or None.
        sinks: [N], or None.
        out_dtype: dtype of the output.
        out: [T, N, Dh] in `out_dtype`, any strides, written in place; None allocates a tensor.

    Returns:
        out [T, N, Dh] and lse [N, T], natural log, float32.
    """
    if q.shape[0] == 0 or k.shape[0] == 0:
        return grouped_state_without_keys(q, sinks, out_dtype, out)
    queries, blocks = blocks_of(cu_seqlens_q, q.shape[0]), blocks_of(cu_seqlens_k, k.shape[0])
    request = request_of_tokens(cu_seqlens_q, q.shape[0])
    ranges = packed_ranges(
        request, cu_seqlens_q, blocks.lens, attention_type, sliding_window, attention_chunk_size
    )  # fmt: skip
    keys = Keys(aligned(k, blocks), aligned(v, blocks), BLOCK * blocks.first)
    return _attend(q, queries, request, cu_seqlens_q, keys, ranges, softmax_scale, soft_cap, alibi_slopes, sinks,
                   out_dtype, out)  # fmt: skip


def _attend(
    q, queries, request, starts, keys, ranges, softmax_scale, soft_cap, alibi_slopes, sinks, out_dtype, out
):  # fmt: skip
    """Attend with the compiled function, and convert its result to an attention state with the sinks."""
    slopes = None if alibi_slopes is None else slopes_on_device(q.device, tuple(alibi_slopes))
    attend = _compiled(q.dtype, q.shape[1], keys.keys.shape[1], q.shape[2], softmax_scale, soft_cap, slopes is not None)
    with torch.no_grad():
        row = rows_of_tokens(request, starts, queries)
        mask = row_mask(queries, row, keys, request, ranges)
        made, lse = attend(aligned(q, queries), keys.keys, keys.values, mask, row, slopes)
        return grouped_state(made, lse, sinks, out_dtype, out)


@functools.cache
def _compiled(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, softmax_scale: float, soft_cap: float | None,
    has_alibi: bool,
) -> Callable:  # fmt: skip
    """Return `attend_rows`, compiled for one combination of the properties that its graph has (`flex` says why)."""
    scale, cap = repr(softmax_scale), repr(soft_cap or 0.0)  # a text is a constant of the graph, a float is an input
    attend = lambda q, k, v, mask, row, slopes: attend_rows(  # noqa: E731  a code object of its own
        q, k, v, mask, row, slopes, float(scale), float(cap)
    )
    attend.__code__ = attend.__code__.replace(co_name=f"attend_rows_{next(_NUMBERS)}")
    return torch.compile(attend, fullgraph=True, dynamic=True)


@no_type_check
def attend_rows(
    q: Tensor, k: Tensor, v: Tensor, mask: RowMask, row: Tensor, slopes: Tensor | None, softmax_scale: float,
    soft_cap: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute attention of requests that begin at blocks, with one call of flex_attention.

    Args:
        q: [1, N, rows, Dh].
        k: [1, Nkv, places of keys, Dh].
        v: [1, Nkv, places of keys, Dh].
        mask: the mask of all rows.
        row: [T], row of each query token.
        slopes: [N], ALiBi slopes, or None.
        softmax_scale: factor of the dot products.
        soft_cap: soft cap of the scores; 0 for none.

    Returns:
        out [T, N, Dh] in the dtype of `q`, and the LSE [N, T] in float32.
    """
    from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

    def score_mod(score, batch, head, query, key):
        if soft_cap:
            score = soft_cap * torch.tanh(score / soft_cap)
        return score if slopes is None else score - slopes[head] * (mask.position[query] - key).abs()

    blocks = BlockMask.from_kv_blocks(
        mask.partial,
        mask.partial_blocks,
        mask.full,
        mask.full_blocks,
        BLOCK_SIZE=BLOCK,
        mask_mod=lambda batch, head, query, key: (key >= mask.first[query]) & (key < mask.end[query]),
        seq_lengths=(q.shape[2], k.shape[2]),
        compute_q_blocks=False,
    )
    made, aux = flex_attention(
        q, k, v, score_mod=score_mod if soft_cap or slopes is not None else None, block_mask=blocks,
        scale=softmax_scale, enable_gqa=True, return_aux=AuxRequest(lse=True),
    )  # fmt: skip
    return made[0].index_select(1, row).transpose(0, 1).contiguous(), aux.lse[0].index_select(1, row)


@no_type_check
def request_of_tokens(starts: Tensor, tokens: int) -> Tensor:
    """Return the request of each query token, [T]; a token behind the last request counts as its token.

    Args:
        starts: [B + 1], first query token of each request.
        tokens: T.
    """
    token = torch.arange(tokens, dtype=torch.int32, device=starts.device)
    return torch.searchsorted(starts[1:], token, right=True).clamp(max=starts.shape[0] - 2)


@no_type_check
def rows_of_tokens(request: Tensor, starts: Tensor, queries: Blocks) -> Tensor:
    """Return the row of each query token, [T]."""
    token = torch.arange(request.shape[0], dtype=torch.int32, device=request.device)
    row = token - starts[request] + BLOCK * queries.first[request]
    return row.clamp(max=queries.count * BLOCK - 1)


@no_type_check
def keys_of_cache(kv_cache: Tensor, block_table: Tensor, request: Tensor, ranges: Ranges, most: int) -> Keys:
    """Copy the keys and values of all requests out of a cache; keys that no query token attends become 0.

    Args:
        kv_cache: [2, num_blocks, block_size, Nkv, Dh].
        block_table: [B, W].
        request: [T], request of each query token.
        ranges: keys that each query token attends.
        most: upper bound of the keys of a request, at least 1.
    """
    _, num_blocks, block_size, _, _ = kv_cache.shape
    requests, room = block_table.shape[0], BLOCK * ((most + BLOCK - 1) // BLOCK)
    sees = ranges.first < ranges.end  # a query token without keys must not widen the range of its request
    low = torch.full((requests,), room, dtype=torch.int32, device=request.device)
    low = low.scatter_reduce(0, request, torch.where(sees, ranges.first, room), "amin")
    high = torch.zeros_like(low).scatter_reduce(0, request, torch.where(sees, ranges.end, 0), "amax")
    key = torch.arange(room, dtype=torch.int32, device=request.device)
    block = block_table[:, (key // block_size).clamp(max=block_table.shape[1] - 1).long()]
    readable = (key >= low[:, None]) & (key < high[:, None]) & (key < most) & (block >= 0) & (block < num_blocks)
    block, place = torch.where(readable, block, 0).long(), (key % block_size).long()
    halves = [torch.where(readable[..., None, None], half[block, place], 0) for half in kv_cache]
    keys, values = (each.flatten(0, 1).transpose(0, 1)[None] for each in halves)
    return Keys(keys, values, room * torch.arange(requests + 1, dtype=torch.int32, device=request.device))


@no_type_check
def packed_ranges(
    request: Tensor, starts: Tensor, key_lens: Tensor, attention_type: str, sliding_window: int | None,
    attention_chunk_size: int | None,
) -> Ranges:  # fmt: skip
    """Return the keys that each query token attends if the keys are packed (`fast.gqa_varlen_attention`).

    Args:
        request: [T], request of each query token.
        starts: [B + 1], first query token of each request.
        key_lens: [B + 1], number of keys of each request.
        attention_type: value of an `AttentionType`.
        sliding_window: number of keys of a window, or None.
        attention_chunk_size: positions of an attention chunk, or None.
    """
    keys = key_lens[request]
    position = torch.arange(request.shape[0], dtype=torch.int32, device=request.device) - starts[request]
    first, end = torch.zeros_like(position), keys
    if attention_type == "decoder":
        position = position + keys - starts.diff()[request]
        end = position + 1
    if sliding_window is not None:
        first = position - sliding_window + 1
        end = torch.minimum(end, position + sliding_window)
    if attention_chunk_size is not None:
        first = torch.maximum(first, position - position.remainder(attention_chunk_size))
    end = torch.minimum(end, keys).clamp(min=0)
    return Ranges(torch.minimum(first.clamp(min=0), end), end, position)


@no_type_check
def row_mask(queries: Blocks, row: Tensor, keys: Keys, request: Tensor, ranges: Ranges) -> RowMask:
    """Return the mask of all rows, and the blocks of keys that each block of queries attends.

    Args:
        queries: places of the query tokens.
        row: [T], row of each query token.
        keys: keys of all requests.
        request: [T], request of each query token.
        ranges: keys that each query token attends.
    """
    rows, shift = queries.count * BLOCK, keys.first[request]
    zeros = torch.zeros(rows, dtype=torch.int32, device=row.device)
    first, end, position = (
        zeros.scatter(0, row.long(), (each + shift).to(torch.int32)) for each in ranges
    )  # fmt: skip
    used = zeros.scatter(0, row.long(), 1).view(-1, BLOCK) > 0
    sees = (first < end).view(-1, BLOCK)
    most = keys.keys.shape[2]
    of_block = first.view(-1, BLOCK), end.view(-1, BLOCK)
    low = torch.where(sees, of_block[0], most).amin(1)  # the block attends places from `low` on, and before `high`
    high = torch.where(sees, of_block[1], 0).amax(1)
    # all rows attend the places from `all_low` on, and before `all_high`; rows without a token attend nothing
    all_low = torch.where(used, of_block[0], 0).amax(1)
    all_high = torch.where(used, torch.where(sees, of_block[1], 0), most).amin(1)
    begin, stop = low // BLOCK, (high + BLOCK - 1) // BLOCK
    count = (stop - begin).clamp(min=0)
    full_begin = (all_low + BLOCK - 1) // BLOCK
    full = (all_high // BLOCK - full_begin).clamp(min=0)
    full = torch.where(count > 0, full, 0)
    before = torch.where(full > 0, full_begin - begin, count)  # partial blocks before the full blocks
    column = torch.arange(most // BLOCK, dtype=torch.int32, device=row.device)
    partial_blocks = begin[:, None] + column + torch.where(column < before[:, None], 0, full[:, None])
    lists = [
        each.clamp(0, most // BLOCK - 1).to(torch.int32)[None, None]
        for each in (partial_blocks, full_begin[:, None] + column)
    ]
    counts = [each.to(torch.int32)[None, None] for each in (count - full, full)]
    return RowMask(counts[0], lists[0], counts[1], lists[1], first, end, position)
