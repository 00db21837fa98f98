"""Argument checks of the functions of grouped-query attention: caches, queries, keys and plans.

"Read no values" means that a check looks at shapes, dtypes and devices alone, so it does not wait for a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..attention_arguments import check_decode_plan, check_schedule
from ..cache_format import COMPUTE_FORMAT, FP8_E4M3, CacheFormat, check_format, check_kv_scale
from ..checks import (
    check,
    check_blocks,
    check_dtype,
    check_int,
    check_offsets,
    check_tensor,
    check_type,
)
from ..decode_schedule import DecodeSchedule
from ..errors import UnsupportedConfiguration
from ..metadata import CascadeMetadata, DecodeMetadata
from ..support import CAUSAL, GraphSupport
from .attention_type import AttentionType
from .config import GQAConfig
from .dims import BLOCK_SIZE_UNIT
from .metadata import PagedAttentionMetadata

KEY_VALUE_FORMATS = (COMPUTE_FORMAT.name, FP8_E4M3.name)  # names of the cache formats of this family


def check_gqa_config(config: GQAConfig, argument: str = "config") -> None:
    """Check that an argument is a `GQAConfig`."""
    check_type(argument, config, GQAConfig)


def check_key_value_format(cache_format: CacheFormat) -> None:
    """Check that a format is one of `KEY_VALUE_FORMATS`.

    Raises:
        TypeError: the argument is not a `CacheFormat`.
        ValueError: the format is not implemented.
        UnsupportedConfiguration: the format is for the latent cache alone, such as `fp8_ds_mla`.
    """
    check_format(cache_format)
    if cache_format.name not in KEY_VALUE_FORMATS:
        wanted = f"cache_format: expected {' or '.join(KEY_VALUE_FORMATS)} for a key/value cache"
        raise UnsupportedConfiguration([f"{wanted}, got {cache_format.name}"])


def check_key_value_block_size(argument: str, block_size: int) -> None:
    """Check that a block size is a positive multiple of `BLOCK_SIZE_UNIT`."""
    wanted = f"a positive multiple of {BLOCK_SIZE_UNIT}"
    check_int(argument, block_size, 1, wanted)
    check(block_size % BLOCK_SIZE_UNIT == 0, argument, wanted, block_size)


def check_plan_block_size(argument: str, block_size: int, kv_cache: Tensor) -> None:
    """Check that the block size for which a plan was made is the block size of the cache."""
    check_int(argument, block_size)
    check(block_size == kv_cache.shape[2], argument, f"{kv_cache.shape[2]}, the block size of kv_cache", block_size)


def check_key_value_cache(
    kv_cache: Tensor,
    num_kv_heads: int | str,
    head_dim: int | str,
    query_dtype: torch.dtype,
    device: torch.device,
    cache_format: CacheFormat,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Check the shape, dtype, device, block size and scales of a key/value cache with any strides; read no values.

    Args:
        kv_cache: [2, num_blocks, block_size, Nkv, Dh].
        num_kv_heads: Nkv, or a name for any number.
        head_dim: Dh, or a name for any number.
        query_dtype: dtype of the queries that attend over the cache, or of the keys that are written to it.
        device: device of these queries or keys.
        cache_format: format of the cache.
        k_scale: float32 scale [] of the keys if the format has `layer_scale`, otherwise None.
        v_scale: float32 scale [] of the values if the format has `layer_scale`, otherwise None.

    Raises:
        TypeError: an argument has another class.
        ValueError: a shape, dtype, device or block size is wrong; a scale is missing, or is given for a format without
            scales.
        UnsupportedConfiguration: the format is for the latent cache alone.
    """
    check_key_value_format(cache_format)
    shape = (2, "num_blocks", "block_size", num_kv_heads, head_dim)
    check_tensor("kv_cache", kv_cache, shape, (cache_format.dtype_for(query_dtype),), device)
    block_size = kv_cache.shape[2]
    check(block_size >= 1 and block_size % BLOCK_SIZE_UNIT == 0, "kv_cache",
          f"a block size that is a positive multiple of {BLOCK_SIZE_UNIT}", block_size)  # fmt: skip
    check_kv_scale(cache_format, k_scale, device, "k_scale")
    check_kv_scale(cache_format, v_scale, device, "v_scale")


