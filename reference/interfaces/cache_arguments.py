"""Argument checks of the cache functions: caches, slots, blocks and chunks of context.

A slot is the place of one token in a paged cache. A chunk is a part of the cached context that is gathered at once.
"Read no values" means that a check looks at shapes, dtypes and devices alone, so it does not wait for a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .cache_format import CacheFormat, check_format, check_kv_scale, storage_dtypes
from .checks import (
    check,
    check_flag,
    check_int,
    check_offsets,
    check_readable,
    check_tensor,
    check_type,
)
from .context_chunk import ChunkRun, ContextChunk, ContextParallelChunk
from .metadata import CommonAttentionMetadata
from .ownership import TokenOwnership, get_dcp_local_seq_lens

CPU = torch.device("cpu")


def check_cache(kv_cache: Tensor, columns: int | str = "columns", dtype: torch.dtype | None = None,
                device: torch.device | None = None) -> None:  # fmt: skip
    """Check the number of dimensions, the columns, the dtype and the device of a paged latent cache."""
    check_tensor("kv_cache", kv_cache, ("num_blocks", "block_size", columns),
                 storage_dtypes() if dtype is None else (dtype,), device)  # fmt: skip
    check(kv_cache.shape[1] >= 1, "kv_cache", "a block size of at least 1", kv_cache.shape[1])


def check_formatted_cache(
    kv_cache: Tensor,
    cache_format: CacheFormat,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    query_dtype: torch.dtype,
    device: torch.device,
    kv_scale: Tensor | None = None,
) -> None:
    """Check that a paged latent cache has the columns and the storage dtype of its format; read no values.

    Args:
        kv_cache: the cache.
        cache_format: format of the cache.
        kv_lora_rank: Lkv.
        qk_rope_head_dim: R.
        query_dtype: dtype of the queries that attend over the cache, or of the latents that are written to it.
        device: device of these queries or latents.
        kv_scale: scale of the layer's cache, or None.
    """
    check_format(cache_format)
    columns = cache_format.columns(kv_lora_rank, qk_rope_head_dim)
    check_cache(kv_cache, columns, cache_format.dtype_for(query_dtype), device)
    check_alignment(kv_cache, cache_format)
    check_kv_scale(cache_format, kv_scale, device)


def check_alignment(kv_cache: Tensor, cache_format: CacheFormat) -> None:
    """Check that address and strides of a cache are multiples of `CacheFormat.alignment`; its columns have no gaps."""
    bytes_ = cache_format.alignment
    if bytes_ == 1:
        return
    *strides, column = kv_cache.stride()
    size = kv_cache.element_size()
    aligned = column == 1 and all(stride * size % bytes_ == 0 for stride in strides)
    if not torch.compiler.is_compiling() and not kv_cache.is_meta:
        aligned = aligned and kv_cache.data_ptr() % bytes_ == 0
    check(aligned, "kv_cache", f"address and strides that are multiples of {bytes_} bytes, and columns without gaps, "
          f"for format {cache_format.name}", f"strides {list(kv_cache.stride())}")  # fmt: skip


def check_stored_cache(
    kv_cache: Tensor, cache_format: CacheFormat, out_dtype: torch.dtype | None, kv_scale: Tensor | None = None
) -> tuple[int, torch.dtype]:
    """Check a cache from which entries are gathered, and the dtype of the result; read no values.

    Args:
        kv_cache: the cache. Its number of columns is checked if the format allows exactly one pair (Lkv, R).
            Otherwise every number of columns is valid, because the caller of a gather gives neither Lkv nor R.
        cache_format: format of the cache.
        out_dtype: dtype of the result. None means the dtype of the cache. If the format has a `storage_dtype`, the
            caller must give a dtype.
        kv_scale: scale of the layer's cache, or None.

    Returns:
        The number of elements of a gathered entry, and its dtype.
    """
    check_format(cache_format)
    check_cache(kv_cache)
    check_tensor("kv_cache", kv_cache, ("num_blocks", "block_size", "columns"), _dtypes_of(cache_format))
    dtype = cache_format.gathered_dtype(kv_cache.dtype, out_dtype)
    check_alignment(kv_cache, cache_format)
    if cache_format.returns_stored(dtype):
        check_type("kv_scale", kv_scale, (Tensor, type(None)), "a tensor or None")
    else:
        check_kv_scale(cache_format, kv_scale, kv_cache.device)
    return cache_format.gathered_width(kv_cache.shape[2], dtype), dtype


def _dtypes_of(cache_format: CacheFormat) -> tuple[torch.dtype, ...]:
    """Return every dtype that a cache of a format may have."""
    return cache_format.query_dtypes if cache_format.storage_dtype is None else (cache_format.storage_dtype,)


def check_entries(kv_c_normed: Tensor, k_pe: Tensor, cache_format: CacheFormat, kv_scale: Tensor | None = None) -> None:
    """Check shapes, dtypes and devices of the arguments of `quantize_entries`; read no values."""
    check_tensor("kv_c_normed", kv_c_normed, ("T", "Lkv"))
    tokens, latent = kv_c_normed.shape
    check_tensor("k_pe", k_pe, (tokens, "R"), (kv_c_normed.dtype,), kv_c_normed.device)
    check_format(cache_format)
    cache_format.columns(latent, k_pe.shape[1])
    cache_format.dtype_for(kv_c_normed.dtype)
    check_kv_scale(cache_format, kv_scale, kv_c_normed.device)


def check_stored_entries(
    entries: Tensor, cache_format: CacheFormat, out_dtype: torch.dtype | None, kv_scale: Tensor | None = None
) -> torch.dtype:
    """Check shape, dtype and device of stored cache entries [S, columns]; read no values.

    Returns:
        Dtype of the entries after `dequantize_entries`.
    """
    check_format(cache_format)
    check_tensor("entries", entries, ("S", "columns"), _dtypes_of(cache_format))
    dtype = cache_format.gathered_dtype(entries.dtype, out_dtype)
    cache_format.gathered_width(entries.shape[1], dtype)
    check_kv_scale(cache_format, kv_scale, entries.device)
    return dtype


def check_cache_write(
    kv_c_normed: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    cache_format: CacheFormat,
    kv_scale: Tensor | None = None,
) -> None:
    """Check shapes, dtypes and devices of the arguments of `concat_and_cache_mla`; read no values."""
    check_tensor("kv_c_normed", kv_c_normed, ("T", "Lkv"))
    device = kv_c_normed.device
    tokens, latent = kv_c_normed.shape
    check_tensor("k_pe", k_pe, (tokens, "R"), (kv_c_normed.dtype,), device)
    check_formatted_cache(kv_cache, cache_format, latent, k_pe.shape[1], kv_c_normed.dtype, device, kv_scale)
    check_tensor("slot_mapping", slot_mapping, ("slots",), (torch.int64,), device)
    check(slot_mapping.shape[0] >= tokens, "slot_mapping", f"at least {tokens} slots", slot_mapping.shape[0])


def check_gather(
    kv_cache: Tensor,
    block_table: Tensor,
    cu_seq_lens: Tensor,
    starts: Tensor,
    num_tokens: int,
    cache_format: CacheFormat,
    out_dtype: torch.dtype | None,
    kv_scale: Tensor | None = None,
) -> tuple[int, torch.dtype]:
    """Check shapes, dtypes and devices of the arguments of `gather_and_maybe_dequant_cache`; read no values.

    Returns:
        The number of elements of a gathered entry, and its dtype.
    """
    gathered = check_stored_cache(kv_cache, cache_format, out_dtype, kv_scale)
    device = kv_cache.device
    check_tensor("block_table", block_table, ("B", "W"), (torch.int32,), device)
    requests = block_table.shape[0]
    check_tensor("cu_seq_lens", cu_seq_lens, (requests + 1,), (torch.int32,), device)
    check_tensor("starts", starts, (requests,), (torch.int32,), device)
    check_int("num_tokens", num_tokens, 0)
    return gathered


def check_block_cache(kv_cache: Tensor, argument: str = "kv_caches") -> None:
    """Check a cache whose blocks are copied: a latent cache or a key/value cache; read no values.

    Args:
        kv_cache: [num_blocks, block_size, columns], or [2, num_blocks, block_size, Nkv, Dh].
        argument: name of the cache in messages.
    """
    shape: tuple[int | str, ...] = ("num_blocks", "block_size", "columns")
    if isinstance(kv_cache, Tensor) and kv_cache.dim() == 5:
        shape = (2, "num_blocks", "block_size", "Nkv", "Dh")
    check_tensor(argument, kv_cache, shape, storage_dtypes())
    block_size = kv_cache.shape[shape.index("block_size")]
    check(block_size >= 1, argument, "a block size of at least 1", block_size)
    check_readable(argument, kv_cache)


def cache_halves(kv_cache: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors [num_blocks, ...] of a cache: the keys and the values, or the latent cache itself."""
    return kv_cache.unbind(0) if kv_cache.dim() == 5 else (kv_cache,)


