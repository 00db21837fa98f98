"""Loop that serves requests with a paged key/value cache for each layer, in batches of decodes and prefills.

`BatchLoop` (fast.demo.batch_loop) explains how the loop schedules.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import ModuleType
from typing import Any

from torch import nn

from reference.interfaces import CommonAttentionMetadata, check, check_type
from reference.interfaces.gqa import GQAConfig, check_key_value_block_size, group_layers

from ...backends import check_one_set_of_parameters
from ..batch_loop import BatchLoop, StepPlan, check_ops, read_eos

NEEDED = ("allocate_key_value_cache", "build_gqa_metadata", "slot_mapping", "split_decodes_and_prefills")


class GQAServingLoop(BatchLoop):
    """Loop that serves requests with grouped-query attention.

    Args:
        model: causal language model under `fast.integrations.transformers.use_attention`. The caches have the device of
            the model, and the cache format of its layers.
        layers: the layers of the model by name (`fast.integrations.transformers.gqa_layers`).
        ops: module that plans and allocates: `reference`, `fast`, or another module with the same functions.
        num_blocks: blocks of the cache of each layer.
        block_size: tokens per block, a multiple of 16.
        max_num_seqs: largest number of requests that run at the same time.
        token_budget: largest number of tokens in one step; at least `max_num_seqs`, so that every running request can
            decode.
        eos: token or tokens that end a request, or None.
        block_order: order in which blocks are first used; None means the ascending order.
        planning: further keyword arguments of `ops.build_gqa_metadata`, such as `backend`.

    Attributes:
        groups: config of each group of layers that can use one plan, and the names of its layers.
        kv_caches: cache of each layer by name; no cache for a layer that reads the cache of another layer.

    Raises:
        ValueError: a number is too small, or an argument is invalid. Nothing has been allocated then.
        UnsupportedConfiguration: layers differ that a backend with one set of parameters would serve. Nothing has been
            allocated then.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[str, nn.Module],
        ops: ModuleType,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        token_budget: int,
        eos: int | Collection[int] | None = None,
        block_order: Sequence[int] | None = None,
        planning: Mapping[str, Any] | None = None,
    ):
        check_type("model", model, nn.Module, "a model under use_attention")
        check_ops(ops, NEEDED)
        check_type("layers", layers, Mapping)
        check(len(layers) > 0, "layers", "at least one layer", "none")
        check_key_value_block_size("block_size", block_size)
        groups = group_layers(layers)
        super().__init__(model, ops, num_blocks, block_size, max_num_seqs, token_budget, read_eos(eos), block_order)
        self.groups: dict[GQAConfig, tuple[str, ...]] = groups
        self._planning = {} if planning is None else dict(planning)
        if "backend" in self._planning:  # `reference` has no backends
            backend = self._planning["backend"]
            check_one_set_of_parameters(layers, self.device, model.dtype, block_size, backend)
        self.kv_caches = {}
        for name, layer in layers.items():
            config = layer.config
            if config.kv_sharing_layer is None:
                dtype = layer.cache_format.dtype_for(model.dtype)
                self.kv_caches[name] = ops.allocate_key_value_cache(
                    num_blocks, block_size, config.num_kv_heads, config.head_dim, dtype, self.device
                )
        self._formats = {config: layers[names[0]].cache_format for config, names in groups.items()}
        self._block_bytes = sum(cache[:, 0].numel() * cache.element_size() for cache in self.kv_caches.values())

    def _plan(self, common: CommonAttentionMetadata) -> StepPlan:
        plans = {}
        for config, names in self.groups.items():
            plan = self.ops.build_gqa_metadata(
                common, self.block_size, config, cache_format=self._formats[config], dtype=self.model.dtype,
                **self._planning,
            )  # fmt: skip
            plans.update(dict.fromkeys(names, plan))
        # not the counts of a plan: with attention chunks, these are counts of virtual requests
        split = self.ops.split_decodes_and_prefills(common, 1)
        arguments = {"gqa_metadata": plans, "gqa_kv_caches": self.kv_caches}
        return StepPlan(arguments, split.num_decodes, split.num_prefills, 0)
