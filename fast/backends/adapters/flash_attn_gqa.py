"""Adapters of grouped-query attention to flash-attn 2 and 3, over a paged cache and over packed keys.

Both versions have a causal mask with a window, and a soft cap. flash-attn 2 also has ALiBi. The adapter adds attention
sinks itself, from the LSE, which is one more pass over the output.

The page sizes of a cache:

- flash-attn 2: multiples of 16 tokens with vLLM's copy, multiples of 256 tokens with the package `flash_attn`.
- flash-attn 3: any. The library has two ways to load pages. The first way loads whole pages, also the entries after the
  last token of a request, and multiplies them by 0, so that a NaN in such an entry makes the output NaN. The library
  takes it only if the tokens of a page are a multiple of the keys of a tile. The adapter therefore gives the library
  pages of at most 32 tokens, which are parts of the blocks.

A window: the library reads whole tiles of keys, also the keys before the window in the same tile. The entries of the
block table for blocks before the window may have any value. The adapter therefore removes these blocks from the table
and from the lengths.

flash-attn 3 reads values of packed requests in whole tiles (`flash_attn` says what this means for NaN).

Requests without keys: the paged kernel of flash-attn 2 writes the LSE of 64 query tokens that see no key to a wrong
place, which may lie outside of the LSE (`row_offset_lseaccum` of the early exit in `compute_attn_1rowblock_splitkv`).
The adapter therefore gives such a request one key for each query token, and sets its output and LSE afterwards.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from reference.interfaces import COMPUTE_FORMAT, CacheFormat, InvariantSplitRule, UnsupportedConfiguration

from .conversion import (
    grouped_state,
    grouped_state_without_keys,
    in_words,
    is_in_words,
    slopes_on_device,
    with_poison,
    without_empty_rows,
)
from .flash_attn import LEAST_QUERY_BOUND, SOURCES_2, SOURCES_3, SOURCES_3_OF_ALL, VLLM
from .sources import Source, loaded

PAGE = 32  # most tokens of a page of flash-attn 3
SOURCES = {2: SOURCES_2, 3: SOURCES_3}  # sources of kernels over packed keys
# vLLM's copy of flash-attn 2 takes more page sizes, so it comes first
SOURCES_PAGED = {2: tuple(sorted(SOURCES_2, key=lambda source: source.module != VLLM)), 3: SOURCES_3_OF_ALL}


class Scores(NamedTuple):
    """How the library computes scores, and which keys a query attends.

    Attributes:
        softmax_scale: factor of the dot products.
        causal: whether the last query of a request sees all keys, and each earlier query sees one key less.
        window: number of keys before and after the query's own key that the query attends; -1 for no limit.
        soft_cap: soft cap of the scores; 0 for none.
        slopes: [N], float32 slopes of ALiBi, or None.
    """

    softmax_scale: float
    causal: bool
    window: tuple[int, int]
    soft_cap: float
    slopes: Tensor | None

    @classmethod
    def of(
        cls,
        device: torch.device,
        softmax_scale: float,
        causal: bool,
        keys_of_window: int | None,
        soft_cap: float | None,
        alibi_slopes: Sequence[float] | None,
        max_key_len: int,
    ) -> Scores:
        """Return the scores of a call.

        Args:
            device: device of the tensors.
            softmax_scale: factor of the dot products.
            causal: whether the mask is causal.
            keys_of_window: number of keys of the window, the query's own key included; None for no window. Without a
                causal mask, a window has as many keys after the query as before it.
            soft_cap: soft cap, or None.
            alibi_slopes: N slopes, or None.
            max_key_len: upper bound of the keys of a request.
        """
        before = -1 if keys_of_window is None else keys_of_window - 1
        if causal and alibi_slopes is not None and not 0 <= before < max_key_len:
            # Without a window, a causal kernel adds slope * key in place of -slope * distance. This changes the LSE.
            before = max(max_key_len - 1, 0)
        slopes = None if alibi_slopes is None else slopes_on_device(device, tuple(alibi_slopes))
        return cls(softmax_scale, causal, (before, 0 if causal else before), soft_cap or 0.0, slopes)

    def arguments(self, version: int) -> dict:
        """Return the library's arguments."""
        given = dict(
            softmax_scale=self.softmax_scale, causal=self.causal, window_size=self.window, softcap=self.soft_cap
        )
        return given | {"alibi_slopes": self.slopes} if version == 2 else given


