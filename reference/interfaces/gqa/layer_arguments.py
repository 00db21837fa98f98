"""Argument checks of the constructor of a layer of grouped-query attention."""

from __future__ import annotations

from torch import Tensor

from ..cache_format import COMPUTE_FORMAT, CacheFormat
from ..checks import check, check_type
from .arguments import check_gqa_config, check_key_value_format, check_sinks
from .config import GQAConfig


def check_gqa_layer(config: GQAConfig, cache_format: CacheFormat, sinks: Tensor | None, num_ranks: int = 1) -> None:
    """Check the arguments of a `GQAAttention` against each other; read no values.

    Args:
        config: config of the layer, with all N heads.
        cache_format: format of the layer's cache.
        sinks: [N], or None.
        num_ranks: D, number of ranks that share every sequence.

    Raises:
        TypeError: an argument has another class.
        ValueError: the sinks do not suit the config; a layer without a cache has a cache format with scales, or ranks
            that share its sequences.
        UnsupportedConfiguration: the format is for the latent cache alone.
    """
    check_gqa_config(config)
    check_key_value_format(cache_format)
    check_type("sinks", sinks, (Tensor, type(None)), "a tensor or None")
    if config.attention_sinks or sinks is not None:
        check_sinks(sinks, config, None if sinks is None else sinks.device)
    if not config.attention_type.cached:
        kind = f"attention type {config.attention_type.value}, which has no cache"
        check(not cache_format.scaled, "cache_format", f"{COMPUTE_FORMAT.name} for {kind}", cache_format.name)
        check(num_ranks == 1, "context_parallel", f"ranks that share no sequences for {kind}", f"{num_ranks} ranks")
