"""Integers in closed form that both wings share: shapes, strides, sizes, thresholds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from .checks import check, check_flag, check_int, check_type
from .config import MLAConfig
from .support import QueryLenSupport

MOST_WORKSPACE_TOKENS = 64 * 1024  # of context that are expanded at once (vLLM's bound)
LAYOUTS = {  # physical order of the logical axes [layers, blocks, block_size, head_size]
    "layers_first": (0, 1, 2, 3),  # each layer's cache in one piece
    "blocks_first": (1, 0, 2, 3),  # all layers of a block side by side: one piece to send or to swap
}


def kv_cache_shape(
    num_blocks: int, block_size: int, head_size: int, num_layers: int | None = None
) -> tuple[int, int, int] | tuple[int, int, int, int]:
    """Shape of the paged latent cache: [num_blocks, block_size, Lkv + R] of one layer.

    Args:
        num_blocks: of one layer; may be 0.
        block_size: tokens a block.
        head_size: Lkv + R.
        num_layers: of a cache of all layers, [num_layers, num_blocks, block_size, Lkv + R].

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
    """In which order the axes of `kv_cache_shape` lie in memory, the slowest first.

    Args:
        include_layers: the shape has a layers dimension in front.
        layout: "layers_first", or "blocks_first" where all layers of a block lie side by side. Without a layers
            dimension the two are one.

    Raises:
        ValueError: another layout.
    """
    check_flag("include_layers", include_layers)
    check(isinstance(layout, str) and layout in LAYOUTS, "layout", f"one of {', '.join(LAYOUTS)}", layout)
    return LAYOUTS[layout] if include_layers else (0, 1, 2)


def context_unit(block_size: int, context_parallel_size: int = 1, interleave: int = 1) -> int:
    """Tokens on whose multiples cached context may be cut: whole blocks, and whole turns of the ranks that share it.

    lcm(block_size, D x I), and the block size alone where one rank holds everything.

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
    """Tokens of context that are expanded at once: min(max(8 max_model_len, 4 max_num_seqs block), 64k).

    In whole units (`context_unit`; without context parallelism a unit is a block): rounded up, but no more than 64k,
    and at least one unit a sequence, so that an equal share for each sequence fits as well. vLLM has this rule for
    its MLA workspace.

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
    """The longest query that always decodes: one token, and the drafted ones where the kernel takes several.

    Args:
        query_len_support: of the decode kernel. SINGLE_ONLY takes one token, so drafted ones go the expanded path.
        num_speculative_tokens: drafted tokens a request and step.

    Raises:
        ValueError: a negative number of tokens.
    """
    check_type("query_len_support", query_len_support, QueryLenSupport)
    check_int("num_speculative_tokens", num_speculative_tokens, 0)
    return 1 if query_len_support is QueryLenSupport.SINGLE_ONLY else 1 + num_speculative_tokens


@dataclass(frozen=True)
class GlobalHyperparameters:
    """What all attention layers of a model must share, so that one plan serves them all.

    Attributes:
        num_heads: N.
        kv_lora_rank: Lkv.
        qk_nope_head_dim: P.
        qk_rope_head_dim: R.
        v_head_dim: V.
        softmax_scale: of both paths.
    """

    num_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    softmax_scale: float


def infer_global_hyperparameters(layers: Mapping[str, Any]) -> GlobalHyperparameters:
    """What the layers of a model share.

    Args:
        layers: by name; an `MLAConfig` each, or anything with one as `.config` (an `MLAAttention`).

    Raises:
        ValueError: no layer; or one that differs from the first, by name.
    """
    check_type("layers", layers, Mapping)
    check(len(layers) > 0, "layers", "at least one layer", "none")
    found = {}
    for name, layer in layers.items():
        config = layer if isinstance(layer, MLAConfig) else getattr(layer, "config", None)
        check(isinstance(config, MLAConfig), "layers", f"an MLAConfig or a layer with one at {name!r}",
              type(layer).__name__)  # fmt: skip
        found[name] = GlobalHyperparameters(*(getattr(config, f.name) for f in fields(GlobalHyperparameters)))
    first, *others = found
    for name in others:
        for field in fields(GlobalHyperparameters):
            wanted, got = (getattr(found[layer], field.name) for layer in (first, name))
            check(wanted == got, "layers", f"{field.name} {wanted} of {first!r} in all", f"{got} at {name!r}")
    return found[first]
