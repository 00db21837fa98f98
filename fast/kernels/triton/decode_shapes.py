"""Choose the compile-time constants of a decode: the launch shape, and how a cache in e4m3 (8 bits) is multiplied."""

from __future__ import annotations

import functools

import torch

from reference.interfaces import CONVERTED, E4M3, CacheFormat, UnsupportedConfiguration

from ..device import DeviceFacts
from ..integers import cdiv, next_power_of_2
from .fp8 import NATIVE_CAPABILITY

LEAST_IN_FOUR_BLOCKS = 64  # smallest padded Lkv for which a latent without scales of its own gets four column blocks
WARP_GROUP_ROWS = 64  # row blocks of 64 rows keep bfloat16 queries: converted queries would serialise the products
E4M3_COLUMNS = 32  # smallest number of columns (or keys) in a product of e4m3 numbers on a GPU
# GPUs of these generations (Hopper, and Blackwell of data centers) compute products in e4m3 only for 64 rows or more.
# For fewer rows, the assembler converts every operand to float16, each time that the operand is used.
CONVERTING_GENERATIONS = (9, 10)
RESIDENT = 2  # programs that run on an SM at the same time, if the kernel prefetches tiles (`prefetch_shape`)

# A wave is a set of programs that run on the GPU at the same time. With n waves, the estimated time of a decode is
# longer by n times this fraction, because programs must start and must write partial outputs.
WAVE_COST = 0.35
MOST_WAVES = 4  # a schedule has at most as many programs as run in 4 waves


