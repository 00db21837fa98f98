"""Choose how the prefill kernel computes a call: the parts of a key, tile sizes, and the order of the work items."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from reference.interfaces import UnsupportedConfiguration

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
L2_BYTES = 32 * 2**20  # keys and values of a group of heads should fit into this share of the L2 (50 MB)


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
        STAGES=2 if stages < 4 else 4,
    )  # fmt: skip


class Order(NamedTuple):
    """The order of work items (`work_items`) and the number of programs.

    Attributes:
        num_slots: slots for query tiles of one head.
        group_heads: heads of a group.
        programs: programs of the launch, at most one for each multiprocessor.
    """

    num_slots: int
    group_heads: int
    programs: int


def order_of(tokens: int, requests: int, heads: int, max_keys: int, width: int, causal: bool, processors: int) -> Order:
    """Return the `Order` of a call.

    Heads-outer order reads keys from the L2 most often. With a causal mask, a group of several heads has fewer short
    work items at its end; its keys and values should still fit into the L2. Splitting the keys of an item over several
    programs, for calls with fewer items than multiprocessors, is not implemented; it would belong here.

    Args:
        tokens: T.
        requests: B.
        heads: N.
        max_keys: upper bound of the keys of a request.
        width: columns of a key that are not shared, and of a value.
        causal: whether there is a causal mask.
        processors: number of multiprocessors.
    """
    num_slots = tokens // QUERY_TILE.value + requests
    fitting = L2_BYTES // max(ELEMENT_BYTES * width * max_keys, 1)
    group_heads = max(1, min(fitting, heads)) if causal else 1
    return Order(num_slots, group_heads, max(1, min(processors, num_slots * heads)))
