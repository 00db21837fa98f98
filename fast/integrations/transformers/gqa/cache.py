"""Paged key/value cache of a padded batch, as the layers of a `DynamicCache` of transformers.

As for the latent cache (`fast.integrations.transformers.cache`), a padded batch has B rows of W blocks, the real tokens
of a row are stored without gaps, and one record for all layers counts the cached tokens. An encoder-decoder model has
two such caches: one for the tokens of the decoder, and one for the output of the encoder, which cross attention reads.
"""

from __future__ import annotations

import operator
from types import ModuleType, TracebackType
from typing import Any, NamedTuple

import torch
from jaxtyping import Shaped
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, EncoderDecoderCache

from reference.interfaces import check

from ..cache import BatchRecord, PagedCacheLayer

# Layers of a new DynamicCache; a layer that shares the cache of another layer has a DummyLayer in some versions.
STOCK_LAYERS = tuple(
    getattr(cache_utils, name)
    for name in ("DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer")
    if hasattr(cache_utils, name)
)


class KeyValueEntry(NamedTuple):
    """The cache that an attention module needs.

    Attributes:
        num_kv_heads: Nkv, number of key/value heads.
        head_dim: Dh, dim of a head.
        dtype: dtype of the cache tensor.
        device: device of the cache tensor.
        scales: float32 scales of the keys and of the values; None if the format of the cache has no such scales.
    """

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    scales: tuple[Tensor, Tensor] | None = None


class KeyValueRecord(BatchRecord):
    """Record of a padded batch (`BatchRecord`) for key/value caches.

    Attributes:
        in_step: True while a model under `use_attention` runs. Only then a cache layer takes keys and values.
    """

    def __init__(self, block_size: int):
        super().__init__(block_size)
        self.in_step = False