def _attend_cache(
    version: int,
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
    """Attend the cached keys of each request with its query tokens, under a causal mask.

    Args:
        version: 2 or 3.
        q: [T, N, Dh], bfloat16 or float16.
        kv_cache: [2, num_blocks, block_size, Nkv, Dh] in the dtype of the queries.
        block_table: [B, W].
        seq_lens: [B], keys of each request.
        query_start_loc: [B + 1], first query token of each request; no token is behind the last request.
        visible_lens: [T], 0 for the query tokens of a request without keys. Query i of Sq of another request sees the
            keys before S - Sq + i + 1.
        first_visible: [T], first key of each query token, which follows from the window; None without a window.
        max_query_len: upper bound of the query tokens of a request.
        max_seq_len: upper bound of the keys of a request.
        max_visible_len: with a window, the number of keys of the window, or `max_seq_len` if that is smaller.
        softmax_scale: factor of the dot products.
        soft_cap: soft cap of the scores, or None.
        alibi_slopes: N slopes, or None; None for flash-attn 3.
        sinks: [N], or None.
        out_dtype: dtype of the output.
        tile_ranges: not used, because the library makes its own schedule.
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

    Raises:
        UnsupportedConfiguration: the library cannot load the pages of a cache with these strides.
    """
    most = min(max_seq_len, block_table.shape[1] * kv_cache.shape[2])
    if q.shape[0] == 0 or seq_lens.shape[0] == 0 or most == 0 or kv_cache.shape[1] == 0:
        return grouped_state_without_keys(q, sinks, out_dtype, out)
    source, module = loaded(SOURCES_PAGED[version])
    table, lens = block_table, seq_lens
    if first_visible is not None:
        table, lens = without_hidden_blocks(table, lens, first_visible, query_start_loc, kv_cache.shape[2])
    pages = _pages(version, kv_cache, table)
    keys, values, table = pages.keys, pages.values, pages.table
    if version == 2:
        lens, table = _with_keys(lens, table, query_start_loc, max_query_len, keys.shape[1])
        most = max(most, max_query_len)
    window = None if first_visible is None else max_visible_len
    scores = Scores.of(q.device, softmax_scale, True, window, soft_cap, alibi_slopes, most)
    lens = lens.contiguous()
    starts = query_start_loc.contiguous()
    if source.module == VLLM:
        made = module.flash_attn_varlen_func(
            in_words(q), keys, values, max_seqlen_q=max_query_len, cu_seqlens_q=starts, max_seqlen_k=most,
            seqused_k=lens, block_table=table, return_softmax_lse=True, num_splits=0, fa_version=version,
            **scores.arguments(version),
        )  # fmt: skip
    elif version == 2:
        made = module.flash_attn_varlen_func(
            in_words(q), keys, values, starts, pad(lens.cumsum(0, dtype=torch.int32), (1, 0)), max_query_len, most,
            block_table=table, return_attn_probs=True, **scores.arguments(version),
        )  # fmt: skip
    else:
        made = module.flash_attn_with_kvcache(
            in_words(q), keys, values, cache_seqlens=lens, page_table=table, cu_seqlens_q=starts,
            max_seqlen_q=max_query_len, num_splits=0, return_softmax_lse=True, **scores.arguments(version),
        )  # fmt: skip
    made, lse = made[:2]
    lse = _converted_lse(version, made, lse)
    if version == 2:  # rows of requests without keys
        without = visible_lens <= 0
        made, lse = made.masked_fill(without[:, None, None], 0), lse.masked_fill(without, -torch.inf)
    return grouped_state(made, lse, sinks, out_dtype, out)


def _attend_packed(
    version: int,
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
        version: 2 or 3.
        q: [T, N, Dh], bfloat16 or float16.
        k: [S, Nkv, Dh].
        v: [S, Nkv, Dh].
        cu_seqlens_q: [B + 1], first query token of each request.
        cu_seqlens_k: [B + 1], first key of each request.
        max_seqlen_q: upper bound of the query lengths.
        max_seqlen_k: upper bound of the key lengths.
        softmax_scale: factor of the dot products.
        attention_type: value of an `AttentionType`; a decoder has a causal mask.
        sliding_window: number of keys of a window, the query's own key included; None for no window.
        attention_chunk_size: None, because the declaration excludes attention chunks.
        soft_cap: soft cap of the scores, or None.
        alibi_slopes: N slopes, or None; None for flash-attn 3.
        sinks: [N], or None.
        out_dtype: dtype of the output.
        out: [T, N, Dh] in `out_dtype`, any strides, written in place; None allocates a tensor.

    Returns:
        out [T, N, Dh] and lse [N, T], natural log, float32.
    """
    if q.shape[0] == 0 or k.shape[0] == 0:
        return grouped_state_without_keys(q, sinks, out_dtype, out)
    source, module = loaded(_sources_packed(version, q.dtype))
    causal = attention_type == "decoder"
    scores = Scores.of(q.device, softmax_scale, causal, sliding_window, soft_cap, alibi_slopes, max_seqlen_k)
    given = dict(
        cu_seqlens_q=cu_seqlens_q.contiguous(), cu_seqlens_k=cu_seqlens_k.contiguous(),
        max_seqlen_q=max(max_seqlen_q, LEAST_QUERY_BOUND[version]), max_seqlen_k=max_seqlen_k,
        **scores.arguments(version),
    )  # fmt: skip
    if source.module == VLLM:
        given |= dict(return_softmax_lse=True, num_splits=1, fa_version=version)
    else:
        given |= dict(return_attn_probs=True) | ({} if version == 2 else dict(num_splits=1))
    made, lse, *_ = module.flash_attn_varlen_func(in_words(q), in_words(k), in_words(v), **given)
    return grouped_state(made, _converted_lse(version, made, lse), sinks, out_dtype, out)


def _converted_lse(version: int, made: Tensor, lse: Tensor) -> Tensor:
    """Return the LSE of the library, with -inf for rows without keys, and NaN for rows whose output is NaN."""
    return without_empty_rows(made, lse) if version == 2 else with_poison(made, lse)


def _sources_packed(version: int, dtype: torch.dtype) -> tuple[Source, ...]:
    """Return the modules that have the kernel for packed keys of a dtype."""
    return SOURCES_3_OF_ALL if version == 3 and dtype != torch.bfloat16 else SOURCES[version]


def without_hidden_blocks(
    block_table: Tensor, seq_lens: Tensor, first_visible: Tensor, query_start_loc: Tensor, block_size: int
) -> tuple[Tensor, Tensor]:
    """Return the block table and the lengths of the requests without the blocks before their first visible key.

    A causal mask and a window count from the last key, so the library attends the same keys.

    Args:
        block_table: [B, W].
        seq_lens: [B], keys of each request.
        first_visible: [T], first key of each query token; it does not decrease within a request.
        query_start_loc: [B + 1], first query token of each request.
        block_size: tokens of a block.

    Returns:
        The table [B, W], whose entries after the last block of a request may have any value, and the lengths [B], both
        int32. The results of a request without query tokens have no meaning, and are not used.
    """
    token = query_start_loc[:-1].long().clamp(max=first_visible.shape[0] - 1)
    hidden = first_visible[token] // block_size  # number of blocks before the first visible key
    columns = torch.arange(block_table.shape[1], dtype=torch.int32, device=block_table.device)
    kept = (columns + hidden[:, None]).clamp(max=block_table.shape[1] - 1)
    return block_table.gather(1, kept.long()), (seq_lens - hidden * block_size).clamp(min=0)


def _with_keys(
    seq_lens: Tensor, table: Tensor, query_start_loc: Tensor, max_query_len: int, page_size: int
) -> tuple[Tensor, Tensor]:
    """Return lengths and a table in which a request without keys has one key for each query token, all in page 0.

    Args:
        seq_lens: [B], keys of each request.
        table: [B, W], pages of each request.
        query_start_loc: [B + 1], first query token of each request.
        max_query_len: upper bound of the query tokens of a request.
        page_size: tokens of a page.

    Returns:
        The lengths [B], and the table with at least as many columns as `max_query_len` tokens need.
    """
    empty = seq_lens <= 0
    table = pad(table, (0, max(0, -(-max_query_len // page_size) - table.shape[1])))
    return torch.where(empty, query_start_loc.diff(), seq_lens), table.masked_fill(empty[:, None], 0)


def _page_size(version: int, block_size: int) -> int:
    """Return the page size that the library gets: that of the cache, or a part of it for flash-attn 3."""
    if version == 2 or block_size <= PAGE:
        return block_size
    return PAGE if block_size % PAGE == 0 else PAGE // 2


def _cache_reasons(version: int, kv_cache: Tensor) -> list[str]:
    """Return why the library cannot load the pages of a cache with such strides; an empty list if it can.

    Args:
        version: 2 or 3.
        kv_cache: [2, num_blocks, block_size, Nkv, Dh].
    """
    keys, values = kv_cache.unbind(0)
    num_blocks, block_size = keys.shape[:2]
    reasons = []
    if not (is_in_words(keys) and is_in_words(values)):
        reasons.append(f"needs a cache of aligned 16-byte words, got strides {kv_cache.stride()}")
    divided = _page_size(version, block_size) < block_size
    if divided and num_blocks > 1 and keys.stride(0) != block_size * keys.stride(1):
        reasons.append(
            f"serves blocks of more than {PAGE} tokens only if they follow each other in memory, got blocks of "
            f"{block_size} tokens with strides {kv_cache.stride()[1:]}"
        )
    return [f"flash_attn_{version}: {reason}" for reason in reasons]


class _Pages(NamedTuple):
    """Pages of keys and of values, [pages, page size, Nkv, Dh], and the table of the pages of each request."""

    keys: Tensor
    values: Tensor
    table: Tensor


def _pages(version: int, kv_cache: Tensor, block_table: Tensor) -> _Pages:
    """Return the cache as pages of a size that the library knows, without a copy.

    Raises:
        UnsupportedConfiguration: `_cache_reasons` has a reason.
    """
    if reasons := _cache_reasons(version, kv_cache):
        raise UnsupportedConfiguration(reasons)
    keys, values = kv_cache.unbind(0)
    block_size, heads, width = kv_cache.shape[2:]
    page = _page_size(version, block_size)
    parts = block_size // page
    if parts == 1:
        return _Pages(keys, values, block_table if block_table.stride(-1) == 1 else block_table.contiguous())
    offsets = torch.arange(parts, dtype=torch.int32, device=block_table.device)
    table = torch.add(offsets, block_table[:, :, None], alpha=parts).flatten(1)
    return _Pages(keys.view(-1, page, heads, width), values.view(-1, page, heads, width), table)


cache_reasons_2 = functools.partial(_cache_reasons, 2)
cache_reasons_3 = functools.partial(_cache_reasons, 3)
gqa_paged_attention_2 = functools.partial(_attend_cache, 2)
gqa_paged_attention_3 = functools.partial(_attend_cache, 3)
gqa_varlen_attention_2 = functools.partial(_attend_packed, 2)
gqa_varlen_attention_3 = functools.partial(_attend_packed, 3)
