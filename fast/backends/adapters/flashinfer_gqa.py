"""Adapter of grouped-query attention to FlashInfer, over a paged cache (`BatchPrefillWithPagedKVCacheWrapper`).

The kernel has a causal mask aligned bottom right, a window and a soft cap. FlashInfer compiles a kernel of its own for
each combination of a window and a soft cap. The adapter adds attention sinks itself, from the LSE, which is one more
pass over the output. ALiBi, attention chunks and caches in e4m3 are not declared, so that each is refused by its name.

Each call copies the lengths and the block table to the CPU, which waits for the GPU, and plans anew. No CUDA graph can
capture a call. The calls on a device share a workspace, which the process keeps.

NaN in the cache: by the sources of FlashInfer 0.6.18, "fa2" and "fa3" fill the slots behind the last token of a request
with zeros in place of loading their values, so that a NaN there has no effect. Both kernels multiply values of the same
request outside the window of a query by 0. If such a value is NaN or infinite, the output of the query becomes NaN. The
entries of the block table for blocks before the window may have any value: the adapter removes these blocks from the
plan.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from reference.interfaces import (
    COMPUTE_FORMAT,
    CacheFormat,
    InvariantSplitRule,
    UnsupportedConfiguration,
    check_offsets,
)

from .conversion import grouped_state, grouped_state_without_keys, in_words, is_in_words, natural_lse
from .flash_attn_gqa import without_hidden_blocks
from .flashinfer import kernel_of
from .flashinfer_workspace import new_workspace


class PagedCall(NamedTuple):
    """The requests of a call that attend a key, in the form that FlashInfer plans. All tensors are on the CPU.

    FlashInfer leaves the result of a row without keys open, so the plan has no such row. It has R requests.

    Attributes:
        q_offsets: [R + 1], int32, first query row of each request.
        page_offsets: [R + 1], int32, first page of each request in `pages`.
        pages: [number of pages], int32, block numbers of all requests.
        last_page_lens: [R], int32, keys in the last page of each request.
        rows: int64, the query token of each row; None if every query token has a row.
    """

    q_offsets: Tensor
    page_offsets: Tensor
    pages: Tensor
    last_page_lens: Tensor
    rows: Tensor | None

    @classmethod
    def of(
        cls, block_table: Tensor, seq_lens: Tensor, query_start_loc: Tensor, num_tokens: int, block_size: int, most: int
    ) -> PagedCall:
        """Copy the lengths and the block table of a call to the CPU, which waits for the GPU, and return the call.

        A query token sees no key if its request has no key, or has fewer keys than query tokens and the token is one
        of the first tokens. Query tokens behind the last request see no key either.

        Args:
            block_table: [B, W], int32.
            seq_lens: [B], int32, keys of each request; taken as 0 if negative, and as `most` if larger.
            query_start_loc: [B + 1], int32, first query token of each request.
            num_tokens: number of query tokens T.
            block_size: tokens of a block.
            most: upper bound of the keys of a request, at most W * block_size.

        Raises:
            ValueError: the offsets decrease, do not begin at 0, or exceed the number of query tokens.
        """
        requests, width = block_table.shape
        host = torch.cat((seq_lens, query_start_loc, block_table.flatten())).cpu()
        lens, starts, table = host.split((requests, requests + 1, requests * width))
        check_offsets("query_start_loc", starts, most=num_tokens)
        lens = lens.clamp(0, most)
        seen = torch.minimum(starts.diff(), lens)  # query tokens of each request that see a key: the last ones
        kept = seen > 0
        pages = (lens + block_size - 1) // block_size * kept
        is_used = torch.arange(width, device="cpu") < pages[:, None]
        ends = seen.cumsum(0)
        rows = None
        if int(ends[-1]) < num_tokens:
            rows = (starts[1:] - ends).repeat_interleave(seen) + torch.arange(int(ends[-1]), device="cpu")
        return cls(
            _offsets(seen[kept]), _offsets(pages[kept]), table.view(requests, width)[is_used],
            (lens[kept] - 1) % block_size + 1, rows,
        )  # fmt: skip


def _offsets(lens: Tensor) -> Tensor:
    """Return the prefix sum of lengths [R], int32 [R + 1]."""
    return pad(lens.cumsum(0, dtype=torch.int32), (1, 0))


class PagedWrapper:
    """The wrapper of FlashInfer for the calls on a device, which runs one call at a time.

    Args:
        device: device of the calls.
    """

    def __init__(self, device: torch.device):
        import flashinfer

        workspace = new_workspace(device)
        self._library = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=kernel_of(device))
        self._used, self._device, self._lock = torch.cuda.Event(), device, threading.Lock()

    def run(
        self, call: PagedCall, q: Tensor, keys: Tensor, values: Tensor, softmax_scale: float, window_left: int,
        soft_cap: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Plan a call and run it.

        A plan overwrites memory that the call before it reads, perhaps on another stream. So wait for this call first.

        Args:
            call: the lengths of the call.
            q: [rows, N, Dh].
            keys: [num_blocks, block_size, Nkv, Dh].
            values: [num_blocks, block_size, Nkv, Dh].
            softmax_scale: factor of the dot products.
            window_left: number of keys before the query's own key that the query attends; -1 for no limit.
            soft_cap: soft cap of the scores; 0 for none.

        Returns:
            out [rows, N, Dh] and the LSE in base 2, [rows, N].
        """
        with self._lock:
            self._used.synchronize()
            self._library.plan(
                qo_indptr=call.q_offsets, paged_kv_indptr=call.page_offsets, paged_kv_indices=call.pages,
                paged_kv_last_page_len=call.last_page_lens, num_qo_heads=q.shape[1], num_kv_heads=keys.shape[2],
                head_dim_qk=q.shape[2], page_size=keys.shape[1], causal=True, sm_scale=softmax_scale,
                window_left=window_left, logits_soft_cap=soft_cap, q_data_type=q.dtype, kv_data_type=keys.dtype,
            )  # fmt: skip
            made = self._library.run(q=q, paged_kv_cache=(keys, values), return_lse=True)
            self._used.record(torch.cuda.current_stream(self._device))
        return made


