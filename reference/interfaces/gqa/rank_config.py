"""The heads of one rank of grouped-query attention, if ranks share the heads and the tokens of every sequence.

TP ranks divide the query heads among themselves. D of these ranks form a context-parallel group, whose ranks divide the
tokens of every sequence among themselves.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from ..checks import check, check_int
from ..errors import UnsupportedConfiguration
from .arguments import check_gqa_config
from .config import GQAConfig


def check_shared_sequences(config: GQAConfig, size: int) -> None:
    """Check that D ranks can divide the sequences of a layer among themselves.

    A rank knows how many of its keys a query token attends, and not their positions in the sequence. ALiBi needs these
    positions. Chunked local attention would need a plan for the chunks of each rank.

    Args:
        config: config of the layer.
        size: D.

    Raises:
        UnsupportedConfiguration: D is above 1, and the layer has ALiBi or chunked local attention.
    """
    check_gqa_config(config)
    names = [name for name in ("alibi_slopes", "attention_chunk_size") if getattr(config, name) is not None]
    if size > 1 and names:
        raise UnsupportedConfiguration(
            [f"config.{name}: expected None if {size} ranks share sequences, got {getattr(config, name)}"
             for name in names]
        )  # fmt: skip


def kv_heads_of_ranks(config: GQAConfig, num_ranks: int, members: Sequence[int]) -> tuple[int, ...]:
    """Return the KV heads in the caches of D ranks that share every sequence; the caches of all D ranks have the same.

    The ranks gather their queries, so each rank attends its tokens with the query heads of all D ranks. Its cache
    therefore has the KV heads of all these query heads, in the order of the ranks.

    Args:
        config: config of the layer, with all N query heads and all Nkv KV heads.
        num_ranks: TP. Rank r has the query heads [r N / TP, (r + 1) N / TP).
        members: the D ranks.

    Raises:
        ValueError: N is not a multiple of TP.
        UnsupportedConfiguration: the gathered query heads are not equal groups of consecutive heads, one group for each
            KV head.
    """
    check_gqa_config(config)
    check_int("num_ranks", num_ranks)
    check(config.num_heads % num_ranks == 0, "num_heads", f"a multiple of {num_ranks} ranks", config.num_heads)
    local = config.num_heads // num_ranks
    heads = [head for member in members for head in range(member * local, (member + 1) * local)]
    groups = [(kv, len(list(own))) for kv, own in itertools.groupby(head // config.group_size for head in heads)]
    kv_heads, sizes = [kv for kv, _ in groups], {size for _, size in groups}
    if len(sizes) != 1 or len(set(kv_heads)) != len(kv_heads):
        wanted = f"KV heads that divide the {len(heads)} query heads of {len(members)} ranks into equal groups"
        got = ", ".join(f"{size} of KV head {kv}" for kv, size in groups)
        raise UnsupportedConfiguration([f"num_kv_heads: expected {wanted}, got {got}"])
    return tuple(kv_heads)


def rank_config(config: GQAConfig, num_ranks: int, members: Sequence[int], rank: int) -> GQAConfig:
    """Return the config of one of D ranks that share every sequence: its query heads, and the KV heads of its cache.

    Args:
        config: config of the layer, with all N query heads and all Nkv KV heads.
        num_ranks: TP.
        members: the D ranks.
        rank: index of the rank in `members`.

    Raises:
        ValueError: N is not a multiple of TP.
        UnsupportedConfiguration: the layer has ALiBi or chunked local attention and D is above 1; `kv_heads_of_ranks`
            raises; N / TP is not a multiple of the number of KV heads in a cache.
    """
    check_shared_sequences(config, len(members))
    kv_heads, local = kv_heads_of_ranks(config, num_ranks, members), config.num_heads // num_ranks
    if local % len(kv_heads):
        wanted = f"KV heads that divide the {local} query heads of a rank"
        raise UnsupportedConfiguration([f"num_kv_heads: expected {wanted}, got {len(kv_heads)} in the cache of a rank"])
    slopes = config.alibi_slopes
    if slopes is not None:
        slopes = slopes[members[rank] * local : (members[rank] + 1) * local]
    return replace(config, num_heads=local, num_kv_heads=len(kv_heads), alibi_slopes=slopes)


def gathered_config(config: GQAConfig, size: int, has_sinks: bool = True) -> GQAConfig:
    """Return the config of attention with the gathered query heads of D ranks over the cache of one rank.

    Args:
        config: config of one rank, `rank_config`.
        size: D.
        has_sinks: whether this attention counts the attention sinks. Of the states of D ranks that are merged, exactly
            one counts them.
    """
    check_shared_sequences(config, size)
    slopes = config.alibi_slopes if size == 1 else None
    sinks = config.attention_sinks and has_sinks
    return replace(config, num_heads=config.num_heads * size, alibi_slopes=slopes, attention_sinks=sinks)
