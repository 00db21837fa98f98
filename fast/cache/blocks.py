"""Copy whole blocks, within paged caches or from one cache to another."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from reference.interfaces import (
    check_block_mapping,
    check_cache,
    check_equal_scales,
    check_readable,
    check_swap,
    check_tensor,
    check_type,
)

from .. import backends
from ..backends import BackendChoice


def copy_blocks(
    kv_caches: list[Shaped[Tensor, "num_blocks block_size columns"]],
    block_mapping: Int64[Tensor, "pairs 2"],
    *,
    backend: BackendChoice = None,
) -> None:
    """Copy whole blocks within each cache, bit for bit, for example for copy on write.

    Args:
        kv_caches: one cache per layer, all with the same number of blocks.
        block_mapping: [pairs, 2], (source block, target block).
        backend: name of a backend, mapping from op to backend name, or None for an automatic choice (`fast.backends`).

    Raises:
        ValueError: shapes, dtypes or devices do not match. For CPU tensors also: a block is outside the cache, is
            written twice, or is both read and written. Nothing has been written when the error is raised.
        UnsupportedConfiguration: no backend that `backend` allows can serve the call.
    """
    check_tensor("block_mapping", block_mapping, ("pairs", 2), (torch.int64,))
    check_readable("block_mapping", block_mapping)
    check_type("kv_caches", kv_caches, (list, tuple), "a list of caches")
    for kv_cache in kv_caches:
        check_cache(kv_cache)
        check_readable("kv_caches", kv_cache)
    if kv_caches:
        chosen = backends.select(backends.copy_request("copy_blocks", kv_caches[0]), backend)
        torch.ops.mla_twins.copy_blocks(kv_caches, block_mapping, chosen.name)


@torch.library.custom_op(
    "mla_twins::copy_blocks",
    mutates_args=("kv_caches",),
    schema="(Tensor(a!)[] kv_caches, Tensor block_mapping, str backend) -> ()",
)
def _copy_blocks(kv_caches, block_mapping, backend):
    if block_mapping.device.type == "cpu":
        for kv_cache in kv_caches:
            check_block_mapping(block_mapping, kv_cache.shape[0], kv_cache.shape[0], same_cache=True)
    backends.kernel(backend, "copy_blocks")(kv_caches, block_mapping)


@_copy_blocks.register_fake
def _(kv_caches, block_mapping, backend):
    return None


def swap_blocks(
    source: Shaped[Tensor, "source_blocks block_size columns"],
    target: Shaped[Tensor, "target_blocks block_size columns"],
    block_mapping: Int64[Tensor, "pairs 2"],
    source_scale: Float[Tensor, ""] | None = None,
    target_scale: Float[Tensor, ""] | None = None,
    *,
    backend: BackendChoice = None,
) -> None:
    """Copy whole blocks from one cache into another, bit for bit, on the same or another device.

    Args:
        source: cache that is read.
        target: cache that is written, with the block size, entry width and dtype of `source`.
        block_mapping: [pairs, 2], (source block, target block).
        source_scale: float32 scale of the source cache, if its format has one. The function compares the values of the
            two scales, so the host waits if a scale is on a GPU.
        target_scale: float32 scale of the target cache; it must equal `source_scale`.
        backend: name of a backend, mapping from op to backend name, or None for an automatic choice (`fast.backends`).

    Raises:
        ValueError: the caches or their scales do not match. For CPU tensors also: a block is outside its cache or is
            written twice. Nothing has been written when the error is raised.
        UnsupportedConfiguration: no backend that `backend` allows can serve the call.
    """
    check_swap(source, target, block_mapping)
    check_equal_scales(source_scale, target_scale)
    served = target if source.device.type == "cpu" else source  # between CPU and GPU, the backend of the GPU copies
    chosen = backends.select(backends.copy_request("swap_blocks", served), backend)
    torch.ops.mla_twins.swap_blocks(source, target, block_mapping, chosen.name)


@torch.library.custom_op(
    "mla_twins::swap_blocks",
    mutates_args=("target",),
    schema="(Tensor source, Tensor(a!) target, Tensor block_mapping, str backend) -> ()",
)
def _swap_blocks(source, target, block_mapping, backend):
    if block_mapping.device.type == "cpu":
        same_cache = source.data_ptr() == target.data_ptr()
        check_block_mapping(block_mapping, source.shape[0], target.shape[0], same_cache)
    backends.kernel(backend, "swap_blocks")(source, target, block_mapping)


@_swap_blocks.register_fake
def _(source, target, block_mapping, backend):
    return None
