"""The forwards that `use_attention` puts in place of the forwards of an encoder and a decoder.

They check the arguments of a call, refuse unsupported calls, and plan the step once for all layers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.masking_utils import find_packed_sequence_indices
from transformers.modeling_utils import PreTrainedModel

from reference.interfaces import check, check_tensor
from reference.interfaces.gqa import GQAMetadata

from ..padding import read_mask, read_positions
from .cache import OpenCache
from .configs import ReplacedConfigs
from .interface import INTERFACE, Step
from .models import Stack, entry_of
from .steps import EncoderOutput, EncoderStep, Options, check_local_padding, check_right_padding, plan_decoder

OTHER_BATCHES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "cache", "block_table")


def _check_query_scale(module: nn.Module, plan: GQAMetadata, tokens: int) -> None:
    """Check that an attention module of Llama 4 scales no query of a packed batch.

    With `attn_temperature_tuning`, transformers scales the queries in layers without rope. The scale is 1 for the first
    tokens, and then depends on the index of the token in the row. In a packed batch, this index is not the position.

    Args:
        module: the attention module.
        plan: its plan.
        tokens: T, tokens of the batch.
    """
    if not getattr(module, "attn_temperature_tuning", None) or getattr(module, "use_rope", True):
        return
    longest = max(tokens, plan.decode.max_seq_len, plan.prefill.max_seq_len)
    check(longest < module.floor_scale, "gqa_metadata", f"a batch and requests of less than {module.floor_scale:g} "
          "tokens, because attn_temperature_tuning scales queries by their index in the batch", longest)  # fmt: skip


class StackAdapter:
    """Replace the `forward` of an encoder or a decoder: check a call, plan it, and run the layers.

    Args:
        stack: the encoder or the decoder.
        options: options of `use_attention`.
        replaced: the replaced configs of the model.
    """

    def __init__(self, stack: Stack, options: Options, replaced: ReplacedConfigs):
        self.stack, self.options, self.replaced = stack, options, replaced

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.original)

    @property
    def base(self) -> PreTrainedModel:
        """Return the module whose forward this adapter replaces."""
        return self.stack.base

    @property
    def original(self) -> Callable[..., Any]:
        """Return the forward of the module's class."""
        return type(self.base).forward.__get__(self.base)

    def read(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return all arguments of a call by name; refuse a call that is not supported.

        Raises:
            TypeError: there are too many positional arguments, or an argument is given twice.
            ValueError: the call is not supported, for example in training mode or with `output_attentions`.
        """
        bound = self.__signature__.bind_partial(*args, **kwargs).arguments
        kwargs = {**{name: value for name, value in bound.items() if name != "kwargs"}, **bound.get("kwargs", {})}
        base, modules = self.base, self.stack.modules
        training = base.training or any(module.training for module in modules.values())
        check(not training, "model", "eval mode (inference only)", "training mode")
        autocast = torch.is_autocast_enabled(base.device.type)
        check(not autocast, "model", "no autocast, because the cache has one dtype", "autocast")
        for name in ("output_attentions", "output_cross_attentions"):
            asked = kwargs.get(name)
            asked = getattr(base.config, name, False) if asked is None else asked
            check(not asked, name, "False (no attention weights are ever formed)", "True")
        for config in {id(each.config): each.config for each in (base, *modules.values())}.values():
            used = config._attn_implementation
            check(
                used == INTERFACE,
                "model",
                f"the attention {INTERFACE} that use_attention set (restore undoes it)",
                used,
            )
        other = [name for name in OTHER_BATCHES if kwargs.get(name) is not None]
        check(not other, "model", "a padded batch, or a packed batch with gqa_metadata", ", ".join(other))
        return kwargs

    def run(self, kwargs: dict[str, Any], step: Step) -> Any:
        """Run the layers, and check that each of them has called the attention of this project."""
        output = self.original(**kwargs, gqa_step=step)
        skipped = [name for name in self.stack.modules if name not in step.done]
        check(not skipped, "model", "attention through the attention interface of transformers in every layer",
              f"other attention at {', '.join(skipped[:3])}")  # fmt: skip
        return output


class EncoderAdapter(StackAdapter):
    """Replace the `forward` of an encoder."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the encoder; padding tokens are not attended, and their attention output is 0.

        Raises:
            ValueError: the call is not supported.
        """
        kwargs = self.read(args, kwargs)
        return self.run(kwargs, EncoderStep(self.options, self.stack.modules))


class DecoderAdapter(StackAdapter):
    """Replace the `forward` of a decoder: plan each call, run the layers, and record the cached tokens."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Plan a padded or a packed batch, and run the decoder's own forward with the plan.

        Args:
            args: positional arguments of the decoder's forward.
            kwargs: keyword arguments of the decoder's forward. For a packed batch: `input_ids` [1, T], `position_ids`
                [1, T], `use_cache=False`, `gqa_metadata` (the plan of each layer, by the names of `gqa_layers`) and
                `gqa_kv_caches` (the paged cache of each layer that has one, by the same names).

        Raises:
            TypeError: a cache of a packed batch is no tensor.
            ValueError: the call is not supported. Nothing has been written to a cache then.
        """
        kwargs = self.read(args, kwargs)
        check(kwargs.get("is_causal", getattr(self.base.config, "is_causal", True)) is not False, "is_causal", "True",
              "False")  # fmt: skip
        given = [name for name in ("input_ids", "inputs_embeds") if kwargs.get(name) is not None]
        check(len(given) == 1, "input_ids", "exactly one of input_ids and inputs_embeds", " and ".join(given) or "none")
        inputs = kwargs[given[0]]
        metadata, kv_caches = kwargs.pop("gqa_metadata", None), kwargs.pop("gqa_kv_caches", None)
        if metadata is not None or kv_caches is not None:
            step = self.plan_packed(inputs, kwargs, metadata, kv_caches)
            return self.run({**kwargs, "use_cache": False}, step)
        return self.run_padded(inputs, kwargs)

    def run_padded(self, inputs: Tensor, kwargs: dict[str, Any]) -> Any:
        """Plan a padded batch, run the layers, and record the cached tokens."""
        has_encoder = self.stack.has_cross_attention
        past, use_cache = kwargs.get("past_key_values"), kwargs.get("use_cache")
        use_cache = self.base.config.use_cache if use_cache is None else use_cache
        check(use_cache or past is None or not has_encoder, "past_key_values", "None beside use_cache=False",
              type(past).__name__)  # fmt: skip
        if past is None and use_cache:
            past = EncoderDecoderCache(DynamicCache(), DynamicCache()) if has_encoder else DynamicCache()
        num_layers = len(self.base.layers)
        caches = OpenCache(past, num_layers, self.options.block_size, has_encoder)
        record = caches.record
        rows, queries = inputs.shape[:2]
        check(record.length == 0 or rows == record.rows, "input_ids", f"{record.rows} rows as in past_key_values", rows)
        mask = read_mask(kwargs.get("attention_mask"), rows, queries, record)
        if past is not None:
            check_right_padding(mask, record.length, "decoder_attention_mask" if has_encoder else "attention_mask")
        check_local_padding(mask, self.options)
        positions = kwargs.get("position_ids")
        if positions is not None:
            positions = read_positions(positions, rows, queries, record.length, inputs.device)
            if past is None and mask is None:
                check(find_packed_sequence_indices(positions) is None, "position_ids",
                      "positions that rise by one in each row (a packed batch takes gqa_metadata and gqa_kv_caches)",
                      "a jump")  # fmt: skip
        encoder = self.read_encoder(kwargs, rows, caches) if has_encoder else None
        planned = plan_decoder(self.options, self.stack, caches, (rows, queries), mask, encoder, inputs.device)
        unmasked = {name: None for name in ("attention_mask", "encoder_attention_mask") if name in kwargs}
        with caches:
            output = self.run({**kwargs, **unmasked, "past_key_values": past}, planned.step)
        planned.commit()
        return output

    def read_encoder(self, kwargs: dict[str, Any], rows: int, caches: OpenCache) -> EncoderOutput:
        """Return the output of the encoder that a call of a decoder has.

        Raises:
            ValueError: there is no output, its shape is wrong, or the padding differs from that of the cached keys.
        """
        states, record = kwargs.get("encoder_hidden_states"), caches.cross_record
        check(isinstance(states, Tensor), "encoder_hidden_states", "the output of the encoder [B, S, H]",
              type(states).__name__)  # fmt: skip
        ran = record.length == 0
        length = "S" if ran else record.length
        check_tensor("encoder_hidden_states", states, (rows, length, "H"))
        new = states.shape[1] if ran else 0
        mask = read_mask(kwargs.get("encoder_attention_mask"), rows, new, record)
        return EncoderOutput(states.shape[1], mask, ran)

    def plan_packed(self, inputs: Tensor, kwargs: dict[str, Any], metadata: Any, kv_caches: Any) -> Step:
        """Check a packed batch, and return a step with the plans and the caches of the caller."""
        check(not self.stack.has_cross_attention, "gqa_metadata", "None for a model with an encoder",
              type(metadata).__name__)  # fmt: skip
        modules, configs = self.stack.modules, self.stack.configs
        for name, given in (("gqa_metadata", metadata), ("gqa_kv_caches", kv_caches)):
            check(isinstance(given, Mapping), name, "a mapping by the names of gqa_layers", type(given).__name__)
        for name, module in modules.items():
            plan = metadata.get(name)
            check(isinstance(plan, GQAMetadata), f"gqa_metadata[{name!r}]", "the plan of ops.build_gqa_metadata",
                  type(plan).__name__)  # fmt: skip
            _check_query_scale(module, plan, inputs.shape[1])
        owned = {name: module for name, module in modules.items() if configs[name].kv_sharing_layer is None}
        for name, module in owned.items():
            entry = entry_of(module, self.base.dtype)
            shape = (2, "num_blocks", "block_size", entry.num_kv_heads, entry.head_dim)
            check_tensor(f"gqa_kv_caches[{name!r}]", kv_caches.get(name), shape, (entry.dtype,), entry.device)
        starts = {kv_caches[name].data_ptr() for name in owned}
        empty = any(kv_caches[name].numel() == 0 for name in owned)
        check(empty or len(starts) == len(owned), "gqa_kv_caches", "a separate cache for each layer",
              "one tensor for several layers")  # fmt: skip
        for name in ("attention_mask", "past_key_values"):
            check(kwargs.get(name) is None, name, "None beside gqa_metadata", type(kwargs.get(name)).__name__)
        check(not kwargs.get("use_cache"), "use_cache", "False beside gqa_metadata", kwargs.get("use_cache"))
        check(inputs.shape[0] == 1, "input_ids", "one packed row [1, T] beside gqa_metadata", list(inputs.shape))
        positions = kwargs.get("position_ids")
        check_tensor("position_ids", positions, tuple(inputs.shape[:2]), (torch.int64, torch.int32), inputs.device)
        return Step(dict(metadata), {name: kv_caches[configs[name].kv_sharing_layer or name] for name in modules})