class KeyValueCacheLayer(PagedCacheLayer):
    """The paged key/value cache of one layer of a model under `use_attention`.

    The attention function writes keys and values to the blocks. A layer of the model that reads the cache of another
    layer has a `KeyValueCacheLayer` without blocks.

    Attributes:
        scales: scales of the cached keys and values; None if the cache format has no scales.
    """

    served_by = "use_attention"
    block_axis = 1
    kv_cache: Shaped[Tensor, "2 num_blocks block_size Nkv Dh"] | None

    def __init__(self, record: KeyValueRecord, leads: bool):
        super().__init__(record, leads)
        self.scales: tuple[Tensor, Tensor] | None = None

    def reserve(
        self, ops: ModuleType, rows: int, width: int, entry: KeyValueEntry
    ) -> Shaped[Tensor, "2 num_blocks block_size Nkv Dh"]:
        """Return a cache for `rows` rows of `width` blocks; copy a cache with too few blocks into a larger one.

        Args:
            ops: package that allocates.
            rows: B.
            width: W.
            entry: the cache that the layer needs.

        Raises:
            ValueError: the existing cache has other heads or another dtype, or tokens with other scales.
        """
        heads, dim, dtype = entry.num_kv_heads, entry.head_dim, entry.dtype
        if (old := self.kv_cache) is not None and rows == self.rows:
            got = tuple(old.shape[3:])
            check(got == (heads, dim), "past_key_values", f"keys and values of {heads} heads of {dim} elements",
                  f"{got[0]} heads of {got[1]} elements")  # fmt: skip
            check(old.dtype == dtype, "past_key_values", f"entries in {dtype}", old.dtype)
            if self.record.length > 0:
                self._check_scales(entry.scales)
        self.scales = entry.scales
        block_size = self.record.block_size
        return self._grow(
            rows,
            width,
            lambda blocks: ops.allocate_key_value_cache(blocks, block_size, heads, dim, dtype, entry.device),
        )

    def _check_scales(self, scales: tuple[Tensor, Tensor] | None) -> None:
        """Check that the layer has the scales of the cached tokens.

        The values of two scales are compared only if they are other tensors than those with which the tokens were
        stored.
        """
        if scales is not None and self.scales is not None and all(map(operator.is_, scales, self.scales)):
            return
        wanted, got = (
            "no scales" if pair is None else f"the scales {float(pair[0])} and {float(pair[1])}"
            for pair in (scales, self.scales)
        )
        check(wanted == got, "past_key_values", f"tokens stored with {wanted}", got)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return the new keys and values unchanged; the attention function then writes them to the blocks.

        Raises:
            TypeError: the caller is not a model under `use_attention`.
        """
        if not self.record.in_step:
            self.lazy_initialization(key_states, value_states)
        return key_states, value_states

    def reset(self) -> None:
        """Release the cache and reset the record."""
        super().reset()
        self.scales = None


def key_value_layers(
    past_key_values: Cache, num_layers: int, block_size: int, argument: str = "past_key_values"
) -> list[KeyValueCacheLayer]:
    """Return the `KeyValueCacheLayer`s of a DynamicCache, or new layers if it is empty; do not change the cache.

    Args:
        past_key_values: the cache.
        num_layers: number of layers of the model that need an entry in the cache.
        block_size: tokens per block.
        argument: name of the cache in messages.

    Raises:
        ValueError: the cache is not a DynamicCache, moves its data between devices (offloading), holds tokens in layers
            of another class, or has another number of layers or another block size.
    """
    check(type(past_key_values) is DynamicCache, argument, "a DynamicCache", type(past_key_values).__name__)
    check(not past_key_values.offloading, argument, "a DynamicCache that stays on its device",
          "a DynamicCache with offloading")  # fmt: skip
    layers = past_key_values.layers
    if layers and all(type(layer) is KeyValueCacheLayer for layer in layers):
        check(len(layers) == num_layers, argument, f"{num_layers} layers", len(layers))
        held = layers[0].record.block_size
        check(held == block_size, argument, f"blocks of {block_size} tokens", held)
        return layers
    for index, layer in enumerate(layers):
        check(type(layer) in STOCK_LAYERS, argument, "a DynamicCache of stock layers",
              f"a {type(layer).__name__} at layer {index}")  # fmt: skip
        tokens = layer.get_seq_length() if isinstance(layer, DynamicLayer) else 0
        check(tokens == 0, argument, "an empty DynamicCache or a DynamicCache of use_attention",
              f"{tokens} tokens in a stock layer")  # fmt: skip
    record = KeyValueRecord(block_size)
    return [KeyValueCacheLayer(record, leads=index == 0) for index in range(num_layers)]


class OpenCache:
    """The caches of one forward: put the paged layers in place, and undo this if the forward raises.

    Args:
        past_key_values: the cache that the model got: a DynamicCache, an EncoderDecoderCache for a model with an
            encoder, or None, if the step needs no cache afterwards.
        num_layers: number of layers of the decoder.
        block_size: tokens per block.
        has_encoder: whether the model has an encoder.

    Attributes:
        record: record of the decoder's tokens.
        layers: cache layers of the decoder; None without a cache.
        cross_record: record of the encoder's tokens.
        cross_layers: cache layers of cross attention; None without a cache or without an encoder.

    Raises:
        ValueError: the cache cannot be used (`key_value_layers`).
    """

    def __init__(self, past_key_values: Cache | None, num_layers: int, block_size: int, has_encoder: bool):
        self.layers = self.cross_layers = None
        self.record, self.cross_record = KeyValueRecord(block_size), KeyValueRecord(block_size)
        self._opened: list[tuple[DynamicCache, list]] = []
        self._updated: dict | None = None
        if past_key_values is None:
            return
        if not has_encoder:
            self.layers = self._open(past_key_values, num_layers, block_size, "past_key_values")
        else:
            check(type(past_key_values) is EncoderDecoderCache, "past_key_values",
                  "an EncoderDecoderCache for a model with an encoder", type(past_key_values).__name__)  # fmt: skip
            own, cross = past_key_values.self_attention_cache, past_key_values.cross_attention_cache
            self.layers = self._open(own, num_layers, block_size, "past_key_values.self_attention_cache")
            self.cross_layers = self._open(cross, num_layers, block_size, "past_key_values.cross_attention_cache")
            self.cross_record = self.cross_layers[0].record
            self._updated = past_key_values.is_updated
            self._updated_before = dict(self._updated)
        self.record = self.layers[0].record

    def _open(self, cache: Cache, num_layers: int, block_size: int, argument: str) -> list[KeyValueCacheLayer]:
        """Return the paged layers of a cache, and remember the layers that the cache has now."""
        layers = key_value_layers(cache, num_layers, block_size, argument)
        self._opened.append((cache, layers))
        return layers

    def __enter__(self) -> OpenCache:
        self._before = [list(cache.layers) for cache, _ in self._opened]
        for cache, layers in self._opened:
            cache.layers[:] = layers
        self.record.in_step = self.cross_record.in_step = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.record.in_step = self.cross_record.in_step = False
        if kind is None:
            return
        for (cache, _), before in zip(self._opened, self._before, strict=True):
            cache.layers[:] = before
        if self._updated is not None:
            self._updated.clear()
            self._updated.update(self._updated_before)
