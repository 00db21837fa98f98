"""Sizes that an engine needs: cache shapes, strides, workspace sizes and thresholds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from .checks import check, check_flag, check_int, check_type, short_text
from .config import MLAConfig
from .layer_parameters import GQAHyperparameters
from .support import QueryLenSupport

MOST_WORKSPACE_TOKENS = 64 * 1024  # largest number of context tokens that a prefill expands at once, as in vLLM
LAYOUTS = {  # order in memory of the logical axes [layers, blocks, block_size, head_size]
    "layers_first": (0, 1, 2, 3),  # the cache of one layer is contiguous
    "blocks_first": (1, 0, 2, 3),  # all layers of one block are contiguous: one copy sends or swaps a block
}


def kv_cache_shape(
    num_blocks: int, block_size: int, head_size: int, num_layers: int | None = None
) -> tuple[int, int, int] | tuple[int, int, int, int]:
    """Return the shape of the paged latent cache: [num_blocks, block_size, head_size] for one layer.

    Args:
        num_blocks: blocks of one layer; may be 0.
        block_size: tokens per block.
        head_size: elements of a cache entry in the dtype of the cache: `CacheFormat.columns`, which is Lkv + R without
            scales.
        num_layers: number of layers, if one tensor has the caches of all layers. The shape is then
            [num_layers, num_blocks, block_size, head_size].

    Raises:
        ValueError: an argument is below 1 (`num_blocks` may be 0).
    """
    check_int("num_blocks", num_blocks, 0)
    check_int("block_size", block_size)
    check_int("head_size", head_size)
    if num_layers is None:
        return (num_blocks, block_size, head_size)
    check_int("num_layers", num_layers, 1, "a positive int or None")
    return (num_layers, num_blocks, block_size, head_size)


def stride_order(include_layers: bool = False, layout: str = "layers_first") -> tuple[int, ...]:
    """Return the order in memory of the axes of `kv_cache_shape`, the axis with the largest stride first.

    Args:
        include_layers: whether the shape begins with a layers dimension.
        layout: "layers_first" (the cache of one layer is contiguous) or "blocks_first" (all layers of one block are
            contiguous). Without a layers dimension both layouts are the same.

    Raises:
        ValueError: `layout` is neither "layers_first" nor "blocks_first".
    """
    check_flag("include_layers", include_layers)
    check(isinstance(layout, str) and layout in LAYOUTS, "layout", f"one of {', '.join(LAYOUTS)}", layout)
    return LAYOUTS[layout] if include_layers else (0, 1, 2)


def context_unit(block_size: int, context_parallel_size: int = 1, interleave: int = 1) -> int:
    """Return the unit of context chunks, in tokens: every chunk begins at a multiple of this number.

    A chunk is a part of the cached context that a prefill expands at once. With one rank the result is the block size,
    so that a chunk begins at the start of a block. With D ranks and interleave I the result is lcm(block_size, D * I).
    The tokens of a request before the chunk are then divided equally among the ranks.

    Args:
        block_size: tokens per block.
        context_parallel_size: D, number of ranks that own the tokens of each sequence in turn.
        interleave: I, number of consecutive tokens on one rank.

    Raises:
        ValueError: an argument is below 1.
    """
    sizes = {"block_size": block_size, "context_parallel_size": context_parallel_size, "interleave": interleave}
    for name, value in sizes.items():
        check_int(name, value)
    return block_size if context_parallel_size == 1 else math.lcm(block_size, context_parallel_size * interleave)


def chunked_prefill_workspace_size(
    max_model_len: int, max_num_seqs: int, block_size: int, context_parallel_size: int = 1, interleave: int = 1
) -> int:
    """Return the number of context tokens that a prefill expands at once, by the rule of vLLM.

    The number is `min(max(8 * max_model_len, 4 * max_num_seqs * block_size), 65536)`. It is rounded up to whole units
    (`context_unit`; with one rank a unit is a block), but not above 65536. The result is at least one unit for each of
    `max_num_seqs` sequences, even if this is more than 65536.

    Args:
        max_model_len: largest number of tokens of a sequence.
        max_num_seqs: largest number of requests in a batch.
        block_size: tokens per block.
        context_parallel_size: D, number of ranks that own the tokens of each sequence in turn.
        interleave: I, number of consecutive tokens on one rank.

    Raises:
        ValueError: an argument is below 1.
    """
    for name, value in (("max_model_len", max_model_len), ("max_num_seqs", max_num_seqs)):
        check_int(name, value)
    unit = context_unit(block_size, context_parallel_size, interleave)
    tokens = max(8 * max_model_len, 4 * max_num_seqs * block_size)
    units = min(-(-tokens // unit), MOST_WORKSPACE_TOKENS // unit)
    return max(units, max_num_seqs) * unit


def reorder_batch_threshold(query_len_support: QueryLenSupport, num_speculative_tokens: int = 0) -> int:
    """Return the largest number of query tokens with which a request may decode without a call of `choose_path`.

    For a request with more query tokens, `choose_path` may choose the absorbed path of decodes. The number is 1 plus
    the number of drafted tokens. With `QueryLenSupport.SINGLE_ONLY` the number is 1, and requests with drafted tokens
    take the expanded path.

    Args:
        query_len_support: query lengths that the decode kernel supports.
        num_speculative_tokens: number of tokens that a draft model proposes for a request in one step.

    Raises:
        ValueError: `num_speculative_tokens` is negative.
    """
    check_type("query_len_support", query_len_support, QueryLenSupport)
    check_int("num_speculative_tokens", num_speculative_tokens, 0)
    return 1 if query_len_support is QueryLenSupport.SINGLE_ONLY else 1 + num_speculative_tokens


@dataclass(frozen=True)
class GlobalHyperparameters:
    """Values that must be equal in all attention layers of a model, so that all layers can use one plan.

    Attributes:
        num_heads: N.
        kv_lora_rank: Lkv.
        qk_nope_head_dim: P.
        qk_rope_head_dim: R.
        v_head_dim: V.
        softmax_scale: factor of the attention scores before the softmax.
    """

    num_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    softmax_scale: float


def infer_global_hyperparameters(layers: Mapping[str, Any]) -> GlobalHyperparameters | GQAHyperparameters:
    """Return the hyperparameters that all layers of a model have in common, and raise if a layer differs.

    Args:
        layers: mapping from the name of a layer to its `MLAConfig` or `GQAConfig`, or to an attention layer with such
            a config as `.config`. The `.cache_format` of a GQA layer is one of its hyperparameters.

    Returns:
        A `GlobalHyperparameters` for MLA layers, a `GQAHyperparameters` for GQA layers.

    Raises:
        ValueError: `layers` is empty, or a layer differs from the first layer in a value or in its attention family;
            the message names both layers.
    """
    check_type("layers", layers, Mapping)
    check(len(layers) > 0, "layers", "at least one layer", "none")
    found = {name: _hyperparameters(name, layer) for name, layer in layers.items()}
    first, *others = found
    for name in others:
        wanted, got = (type(found[layer]).__name__ for layer in (first, name))
        check(wanted == got, "layers", f"{wanted} of {first!r} in all layers (one family)", f"{got} at {name!r}")
        for field in fields(found[first]):
            wanted, got = (getattr(found[layer], field.name) for layer in (first, name))
            check(wanted == got, "layers", f"{field.name} {_text(wanted)} of {first!r} in all layers",
                  f"{_text(got)} at {name!r}")  # fmt: skip
    return found[first]


def _hyperparameters(name: str, layer: Any) -> GlobalHyperparameters | GQAHyperparameters:
    """Return the hyperparameters of one layer, a frozen dataclass."""
    config = getattr(layer, "config", layer)
    if isinstance(config, MLAConfig):
        return GlobalHyperparameters(*(getattr(config, field.name) for field in fields(GlobalHyperparameters)))
    read = getattr(config, "hyperparameters", None)  # `GQAConfig.hyperparameters`; its module imports this one's
    check(callable(read), "layers", f"an MLAConfig or GQAConfig, or a layer with a config, at {name!r}",
          type(layer).__name__)  # fmt: skip
    return read(layer.cache_format) if hasattr(layer, "cache_format") else read()


def _text(value: Any) -> Any:
    """Return the name of a value that has a name, such as a cache format; the begin of a tuple; other values itself."""
    return short_text(value) if isinstance(value, tuple) else getattr(value, "name", value)