def check_key_value_write(
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    cache_format: CacheFormat,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Check shapes, dtypes and devices of the arguments of `reshape_and_cache`; read no values.

    Args:
        key: [T, Nkv, Dh].
        value: [T, Nkv, Dh].
        kv_cache: [2, num_blocks, block_size, Nkv, Dh].
        slot_mapping: at least T slots.
        cache_format: format of the cache.
        k_scale: scale of the keys, or None.
        v_scale: scale of the values, or None.
    """
    check_tensor("key", key, ("T", "Nkv", "Dh"))
    check_tensor("value", value, tuple(key.shape), (key.dtype,), key.device)
    tokens, heads, dim = key.shape
    check_key_value_cache(kv_cache, heads, dim, key.dtype, key.device, cache_format, k_scale, v_scale)
    check_tensor("slot_mapping", slot_mapping, ("slots",), (torch.int64,), key.device)
    check(slot_mapping.shape[0] >= tokens, "slot_mapping", f"at least {tokens} slots", slot_mapping.shape[0])


def check_sinks(sinks: Tensor | None, config: GQAConfig, device: torch.device) -> None:
    """Check that the attention sinks are a float tensor [N] if the config has sinks, otherwise None; read no values."""
    check_type("sinks", sinks, (Tensor, type(None)), "a tensor or None")
    if not config.attention_sinks:
        check(sinks is None, "sinks", "None for a config without attention_sinks", "a tensor")
        return
    check(sinks is not None, "sinks", f"a tensor [{config.num_heads}] for a config with attention_sinks", None)
    check_tensor("sinks", sinks, (config.num_heads,), device=device)


def check_gqa_inputs(q: Tensor, config: GQAConfig, sinks: Tensor | None = None) -> None:
    """Check queries [T, N, Dh] and attention sinks [N] against a config; read no values."""
    check_gqa_config(config)
    check_tensor("q", q, ("T", config.num_heads, config.head_dim))
    check_sinks(sinks, config, q.device)


def check_query_scale(cache_format: CacheFormat, q_scale: Tensor | None, device: torch.device) -> None:
    """Check the scale of queries in e4m3: a float32 tensor [] or None, and None for a cache that is not in e4m3."""
    check_type("q_scale", q_scale, (Tensor, type(None)), "a tensor or None")
    if q_scale is not None:
        check(cache_format.layer_scale, "q_scale", f"None for format {cache_format.name}", "a tensor")
        check_tensor("q_scale", q_scale, (), (torch.float32,), device)


def check_paged_plan(
    metadata: DecodeMetadata,
    num_tokens: int,
    config: GQAConfig,
    device: torch.device,
    argument: str = "metadata",
) -> None:
    """Check shapes, dtypes and devices of a plan over the key/value cache; read no values.

    Args:
        metadata: the plan.
        num_tokens: T, number of query tokens.
        config: config of the layer. A config with a window needs a plan with `first_visible`.
        device: device of the queries.
        argument: name of the plan in messages.
    """
    check_type(argument, metadata, PagedAttentionMetadata)
    check_decode_plan(metadata, num_tokens, device, argument)
    first = metadata.first_visible
    check_type(f"{argument}.first_visible", first, (Tensor, type(None)), "a tensor or None")
    if config.sliding_window is not None:
        check(first is not None, f"{argument}.first_visible",
              f"a tensor for a config with sliding_window {config.sliding_window}", None)  # fmt: skip
    if first is not None:
        check_tensor(f"{argument}.first_visible", first, (num_tokens,), (torch.int32,), device)
    if config.attention_type is AttentionType.CROSS:
        check(metadata.mask != CAUSAL or metadata.max_query_len <= 1, f"{argument}.mask",
              "a mask that is not causal for attention type cross", metadata.mask)  # fmt: skip


def check_cached_type(config: GQAConfig) -> None:
    """Check that layers of the config have a key/value cache: the attention type is DECODER or CROSS."""
    check(config.attention_type.cached, "config.attention_type", "decoder or cross, which have a key/value cache",
          config.attention_type.value)  # fmt: skip


def check_paged_attention(
    q: Tensor,
    kv_cache: Tensor,
    metadata: PagedAttentionMetadata,
    config: GQAConfig,
    sinks: Tensor | None = None,
    schedule: DecodeSchedule | None = None,
    out_dtype: torch.dtype | None = None,
    cache_format: CacheFormat = COMPUTE_FORMAT,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    q_scale: Tensor | None = None,
) -> None:
    """Check shapes, dtypes and devices of the arguments of `gqa_paged_attention`; read no values.

    The arguments have the order of `gqa_paged_attention`. The values of the plan are checked by `check_paged_values`,
    the values of the scales by `check_scale_values`.
    """
    _check_cached_inputs(q, kv_cache, config, sinks, out_dtype, cache_format, k_scale, v_scale, q_scale)
    check_paged_plan(metadata, q.shape[0], config, q.device)
    check_plan_block_size("metadata.block_size", metadata.block_size, kv_cache)
    if schedule is not None:
        check_schedule(schedule, metadata.seq_lens.shape[0], q.device)


def check_gqa_cascade(
    q: Tensor,
    kv_cache: Tensor,
    cascade: CascadeMetadata,
    config: GQAConfig,
    sinks: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    cache_format: CacheFormat = COMPUTE_FORMAT,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    q_scale: Tensor | None = None,
) -> None:
    """Check shapes, dtypes and devices of the arguments of `gqa_cascade_attention`; read no values.

    The parts of a cascade count keys from different starts. A score or a mask that depends on the position of a key
    would therefore be wrong, so the config must be a decoder without ALiBi, window and attention chunks.
    """
    _check_cached_inputs(q, kv_cache, config, sinks, out_dtype, cache_format, k_scale, v_scale, q_scale)
    check(config.attention_type is AttentionType.DECODER, "config.attention_type", "decoder for a cascade",
          config.attention_type.value)  # fmt: skip
    for name in ("alibi_slopes", "sliding_window", "attention_chunk_size"):
        check(getattr(config, name) is None, f"config.{name}", "None for a cascade", getattr(config, name))
    check_type("cascade", cascade, CascadeMetadata)
    for name, part in (("prefix", cascade.prefix), ("suffix", cascade.suffix)):
        check_type(f"cascade.{name}", part, DecodeMetadata)
        check_decode_plan(part, q.shape[0], q.device, f"cascade.{name}")
        check(getattr(part, "first_visible", None) is None, f"cascade.{name}.first_visible", "None", "a tensor")
        check_plan_block_size(f"cascade.{name}.block_size", part.block_size, kv_cache)
    check(cascade.prefix.seq_lens.shape[0] == 1, "cascade.prefix", "a plan with one request",
          cascade.prefix.seq_lens.shape[0])  # fmt: skip


def _check_cached_inputs(
    q: Tensor,
    kv_cache: Tensor,
    config: GQAConfig,
    sinks: Tensor | None,
    out_dtype: torch.dtype | None,
    cache_format: CacheFormat,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    q_scale: Tensor | None,
) -> None:
    """Check all arguments of attention over a cache except the plan; read no values."""
    check_gqa_inputs(q, config, sinks)
    check_cached_type(config)
    check_key_value_cache(
        kv_cache, config.num_kv_heads, config.head_dim, q.dtype, q.device, cache_format, k_scale, v_scale
    )
    check_query_scale(cache_format, q_scale, q.device)
    check_dtype("out_dtype", q.dtype if out_dtype is None else out_dtype)


def check_paged_values(metadata: DecodeMetadata, num_blocks: int, block_size: int, argument: str = "metadata") -> None:
    """Check the values of a plan over the key/value cache: offsets, lengths, visible keys and blocks.

    A block that lies before the first visible key of every query token of its request may have been freed. Its entry in
    the block table may have any value and is not checked. The blocks of a request without query tokens are not checked
    either. A request may have fewer keys than query tokens, because `seq_lens` may count the keys of one rank alone.

    Args:
        metadata: plan of any query tokens. A `DecodeMetadata` without `first_visible` is legal: each query token then
            attends the keys from 0 on.
        num_blocks: blocks of the cache.
        block_size: tokens per block.
        argument: name of the plan in messages.

    Raises:
        ValueError: offsets decrease or end at a wrong number of tokens; a length is negative or above `max_seq_len`;
            a visible range is not in [0, length]; the block table has too few columns, or a block is out of range.
    """
    num_tokens, starts = metadata.visible_lens.shape[0], metadata.query_start_loc
    mixed = metadata.graph is GraphSupport.ANY  # if True, tokens behind the last request are padding
    check_offsets(f"{argument}.query_start_loc", starts, None if mixed else num_tokens, num_tokens)
    lengths = metadata.seq_lens.tolist()
    low, high = min(lengths, default=0), max(lengths, default=0)
    check(low >= 0, f"{argument}.seq_lens", "lengths >= 0", low)
    check(high <= metadata.max_seq_len, f"{argument}.seq_lens", f"lengths up to max_seq_len {metadata.max_seq_len}",
          high)  # fmt: skip
    query_lens = starts.diff()
    longest = int(query_lens.max()) if lengths else 0
    check(longest <= metadata.max_query_len, f"{argument}.query_start_loc",
          f"query lengths up to max_query_len {metadata.max_query_len}", longest)  # fmt: skip
    used = int(starts[-1])
    request = torch.repeat_interleave(torch.arange(len(lengths), device="cpu"), query_lens.cpu())
    ends = torch.nn.functional.pad(metadata.seq_lens.cpu()[request], (0, num_tokens - used))
    visible, first = metadata.visible_lens.cpu(), getattr(metadata, "first_visible", None)
    _check_rows(f"{argument}.visible_lens", visible, ends)
    first = torch.zeros_like(visible) if first is None else first.cpu()
    _check_rows(f"{argument}.first_visible", first, visible)
    seen = (first < visible)[:used]
    earliest = torch.full((len(lengths),), 2**31 - 1, dtype=torch.int32, device="cpu")
    earliest.scatter_reduce_(0, request[seen], first[:used][seen], "amin")
    held = [length if start < length else 0 for start, length in zip(earliest.tolist(), lengths, strict=True)]
    check_blocks(metadata.block_table, held, block_size, num_blocks, f"{argument}.block_table", earliest)


def _check_rows(argument: str, values: Tensor, most: Tensor) -> None:
    """Check that element t of `values` is in [0, most[t]]; the message names the first wrong row."""
    wrong = ((values < 0) | (values > most)).nonzero()
    if wrong.numel():
        row = int(wrong[0])
        check(False, argument, f"a value in [0, {int(most[row])}] at row {row}", int(values[row]))


def check_gqa_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    config: GQAConfig,
    sinks: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> None:
    """Check shapes, dtypes and devices of the arguments of `gqa_varlen_attention`; read no values.

    In an encoder, queries and keys are the same tokens, so there must be as many keys as queries.
    """
    check_gqa_inputs(q, config, sinks)
    encoder = config.attention_type in (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)
    keys = (q.shape[0] if encoder else "S", config.num_kv_heads, config.head_dim)
    check_tensor("k", k, keys, (q.dtype,), q.device)
    check_tensor("v", v, tuple(k.shape), (q.dtype,), q.device)
    check_tensor("cu_seqlens_q", cu_seqlens_q, ("B + 1",), (torch.int32,), q.device)
    check_tensor("cu_seqlens_k", cu_seqlens_k, (cu_seqlens_q.shape[0],), (torch.int32,), q.device)
    check_int("max_seqlen_q", max_seqlen_q, 0)
    check_int("max_seqlen_k", max_seqlen_k, 0)
    check_dtype("out_dtype", q.dtype if out_dtype is None else out_dtype)


def check_gqa_varlen_values(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, num_queries: int, num_keys: int, config: GQAConfig
) -> None:
    """Check the values of the offsets of `gqa_varlen_attention`.

    Raises:
        ValueError: offsets decrease, or do not end at the number of tokens; in an encoder, the offsets of queries and
            keys differ.
    """
    check_offsets("cu_seqlens_q", cu_seqlens_q, num_queries)
    check_offsets("cu_seqlens_k", cu_seqlens_k, num_keys)
    if config.attention_type in (AttentionType.ENCODER, AttentionType.ENCODER_ONLY):
        check(torch.equal(cu_seqlens_q, cu_seqlens_k), "cu_seqlens_k",
              f"cu_seqlens_q itself for attention type {config.attention_type.value}", "other offsets")  # fmt: skip
