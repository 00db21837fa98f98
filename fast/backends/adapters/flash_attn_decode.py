"""Adapter to the absorbed decode of flash-attn 3: rope parts are queries and keys, latents are `qv` and values.

flash-attn 3 has two ways to load the pages of a cache. The first way loads whole pages, also the entries after the last
token of a request. It multiplies these entries by 0, so a NaN in such an entry makes the output NaN. The second way
fills these entries with zeros. The library takes the first way if the page size is a multiple of 64 and a request has
more than 64 rows (heads times query tokens). The adapter therefore gives the library pages of at most 32 tokens: it
splits each block of 64 or 128 tokens into pages of 32 tokens. This takes two small ops on the block table. With a
prepared step, the hooks do both ops once in a step.

Limits of the library:

- It trusts `seq_lens`: a length above `W * block_size` makes the kernel read outside the block table. It does not read
  entries of the block table after the last block of a request.
- Under context parallelism with several query tokens, only vLLM's copy serves a decode: it has the arguments
  `cp_world_size`, `cp_rank` and `cp_tot_seqused_k`, and computes the mask of the whole sequence from them. Its formula
  is for an interleave of 1.
- If the library divides a request into several splits, it leaves out each split whose sum of probabilities is NaN. A
  row with a NaN query then has output 0 and LSE -inf.
"""

from __future__ import annotations

import torch
from torch import Tensor

from reference.interfaces import (
    CAUSAL_OVER_RANKS,
    COMPUTE_FORMAT,
    CONVERTED,
    CacheFormat,
    DecodeMetadata,
    InvariantSplitRule,
    TokenOwnership,
    UnsupportedConfiguration,
)

from .conversion import StateConversion
from .flash_attn import POISONED, SOURCES_3_OF_ALL, SOURCES_3_OF_RANKS, VLLM
from .sources import Source, loaded

PAGE = 32  # most tokens in a page that the library loads in its second way


