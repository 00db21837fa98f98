"""Integers in closed form that both wings share: shapes, strides, sizes, thresholds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from jaxtyping import Int32
from torch import Tensor

from .checks import check, check_flag, check_int, check_not_negative, check_tensor, check_type
from .config import MLAConfig
from .support import QueryLenSupport

DECODE_TILE = 64  # keys in a tile of the decode schedule, whatever the page
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


class InvariantCut(NamedTuple):
    """How requests are cut under `batch_invariant`: into small splits, then larger ones, then more of those.

    Attributes:
        small_tiles: tiles of a small split, an even number.
        small_splits: of a request at most; a longer one has as many, of more tiles each,
        large_tiles: up to so many, an even number; a longer one has more splits of that size,
        max_splits: up to so many, beyond which their size grows again.
    """

    small_tiles: int
    small_splits: int
    large_tiles: int
    max_splits: int


def invariant_cut(num_heads: int) -> InvariantCut:
    """The cut of requests with so many heads.

    Raises:
        ValueError: a number of heads below 1.
    """
    check_int("num_heads", num_heads)
    return InvariantCut(4, 32, 16, 128) if num_heads <= 16 else InvariantCut(16, 8, 32, 64)


def invariant_split_tiles(num_tiles: int, num_heads: int) -> int:
    """Tiles of a split under `batch_invariant`, from the request's own length and N alone; an even number.

    Raises:
        ValueError: a number of tiles below 0, or of heads below 1.
    """
    check(num_tiles >= 0, "num_tiles", "an int >= 0", num_tiles)
    cut = invariant_cut(num_heads)
    grown = min(cut.large_tiles, -(-num_tiles // cut.small_splits))
    tiles = max(cut.small_tiles, grown, -(-num_tiles // cut.max_splits))
    return tiles + tiles % 2  # kernels take them in pairs


def most_invariant_splits(num_tiles: int, num_heads: int) -> int:
    """Most splits of any request of at most so many tiles under `batch_invariant`; at least 1."""
    cut = invariant_cut(num_heads)
    small = min(cut.small_splits, -(-num_tiles // cut.small_tiles))
    return max(1, small, min(cut.max_splits, -(-num_tiles // cut.large_tiles)))


def piece_overhead(num_heads: int) -> int:
    """What starting on a request costs a decode kernel, in tiles: what `plan_decode` reckons with.

    Its queries, its results and the way into its loop. 8 for more than 32 heads was measured on an H200
    (`docs/log.md`); up to 32 heads, whose tiles take longer beside the rest, anything from 1 to 5 served as well.

    Raises:
        ValueError: a number of heads below 1.
    """
    check_int("num_heads", num_heads)
    return 5 if num_heads <= 32 else 8


def fold_overhead(num_heads: int) -> int:
    """What each split costs a decode kernel under `batch_invariant`, in tiles: a part of `piece_overhead`.

    Up to 16 heads a Hopper kernel keeps a split in shared memory for the next, with more rows half of it or nothing.
    What goes through memory costs (`docs/log.md`).

    Raises:
        ValueError: a number of heads below 1.
    """
    check_int("num_heads", num_heads)
    return 1 if num_heads <= 16 else 4


@dataclass(frozen=True)
class ScheduleChoice:
    """Whether a step's decode is planned over programs, and the numbers that decide it.

    Attributes:
        num_programs: programs that a schedule has; 0 where none was considered: nobody asked for one, a shared prefix
            is attended apart, or the queries are longer than the threshold.
        requests: requests that have keys.
        longest_tiles: tiles of the longest request.
        total_tiles: tiles of all requests together.
        planned: the decode has a schedule; otherwise the kernel cuts every request into equally many splits.
    """

    num_programs: int
    requests: int
    longest_tiles: int
    total_tiles: int
    planned: bool


NEVER_PLANNED = ScheduleChoice(num_programs=0, requests=0, longest_tiles=0, total_tiles=0, planned=False)
INVARIANT_STARTS = 4  # a batch-invariant schedule starts on splits, of which every request has several


def choose_schedule(
    seq_lens: Int32[Tensor, " B"], num_programs: int, num_heads: int, batch_invariant: bool = False
) -> ScheduleChoice:
    """Choose between a schedule and the kernel's own cut, from lengths that the host knows.

    Without a schedule a kernel cuts every request into equally many splits, so the decode takes about as long as if
    every request were the longest: a schedule saves B * longest - total tiles. It costs about one more start
    (`piece_overhead`) for each request and each program, and four times as much where it is batch-invariant. The
    decode is planned where the schedule saves more than it costs (`docs/log.md` has the measurement).

    Args:
        seq_lens: [B], keys of each request, on the CPU.
        num_programs: programs of a schedule; 0 never plans, and with 1 there is nothing to share out.
        num_heads: N.
        batch_invariant: of the schedule.

    Returns:
        The choice and its numbers.

    Raises:
        ValueError: a tensor that does not fit; a number below its least value.
    """
    check_tensor("seq_lens", seq_lens, ("B",), (torch.int32,), torch.device("cpu"))
    check_int("num_programs", num_programs, 0)
    check_flag("batch_invariant", batch_invariant)
    overhead = piece_overhead(num_heads) * (INVARIANT_STARTS if batch_invariant else 1)
    if num_programs == 0 or seq_lens.numel() == 0:
        return NEVER_PLANNED
    check_not_negative("seq_lens", seq_lens)
    tiles = seq_lens.long().add_(DECODE_TILE - 1).div_(DECODE_TILE, rounding_mode="floor")
    longest, total, requests = int(tiles.max()), int(tiles.sum()), int(tiles.count_nonzero())
    pays = requests * longest - total > overhead * (requests + num_programs)
    return ScheduleChoice(num_programs, requests, longest, total, num_programs > 1 and pays)


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
