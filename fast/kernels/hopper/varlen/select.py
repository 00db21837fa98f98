"""Choose how the prefill kernel computes a call: parts of a key, tile sizes, order of work items, and key splits."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch

from reference.interfaces import UnsupportedConfiguration

from ...integers import cdiv
from .records import QUERY_TILE, Constants

DTYPES = (torch.bfloat16, torch.float16)
OUT_DTYPES = (*DTYPES, torch.float32)
KEY_WIDTHS = {64: (64, 0), 96: (64, 32), 128: (128, 0), 192: (128, 64), 256: (256, 0)}  # D: FIRST and SECOND columns
VALUE_WIDTHS = (64, 128, 256)
KEYS = {64: 128, 128: 128, 256: 64}  # keys of a key tile by columns of a value: the accumulators must fit in registers
MOST_STAGES = 4
ELEMENT_BYTES = torch.bfloat16.itemsize  # as of float16
SHARED = 227 * 1024  # bytes of shared memory of a program on Hopper
OTHER_MEMORY = 4608  # bytes, rounded up: barriers, work items, and the conversion of an output from accumulator to rows
# Keys and values of a group of heads should fit into this fraction of the L2 (50 MB). 16 and 32 MiB take 2 and 3 % more
# time for 4 x 2048 tokens with 128 heads, and the same time for 16384 tokens.
L2_BYTES = 8 * 2**20
LEAST_SPLIT_TILES = 8  # key tiles of a split of the longest request
MOST_SPLITS = 32
MOST_PARTIAL_ROWS = 2**17  # (query token, head, split) triples with partial outputs: 64 MiB for values of 128 columns
# Estimates in units of the time in which a program processes one key tile. They were not measured.
ITEM_STEPS = 2  # a work item, in addition to its key tiles
COMBINE_STEPS = 3  # the launch of the combine kernel
PARTIAL_ROWS_OF_A_STEP = 10_000  # partial outputs that are written and combined


class Parts(NamedTuple):
    """How the columns of a key are divided into two matrix products.

    Attributes:
        first: columns of the first part.
        second: columns of the second part; 0 if there is none.
        shared: whether all heads share the second part.
        whole: whether the launcher must first join `k_nope` and `k_pe` to whole keys, because their widths are no
            powers of two that the kernel serves.
    """

    first: int
    second: int
    shared: bool
    whole: bool


def parts_of(nope: int, rope: int) -> Parts:
    """Return the `Parts` of keys of `nope` columns of their own and `rope` columns that all heads share.

    Raises:
        UnsupportedConfiguration: the kernel does not serve keys of this width.
    """
    width = nope + rope
    if rope in (32, 64) and nope in (64, 128) and width in KEY_WIDTHS:
        return Parts(nope, rope, True, False)
    if width not in KEY_WIDTHS:
        raise UnsupportedConfiguration([f"hopper: flash_attn_varlen serves keys of {_words(KEY_WIDTHS)} columns, got "
                                        f"{width}"])  # fmt: skip
    return Parts(*KEY_WIDTHS[width], False, rope > 0)


def _words(numbers) -> str:
    return ", ".join(map(str, numbers))


@functools.lru_cache
def constants_of(parts: Parts, value: int) -> Constants:
    """Return the constants of the kernel for keys with these parts and values of `value` columns.

    Raises:
        UnsupportedConfiguration: the kernel does not serve values of this width, or the tiles do not fit into shared
            memory.
    """
    width = parts.first + parts.second
    if value not in VALUE_WIDTHS:
        raise UnsupportedConfiguration([f"hopper: flash_attn_varlen serves values of {_words(VALUE_WIDTHS)} columns, "
                                        f"got {value}"])  # fmt: skip
    keys = min(KEYS[value], KEYS[parts.first])
    room = SHARED - OTHER_MEMORY - ELEMENT_BYTES * QUERY_TILE.value * width
    stages = min(room // (ELEMENT_BYTES * keys * (width + value)), MOST_STAGES)
    if stages < 2:
        raise UnsupportedConfiguration([f"hopper: flash_attn_varlen has no tiles for keys of {width} columns and values"
                                        f" of {value} columns"])  # fmt: skip
    return Constants(
        CONSUMER=0, FIRST=parts.first, SECOND=parts.second, SHARED=parts.shared, VALUE=value, KEYS=keys,
        STAGES=2 if stages < 4 else 4, SPLIT=False, WIDE_STORES=False,
    )  # fmt: skip


class BatchSizes(NamedTuple):
    """Sizes of a call that the host knows without reading a length from the GPU.

    Attributes:
        tokens: T.
        keys: S.
        requests: B.
        heads: N.
        max_queries: upper bound of the query tokens of a request.
        max_keys: upper bound of the keys of a request.
        causal: whether there is a causal mask.
        prescribed_splits: number of splits that `prescribe_splits` prescribes, or 1 for a batch-invariant call; None
            lets `best_num_splits` choose.
    """

    tokens: int
    keys: int
    requests: int
    heads: int
    max_queries: int
    max_keys: int
    causal: bool
    prescribed_splits: int | None = None


class Order(NamedTuple):
    """The order of work items (`work_items`) and the number of programs.

    Attributes:
        num_candidates: candidates (see `work_items`) of one head. Without splits, up to one candidate of each request
            but the last is empty. With splits, no candidate is empty, and this number is an upper bound.
        group_heads: heads of a group.
        num_splits: splits of each query tile; 1 means that the keys are not divided.
        programs: programs of the launch, at most one for each multiprocessor.
        counts_items: whether there may be more work items than programs, so that programs need a common counter.
    """

    num_candidates: int
    group_heads: int
    num_splits: int
    programs: int
    counts_items: bool


def order_of(batch: BatchSizes, width: int, tile_keys: int, processors: int) -> Order:
    """Return the `Order` of a call.

    Heads-outer order reads keys from the L2 most often. With a causal mask, a group of several heads has fewer short
    work items at its end; its keys and values should still fit into the L2.

    Args:
        batch: sizes of the call.
        width: columns of a key that are not shared, and of a value.
        tile_keys: keys of a key tile.
        processors: number of multiprocessors.
    """
    num_candidates = _candidates_of(batch)
    fitting = L2_BYTES // max(ELEMENT_BYTES * width * batch.max_keys, 1)
    group_heads = max(1, min(fitting, batch.heads)) if batch.causal else 1
    num_splits = best_num_splits(batch, tile_keys, processors)
    items = num_candidates * batch.heads * num_splits
    programs = max(1, min(processors, items))
    return Order(num_candidates, group_heads, num_splits, programs, items > programs)


def _candidates_of(batch: BatchSizes) -> int:
    """Return an upper bound of the candidates of one head, for any lengths of the requests."""
    return max(cdiv(batch.tokens, QUERY_TILE.value) + batch.requests - 1, 0)


def best_num_splits(batch: BatchSizes, tile_keys: int, processors: int) -> int:
    """Return into how many splits to divide the key tiles of each query tile, so that the estimated time is lowest.

    If `batch.prescribed_splits` is not None, the function returns this number. If several numbers give the same time,
    the function returns the smallest of these numbers. The estimate is a sum:

    - The programs process the work items in waves. A wave takes as long as its longest item. Short items count as a
      fraction of a longest item, which the mean number of keys of a request gives. With a causal mask and as many
      queries as keys, items have all lengths from the longest to 0, and the last wave is short too.
    - Each work item takes some time in addition to its key tiles, even if it has no key tile. Without splits, empty
      candidates take this time too, but no more: a program that gets one counts on to the next item.
    - The combine kernel takes some time, and more time for more partial outputs.

    Args:
        batch: sizes of the call.
        tile_keys: keys of a key tile.
        processors: number of multiprocessors.
    """
    if batch.prescribed_splits is not None:
        return batch.prescribed_splits
    longest = min(batch.max_keys, batch.keys)
    steps = cdiv(longest, tile_keys)
    rows = batch.tokens * batch.heads
    most = min(MOST_SPLITS, steps // LEAST_SPLIT_TILES, MOST_PARTIAL_ROWS // max(rows, 1))
    if rows == 0 or batch.requests == 0 or most < 2:
        return 1
    candidates = _candidates_of(batch)
    longest_query = max(min(batch.max_queries, batch.tokens), 1)
    tiles = min(candidates, batch.requests * cdiv(longest_query, QUERY_TILE.value))
    uneven = min(batch.max_queries / longest, 1.0) if batch.causal else 0.0
    # mean length of an item, divided by the longest length
    mean = min(batch.keys / (batch.requests * longest), 1.0) * (1 - uneven / 2)

    def cost(splits: int) -> float:
        items = tiles * batch.heads * splits
        begun = candidates * batch.heads if splits == 1 else items
        waves = items * mean / processors
        waves = max(1.0, waves + (1 - uneven) * (math.ceil(waves) - waves))
        combine_steps = COMBINE_STEPS + rows * splits / PARTIAL_ROWS_OF_A_STEP if splits > 1 else 0.0
        return waves * cdiv(steps, splits) + ITEM_STEPS * cdiv(begun, processors) + combine_steps

    return min(range(1, most + 1), key=cost)
