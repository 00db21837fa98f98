"""Paged latent cache of a padded batch, as the layers of a `DynamicCache` of transformers.

A padded batch has B rows. The real tokens of a row are stored in order and without gaps; padding tokens are not stored.
Each row has W blocks: row b owns the blocks [b W, (b + 1) W). Each layer has its own cache, [B W, block_size, columns].

All layers share one record (`BatchRecord`) of the number of cached tokens of each row. The record changes only after a
forward of the model has succeeded. If a forward raises, the recorded tokens are therefore unchanged. Entries that this
forward wrote lie behind the recorded tokens, and no later call reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
from jaxtyping import Bool, Int32, Shaped
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DynamicCache, DynamicLayer

from reference.interfaces import check

from .models import CacheEntry


class BatchRecord:
    """Number of cached tokens, mask and blocks of each row of a padded batch; all tensors are on the CPU.

    Attributes:
        block_size: tokens of a block.
        rows: B, number of batch rows.
        length: number of tokens of each row including padding; transformers calls this number the length of the cache.
        lens: [B] int32, real tokens of each row.
        mask: [B, length], True for real tokens; None if there is no padding.
        width: W, number of blocks of a row.
        block_table: [B, W] int32, block ids of each row.
    """

    def __init__(self, block_size: int):
        self.block_size = block_size
        self.clear()

    def clear(self) -> None:
        """Reset the record to an empty batch without rows."""
        self.rows, self.length, self.width = 0, 0, 0
        self.lens: Int32[Tensor, " B"] = torch.zeros(0, dtype=torch.int32, device="cpu")
        self.mask: Bool[Tensor, "B length"] | None = None
        self.block_table: Int32[Tensor, "B W"] = torch.zeros(0, 0, dtype=torch.int32, device="cpu")

    def reserve(self, rows: int, tokens: int) -> Int32[Tensor, "B W"]:
        """Return a block table [rows, W] with room for `tokens` real tokens in each row.

        If W has to grow, it at least doubles, so that caches are rarely copied.
        """
        width = self.width if rows == self.rows else 0
        needed = -(-tokens // self.block_size)
        if needed > width:
            width = max(needed, 2 * width)
        self.width = width
        if self.block_table.shape != (rows, width):
            self.block_table = torch.arange(rows * width, dtype=torch.int32, device="cpu").view(rows, width)
        return self.block_table

    def commit(self, length: int, lens: Int32[Tensor, " B"], mask: Bool[Tensor, "B length"] | None) -> None:
        """Record which tokens are cached, after a forward has succeeded."""
        self.rows, self.length, self.lens, self.mask = lens.shape[0], length, lens, mask

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens of each row, padding included; only counts change, no stored entry moves."""
        mask = None if self.mask is None else self.mask[:, :length]
        lens = torch.full_like(self.lens, length) if mask is None else mask.sum(1, dtype=torch.int32)
        self.commit(length, lens, None if mask is None or mask.all() else mask)

    def select(self, index: Tensor) -> None:
        """Keep the rows that a tensor of indices or a bool mask selects; an index may occur several times."""
        mask = None if self.mask is None else self.mask[index]
        self.commit(self.length, self.lens[index], None if mask is None or mask.all() else mask)


