"""Decide whether decodes that share a prefix are faster with a cascade, from counted bytes and FLOPs."""

from __future__ import annotations

from fractions import Fraction

import torch
from jaxtyping import Int32
from torch import Tensor

from ..interfaces import (
    COMPUTE_FORMAT,
    DECODE_TILE,
    CacheFormat,
    CascadeCosts,
    check_cascade_costs,
    element_bytes,
    wide_dtype,
)
from ..interfaces.gqa import ROW_BLOCK, GQAConfig, check_cascade_choice, supports_cascade


def use_gqa_cascade_attention(
    common_prefix_len: int,
    query_lens: Int32[Tensor, " B"],
    seq_lens: Int32[Tensor, " B"],
    config: GQAConfig,
    cache_format: CacheFormat = COMPUTE_FORMAT,
    dtype: torch.dtype = torch.bfloat16,
    num_processors: int = 1,
    costs: CascadeCosts | None = None,
) -> bool:
    """Return whether a decode is estimated to be faster with a cascade, from counted FLOPs and bytes.

    The result is False for layers whose scores or masks depend on the position of a key: ALiBi, a window, attention
    chunks. It is also False for layers that are no decoders.

    A call of attention over some requests has these numbers:

    - FLOPs: 4 Dh for each (query token, head, key), two products with a multiply and an add each.
    - Bytes: the keys and values of all Nkv heads, which are read once for each request.
    - Tiles: `DECODE_TILE` keys of one request and KV head, once for each row block of up to `ROW_BLOCK` rows. A row is
      a (query token, query head) pair, so a request has query tokens x (N / Nkv) rows for each KV head.
    - Kernels: A call has one kernel, or two kernels if each request is split, because the second one combines the
      splits. Requests are split if one of them has several tiles for a row block, and P is at least twice the number of
      row blocks of all requests and KV heads.

    The time of a call is the larger one of FLOPs and `flops_per_byte` x bytes. P processors compute P tiles at the same
    time. If the last tiles are fewer than P, some processors wait, so the time is multiplied by (tiles, rounded up to a
    multiple of P) / tiles. For each kernel a fixed time is added, for example the time of its launch: the time in which
    the device reads `kernel_bytes` bytes.

    A decode without a cascade is one call. A cascade is two calls and a merge:

    1. The call over the prefix has one request, with the query tokens of all requests.
    2. The call over the suffixes has all requests, without the prefix. It also counts the attention sinks, which are no
       bytes or FLOPs worth counting.
    3. Each call writes an attention state (output and log-sum-exp of each row), and the merge reads both. The merge is
       one more kernel.

    Args:
        common_prefix_len: number of context tokens that all requests share, as the function `common_prefix_len`
            returns it.
        query_lens: [B], new tokens of each request, on the CPU.
        seq_lens: [B], tokens of each request after this step, on the CPU; 0 for padding rows.
        config: config of the layers.
        cache_format: format of the cache.
        dtype: dtype of the queries.
        num_processors: P, processors of the device that work at the same time, such as the multiprocessors of a GPU.
        costs: `flops_per_byte` and `kernel_bytes` of the estimate above; None means the defaults of `CascadeCosts`,
            which were not measured.

    Raises:
        TypeError: `config` or `costs` has another type.
        ValueError: a tensor has a wrong shape, dtype or device; `common_prefix_len` is negative, or longer than a
            request; `num_processors` is below 1; the format does not support the dtype.
        UnsupportedConfiguration: the cache format is for the latent cache alone.
    """
    check_cascade_choice(common_prefix_len, query_lens, seq_lens, config, cache_format, dtype, num_processors)
    costs = check_cascade_costs(costs)
    flops_per_byte, kernel_bytes = costs.flops_per_byte, costs.kernel_bytes
    stored_bytes = element_bytes(cache_format.dtype_for(dtype))
    pairs = zip(query_lens.tolist(), seq_lens.tolist(), strict=True)
    requests = [(query_len, length) for query_len, length in pairs if query_len > 0 and length > 0]
    if not supports_cascade(config) or not requests or common_prefix_len == 0:
        return False

    def time_of(calls: list[tuple[int, int]]) -> Fraction:
        """Return the time of a call over requests of (query tokens, keys)."""
        flops = sum(4 * config.head_dim * config.num_heads * query_len * keys for query_len, keys in calls)
        elements = sum(2 * config.head_dim * config.num_kv_heads * keys for _, keys in calls)  # 2: keys and values
        read = elements * stored_bytes
        row_blocks = [-(-query_len * config.group_size // ROW_BLOCK) for query_len, _ in calls]
        key_tiles = [-(-keys // DECODE_TILE) for _, keys in calls]
        tiles = config.num_kv_heads * sum(rows * keys for rows, keys in zip(row_blocks, key_tiles, strict=True))
        rounds = -(-tiles // num_processors)
        work = Fraction(max(flops, flops_per_byte * read) * rounds * num_processors, max(1, tiles))
        is_split = max(key_tiles) > 1 and 2 * config.num_kv_heads * sum(row_blocks) <= num_processors
        return work + flops_per_byte * kernel_bytes * (2 if is_split else 1)

    tokens = sum(query_len for query_len, _ in requests)
    state_elements = 4 * tokens * config.num_heads * (config.head_dim + 1)  # two states, each written and read
    merge = flops_per_byte * (state_elements * element_bytes(wide_dtype(dtype)) + kernel_bytes)
    suffixes = [(query_len, length - common_prefix_len) for query_len, length in requests]
    return time_of([(tokens, common_prefix_len)]) + time_of(suffixes) + merge < time_of(requests)