def check_swap(source: Tensor, target: Tensor, block_mapping: Tensor) -> None:
    """Check two caches between which blocks are copied: shapes, dtypes and memory; read no values.

    Both are latent caches, or both are key/value caches. `source` and `target` may be the same cache. Two different
    caches must not share storage.
    """
    check_block_cache(source, "source")
    halves = source.shape[:1] if source.dim() == 5 else ()  # (2,) for a key/value cache
    check_tensor("target", target, (*halves, "target_blocks", *source.shape[len(halves) + 1 :]), (source.dtype,))
    check_tensor("block_mapping", block_mapping, ("pairs", 2), (torch.int64,))
    for name, tensor in (("target", target), ("block_mapping", block_mapping)):
        check_readable(name, tensor)
    shared = source.numel() and source.untyped_storage().data_ptr() == target.untyped_storage().data_ptr()
    alike = (source.data_ptr(), source.shape, source.stride()) == (target.data_ptr(), target.shape, target.stride())
    check(alike or not shared, "target", "source itself, or a cache with its own storage", "an overlapping view")


def check_block_mapping(block_mapping: Tensor, source_blocks: int, target_blocks: int, same_cache: bool) -> None:
    """Check the values of the (source, target) pairs in `block_mapping`.

    Raises:
        ValueError: a block is out of range; a target occurs twice; `same_cache` is True and a block is both a source
            and a target.
    """
    pairs = block_mapping.tolist()
    for source, target in pairs:
        check(0 <= source < source_blocks, "block_mapping", f"source blocks in [0, {source_blocks})", source)
        check(0 <= target < target_blocks, "block_mapping", f"target blocks in [0, {target_blocks})", target)
    targets = [target for _, target in pairs]
    check(len(set(targets)) == len(targets), "block_mapping", "distinct target blocks", targets)
    overlap = set(targets) & {source for source, _ in pairs}
    check(not (same_cache and overlap), "block_mapping", "no block that is both source and target", sorted(overlap))