class PagedCacheLayer(CacheLayerMixin):
    """The paged cache of one layer, as a cache layer of transformers.

    The attention of this project writes and reads the blocks. transformers calls the methods of this class, to count
    tokens and to reorder, crop or repeat rows.

    Args:
        record: record of the batch, shared by all layers of a cache.
        leads: True for exactly one layer of a cache, which updates the shared record. transformers calls `crop` and
            `reorder_cache` on every layer, but the record must change only once.

    Attributes:
        served_by: name of the function whose models write to this cache.
        block_axis: axis of `kv_cache` that counts the blocks.
        kv_cache: the cache, with B W blocks; None before the first step.
        rows: B, number of rows for which `kv_cache` has blocks.
    """

    is_sliding = False
    is_croppable = True
    is_compileable = False
    served_by = ""
    block_axis = 0

    def __init__(self, record: BatchRecord, leads: bool):
        super().__init__()
        self.record, self.leads = record, leads
        self.kv_cache: Tensor | None = None
        self.rows = 0

    def _grow(self, rows: int, width: int, allocate: Callable[[int], Tensor]) -> Tensor:
        """Return a cache for `rows` rows of `width` blocks; copy a cache with too few blocks into a larger one.

        Args:
            rows: B. If it differs from the rows of the cache, the caller has checked that the record is empty, so that
                no cached token is lost.
            width: W.
            allocate: function that returns a cache with a number of blocks.
        """
        old, axis = self.kv_cache if rows == self.rows else None, self.block_axis
        if old is not None and old.shape[axis] >= rows * width:
            return old
        with torch.inference_mode(False):  # the cache may be used after the caller's inference mode ends
            new = allocate(rows * width)
            if old is not None:
                before = old.unflatten(axis, (rows, -1))
                new.unflatten(axis, (rows, width)).narrow(axis + 1, 0, before.shape[axis + 1]).copy_(before)
        self.kv_cache, self.rows, self.is_initialized = new, rows, True
        return new

    def _take(self, index: Tensor, rows: int) -> None:
        """Replace the cache by a copy of some of its rows; a row may be copied several times."""
        if self.kv_cache is None or self.record.length == 0:
            return
        axis = self.block_axis
        with torch.inference_mode(False):
            blocks = self.kv_cache.unflatten(axis, (self.rows, -1))
            self.kv_cache = blocks.index_select(axis, index.to(blocks.device)).flatten(axis, axis + 1)
        self.rows = rows
        if self.leads:
            self.record.select(index.cpu())

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace row b by row `beam_idx[b]`, for each row b."""
        self._take(beam_idx, beam_idx.shape[0])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times; the copies of a row are consecutive."""
        self._take(torch.arange(self.rows, device="cpu").repeat_interleave(repeats), self.rows * repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows that `indices` (integers or a bool mask) selects."""
        if self.kv_cache is not None:
            chosen = torch.arange(self.rows, device="cpu")[indices.cpu()]
            self._take(chosen, chosen.shape[0])

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Shorten the cache as `DynamicLayer.crop` of the installed transformers does, with the same errors.

        The method crops a `DynamicLayer` without data (device "meta") and reads its new length.
        """
        if not self.leads:
            return
        stock = DynamicLayer()
        stock.keys = stock.values = torch.empty(1, 1, self.record.length, 1, device="meta")
        stock.is_initialized = self.record.length > 0
        stock.crop(int(tokens_to_remove))
        if stock.keys.shape[-2] < self.record.length:
            self.record.crop(stock.keys.shape[-2])

    def reset(self) -> None:
        """Release the cache and reset the record."""
        self.kv_cache, self.rows, self.is_initialized = None, 0, False
        if self.leads:
            self.record.clear()

    def get_seq_length(self) -> int:
        """Return the number of cached tokens of a row, including padding."""
        return self.record.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys after a step of `query_length` tokens, and 0, the offset of the first key."""
        return self.record.length + query_length, 0

    def get_max_length(self) -> int:
        """Return -1, which means that the length has no limit."""
        return -1

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Raise TypeError: only a model under this project's attention can write to this cache."""
        raise TypeError(f"past_key_values: expected a cache of this model, got a cache of {self.served_by}")

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Raise TypeError: only a model under this project's attention can write to this cache."""
        self.lazy_initialization(key_states, value_states)

    def offload(self) -> None:
        """Raise TypeError: this cache cannot be moved to another device."""
        raise TypeError("past_key_values: expected a cache that stays on its device, got an offloaded cache")

    prefetch = offload


class LatentCacheLayer(PagedCacheLayer):
    """The paged latent cache of one layer of a model under `use_mla`; `PagedCacheLayer` explains the arguments.

    Attributes:
        scale: scale of the cached tokens; None if the cache format has no such scale.
    """

    served_by = "use_mla"
    kv_cache: Shaped[Tensor, "num_blocks block_size columns"] | None

    def __init__(self, record: BatchRecord, leads: bool):
        super().__init__(record, leads)
        self.scale: Tensor | None = None

    def reserve(
        self, ops: ModuleType, rows: int, width: int, entry: CacheEntry
    ) -> Shaped[Tensor, "num_blocks block_size columns"]:
        """Return a cache for `rows` rows of `width` blocks; copy a cache with too few blocks into a larger one.

        Args:
            ops: package that allocates.
            rows: B.
            width: W.
            entry: the cache that the layer needs.

        Raises:
            ValueError: the existing cache has entries of another width or dtype, or tokens with another scale.
        """
        columns, dtype, device = entry.columns, entry.dtype, entry.device
        if (old := self.kv_cache) is not None and rows == self.rows:
            check(old.shape[2] == columns, "past_key_values", f"entries of {columns} elements", old.shape[2])
            check(old.dtype == dtype, "past_key_values", f"entries in {dtype}", old.dtype)
            self._check_scale(entry.scale)
        self.scale = entry.scale
        block_size = self.record.block_size
        return self._grow(rows, width, lambda blocks: ops.allocate_kv_cache(blocks, block_size, columns, dtype, device))

    def reset(self) -> None:
        """Release the cache and reset the record."""
        super().reset()
        self.scale = None

    def _check_scale(self, scale: Tensor | None) -> None:
        """Check that a layer has the scale of the cached tokens.

        The check compares the values of the two scales only if tokens are cached, and if `scale` is another tensor than
        the scale with which these tokens were stored.
        """
        if scale is self.scale or self.record.length == 0:
            return
        values = [None if each is None else float(each) for each in (self.scale, scale)]
        check(values[0] == values[1], "past_key_values", f"tokens stored with the scale {values[1]}", values[0])


def latent_layers(past_key_values: object, num_layers: int, block_size: int) -> list[LatentCacheLayer]:
    """Return the `LatentCacheLayer`s of a DynamicCache, or new layers if it is empty; do not change the cache.

    Raises:
        ValueError: the cache is not a DynamicCache, moves its data between devices (offloading), holds tokens in layers
            of another class, or has another number of layers or another block size.
    """
    check(type(past_key_values) is DynamicCache, "past_key_values", "a DynamicCache", type(past_key_values).__name__)
    check(not past_key_values.offloading, "past_key_values", "a DynamicCache that stays on its device",
          "a DynamicCache with offloading")  # fmt: skip
    layers = past_key_values.layers
    if layers and all(type(layer) is LatentCacheLayer for layer in layers):
        check(len(layers) == num_layers, "past_key_values", f"{num_layers} layers", len(layers))
        held = layers[0].record.block_size
        check(held == block_size, "past_key_values", f"blocks of {block_size} tokens", held)
        return layers
    for index, layer in enumerate(layers):
        check(type(layer) is DynamicLayer, "past_key_values", "a DynamicCache of stock DynamicLayers",
              f"a {type(layer).__name__} at layer {index}")  # fmt: skip
        tokens = 0 if layer.keys is None or layer.keys.numel() == 0 else layer.keys.shape[-2]
        check(tokens == 0, "past_key_values", "an empty DynamicCache or a DynamicCache of use_mla",
              f"{tokens} tokens in a stock layer")  # fmt: skip
    check(len(layers) in (0, num_layers), "past_key_values", f"{num_layers} layers", len(layers))
    record = BatchRecord(block_size)
    return [LatentCacheLayer(record, leads=index == 0) for index in range(num_layers)]
