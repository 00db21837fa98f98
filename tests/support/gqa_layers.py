"""A layer of grouped-query attention as the step of a `DecodeGraph`, and batches for it.

The hidden state of a token has its query, key and value one after another, so an oracle knows all three.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from reference.interfaces import CommonAttentionMetadata
from reference.interfaces.gqa import GQAConfig

from .factories import integers, offsets, positions_of
from .gqa import GQABatch, poisoned_cache


def width_of(config: GQAConfig) -> int:
    """Return the width of a hidden state: N queries, Nkv keys and Nkv values of a token."""
    return (config.num_heads + 2 * config.num_kv_heads) * config.head_dim


def common_of(batch: GQABatch) -> CommonAttentionMetadata:
    """Return a batch in the form that an engine gives to a builder of plans; its last slots are those of padding."""
    return CommonAttentionMetadata.make(
        offsets([query_len for query_len, _ in batch.lens]).cpu(),
        integers(*(length for _, length in batch.lens)).cpu(),
        batch.metadata.block_table,
        batch.slot_mapping,
        batch.block_size,
    )


def hidden_of(batch: GQABatch) -> Tensor:
    """Return the hidden states of the new tokens of a batch, [T, width]."""
    tokens = sum(query_len for query_len, _ in batch.lens)
    return torch.cat([x[:tokens].flatten(1) for x in (batch.q, batch.new_k, batch.new_v)], dim=1)


def token_positions(batch: GQABatch) -> Tensor:
    """Return the position of each new token in its request, [T]."""
    return positions_of([query_len for query_len, _ in batch.lens], [length for _, length in batch.lens])


@dataclass
class GQAStep:
    """One layer over its cache as a function of hidden states.

    Attributes:
        config: config of the layer.
        layer: the layer.
        kv_cache: [2, num_blocks, block_size, Nkv, Dh].
        plans: the plans of all calls, in order.
    """

    config: GQAConfig
    layer: torch.nn.Module
    kv_cache: Tensor
    plans: list

    @classmethod
    def of(cls, ops: ModuleType, config: GQAConfig, num_blocks: int, dtype, sinks=None, block_size=16, **options):
        """Return the step of a layer of the package `ops`, with a cache in which every byte is 0xFF."""
        layer = ops.GQAAttention(config, sinks=None if sinks is None else sinks.to(dtype), **options)
        return cls(config, layer, poisoned_cache(num_blocks, block_size, config, dtype), [])

    def load(self, kv_cache: Tensor) -> None:
        """Write the blocks of another cache to the first blocks of this cache; the other blocks become NaN."""
        self.kv_cache.fill_(torch.nan)
        self.kv_cache[:, : kv_cache.shape[1]] = kv_cache

    def __call__(self, hidden_states: Tensor, positions: Tensor, plan) -> Tensor:
        """Return the outputs [T, width]: N Dh columns of the layer, then zeros."""
        heads, kv_heads, dim = self.config.num_heads, self.config.num_kv_heads, self.config.head_dim
        q, k, v = (
            x.unflatten(1, (-1, dim)) for x in hidden_states.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=1)
        )
        self.plans.append(plan)
        out = self.layer(q, k, v, self.kv_cache, plan).flatten(1)
        return torch.nn.functional.pad(out, (0, hidden_states.shape[1] - out.shape[1]))