class DecodeCall:
    """Absorbed attention by flash-attn 3, for calls with equal properties (`fast.backends.kept_calls`).

    The constructor has the arguments of the first call (`__call__`); later calls have equal shapes, strides, dtypes,
    devices, alignments and numbers.
    """

    def __init__(
        self, ql_nope: Tensor, q_pe: Tensor, kv_cache: Tensor, block_table: Tensor, seq_lens: Tensor,
        query_start_loc: Tensor, visible_lens: Tensor, longest_q: int, longest_k: int, scale: float,
        out_dtype: torch.dtype, tile_ranges: None = None, split_offsets: None = None, batch_invariant: bool = False,
        split_rule: InvariantSplitRule | None = None, cache_format: CacheFormat = COMPUTE_FORMAT, kv_scale: None = None,
        out: Tensor | None = None, *, ownership: TokenOwnership | None = None, **_,
    ):  # fmt: skip
        (tokens, heads, latent), (num_blocks, block_size, columns) = ql_nope.shape, kv_cache.shape
        self._is_empty = tokens == 0 or heads == 0 or seq_lens.shape[0] == 0 or num_blocks == 0
        self._convert = StateConversion(POISONED, out_dtype, latent)
        if self._is_empty:
            return
        source, self._library = loaded(_sources(ownership is not None))
        self._is_vllm = source.module == VLLM
        page = _page_size(kv_cache)
        block, token, column = kv_cache.stride()
        shape, strides = (
            (num_blocks * block_size // page, page, 1),
            (block if page == block_size else page * token, token),
        )
        self._values = (*shape, latent), (*strides, columns * column, column)
        self._keys = (*shape, columns - latent), (*strides, columns * column, column)
        self._first_key = latent * column
        self._copies = not (seq_lens.is_contiguous() and query_start_loc.is_contiguous())
        self._directs = self._is_vllm and out is not None and out.dtype == ql_nope.dtype
        self._options = {
            "max_seqlen_q": longest_q, "softmax_scale": scale, "causal": True, "num_splits": 0,
            "return_softmax_lse": True,
        }  # fmt: skip
        if self._is_vllm:
            self._options |= {"max_seqlen_k": longest_k, "fa_version": 3}
        if ownership is not None:
            self._options |= {"cp_world_size": ownership.size, "cp_rank": ownership.rank}

    def __call__(
        self,
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
        tile_ranges: Tensor | None = None,
        split_offsets: Tensor | None = None,
        batch_invariant: bool = False,
        split_rule: InvariantSplitRule | None = None,
        cache_format: CacheFormat = COMPUTE_FORMAT,
        kv_scale: Tensor | None = None,
        out: Tensor | None = None,
        *,
        fp8_mode: str = CONVERTED,
        q_scale: Tensor | None = None,
        prepared: tuple[Tensor, ...] = (),
        total_seq_lens: Tensor | None = None,
        ownership: TokenOwnership | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute absorbed attention of the query tokens of each request over its cached latents, with a causal mask.

        Args:
            ql_nope: [T, N, 512], absorbed queries; bfloat16 or float16.
            q_pe: [T, N, 64], rope part of the queries.
            kv_cache: [num_blocks, block_size, 576] in the dtype of the queries.
            block_table: [B, W].
            seq_lens: [B], keys of each request.
            query_start_loc: [B + 1], first query token of each request.
            visible_lens: not used, because query i of Sq sees the first S - Sq + i + 1 keys.
            max_query_len: upper bound of the query tokens of a request.
            max_seq_len: upper bound of the keys of a request; the library chooses the number of splits by it.
            softmax_scale: factor of the scores.
            out_dtype: dtype of the output.
            tile_ranges: not used, because the library makes its own schedule.
            split_offsets: not used.
            batch_invariant: False, because the declaration excludes True.
            split_rule: not used.
            cache_format: `compute_dtype`.
            kv_scale: None, because the format has no scale.
            out: [T, N, 512] in `out_dtype`, contiguous, written in place; None allocates a tensor.
            fp8_mode: "converted".
            q_scale: None.
            prepared: the library's schedule and the page table, from `prepare`. Empty: this call makes both.
            total_seq_lens: [B], lengths of the whole sequences, for the mask "causal_over_ranks"; otherwise None.
            ownership: every D-th token of a sequence, which this rank owns, for the same mask; otherwise None.

        Returns:
            out [T, N, 512] and lse [N, T], natural log, float32. Rows without keys: output 0 and LSE -inf.
        """
        if self._is_empty:
            tokens, heads, _ = ql_nope.shape
            out = ql_nope.new_empty(ql_nope.shape, dtype=out_dtype) if out is None else out
            return out.zero_(), torch.full((heads, tokens), -torch.inf, dtype=torch.float32, device=ql_nope.device)
        schedule, table = prepared or (None, _page_table(block_table, kv_cache.shape[1]))
        if self._copies:
            seq_lens, query_start_loc = seq_lens.contiguous(), query_start_loc.contiguous()
        first = kv_cache.storage_offset()
        values = kv_cache.as_strided(*self._values, first)
        keys = kv_cache.as_strided(*self._keys, first + self._first_key)
        target = out if self._directs else None
        if self._is_vllm:
            ranks = {} if total_seq_lens is None else {"cp_tot_seqused_k": total_seq_lens.contiguous()}
            made, lse = self._library.flash_attn_varlen_func(
                q_pe, keys, values, cu_seqlens_q=query_start_loc, q_v=ql_nope, seqused_k=seq_lens, block_table=table,
                out=target, scheduler_metadata=schedule, **self._options, **ranks,
            )  # fmt: skip
        else:  # the function of flash-attn-3 always allocates the output
            made, lse, *_ = self._library.flash_attn_with_kvcache(
                q_pe, keys, values, cu_seqlens_q=query_start_loc, qv=ql_nope, cache_seqlens=seq_lens, page_table=table,
                scheduler_metadata=schedule, **self._options,
            )  # fmt: skip
        return self._convert(made if target is None else target, lse, out)


def kept_decode(*arguments, **options) -> DecodeCall:
    """Return the function for later calls with the same signature."""
    return DecodeCall(*arguments, **options)


def mla_decode(*arguments, **options) -> tuple[Tensor, Tensor]:
    """Compute absorbed attention over cached latents, with a causal mask (`DecodeCall.__call__`)."""
    return DecodeCall(*arguments, **options)(*arguments, **options)


def _sources(over_ranks: bool) -> tuple[Source, ...]:
    """Return the modules that can serve a decode; `over_ranks` means the mask "causal_over_ranks"."""
    return SOURCES_3_OF_RANKS if over_ranks else SOURCES_3_OF_ALL


def _page_size(kv_cache: Tensor) -> int:
    """Return the number of tokens of a page: at most PAGE.

    Raises:
        UnsupportedConfiguration: the blocks have more than PAGE tokens and do not follow each other in memory.
    """
    num_blocks, block_size, _ = kv_cache.shape
    if block_size <= PAGE:
        return block_size
    if num_blocks > 1 and kv_cache.stride(0) != block_size * kv_cache.stride(1):
        raise UnsupportedConfiguration([
            f"flash_attn_3: serves blocks of more than {PAGE} tokens only if they follow each other in memory, got "
            f"blocks of {block_size} tokens with strides {kv_cache.stride()}"
        ])  # fmt: skip
    return PAGE


def _page_table(block_table: Tensor, block_size: int) -> Tensor:
    """Return the table of pages, [B, W * pages of a block]; entries after a request's last block are any numbers."""
    parts = block_size // PAGE
    if parts <= 1:
        return block_table if block_table.stride(-1) == 1 else block_table.contiguous()
    offsets = torch.arange(parts, dtype=torch.int32, device=block_table.device)
    return torch.add(offsets, block_table[:, :, None], alpha=parts).flatten(1)


def _most_keys(source: Source, table: Tensor, page: int, max_seq_len: int) -> int:
    """Return the bound of the keys from which the library's decode chooses the number of splits."""
    return max_seq_len if source.module == VLLM else table.shape[1] * page


def prepare(decode: DecodeMetadata, num_heads: int) -> tuple[Tensor, Tensor]:
    """Return the library's schedule and the page table for the decodes of a step.

    The schedule has the same size for every batch with the same number of requests, the same largest query length and
    the same `max_seq_len`.

    Args:
        decode: decode part of the plan, with at least one request.
        num_heads: number of heads of the decode.
    """
    source, module = loaded(_sources(decode.mask == CAUSAL_OVER_RANKS))
    table = _page_table(decode.block_table, decode.block_size)
    page = min(decode.block_size, PAGE)
    seq_lens = decode.seq_lens.contiguous()
    schedule = module.get_scheduler_metadata(
        batch_size=seq_lens.shape[0], max_seqlen_q=decode.max_query_len,
        max_seqlen_k=_most_keys(source, table, page, decode.max_seq_len), num_heads_q=num_heads, num_heads_kv=1,
        headdim=64, headdim_v=512, cache_seqlens=seq_lens, qkv_dtype=torch.bfloat16,
        cu_seqlens_q=decode.query_start_loc.contiguous(), page_size=page, causal=True, num_splits=0,
    )  # fmt: skip
    return schedule, table
