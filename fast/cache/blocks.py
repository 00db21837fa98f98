"""Copy whole blocks, within paged caches or from one cache to another."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from reference.interfaces import (
    cache_halves,
    check_block_cache,
    check_block_mapping,
    check_equal_scales,
    check_readable,
    check_swap,
    check_tensor,
    check_type,
)

from .. import backends
from ..backends import BackendChoice


def copy_blocks(
    kv_caches: list[Shaped[Tensor, "num_blocks block_size columns"] | Shaped[Tensor, "2 num_blocks block_size Nkv Dh"]],
    block_mapping: Int64[Tensor, "pairs 2"],
    *,
    backend: BackendChoice = None,
) -> None:
    """Copy whole blocks within each cache, bit for bit, for example for copy on write.

    Args:
        kv_caches: one cache per layer, all with the same number of blocks: latent caches, or key/value caches with any
            strides, whose keys and values are copied.
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
        check_block_cache(kv_cache)
    if kv_caches:
        chosen = backends.select(backends.copy_request("copy_blocks", kv_caches[0]), backend)
        views = [view for kv_cache in kv_caches for (view,) in _views_of(kv_cache)]
        _COPIES(views, block_mapping, chosen.name)


def _views_of(*caches: Tensor) -> list[tuple[Tensor, ...]]:
    """Return views [num_blocks, rows, columns] that together have all entries of each cache.

    A latent cache is one view. A key/value cache has one view for the keys and one for the values, if the strides
    allow such views. Otherwise each KV head has a view of its own.

    Args:
        caches: caches whose shapes differ in the number of blocks alone; they may have different strides.

    Returns:
        For each view of one cache, the views of all caches in its place.
    """
    views: list[tuple[Tensor, ...]] = []
    for halves in zip(*(cache_halves(each) for each in caches), strict=True):
        views += [halves] if halves[0].dim() == 3 else _views_of_entries(halves)
    return views


def _views_of_entries(halves: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
    """Return `_views_of` for tensors [num_blocks, block_size, Nkv, Dh]."""
    for views in (halves, tuple(half.transpose(1, 2) for half in halves)):  # memory order NHD or HND
        if all(view.stride(1) == view.shape[2] * view.stride(2) for view in views):
            return [tuple(view.flatten(1, 2) for view in views)]
    return [tuple(half[:, :, head] for half in halves) for head in range(halves[0].shape[2])]


def _launch_copy(kv_caches, block_mapping, backend):
    if block_mapping.device.type == "cpu":
        for kv_cache in kv_caches:
            check_block_mapping(block_mapping, kv_cache.shape[0], kv_cache.shape[0], same_cache=True)
    backends.kernel(backend, "copy_blocks")(kv_caches, block_mapping)


_copy_blocks = torch.library.custom_op(
    "mla_twins::copy_blocks",
    _launch_copy,
    mutates_args=("kv_caches",),
    schema="(Tensor(a!)[] kv_caches, Tensor block_mapping, str backend) -> ()",
)


_COPIES = backends.DirectCalls(torch.ops.mla_twins.copy_blocks, _launch_copy, mutates=(0,))


@_copy_blocks.register_fake
def _(kv_caches, block_mapping, backend):
    return None


def swap_blocks(
    source: Shaped[Tensor, "source_blocks block_size columns"] | Shaped[Tensor, "2 source_blocks block_size Nkv Dh"],
    target: Shaped[Tensor, "target_blocks block_size columns"] | Shaped[Tensor, "2 target_blocks block_size Nkv Dh"],
    block_mapping: Int64[Tensor, "pairs 2"],
    source_scale: Float[Tensor, "*halves"] | None = None,
    target_scale: Float[Tensor, "*halves"] | None = None,
    *,
    backend: BackendChoice = None,
) -> None:
    """Copy whole blocks from one cache into another, bit for bit, on the same or another device.

    If the caches are on two devices, the host waits until the blocks are copied. Put the cache of the host in pinned
    memory (`Tensor.pin_memory`): the blocks are then copied directly, and every long run of consecutive blocks is one
    copy. Blocks in other host memory go through a buffer, which takes longer.

    Args:
        source: cache that is read: a latent cache or a key/value cache.
        target: cache that is written, in the dtype of `source` and with the same shape except for the number of blocks.
            The strides may differ.
        block_mapping: [pairs, 2], (source block, target block).
        source_scale: float32 scale of the source cache, if its format has one: [] for a latent cache, [2] for a
            key/value cache (the scales of keys and of values). The function compares the scales of both caches, so the
            host waits if a scale is on a GPU. A cache does not contain its scale. If both scales are None, nothing is
            compared, and the caller must ensure that both caches have the same scale.
        target_scale: float32 scale of the target cache; it must equal `source_scale`.
        backend: name of a backend, mapping from op to backend name, or None for an automatic choice (`fast.backends`).

    Raises:
        ValueError: the caches or their scales do not match; a scale is not finite and positive. For CPU tensors also: a
            block is outside its cache or is written twice. Nothing has been written when the error is raised.
        UnsupportedConfiguration: no backend that `backend` allows can serve the call.
    """
    check_swap(source, target, block_mapping)
    check_equal_scales(source_scale, target_scale, source)
    served = target if source.device.type == "cpu" else source  # between CPU and GPU, the backend of the GPU copies
    chosen = backends.select(backends.copy_request("swap_blocks", served), backend)
    for read, written in _views_of(source, target):
        _SWAPS(read, written, block_mapping, chosen.name)


def _launch_swap(source, target, block_mapping, backend):
    if block_mapping.device.type == "cpu":
        same_cache = source.data_ptr() == target.data_ptr()
        check_block_mapping(block_mapping, source.shape[0], target.shape[0], same_cache)
    backends.kernel(backend, "swap_blocks")(source, target, block_mapping)


_swap_blocks = torch.library.custom_op(
    "mla_twins::swap_blocks",
    _launch_swap,
    mutates_args=("target",),
    schema="(Tensor source, Tensor(a!) target, Tensor block_mapping, str backend) -> ()",
)


_SWAPS = backends.DirectCalls(torch.ops.mla_twins.swap_blocks, _launch_swap, mutates=(1,))


@_swap_blocks.register_fake
def _(source, target, block_mapping, backend):
    return None
