"""Write keys and values into the paged key/value cache."""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from reference.interfaces import COMPUTE_FORMAT, CacheFormat

from ....backends import launch
from ...device import device_of
from ...integers import next_power_of_2
from ..cache_rows import as_integers
from ..fp8 import converts_natively, float32_to_e4m3

ELEMENTS = 4096  # elements of a token's keys that a program converts or copies at a time


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    cache_format: CacheFormat = COMPUTE_FORMAT,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Write keys [T, Nkv, Dh] and values [T, Nkv, Dh] into the cache [2, num_blocks, block_size, Nkv, Dh].

    `slot_mapping` [>= T] has the slot of each token. A token whose slot lies outside the cache, such as -1, is not
    written. Numbers in the dtype of the cache are copied bit for bit.
    """
    num_blocks, block_size, kv_heads, width = kv_cache.shape[1:]
    tokens = key.shape[0]
    if tokens == 0 or num_blocks == 0:
        return
    if cache_format.scaled:
        cache = kv_cache.view(torch.uint8)
    else:
        key, value, cache = as_integers(key, value, kv_cache)
    k_cache, v_cache = cache.unbind(0)
    columns = next_power_of_2(width)
    heads = min(next_power_of_2(kv_heads), max(1, ELEMENTS // columns))
    with device_of(kv_cache):
        launch(
            _key_value_write_kernel, (tokens, 2),
            key, value, k_cache, v_cache, slot_mapping, k_scale, v_scale, num_blocks, *key.stride(), *value.stride(),
            *k_cache.stride(), slot_mapping.stride(0), KV_HEADS=kv_heads, DIM=width, COLUMNS=columns, HEADS=heads,
            BLOCK_SIZE=block_size, E4M3=cache_format.scaled, NATIVE=converts_natively(kv_cache.device), num_warps=4,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=["num_blocks"],
    do_not_specialize_on_alignment=["slot_mapping", "k_scale", "v_scale"],
)  # fmt: skip
@no_type_check  # otherwise the tests' type checker wraps the kernel, and Triton's interpreter finds no module globals
def _key_value_write_kernel(
    key, value, k_cache, v_cache, slot_mapping, k_scale, v_scale, num_blocks,
    key_token_stride, key_head_stride, key_column_stride, value_token_stride, value_head_stride, value_column_stride,
    block_stride, entry_stride, head_stride, column_stride, slot_stride,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr, HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    E4M3: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Write the keys (program axis 1 is 0) or the values (1) of one token, HEADS heads at a time."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token * slot_stride)
    if (slot < 0) | (slot >= num_blocks.to(tl.int64) * BLOCK_SIZE):
        return
    place = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * entry_stride
    if tl.program_id(1) == 0:
        _write_token(key + token * key_token_stride, k_cache + place, k_scale, key_head_stride, key_column_stride,
                     head_stride, column_stride, KV_HEADS, DIM, COLUMNS, HEADS, E4M3, NATIVE)  # fmt: skip
    else:
        _write_token(value + token * value_token_stride, v_cache + place, v_scale, value_head_stride,
                     value_column_stride, head_stride, column_stride, KV_HEADS, DIM, COLUMNS, HEADS, E4M3,
                     NATIVE)  # fmt: skip


@triton.jit
@no_type_check
def _write_token(
    source, target, scale, source_head_stride, source_column_stride, head_stride, column_stride,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr, HEADS: tl.constexpr, E4M3: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """Write the numbers [Nkv, Dh] of one token to its place in the cache."""
    columns = tl.arange(0, COLUMNS).to(tl.int64)
    for first in range(0, KV_HEADS, HEADS):
        heads = (first + tl.arange(0, HEADS)).to(tl.int64)
        inside = (heads < KV_HEADS)[:, None] & (columns < DIM)[None, :]
        offsets = heads[:, None] * source_head_stride + columns[None, :] * source_column_stride
        numbers = tl.load(source + offsets, mask=inside, other=0)
        if E4M3:
            numbers = float32_to_e4m3(tl.div_rn(numbers.to(tl.float32), tl.load(scale)), NATIVE)
        offsets = heads[:, None] * head_stride + columns[None, :] * column_stride
        tl.store(target + offsets, numbers, mask=inside)