def check_block_size(argument: str, block_size: int, kv_cache: Tensor) -> None:
    """Check that the block size for which a plan was made is the block size of the cache."""
    check_int(argument, block_size)
    check(block_size == kv_cache.shape[1], argument, f"{kv_cache.shape[1]}, the block size of kv_cache", block_size)


def check_chunk(chunk: ContextChunk, requests: int, device: torch.device, name: str = "chunk") -> None:
    """Check the fields of a chunk: shapes, dtypes and devices; read no values."""
    int32 = (torch.int32,)
    check_type(name, chunk, ContextChunk)
    check_int(f"{name}.num_tokens", chunk.num_tokens, 0)
    check_int(f"{name}.max_seq_len", chunk.max_seq_len, 0)
    check_flag(f"{name}.bounded", chunk.bounded)
    check_tensor(f"{name}.starts", chunk.starts, (requests,), int32, device)
    check_tensor(f"{name}.cu_seq_lens", chunk.cu_seq_lens, (requests + 1,), int32, device)
    _check_run(chunk, requests, device, name)
    if isinstance(chunk, ContextParallelChunk):
        check_type(f"{name}.ownership", chunk.ownership, TokenOwnership)
        check_int(f"{name}.padded_tokens", chunk.padded_tokens, 0)
        check_int(f"{name}.local_tokens", chunk.local_tokens, 0)
        check_tensor(f"{name}.local_starts", chunk.local_starts, (requests,), int32, device)
        shape = (chunk.ownership.size, requests + 1)
        check_tensor(f"{name}.local_cu_seq_lens", chunk.local_cu_seq_lens, shape, int32, device)


