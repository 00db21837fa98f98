"""Decide whether decodes that share a prefix are faster with a cascade, from counted bytes and FLOPs.

docs/glossary.md explains the terms and the letters of shapes.
"""

from __future__ import annotations

import torch
from jaxtyping import Int32
from torch import Tensor

from reference.interfaces import (
    COMPUTE_FORMAT,
    DECODE_TILE,
    CacheFormat,
    CascadeCosts,
    check_cascade_costs,
    element_bytes,
    wide_dtype,
)
from reference.interfaces.gqa import ROW_BLOCK, GQAConfig, check_cascade_choice, supports_cascade


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
    """Return whether a cascade is faster than an ordinary decode, estimated from FLOPs and bytes.

    `reference.gqa.choose_cascade.use_gqa_cascade_attention` explains the estimate. The result is False for layers with
    ALiBi, a window or attention chunks, and for layers that are no decoders.

    Args:
        common_prefix_len: number of context tokens that all requests share (`fast.common_prefix_len`).
        query_lens: [B], new tokens of each request, on the CPU.
        seq_lens: [B], tokens of each request after this step, on the CPU; 0 for padding rows.
        config: config of the layers.
        cache_format: format of the cache.
        dtype: dtype of the queries.
        num_processors: number of processors of the device that work at the same time, such as the multiprocessors of a
            GPU.
        costs: costs of FLOPs, bytes and kernels; None means the defaults of `CascadeCosts`, which were not measured.

    Raises:
        TypeError: `config` or `costs` has another type.
        ValueError: shapes, dtypes or devices do not match; `common_prefix_len` is negative, or longer than a request;
            `num_processors` is below 1; the format does not support the dtype.
        UnsupportedConfiguration: the cache format is for the latent cache alone.
    """
    check_cascade_choice(common_prefix_len, query_lens, seq_lens, config, cache_format, dtype, num_processors)
    costs = check_cascade_costs(costs)
    flops_per_byte, kernel_bytes = costs.flops_per_byte, costs.kernel_bytes
    stored_bytes = element_bytes(cache_format.dtype_for(dtype))
    if common_prefix_len == 0 or not supports_cascade(config):
        return False
    real = (query_lens > 0) & (seq_lens > 0)
    queries, keys = query_lens[real].long(), seq_lens[real].long()
    tokens = int(queries.sum())
    if tokens == 0:
        return False
    c, row_blocks = config, (queries * config.group_size + ROW_BLOCK - 1) // ROW_BLOCK

    def time_of(pairs: int, keys: int, tiles: int, longest: int, blocks: int) -> tuple[int, int]:
        """Return the time of a call as a fraction.

        Args:
            pairs: number of (query token, key) pairs.
            keys: number of keys.
            tiles: tiles of one KV head.
            longest: most tiles that a row block has.
            blocks: row blocks of one KV head.
        """
        flops = 4 * c.head_dim * c.num_heads * pairs
        elements = 2 * c.head_dim * c.num_kv_heads * keys  # 2: keys and values
        work = max(flops, flops_per_byte * elements * stored_bytes)
        tiles *= c.num_kv_heads
        least = max(1, tiles)
        kernels = 1 + (longest > 1 and 2 * blocks * c.num_kv_heads <= num_processors)
        fixed = flops_per_byte * kernel_bytes * kernels
        return work * -(-tiles // num_processors) * num_processors + fixed * least, least

    def time_of_requests(keys: Tensor) -> tuple[int, int]:
        tiles = (keys + DECODE_TILE - 1) // DECODE_TILE
        sums = int((queries * keys).sum()), int(keys.sum()), int((row_blocks * tiles).sum())
        return time_of(*sums, int(tiles.max()), int(row_blocks.sum()))

    prefix_blocks, prefix_tiles = -(-tokens * c.group_size // ROW_BLOCK), -(-common_prefix_len // DECODE_TILE)
    whole, suffix = time_of_requests(keys), time_of_requests(keys - common_prefix_len)
    prefix = time_of(
        tokens * common_prefix_len, common_prefix_len, prefix_blocks * prefix_tiles, prefix_tiles, prefix_blocks
    )
    state_elements = 4 * tokens * c.num_heads * (c.head_dim + 1)  # 4: two states, each written and read once
    merge = flops_per_byte * (state_elements * element_bytes(wide_dtype(dtype)) + kernel_bytes)
    # prefix + suffix + merge < whole, with a common denominator
    apart = prefix[0] * suffix[1] + suffix[0] * prefix[1] + merge * prefix[1] * suffix[1]
    return apart * whole[1] < whole[0] * prefix[1] * suffix[1]
