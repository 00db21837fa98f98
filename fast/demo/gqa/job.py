"""The job of the main job for grouped-query attention: options, scales, and the loop that serves."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import torch

from reference.interfaces import CONVERTED, CacheFormat, calibrate_kv_scales, check
from reference.interfaces.gqa import (
    AttentionType,
    GQAConfig,
    check_key_value_block_size,
    check_key_value_format,
    checkpoint_key_value_scales,
    group_layers,
)

from ..job import Job
from .serving import GQAServingLoop


@dataclass(eq=False)
class GQAJob(Job):
    """The checked options and the loaded checkpoint, for grouped-query attention.

    `Job` explains the attributes and the methods. `config` is a tuple with the configs of the layers that differ.
    `kv_scales` has a pair for each layer with a cache of its own: the scale of its keys and the scale of its values.
    """

    MODEL = "tiny-gqa"
    NOTE = "the weights of this model are random, so the generated texts have no meaning"

    @staticmethod
    def check_options(args: argparse.Namespace) -> None:
        """Check the block size and the fp8 mode."""
        check(args.fp8_mode == CONVERTED, "--fp8-mode", f"{CONVERTED} for --family gqa", args.fp8_mode)
        check_key_value_block_size("--block-size", args.block_size)

    @staticmethod
    def read_config(hf_config: Any) -> tuple[GQAConfig, ...]:
        """Return the configs of the model's layers, each config once."""
        first = GQAConfig.from_hf(hf_config)
        kind = first.attention_type
        check(kind is AttentionType.DECODER, "--model", "a causal language model", f"attention type {kind.value}")
        # These layers of Llama 4 scale a query by its index in a row, but the job packs all requests into one row.
        tuned = getattr(hf_config, "attn_temperature_tuning", False)
        check(not tuned, "--model", "a model that takes the positions of tokens from position_ids",
              f"{hf_config.model_type} with attn_temperature_tuning")  # fmt: skip
        # the names with which `kv_sharing_layer` names a layer
        names = {f"layers.{layer}.self_attn": layer for layer in range(hf_config.num_hidden_layers)}
        return tuple(group_layers({name: GQAConfig.from_hf(hf_config, layer) for name, layer in names.items()}))

    def layer_configs(self) -> list[GQAConfig]:
        """Return the config of each layer."""
        hf_config = self.model.config
        return [GQAConfig.from_hf(hf_config, layer) for layer in range(hf_config.num_hidden_layers)]

    @staticmethod
    def check_format(cache_format: CacheFormat, config: tuple[GQAConfig, ...]) -> None:
        """Raise ValueError if caches of the model cannot have this format."""
        check_key_value_format(cache_format)

    @torch.inference_mode()
    def choose_scales(self) -> None:
        """Set the scales of keys and values for the cache of each layer, if the format of the caches has such scales.

        Both packages get the same scales, so that they store the same numbers. A scale comes from the checkpoint, or
        from a calibration on the prompts if the checkpoint has no such scale for the layer.
        """
        from ...integrations.transformers import gqa_layers, restore
        from ...integrations.transformers.gqa.models import attention_modules

        if not self.cache_format.layer_scale:
            return
        stored = {name: checkpoint_key_value_scales(each) for name, each in attention_modules(self.model).items()}
        self.install(list(self.packages)[-1], cache_format="compute_dtype", kv_scales=None)
        try:
            with calibrate_kv_scales(gqa_layers(self.model)) as scales:
                for ids in self.prompt_ids:
                    self.model(torch.tensor([ids], device=self.device), use_cache=False)
        finally:
            restore(self.model)
        self.kv_scales = {
            name: tuple(
                found if scale is None else float(scale)
                for scale, found in zip(stored[name], (scales[name], scales.cached_values[name]), strict=True)
            )
            for name in scales
        }

    def install(self, name: str, **changes: Any) -> None:
        """Let the model compute its attention with one of the packages, until `restore`; see `Job.install`."""
        from ...integrations.transformers import use_attention

        use_attention(self.model, ops=self.packages[name], **{**self.patch_options(name), **changes})

    def options_to_read_the_cache(self, num_tokens: int) -> dict[str, Any]:
        """Return no options, because layers of this family attend the cache in every step."""
        return {}

    def patch_options(self, name: str) -> dict[str, Any]:
        """Return the keyword arguments of `use_attention` for one package."""
        options = {
            "block_size": self.args.block_size,
            "cache_format": self.cache_format,
            "kv_scales": self.kv_scales,
        }
        if name == "fast" and self.args.backend is not None:
            options["backend"] = self.args.backend
        return options

    def make_loop(self, name: str, prompt_ids: list[list[int]], max_new_tokens: int) -> GQAServingLoop:
        """Return a serving loop with these prompts in its queue, and with a cache that has room for all prompts."""
        from ...integrations.transformers import gqa_layers
        from ...integrations.transformers.gqa.options import planning_options

        block, layers = self.args.block_size, gqa_layers(self.model)
        loop = GQAServingLoop(
            self.model,
            layers,
            self.packages[name],
            num_blocks=sum(-(-(len(ids) + max_new_tokens) // block) for ids in prompt_ids),
            block_size=block,
            max_num_seqs=len(prompt_ids),
            token_budget=self.args.token_budget,
            eos=self.eos,
            planning=planning_options(self.packages[name], layers),
        )
        for ids in prompt_ids:
            loop.add(ids, max_new_tokens)
        return loop