def _check_run(chunk: ContextChunk, requests: int, device: torch.device, name: str) -> None:
    """Check the run of a chunk (`ChunkRun`); read no values of tensors."""
    run, offsets, count = chunk.run, chunk.run_query_start_loc, requests
    check_type(f"{name}.run", run, (ChunkRun, type(None)), "a ChunkRun or None")
    if run is not None:
        for value in run:
            check_int(f"{name}.run", value, 0)
        count = run.end_request - run.first_request
        check(0 <= count <= requests >= run.end_request, f"{name}.run", f"requests within {requests}",
              f"[{run.first_request}, {run.end_request})")  # fmt: skip
        check(run.first_token <= run.finished_token <= run.end_token, f"{name}.run",
              "first_token <= finished_token <= end_token",
              f"{run.first_token}, {run.finished_token} and {run.end_token}")  # fmt: skip
    if count < requests:
        check_tensor(f"{name}.run_query_start_loc", offsets, (count + 1,), (torch.int32,), device)
    else:
        check(offsets is None, f"{name}.run_query_start_loc", "None without a run, and for a run with all requests",
              type(offsets).__name__)  # fmt: skip


def check_reorg(gathered: Tensor, chunk: ContextParallelChunk) -> None:
    """Check a chunk and its cache entries from all ranks: shapes, dtypes and devices; read no values."""
    check_type("chunk", chunk, ContextChunk, "a ContextParallelChunk")
    check(isinstance(chunk, ContextParallelChunk), "chunk", "a ContextParallelChunk", type(chunk).__name__)
    check_tensor("gathered", gathered, ("ranks", "padded_tokens", "head_size"), storage_dtypes())
    check_tensor("chunk.starts", chunk.starts, ("B",), (torch.int32,), gathered.device)
    check_chunk(chunk, chunk.starts.shape[0], gathered.device)
    check_tensor("gathered", gathered, (chunk.ownership.size, chunk.padded_tokens, "head_size"),
                 storage_dtypes())  # fmt: skip


def check_rank_offsets(
    cu_seq_lens: Tensor, local_cu_seq_lens: Tensor, interleave: int, num_tokens: int, padded_tokens: int
) -> None:
    """Check that row r of `local_cu_seq_lens` is the prefix sum of the numbers of tokens of rank r in each request.

    Args:
        cu_seq_lens: [B + 1], prefix sum of the number of tokens of each request in the chunk.
        local_cu_seq_lens: [D, B + 1], one row for each of D ranks.
        interleave: I. Each rank in turn owns I consecutive tokens of a sequence.
        num_tokens: upper bound of the tokens of the chunk.
        padded_tokens: upper bound of the number of tokens that one rank owns in the chunk.

    Raises:
        ValueError: the prefix sums differ, or `num_tokens` or `padded_tokens` is too small.
    """
    check_offsets("chunk.cu_seq_lens", cu_seq_lens, most=num_tokens)
    rank_local_lens = get_dcp_local_seq_lens(cu_seq_lens.diff(), local_cu_seq_lens.shape[0], None, interleave).T
    fits = bool((local_cu_seq_lens[:, 0] == 0).all()) and torch.equal(local_cu_seq_lens.diff(dim=1), rank_local_lens)
    check(fits, "chunk.local_cu_seq_lens", "the prefix sums of each rank's tokens in the chunk",
          local_cu_seq_lens.tolist())  # fmt: skip
    most = int(local_cu_seq_lens[:, -1].max())
    check(most <= padded_tokens, "chunk.padded_tokens", f"at least {most}", padded_tokens)


def check_ownership(ownership: TokenOwnership | None) -> None:
    """Check that an argument is a `TokenOwnership`, or None, which means that one rank owns all tokens."""
    if ownership is not None:
        check_type("ownership", ownership, TokenOwnership, "a TokenOwnership or None")


def check_rank_local_slots(common: CommonAttentionMetadata, ownership: TokenOwnership) -> None:
    """Check that a batch has no more slots (other than -1) than new tokens that the rank owns.

    Each rank caches only its own tokens. The check finds slots that were computed for one rank that owns all tokens:
    in such a batch, every token has a slot.
    """
    starts, tokens = common.num_computed_tokens_cpu, common.num_actual_tokens
    own = (get_dcp_local_seq_lens(lens, ownership.size, ownership.rank, ownership.interleave).sum() for lens in
           (common.seq_lens_cpu, starts))  # fmt: skip
    most = int(next(own)) - int(next(own))
    got = int((common.slot_mapping[:tokens] >= 0).sum())
    wanted = f"slots for at most the {most} new tokens of this rank (`dcp_slot_mapping`)"
    check(got <= most, "common.slot_mapping", wanted, got)
