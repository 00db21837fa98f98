"""Launch sizes of the attention kernels of grouped-query attention: rows, tiles, warps and pipeline stages."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from reference.interfaces import E4M3, CacheFormat, UnsupportedConfiguration

from ...device import DeviceFacts, device_facts
from ...integers import cdiv, next_power_of_2
from ..decode_shapes import best_programs
from ..fp8 import NATIVE_CAPABILITY
from .records import Constants

PADDING_TOKENS = 64  # padding tokens that a program writes
# GPUs of these generations multiply 64 rows or more directly from shared memory, into which TMA loads tiles. On other
# GPUs with TMA (compute capability 12.0), tiles in shared memory are copied once more, so pointers load them.
DIRECT_GENERATIONS = (9, 10)
LEAST_COPIED_ROWS = 64  # with fewer rows, pointers load the tiles as fast as TMA
SMALLEST_DOT = 16  # fewest columns of an operand of `tl.dot`
FLOAT32_SUM_COLUMNS = 16  # a float32 dot product adds partial sums over 16 columns each (smaller rounding error)
MOST_SPLIT_ROWS = 64  # a request with more rows per KV head has row blocks like a prefill
COMPILER_BYTES = 1024  # shared memory that the compiler may need in addition


class Shape(NamedTuple):
    """Launch shape of a program.

    Attributes:
        rows: rows of the program.
        tile: keys of a tile.
        warps: warps of the program.
        stages: pipeline stages of the tiles.
        resident: programs that should run on an SM at the same time, if shared memory suffices.
    """

    rows: int
    tile: int
    warps: int
    stages: int
    resident: int = 2


# Launch shapes, the preferred shape first. If possible, the tiles of SMALL_SHAPES leave shared memory for several
# programs on an SM: with few rows, the speed of memory limits the kernel, and more programs have more loads in flight.
# The shapes were compared on an H200 (docs/log.md).
SMALL_SHAPES = {
    16: (Shape(16, 64, 4, 3), Shape(16, 64, 4, 2), Shape(16, 32, 4, 3), Shape(16, 32, 4, 2)),
    32: (Shape(32, 64, 4, 3), Shape(32, 64, 4, 2), Shape(32, 32, 4, 3), Shape(32, 32, 4, 2)),
    64: (Shape(64, 64, 4, 3), Shape(64, 64, 4, 2), Shape(64, 32, 4, 2)),
}
# Preferred to SMALL_SHAPES if one split for each request fills the device, and if requests have LEAST_KEYS_OF_MANY keys
# or more. Small programs need fewer barriers.
FOR_MANY_REQUESTS = {16: (Shape(16, 32, 2, 4, 4),)}
LEAST_KEYS_OF_MANY = 1024
FOR_MANY_NARROW = {16: (Shape(16, 32, 1, 4, 4),)}  # for at most MOST_NARROW_COLUMNS columns, and any number of keys
MOST_NARROW_COLUMNS = 64
# Preferred to SMALL_SHAPES and FOR_MANY_REQUESTS for a cache in e4m3 with at most MOST_E4M3_COLUMNS columns.
FOR_E4M3 = {16: (Shape(16, 64, 2, 3, 4),), 32: (Shape(32, 64, 2, 3, 3),)}
MOST_E4M3_COLUMNS = 128  # with more columns, a program of two warps would need more registers than a thread can have
LARGE_SHAPES = (
    Shape(128, 64, 8, 3), Shape(128, 64, 8, 2), Shape(64, 64, 4, 2), Shape(64, 32, 4, 2), Shape(32, 32, 4, 2)
)  # fmt: skip
# Hopper: two programs of 64 rows on an SM. While one program computes a softmax, the other multiplies.
HOPPER_LARGE_SHAPES = (Shape(64, 64, 4, 3), *LARGE_SHAPES)
HOPPER_COPIED_SHAPES = (Shape(64, 64, 4, 2), *LARGE_SHAPES)  # if TMA loads the tiles
MOST_HOPPER_COLUMNS = 128  # with more columns, LARGE_SHAPES are faster
SMALLEST_SHAPES = (Shape(16, 32, 4, 1), Shape(16, 16, 4, 1))
FLOAT32_SHAPES = (Shape(32, 32, 8, 1), Shape(16, 16, 4, 1))  # small: IEEE float32 products need many registers
INTERPRETER_SHAPES = {16: Shape(16, 32, 1, 1), 32: Shape(32, 32, 1, 1), 64: Shape(64, 32, 1, 1)}


class LaunchSizes(NamedTuple):
    """Properties of a launch that depend on dims, dtypes and device alone.

    Attributes:
        shape: launch shape.
        constants: compile-time constants of the kernel. BULK_COPY is True if TMA can load tiles of these dims.
        resident: programs that run on the device at the same time.
        finds_requests: whether the row blocks of all requests are numbered (`row_blocks.find_request`). Otherwise every
            request has as many row blocks as the longest request.
    """

    shape: Shape
    constants: Constants
    resident: int
    finds_requests: bool

    @property
    def options(self) -> dict[str, object]:
        """Constants and options of the launch, as keyword arguments."""
        return {"c": self.constants, "num_warps": self.shape.warps, "num_stages": self.shape.stages}


@functools.lru_cache(maxsize=1024)
def launch_sizes(
    group: int,
    kv_heads: int,
    width: int,
    query_len: int,
    block_size: int,
    window: bool,
    soft_cap: bool,
    dtype: torch.dtype,
    cache_format: CacheFormat,
    q_in_e4m3: bool,
    facts: DeviceFacts,
    splits: bool,
    many: bool = False,
) -> LaunchSizes:
    """Return the `LaunchSizes` of a call.

    Args:
        group: query heads of a KV head.
        kv_heads: Nkv.
        width: Dh.
        query_len: upper bound of the query tokens of a request.
        block_size: tokens of a cache block; 0 for packed keys.
        window: whether a row may have keys before its first key.
        soft_cap: whether scores have a soft cap.
        dtype: dtype of the queries.
        cache_format: format of the cache.
        q_in_e4m3: whether the queries are rounded to e4m3 first.
        facts: properties of the device.
        splits: whether a schedule or a batch-invariant decode determines the splits. Every request then has as many row
            blocks as the longest request.
        many: whether one split for each request fills the device. The rows of a program do not depend on it.

    Raises:
        UnsupportedConfiguration: no tile fits into the device's shared memory.
    """
    e4m3, rows = cache_format.scaled, group * query_len
    columns = max(SMALLEST_DOT, next_power_of_2(width))
    half = e4m3 and dtype == torch.bfloat16
    small = rows <= MOST_SPLIT_ROWS
    whole_tiles = not (small or splits)
    copied = facts.capability[0] in DIRECT_GENERATIONS and not facts.interpreted and dtype.itemsize == 2 and not e4m3
    copied = copied and columns == width and not splits
    shape = _shape(rows if whole_tiles else min(rows, MOST_SPLIT_ROWS), columns, dtype, e4m3, facts, many, copied)
    # on Blackwell, the compiler cannot pipeline the instruction of `pinned` around products of 64 rows or more
    pinned = e4m3 and dtype != torch.float32 and (facts.capability < (10, 0) or shape.rows < 64)
    constants = Constants(
        DIM=width, COLUMNS=columns, GROUP=group, KV_HEADS=kv_heads, ROWS=shape.rows, TILE=shape.tile,
        BLOCK_SIZE=block_size, WINDOW=window, SOFT_CAP=soft_cap, WHOLE_TILES=whole_tiles,
        BULK_COPY=copied and shape.rows >= LEAST_COPIED_ROWS and block_size % shape.tile == 0,
        SUM_COLUMNS=FLOAT32_SUM_COLUMNS if dtype == torch.float32 else 0, E4M3=e4m3,
        NATIVE=facts.capability >= NATIVE_CAPABILITY and not facts.interpreted,
        PINNED_KEYS=pinned and not facts.interpreted and shape.rows >= 64,
        PINNED_VALUES=pinned and not facts.interpreted, HALF=half, Q_E4M3=q_in_e4m3,
    )  # fmt: skip
    fitting = max(1, facts.shared // _shared_bytes(shape, columns, dtype, e4m3, facts))
    return LaunchSizes(shape, constants, min(shape.resident, fitting) * facts.processors, whole_tiles)


def schedule_programs(
    device: torch.device,
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    query_len: int,
    cache_format: CacheFormat,
) -> int:
    """Return how many programs a schedule should have on a device.

    For each program of the schedule, the launch starts one Triton program for every row block of every KV head.
    """
    group = num_heads // num_kv_heads
    sizes = launch_sizes(
        group, num_kv_heads, head_dim, query_len, block_size, False, False, dtype, cache_format, False,
        device_facts(device), True,
    )  # fmt: skip
    return best_programs(cdiv(group * query_len, sizes.shape.rows) * num_kv_heads, sizes.resident)


def _shape(
    rows: int, columns: int, dtype: torch.dtype, e4m3: bool, facts: DeviceFacts, many: bool, copied: bool
) -> Shape:
    """Return the first launch shape that fits into shared memory, for `rows` rows of a request and a KV head.

    `copied` says whether TMA can load keys and values of these dims. See `launch_sizes` for the other arguments.
    """
    least = next(size for size in SMALL_SHAPES if rows <= size or size == MOST_SPLIT_ROWS)
    if facts.interpreted:
        return INTERPRETER_SHAPES[least]
    large = LARGE_SHAPES
    if facts.capability[0] == 9 and columns <= MOST_HOPPER_COLUMNS:
        large = HOPPER_COPIED_SHAPES if copied else HOPPER_LARGE_SHAPES
    candidates = [(shape, facts.shared) for shape in (*large, *SMALLEST_SHAPES)]
    if dtype == torch.float32:
        candidates = [(shape, facts.shared) for shape in FLOAT32_SHAPES]
    elif rows <= MOST_SPLIT_ROWS:
        wanted = SMALL_SHAPES[least]
        if many and columns <= MOST_NARROW_COLUMNS:
            wanted = FOR_MANY_NARROW.get(least, ()) + wanted
        elif e4m3 and columns <= MOST_E4M3_COLUMNS:
            wanted = FOR_E4M3.get(least, ()) + wanted
        elif many and not e4m3:
            wanted = FOR_MANY_REQUESTS.get(least, ()) + wanted
        candidates = [
            (shape, facts.shared // programs) for shape in wanted for programs in range(shape.resident, 1, -1)
        ]
        candidates += [(shape, facts.shared) for shape in (*wanted, *SMALLEST_SHAPES)]
    for shape, shared in candidates:
        if _shared_bytes(shape, columns, dtype, e4m3, facts) <= shared:
            return shape
    raise UnsupportedConfiguration(
        [f"triton: no tile for heads of {columns} columns ({dtype}) fits into {facts.shared} bytes of shared memory"]
    )


def _shared_bytes(shape: Shape, columns: int, dtype: torch.dtype, e4m3: bool, facts: DeviceFacts) -> int:
    """Return an estimate of the bytes of shared memory of a launch shape.

    It counts the queries and the probabilities, and a tile of keys and a tile of values for each stage. The last stage
    needs no tiles, unless the GPU multiplies 64 rows directly from shared memory; Hopper then has the probabilities in
    registers. One tile in e4m3 is in shared memory a second time, in the dtype of the products.
    """
    tile = shape.tile * columns
    direct = facts.capability[0] in DIRECT_GENERATIONS and shape.rows >= 64
    stages = shape.stages if direct else max(1, shape.stages - 1)
    loaded = 2 * stages * tile * (E4M3 if e4m3 else dtype).itemsize
    converted = tile * dtype.itemsize * (2 if direct else 1) if e4m3 else 0
    probabilities = 0 if direct and facts.capability[0] == 9 else shape.rows * shape.tile * dtype.itemsize
    return loaded + converted + shape.rows * columns * dtype.itemsize + probabilities + COMPILER_BYTES
