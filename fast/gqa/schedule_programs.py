"""Number of programs of a schedule, which depends on the device and on the backend that attends the cache."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from reference.interfaces import (
    VISIBLE_LENS,
    CacheFormat,
    QueryLenSupport,
    TokenOwnership,
    UnsupportedConfiguration,
    check_int,
    decode_mask,
)
from reference.interfaces.gqa import AttentionType, GQAConfig

from ..backends import imported, on_change, paged_attention_request, select, support_of

OP = "gqa_paged_attention"


class ScheduledLayer(NamedTuple):
    """Properties of the layers of a builder from which the number of programs follows.

    Attributes:
        config: config of the layers; the config of a rank under context parallelism.
        device: device of the batches.
        dtype: dtype of the queries.
        block_size: tokens per block.
        cache_format: format of the cache.
        ownership: the tokens that this rank owns, or None; it determines the mask of the plans.
    """

    config: GQAConfig
    device: torch.device
    dtype: torch.dtype
    block_size: int
    cache_format: CacheFormat
    ownership: TokenOwnership | None = None


@functools.lru_cache(maxsize=1024)
def schedule_programs(layer: ScheduledLayer, query_len: int, named: str | None) -> int:
    """Return how many programs a schedule should have; 1 for a backend that ignores schedules.

    Args:
        layer: properties of the layers.
        query_len: length of the longest query in the decode.
        named: name of the backend that attends the cache; None for an automatic choice.

    Raises:
        UnsupportedConfiguration: the named backend cannot attend such a cache.
        ValueError: the backend declares a function whose result is no number of programs; the error names the backend.
    """
    config = layer.config
    is_cross = config.attention_type is AttentionType.CROSS
    request = paged_attention_request(
        config, layer.device, layer.dtype, layer.block_size, QueryLenSupport.VARLEN, layer.cache_format,
        mask=VISIBLE_LENS if is_cross else decode_mask(query_len, layer.ownership, config.sliding_window is not None),
    )  # fmt: skip
    try:
        chosen = select(request, named).name
    except UnsupportedConfiguration:
        if named is not None:
            raise
        return 1
    function = support_of(chosen, OP).schedule_programs
    if function is None:
        return 1
    function = imported(function) if isinstance(function, str) else function
    programs = function(
        layer.device, layer.dtype, config.num_heads, config.num_kv_heads, config.head_dim, layer.block_size, query_len,
        layer.cache_format,
    )  # fmt: skip
    check_int(f"the result of the backend {chosen} for schedule_programs", programs, 0)
    return programs


on_change(schedule_programs.cache_clear)
