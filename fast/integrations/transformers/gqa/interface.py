"""The two functions that transformers calls: one for attention, and one in place of a mask.

A transformers model looks up both functions by the name `_attn_implementation` of its config. Under `use_attention`
this name is `INTERFACE`:

- `describe_mask` forms no mask. It returns a `ModelMask`, which says what mask the model asked for.
- `gqa_attention` runs the `ops.GQAAttention` of a module. The plan and the caches of the step come from the base model
  as the keyword argument `gqa_step`.

The config of a layer comes from the config of the model (`GQAConfig.from_hf`). `gqa_attention` compares it with the
mask, the scale, the window, the soft cap and the sinks that the model passes, and raises ValueError if they differ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from reference.interfaces import check
from reference.interfaces.gqa import AttentionType, EncoderMetadata, GQAConfig, GQAMetadata

from ..attention import InferenceOnly

INTERFACE = "mla_twins_gqa"  # the name under which transformers knows both functions
SERVED = "_gqa_served"  # attribute of an attention module under `use_attention`, a `ServedModule`
OTHER_SCORES = ("position_bias", "head_mask", "layer_head_mask", "indices", "block_indices", "cu_seq_lens_q",
                "cu_seq_lens_k", "cache")  # fmt: skip


@dataclass(frozen=True, eq=False)
class ModelMask:
    """The mask that a model asked for; the layers get it in place of a tensor.

    Attributes:
        local_size: tokens of a window or of an attention chunk; None without either.
        causal: whether a token attends only itself and the tokens before it.
        custom: whether the model changed the mask with a function of its own.
        padding: [B, S], True for real tokens; None if no token is padding.
    """

    local_size: int | None
    causal: bool
    custom: bool
    padding: Bool[Tensor, "B S"] | None

    def contiguous(self) -> ModelMask:
        """Return the mask itself; `generate` calls this method of a mask for a static cache, which is refused later."""
        return self

    def __getitem__(self, index: Any) -> None:
        """Raise ValueError: a model that cuts its masks, such as Gemma 4, leaves out queries of some layers."""
        check(False, "model", "layers that attend with the queries of all tokens", "a part of the queries")


def describe_mask(*args: Any, **kwargs: Any) -> ModelMask:
    """Return the mask that a function of `transformers.masking_utils` asks for; form no tensor.

    Args:
        args: not used; transformers passes keyword arguments.
        kwargs: arguments of a mask function, such as `local_size`, `attention_mask` (padding) and `use_vmap` (whether
            the model gave functions that change the mask). Only masks that are not causal have the argument
            `allow_is_bidirectional_skip`.
    """
    causal = "allow_is_bidirectional_skip" not in kwargs
    custom = bool(kwargs.get("use_vmap", False))
    return ModelMask(kwargs.get("local_size"), causal, custom, kwargs.get("attention_mask"))


@dataclass(eq=False)
class Step:
    """Plans and caches of one forward, made once and read by every layer.

    Attributes:
        metadata: the plan of each layer, by the names of `models.attention_modules`. Layers of one group have the same
            plan.
        kv_caches: the paged cache that each layer writes or reads; None for a layer without a cache.
        tokens: [T], indices of the real (not padding) tokens among the B x Q tokens of the batch; None if all are real.
        encoder_tokens: the same for the tokens of the encoder's output that cross attention caches in this step.
        encoder_ran: whether cross attention gets keys in this step.
        done: names of the layers that have run.
    """

    metadata: Mapping[str, GQAMetadata | EncoderMetadata]
    kv_caches: Mapping[str, Tensor | None]
    tokens: Int64[Tensor, " T"] | None = None
    encoder_tokens: Int64[Tensor, " S"] | None = None
    encoder_ran: bool = False

    def __post_init__(self):
        self.done: set[str] = set()

    def begin(self, query: Tensor, mask: Any) -> None:
        """Prepare for the first layer; the step of an encoder is planned here."""


def _pack(states: Float[Tensor, "B heads Q Dh"], tokens: Int64[Tensor, " T"] | None) -> Float[Tensor, "T heads Dh"]:
    """Return the rows of the real tokens of a padded batch."""
    flat = states.transpose(1, 2).flatten(0, 1)
    return flat if tokens is None else flat[tokens]


class ServedModule:
    """What `use_attention` keeps at an attention module.

    Args:
        name: name of the module (`models.attention_modules`).
        attention: the `GQAAttention`; it is not registered as a submodule of the attention module.
    """

    def __init__(self, name: str, attention: nn.Module):
        self.name, self.attention = name, attention

    @property
    def config(self) -> GQAConfig:
        """Return the config of the layer."""
        return self.attention.config

    def check_call(self, module: nn.Module, mask: Any, scaling: float | None, options: Mapping[str, Any]) -> None:
        """Check that the model asks for the attention of the layer's config.

        Args:
            module: the attention module.
            mask: what the model passes as mask: a `ModelMask`, or None if it uses no mask.
            scaling: factor of the scores that the model passes; None means head_dim^-1/2.
            options: further keyword arguments that the model passes.
        """
        config, argument = self.config, f"model ({self.name})"

        def agree(what: str, wanted: Any, got: Any) -> None:
            same = wanted == got
            if isinstance(wanted, float) and isinstance(got, float):
                same = math.isclose(wanted, got, rel_tol=1e-6)
            check(same, argument, f"{what} {wanted}, as in the config of the layer", got)

        agree("scaling", config.softmax_scale, config.head_dim**-0.5 if scaling is None else float(scaling))
        if "sliding_window" in options and config.attention_type is not AttentionType.CROSS:
            agree("sliding_window", config.sliding_window, options["sliding_window"])
        cap = options.get("softcap")
        agree("softcap", config.logits_soft_cap, cap if cap is None else float(cap))
        agree("attention sinks", config.attention_sinks, options.get("s_aux") is not None)
        same = options.get("s_aux") is self.attention.sinks
        check(same, argument, "the sinks that the module had when use_attention was called", "other sinks")
        causal = config.attention_type is AttentionType.DECODER
        agree("is_causal", causal, bool(getattr(module, "is_causal", causal)))
        if options.get("is_causal") is not None and config.attention_type is not AttentionType.CROSS:
            agree("is_causal", causal, bool(options["is_causal"]))
        for name in OTHER_SCORES:
            check(options.get(name) is None, argument, f"no {name}", type(options.get(name)).__name__)
        if mask is None and not causal:
            return
        check(isinstance(mask, ModelMask), argument, f"the mask of the attention interface {INTERFACE}",
              type(mask).__name__)  # fmt: skip
        check(not mask.custom, argument, "a causal mask, a window or attention chunks",
              "a mask that the model changes, such as ranges of tokens that attend each other")  # fmt: skip
        names = {True: "a causal mask", False: "a mask that is not causal"}
        check(mask.causal == causal, argument, f"{names[causal]}, as in the config of the layer", names[mask.causal])
        local = config.sliding_window if config.attention_chunk_size is None else config.attention_chunk_size
        agree("a window or an attention chunk of", local, mask.local_size)

    def run(
        self, query: Float[Tensor, "B N Q Dh"], key: Tensor | None, value: Tensor | None, step: Step
    ) -> Float[Tensor, "B Q N Dh"]:
        """Write the new keys and values to the cache, and return the attention output of every token; padding gets 0.

        Args:
            query: [B, N, Q, Dh].
            key: [B, Nkv, S, Dh], keys of this step; ignored if the layer reads the cache of another layer; None if
                cross attention has all keys in the cache.
            value: [B, Nkv, S, Dh], or None exactly if `key` is None.
            step: the step.
        """
        config, argument = self.config, f"model ({self.name})"
        rows, _, queries, _ = query.shape
        for scale in (self.attention.k_scale, self.attention.v_scale, self.attention.q_scale):
            if scale is not None and scale.value.device != query.device:  # the model was moved after `use_attention`
                scale.to(query.device)
        tokens = key_tokens = step.tokens
        if config.attention_type is AttentionType.CROSS:
            key_tokens = step.encoder_tokens
            check((key is not None) == step.encoder_ran, argument,
                  f"{'new keys' if step.encoder_ran else 'no keys'} of the encoder, as past_key_values says",
                  "none" if key is None else "keys")  # fmt: skip
        elif config.kv_sharing_layer is None:
            check(key is not None and key.shape[2] == queries, argument, f"the keys of {queries} new tokens",
                  None if key is None else key.shape[2])  # fmt: skip
        else:
            key = value = None
        with torch.no_grad():
            output = self.attention(
                _pack(query, tokens),
                None if key is None else _pack(key, key_tokens),
                None if value is None else _pack(value, key_tokens),
                step.kv_caches[self.name],
                step.metadata[self.name],
            )
            if tokens is not None:
                output = output.new_zeros(rows * queries, *output.shape[1:]).index_copy_(0, tokens, output)
        return output.view(rows, queries, *output.shape[1:])


def gqa_attention(
    module: nn.Module,
    query: Float[Tensor, "B N Q Dh"],
    key: Float[Tensor, "B Nkv S Dh"] | None,
    value: Float[Tensor, "B Nkv S Dh"] | None,
    attention_mask: Any = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    gqa_step: Step | None = None,
    **kwargs: Any,
) -> tuple[Float[Tensor, "B Q N Dh"], None]:
    """Return the attention output of a module of a model under `use_attention`, and None for attention weights.

    Args:
        module: the attention module.
        query: [B, N, Q, Dh], with the rotary embedding applied, as are the keys.
        key: [B, Nkv, S, Dh], the new keys; None if they are all in the cache.
        value: [B, Nkv, S, Dh], the new values, or None.
        attention_mask: the `ModelMask` of `describe_mask`, or None for attention to all tokens.
        scaling: factor of the scores; None means head_dim^-1/2.
        dropout: must be 0.
        gqa_step: plans and caches of the step, from the base model.
        kwargs: what the model passes in addition, such as `sliding_window`, `softcap` and `s_aux` (sinks).

    Raises:
        ValueError: the call does not come from a model under `use_attention`, or the model asks for other attention
            than the config of the layer describes.
    """
    served = module.__dict__.get(SERVED)
    wanted = "a call through the model that use_attention was given, whose layers pass keyword arguments to attention"
    check(served is not None and gqa_step is not None, "model", wanted, "a call without gqa_step")
    check(dropout == 0, "model", "no dropout (inference only)", dropout)
    served.check_call(module, attention_mask, scaling, kwargs)
    gqa_step.begin(query, attention_mask)
    output = served.run(query, key, value, gqa_step)
    gqa_step.done.add(served.name)
    if torch.is_grad_enabled():
        inputs = [tensor for tensor in (query, key, value) if tensor is not None and tensor.requires_grad]
        output = InferenceOnly.apply(output, *inputs)
    return output, None


def register() -> None:
    """Make `INTERFACE` known to transformers."""
    AttentionInterface.register(INTERFACE, gqa_attention)
    AttentionMaskInterface.register(INTERFACE, describe_mask)