wrapper_of = functools.cache(PagedWrapper)  # by device


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
    """Attend the cached keys of each request with its query tokens, under a causal mask; this waits for the GPU.

    Args:
        q: [T, N, Dh], bfloat16 or float16.
        kv_cache: [2, num_blocks, block_size, Nkv, Dh] in the dtype of the queries.
        block_table: [B, W].
        seq_lens: [B], keys of each request.
        query_start_loc: [B + 1], first query token of each request; no token is behind the last request.
        visible_lens: not used, because query i of Sq sees the keys before S - Sq + i + 1.
        first_visible: [T], first key of each query token, which follows from the window; None without a window.
        max_query_len: not used.
        max_seq_len: upper bound of the keys of a request.
        max_visible_len: with a window, the number of keys of the window, or `max_seq_len` if that is smaller.
        softmax_scale: factor of the dot products.
        soft_cap: soft cap of the scores, or None.
        alibi_slopes: None, because the declaration excludes ALiBi.
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
        ValueError: `query_start_loc` decreases, does not begin at 0, or exceeds T.
    """
    block_size = kv_cache.shape[2]
    most = min(max_seq_len, block_table.shape[1] * block_size)
    if q.shape[0] == 0 or seq_lens.shape[0] == 0 or most == 0 or kv_cache.shape[1] == 0:
        return grouped_state_without_keys(q, sinks, out_dtype, out)
    if reasons := cache_reasons(kv_cache):
        raise UnsupportedConfiguration(reasons)
    table, lens, window_left = block_table, seq_lens, -1
    if first_visible is not None:
        window_left = max_visible_len - 1
        table, lens = without_hidden_blocks(table, lens.clamp(0, most), first_visible, query_start_loc, block_size)
    call = PagedCall.of(table, lens, query_start_loc, q.shape[0], block_size, most)
    if len(call.last_page_lens) == 0:
        return grouped_state_without_keys(q, sinks, out_dtype, out)
    rows = None if call.rows is None else call.rows.to(q.device)
    made, lse = wrapper_of(q.device).run(
        call, in_words(q) if rows is None else q[rows], *kv_cache.unbind(0), softmax_scale, window_left, soft_cap or 0.0
    )
    lse = natural_lse(lse).T
    if rows is not None:
        whole, whole_lse = grouped_state_without_keys(q, None, made.dtype, None)
        made, lse = whole.index_copy_(0, rows, made), whole_lse.index_copy_(1, rows, lse)
    return grouped_state(made, lse, sinks, out_dtype, out)


def cache_reasons(kv_cache: Tensor) -> list[str]:
    """Return why the library cannot load the pages of a cache with such strides; an empty list if it can.

    Args:
        kv_cache: [2, num_blocks, block_size, Nkv, Dh].
    """
    if all(is_in_words(each) for each in kv_cache.unbind(0)):
        return []
    return [f"flashinfer: needs a cache of aligned 16-byte words, got strides {kv_cache.stride()}"]
