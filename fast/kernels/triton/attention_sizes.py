"""Launch sizes of the attention over packed requests (`attention.flash_attn_varlen`): queries, tiles, warps, stages."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from reference.interfaces import UnsupportedConfiguration

from ..device import DeviceFacts
from ..integers import next_power_of_2

SMALLEST_DOT = 16  # fewest columns of a `tl.dot` operand; a narrower operand is padded with zeros in registers


class Constants(NamedTuple):
    """Compile-time constants of the kernel.

    Attributes:
        P: columns of `k_nope`, the head's own part of a key. If R is 0, `k_nope` is the whole key.
        R: columns of `k_pe`, the part of the key that all heads share; 0 if there is no such part.
        V: columns of a value.
        FIRST: columns of the first part of `k_nope`, a power of two.
        SECOND: columns of the second part of `k_nope`, a power of two; 0 if the first part has all columns.
        ROPE: R rounded up to a power of two; 0 if R is 0.
        VALUE: V rounded up to a power of two.
        BLOCK_N: keys of a tile.
        USE_TMA: True if TMA, the GPU's bulk copy engine, loads keys and values.
    """

    P: Any
    R: Any
    V: Any
    FIRST: Any
    SECOND: Any
    ROPE: Any
    VALUE: Any
    BLOCK_N: Any
    USE_TMA: Any


def _powers_of_two(width: int) -> tuple[int, int]:
    """Return two powers of two whose sum covers a width with little padding; the second is 0 if one suffices.

    Examples: 128 -> (128, 0), 192 -> (128, 64), 12 -> (16, 0).
    """
    whole = max(next_power_of_2(width), SMALLEST_DOT)
    first = whole // 2
    second = max(next_power_of_2(width - first), SMALLEST_DOT)
    return (first, second) if first >= SMALLEST_DOT and first + second < whole else (whole, 0)


class Blocks(NamedTuple):
    """Launch shape of a program.

    Attributes:
        block_m: queries of the program.
        block_n: keys of a tile.
        num_warps: warps of the program.
        num_stages: pipeline stages of the key and value tiles.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# launch shapes, the fastest first; a launch takes the first shape whose tiles fit into shared memory
HOPPER_BLOCKS = (
    Blocks(128, 64, 8, 3), Blocks(128, 64, 8, 2), Blocks(64, 64, 4, 2), Blocks(64, 32, 4, 2), Blocks(32, 32, 4, 2)
)  # fmt: skip
# preferred to HOPPER_BLOCKS if programs of 128 queries would not fill the GPU
HOPPER_FEW_BLOCKS = (Blocks(64, 64, 4, 3), *HOPPER_BLOCKS)
MOST_QUERIES = 128  # of a program
PORTABLE_BLOCKS = (
    Blocks(128, 64, 8, 2), Blocks(64, 64, 4, 2), Blocks(64, 32, 4, 2), Blocks(32, 32, 4, 2), Blocks(16, 16, 4, 1)
)  # fmt: skip
FLOAT32_BLOCKS = (Blocks(32, 32, 8, 1), Blocks(16, 16, 4, 1))  # small: IEEE float32 products need many registers
INTERPRETER_BLOCKS = Blocks(32, 32, 1, 1)


def blocks_for(dtype: torch.dtype, device: DeviceFacts, key_width: int, value_width: int, few: bool) -> Blocks:
    """Return the first launch shape whose tiles fit into the shared memory of a device.

    Args:
        dtype: dtype of queries, keys and values.
        device: properties of the device.
        key_width: columns of a key, with padding.
        value_width: columns of a value, with padding.
        few: whether there are fewer programs of MOST_QUERIES queries than multiprocessors.

    Raises:
        UnsupportedConfiguration: no launch shape fits.
    """
    if device.interpreted:
        return INTERPRETER_BLOCKS
    table = PORTABLE_BLOCKS
    if device.capability[0] == 9:
        table = HOPPER_FEW_BLOCKS if few else HOPPER_BLOCKS
    if dtype == torch.float32:
        table = FLOAT32_BLOCKS
    for blocks in table:
        elements = blocks.block_m * key_width + blocks.num_stages * blocks.block_n * (key_width + value_width)
        if elements * dtype.itemsize + 4096 <= device.shared:
            return blocks
    widths = f"keys of {key_width} columns and values of {value_width} columns ({dtype})"
    raise UnsupportedConfiguration(
        [f"triton: flash_attn_varlen has no tile for {widths} within {device.shared} bytes of shared memory"]
    )


class LaunchSizes(NamedTuple):
    """Properties of a launch that depend on widths, dtype and device, and on whether there are few programs.

    Attributes:
        blocks: launch shape.
        constants: compile-time constants; USE_TMA is True if TMA can load tiles of these widths.
        boxes: shapes of the tiles that TMA loads: first part of `k_nope`, second part of `k_nope`, `k_pe`, `v`.
    """

    blocks: Blocks
    constants: Constants
    boxes: tuple[tuple[int, ...], ...]


@functools.lru_cache
def launch_sizes(dtype: torch.dtype, device: DeviceFacts, nope: int, rope: int, value: int, few: bool) -> LaunchSizes:
    """Return the `LaunchSizes` for queries and keys of `nope` + `rope` columns and values of `value` columns.

    `few` says whether there are fewer programs of MOST_QUERIES queries than multiprocessors.
    """
    first, second = _powers_of_two(nope)
    rope_columns = max(next_power_of_2(rope), SMALLEST_DOT) if rope else 0
    value_columns = max(next_power_of_2(value), SMALLEST_DOT)
    blocks = blocks_for(dtype, device, first + second + rope_columns, value_columns, few)
    unpadded = (first + second, rope_columns, value_columns) == (nope, rope, value)
    rows = blocks.block_n
    boxes = ((rows, 1, first), (rows, 1, second or SMALLEST_DOT), (rows, rope_columns or SMALLEST_DOT),
             (rows, 1, value_columns))  # fmt: skip
    constants = Constants(
        P=nope, R=rope, V=value, FIRST=first, SECOND=second, ROPE=rope_columns, VALUE=value_columns, BLOCK_N=rows,
        USE_TMA=device.has_copy_engine and not device.interpreted and dtype.itemsize == 2 and unpadded,
    )  # fmt: skip
    return LaunchSizes(blocks, constants, boxes)