def best_programs(row_blocks: int, resident: int) -> int:
    """Return the number of programs of a schedule for which the estimated time of a decode is lowest.

    More programs fill the last wave better, but each further wave costs `WAVE_COST`.

    Args:
        row_blocks: number of Triton programs that the launch starts for each program of the schedule.
        resident: number of Triton programs that run on the device at the same time.
    """

    def time(programs: int) -> float:
        num_waves = cdiv(programs * row_blocks, resident)
        return num_waves / programs * (1 + WAVE_COST * num_waves)

    return min(range(1, max(1, MOST_WAVES * resident // row_blocks) + 1), key=time)


def best_splits(
    programs: int, rows: int, keys: int, resident: int, program_cost: int, combine_cost: int, rows_per_key: int
) -> int:
    """Return into how many splits to divide each request, so that the estimated time is lowest; the fewest in a tie.

    The unit of time is the time in which a program attends one key.

    Args:
        programs: number of programs that one split for each request would need.
        rows: rows of all requests.
        keys: upper bound of the keys of a request.
        resident: number of programs that run on the device at the same time.
        program_cost: time that a program needs to start, load queries and store its output.
        combine_cost: time to start the combine kernel.
        rows_per_key: rows of partial outputs that the combine kernel adds in one unit of time.
    """

    def cost(splits: int) -> int:
        waves = -(-programs * splits // resident)
        combine = combine_cost + splits * rows // rows_per_key if splits > 1 else 0
        return waves * (-(-keys // splits) + program_cost) + combine

    return min(range(1, max(1, min(keys // 64, 2 * resident)) + 1), key=cost)


@functools.lru_cache(maxsize=1024)
def prefetch_shape(
    request_rows: int,
    latent_pad: int,
    rope_pad: int,
    cache_format: CacheFormat,
    latent: int,
    rope: int,
    dtype: torch.dtype,
    facts: DeviceFacts,
    fp8_mode: str,
    many: bool,
) -> dict[str, int] | None:
    """Return the launch shape of a kernel that prefetches tiles into registers (PREFETCH); None if it cannot serve.

    The kernel needs a row block of 16 rows, one scale for the layer, latents and rope parts without padding, products
    in float16, instructions for e4m3 (or Triton's interpreter), and shared memory for two programs on an SM. If `many`
    is True, the mode `converted` also has row blocks of 32 rows.

    Args:
        request_rows: upper bound of the rows of a request.
        latent_pad: Lkv, padded to a power of two.
        rope_pad: R, padded to a power of two.
        cache_format: format of the cache.
        latent: Lkv.
        rope: R.
        dtype: dtype of the queries; float16 for queries in e4m3.
        facts: properties of the device.
        fp8_mode: mode of the decode.
        many: whether two programs on each SM have work, because there are many requests, or a schedule with many
            programs (`decode_splits` has the condition). A tile then has 64 keys, and otherwise 32 keys, because a
            program that attends few keys waits longer for a large first tile.
    """
    rows = 32 if request_rows > 16 and many and fp8_mode == CONVERTED else 16
    halves = dtype in (torch.bfloat16, torch.float16) and request_rows <= rows
    stored = cache_format.scaled and cache_format.scale_tile == 0 and cache_format.rope_dtype is None
    whole = latent == latent_pad >= LEAST_IN_FOUR_BLOCKS and rope in (0, rope_pad)
    native = facts.interpreted or facts.capability >= NATIVE_CAPABILITY
    tile = 64 if many else 32
    needed = _shared_bytes(rows, tile, 1, latent_pad + rope_pad, torch.float16, E4M3.itemsize, 1)
    in_e4m3 = multiplies_e4m3(facts.capability, rows, tile, fp8_mode)
    if halves and stored and whole and native and not in_e4m3 and RESIDENT * needed <= facts.shared:
        return {"ROWS": rows, "TILE": tile, "num_warps": 4, "num_stages": 1}
    return None


@functools.lru_cache(maxsize=1024)
def launch_shape(
    request_rows: int,
    block_size: int,
    width: int,
    dtype: torch.dtype,
    cache_element_size: int,
    capability: tuple[int, int],
    shared: int,
    column_blocks: int = 1,
    fp8_mode: str = CONVERTED,
) -> dict[str, int]:
    """Return the constants ROWS, TILE, num_warps and num_stages: the first choice that fits into shared memory.

    Args:
        request_rows: upper bound of the rows of a request.
        block_size: tokens of a cache block.
        width: columns of a cache entry; the latent and the rope part are each padded to a power of two.
        dtype: dtype of the queries and of the softmax probabilities; float16 for queries in e4m3.
        cache_element_size: bytes of an element of the cache, and of a loaded tile in shared memory. If it is less than
            the bytes of an element of the queries, shared memory also has one tile in the dtype of the queries.
        capability: compute capability of the device.
        shared: bytes of shared memory that a program may use.
        column_blocks: number of scales of a latent in a cache entry; 1 without such scales. With several column blocks,
            a tile has at most 32 keys, because each column block needs registers for its own softmax probabilities.
        fp8_mode: mode of the decode. If products are computed in e4m3, their operands are in e4m3 in shared memory too.

    Raises:
        UnsupportedConfiguration: no choice fits into shared memory.
    """
    converted = cache_element_size < dtype.itemsize
    # each shape is (rows, tile, warps, stages); the preferred shape comes first
    if dtype == torch.float32:  # Tensor Cores do not compute IEEE float32 products
        shapes = ((16, 16, 4, 2), (16, 16, 4, 1))
    elif request_rows <= 16:  # memory reads limit the speed: small tiles let two programs run on each SM
        shapes = ((16, 32, 4, 3), (16, 32, 4, 2), (16, 16, 4, 2), (16, 16, 4, 1))
    else:  # Hopper multiplies 64 rows directly from shared memory, so prefer 64 rows, even if half are unused
        shapes = ((32, 32, 8, 2), (32, 16, 8, 2), (32, 16, 8, 1))
        if capability[0] == 9:
            tile = 32 if block_size == 32 or column_blocks > 1 else 64
            shapes = ((64, tile, 8, 3 if converted else 2), *shapes)
    for rows, tile, warps, stages in shapes:
        needed = _shared_bytes(rows, tile, stages, width, dtype, cache_element_size, column_blocks)
        if multiplies_e4m3(capability, rows, tile, fp8_mode):
            needed = _shared_bytes_in_e4m3(rows, tile, stages, width, column_blocks, fp8_mode)
        if needed <= shared:
            return {"ROWS": rows, "TILE": tile, "num_warps": warps, "num_stages": stages}
    raise UnsupportedConfiguration(
        [f"triton: mla_decode has no tile for {width} columns ({dtype}) within {shared} bytes of shared memory"]
    )


def _shared_bytes(
    rows: int, tile: int, stages: int, width: int, dtype: torch.dtype, cache_element_size: int, column_blocks: int
) -> int:
    """Return the bytes of shared memory of a launch shape whose products are computed in the dtype of the queries."""
    elements, cache_elements = rows * (width + column_blocks * tile), stages * tile * width
    if cache_element_size < dtype.itemsize:
        # the tile that is multiplied was converted to `dtype`, and one tile fewer is in the dtype of the cache
        elements, cache_elements = elements + tile * width, cache_elements - tile * width
    return elements * dtype.itemsize + cache_elements * cache_element_size


def _shared_bytes_in_e4m3(rows: int, tile: int, stages: int, width: int, column_blocks: int, fp8_mode: str) -> int:
    """Return the bytes of shared memory of a launch shape whose products with the queries are computed in e4m3.

    Queries and loaded tiles have one byte for each element. The tile of values is in shared memory a second time: in
    float16 (`fp8_query`), or as transposed e4m3 numbers (`fp8_product`). The probabilities are float16 (`fp8_query`).
    For `fp8_product`, the threads exchange the probabilities in float32, before the probabilities are rounded.
    """
    values, weights = (E4M3, torch.float32) if fp8_mode == "fp8_product" else (torch.float16, torch.float16)
    copied = tile * (values.itemsize * width + weights.itemsize * rows * column_blocks)
    return E4M3.itemsize * width * (rows + stages * tile) + copied


def multiplies_e4m3(capability: tuple[int, int], rows: int, tile: int, fp8_mode: str) -> bool:
    """Return whether a decode computes products in e4m3; if False, it converts e4m3 numbers before the products."""
    in_e4m3 = capability >= NATIVE_CAPABILITY and (
        rows >= WARP_GROUP_ROWS or capability[0] not in CONVERTING_GENERATIONS
    )
    return fp8_mode != CONVERTED and in_e4m3 and tile >= E4M3_COLUMNS


def column_blocks(cache_format: CacheFormat, latent: int) -> int:
    """Return the number of column blocks of a latent; the columns of a block have the same scale in a cache entry."""
    return latent // cache_format.scale_tile if cache_format.scale_tile > 0 else 1


@functools.cache  # no caller changes the result
def stored_constants(
    cache_format: CacheFormat,
    latent: int,
    rope: int,
    dtype: torch.dtype,
    facts: DeviceFacts,
    rows: int,
    tile: int,
    fp8_mode: str = CONVERTED,
    prefetch: bool = False,
) -> dict[str, int]:
    """Return the fields of `Constants` that describe the entries of a cache with e4m3 latents.

    `rows` and `tile` are the numbers ROWS and TILE of `launch_shape`, or of `prefetch_shape` if `prefetch` is True.
    """
    layout, blocks = cache_format.layout(latent, rope), column_blocks(cache_format, latent)
    in_e4m3 = not facts.interpreted and multiplies_e4m3(facts.capability, rows, tile, fp8_mode)
    least = 4 * E4M3_COLUMNS if in_e4m3 else LEAST_IN_FOUR_BLOCKS
    if (
        blocks == 1
        and (rows == 16 or prefetch or in_e4m3)
        and dtype != torch.float32
        and next_power_of_2(latent) >= least
    ):
        blocks = 4
    return {
        "E4M3": True,
        "NATIVE": facts.capability >= NATIVE_CAPABILITY and not facts.interpreted,
        "PINNED": dtype != torch.float32 and not facts.interpreted,
        "HALF": dtype == torch.bfloat16 and rows < WARP_GROUP_ROWS,
        "BLOCKS": blocks,
        "SCALE_TILE": cache_format.scale_tile,
        "SCALE_COLUMN": layout.scales,
        "ROPE_COLUMN": layout.rope,
        "ROPE_E4M3": (cache_format.rope_dtype or cache_format.storage_dtype) == E4M3,
        "Q_E4M3": fp8_mode != CONVERTED,
        "P_E4M3": fp8_mode == "fp8_product",
        "E4M3_DOTS": in_e4m3,
    }
