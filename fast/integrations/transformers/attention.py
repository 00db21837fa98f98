"""Implementation of `use_mla`: the base model plans each forward, and the layers run `ops.MLAAttention`.

`ops` is the package `fast` or `reference`. A padded batch is the usual batch of transformers: B rows with Q new tokens
each, and a mask that marks padding. A packed batch is one row of T tokens without padding; the caller also passes the
plan of the step and the caches. docs/glossary.md explains the terms, such as plan, latent and absorbed path.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Int64, Shaped
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache
from transformers.masking_utils import find_packed_sequence_indices
from transformers.modeling_utils import PreTrainedModel

import fast
from reference.distributed.arguments import check_groups
from reference.distributed.groups import ContextParallel
from reference.interfaces import (
    COMPUTE_FORMAT,
    CONVERTED,
    CacheFormat,
    MLAConfig,
    MLAMetadata,
    PathCosts,
    check,
    check_costs,
    check_int,
    check_mode_of_format,
    check_tensor,
)

from .cache import BatchRecord, LatentCacheLayer, latent_layers
from .cache_options import planning_options, read_format, read_query_scales, read_scales
from .models import CacheEntry, attention_modules, base_of, entry_of, same_storage
from .padding import read_mask, read_positions

ARGUMENTS = ("input_ids", "attention_mask", "position_ids", "past_key_values", "inputs_embeds", "use_cache")
OTHER_BATCHES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "cache", "block_table")
NEEDED = ("CommonAttentionMetadata", "MLAAttention", "allocate_kv_cache", "build_mla_metadata",
          "chunked_prefill_workspace_size", "slot_mapping")  # fmt: skip


@dataclass(frozen=True)
class Options:
    """Options of one call of `use_mla`; copies of a model share them, because the module `ops` cannot be copied."""

    ops: ModuleType
    block_size: int
    workspace_tokens: int | None
    decode_threshold: int
    config: MLAConfig
    costs: PathCosts | None
    context_parallel: ContextParallel | None
    planning: dict[str, Any]  # keyword arguments for `ops.build_mla_metadata`

    def __deepcopy__(self, memo: dict) -> Options:
        return self


@dataclass(frozen=True, eq=False)
class Step:
    """Plan and caches of one forward, made once and read by every layer.

    Attributes:
        metadata: the plan: which requests decode, which prefill, and the cache slots of their tokens.
        positions: [T], positions of the real (not padding) tokens.
        tokens: [T], indices of the real tokens among the B x Q tokens of the batch; None if all tokens are real.
        kv_caches: one paged cache for each layer.
    """

    metadata: MLAMetadata
    positions: Int[Tensor, " T"]
    tokens: Int64[Tensor, " T"] | None
    kv_caches: Sequence[Shaped[Tensor, "num_blocks block_size columns"]]


class InferenceOnly(torch.autograd.Function):
    """Identity function whose backward pass raises, because attention under `use_mla` has no gradient."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, *requiring_grad: Tensor) -> Tensor:
        """Return `output` as a node of the autograd graph, so that a backward pass reaches `backward`."""
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        """Raise RuntimeError."""
        raise RuntimeError("backward: expected no gradient through attention under use_mla, which is inference only")


class AttentionAdapter:
    """Replace the `forward` of one attention module: pack the real tokens, and run `ops.MLAAttention` on them.

    Args:
        module: the attention module.
        attention: the layer that shares the module's projections; the layer is not registered as a submodule.
    """

    def __init__(self, module: nn.Module, attention: nn.Module):
        self.module, self.attention = module, attention

    def __call__(
        self, hidden_states: Float[Tensor, "B Q H"], *args: Any, mla_step: Step | None = None, **kwargs: Any
    ) -> tuple[Float[Tensor, "B Q H"], None]:
        """Return the attention output, and None for attention weights; positions, cache and plan are in `mla_step`."""
        check(mla_step is not None, "model", "a call through the model that use_mla was given", "a call of one layer")
        self.refuse_stale_shares()
        self.move_scales()
        flat = hidden_states.flatten(0, 1)
        tokens = mla_step.tokens
        packed = flat if tokens is None else flat[tokens]
        with torch.no_grad():
            output = self.attention(
                packed, mla_step.positions, mla_step.kv_caches[self.module.layer_idx], mla_step.metadata
            )
            if tokens is not None:
                output = torch.zeros_like(flat).index_copy_(0, tokens, output)
        output = output.view(hidden_states.shape)
        if torch.is_grad_enabled():
            inputs = (hidden_states, *self.module.parameters())
            output = InferenceOnly.apply(output, *(tensor for tensor in inputs if tensor.requires_grad))
        return output, None

    @property
    def entry(self) -> CacheEntry:
        """Return the cache that this module needs."""
        return entry_of(self.module, self.attention.cache_format, self.attention)

    def move_scales(self) -> None:
        """Move the scales of the layer to the device of the module, if the model was moved after `use_mla`."""
        device = self.module.kv_a_layernorm.weight.device
        for scale in (self.attention.kv_scale, getattr(self.attention, "q_scale", None)):
            if scale is not None and scale.value.device != device:
                scale.to(device)

    def refuse_stale_shares(self) -> None:
        """Raise ValueError if a weight of the module was replaced after this rank's layer took a view of the weight."""
        if self.attention.context_parallel is None:
            return
        for name in ("q_proj", "q_b_proj", "kv_b_proj", "o_proj"):
            ours, theirs = getattr(self.attention, name), getattr(self.module, name, None)
            same = ours is None or ours is theirs or same_storage(ours.weight, theirs.weight)
            check(same, f"model ({name})", "the weights that use_mla divided among the ranks", "other weights")


class ModelAdapter:
    """Replace the `forward` of the base model: plan each call, run the layers, and record the cached tokens.

    Args:
        base: the DeepseekV2Model or DeepseekV3Model.
        options: options of `use_mla`.
    """

    def __init__(self, base: PreTrainedModel, options: Options):
        self.base, self.options = base, options

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.original)

    @property
    def original(self) -> Callable[..., Any]:
        """Return the forward of the base model's class."""
        return type(self.base).forward.__get__(self.base)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Plan a padded or a packed batch, and run the base model's own forward with the plan.

        Args:
            args: positional arguments of the base model's forward.
            kwargs: keyword arguments of the base model's forward. For a packed batch: `input_ids` [1, T],
                `position_ids` [1, T], `use_cache=False`, `mla_metadata` (plan of `ops.build_mla_metadata`) and
                `mla_kv_caches` (one paged cache for each layer).

        Raises:
            ValueError: the call is not supported. Nothing has been written to a cache then.
        """
        if len(args) > len(ARGUMENTS):
            raise TypeError(f"model: expected at most {len(ARGUMENTS)} positional arguments, got {len(args)}")
        kwargs.update(zip(ARGUMENTS, args, strict=False))
        self.refuse(kwargs)
        inputs = next(kwargs[name] for name in ("input_ids", "inputs_embeds") if kwargs.get(name) is not None)
        metadata, kv_caches = kwargs.pop("mla_metadata", None), kwargs.pop("mla_kv_caches", None)
        unread = inputs.new_empty(0, 0, 0, 0)  # transformers builds no mask if it gets a mask of four dimensions
        if metadata is not None or kv_caches is not None:
            step = self.plan_packed(inputs, kwargs, metadata, kv_caches)
            kwargs["use_cache"] = False
            return self.original(**{**kwargs, "attention_mask": unread, "mla_step": step})

        check(self.options.context_parallel is None, "model", "a packed batch with mla_metadata and mla_kv_caches, "
              "because ranks share its sequences", "a padded batch")  # fmt: skip
        past = kwargs.get("past_key_values")
        use_cache = kwargs.get("use_cache")
        if past is None and (self.base.config.use_cache if use_cache is None else use_cache):
            past = kwargs["past_key_values"] = DynamicCache(config=self.base.config)
        layers = None if past is None else latent_layers(past, len(self.base.layers), self.options.block_size)
        record = BatchRecord(self.options.block_size) if layers is None else layers[0].record
        rows, queries = inputs.shape[:2]
        check(record.length == 0 or rows == record.rows, "input_ids", f"{record.rows} rows as in past_key_values", rows)
        mask = read_mask(kwargs.get("attention_mask"), rows, queries, record)
        positions = read_positions(kwargs.get("position_ids"), rows, queries, record.length, inputs.device)
        if past is None and mask is None and kwargs.get("position_ids") is not None:
            check(find_packed_sequence_indices(positions) is None, "position_ids",
                  "positions that rise by one in each row (a packed batch takes mla_metadata and mla_kv_caches)",
                  "a jump")  # fmt: skip
        step, lens = self.plan_padded(record, layers, mask, positions)
        output = self.original(**{**kwargs, "attention_mask": unread, "mla_step": step})
        if past is not None:
            past.layers[:] = layers
            record.commit(record.length + queries, lens, mask)
        return output

    def refuse(self, kwargs: dict[str, Any]) -> None:
        """Raise ValueError for an unsupported call, for example in training mode or with `output_attentions`."""
        config = self.base.config
        training = self.base.training or any(layer.self_attn.training for layer in self.base.layers)
        check(not training, "model", "eval mode (inference only)", "training mode")
        autocast = torch.is_autocast_enabled(self.base.device.type)
        check(not autocast, "model", "no autocast, because the cache has one dtype", "autocast")
        asked = kwargs.get("output_attentions")
        check(not (config.output_attentions if asked is None else asked), "output_attentions",
              "False (no attention weights are ever formed)", "True")  # fmt: skip
        check(kwargs.get("is_causal", getattr(config, "is_causal", True)) is not False, "is_causal", "True", "False")
        other = [name for name in OTHER_BATCHES if kwargs.get(name) is not None]
        check(not other, "model", "a padded batch, or a packed batch with mla_metadata", ", ".join(other))
        given = [name for name in ("input_ids", "inputs_embeds") if kwargs.get(name) is not None]
        check(len(given) == 1, "input_ids", "exactly one of input_ids and inputs_embeds", " and ".join(given) or "none")

    def plan_packed(self, inputs: Tensor, kwargs: dict[str, Any], metadata: Any, kv_caches: Any) -> Step:
        """Check a packed batch, and return a step with the plan and the caches of the caller."""
        check(isinstance(metadata, MLAMetadata), "mla_metadata",
              "the plan of ops.build_mla_metadata beside mla_kv_caches", type(metadata).__name__)  # fmt: skip
        layers = self.base.layers
        check(isinstance(kv_caches, list | tuple), "mla_kv_caches", "a list of one cache per layer beside mla_metadata",
              type(kv_caches).__name__)  # fmt: skip
        check(len(kv_caches) == len(layers), "mla_kv_caches", f"a cache for each of {len(layers)} layers",
              len(kv_caches))  # fmt: skip
        for name in ("attention_mask", "past_key_values"):
            check(kwargs.get(name) is None, name, "None beside mla_metadata", type(kwargs.get(name)).__name__)
        check(not kwargs.get("use_cache"), "use_cache", "False beside mla_metadata", kwargs.get("use_cache"))
        check(inputs.shape[0] == 1, "input_ids", "one packed row [1, T] beside mla_metadata", list(inputs.shape))
        positions = kwargs.get("position_ids")
        check_tensor("position_ids", positions, tuple(inputs.shape[:2]), (torch.int64, torch.int32), inputs.device)
        for index, (layer, kv_cache) in enumerate(zip(layers, kv_caches, strict=True)):
            shape = ("num_blocks", "block_size") if index == 0 else tuple(kv_caches[0].shape[:2])
            entry = layer.self_attn.forward.entry
            check_tensor(f"mla_kv_caches[{index}]", kv_cache, (*shape, entry.columns), (entry.dtype,), entry.device)
        starts = {kv_cache.data_ptr() for kv_cache in kv_caches}
        check(kv_caches[0].numel() == 0 or len(starts) == len(kv_caches), "mla_kv_caches",
              "a separate cache for each layer", "one tensor for several layers")  # fmt: skip
        return Step(metadata, positions[0], None, kv_caches)

    def plan_padded(
        self,
        record: BatchRecord,
        layers: list[LatentCacheLayer] | None,
        mask: Bool[Tensor, "B S"] | None,
        positions: Int[Tensor, "B Q"],
    ) -> tuple[Step, Tensor]:
        """Pack the real tokens of a padded batch, and plan their attention.

        Args:
            record: record of the cached tokens.
            layers: layers of the cache; with None, the function makes one temporary cache, which all layers of the
                model use one after another.
            mask: [B, cached tokens + Q], True for real tokens; None if no token is padding.
            positions: [B, Q], positions of the new tokens.

        Returns:
            The step, and the number of real tokens of each row after the step, [B] int32.
        """
        ops, options = self.options.ops, self.options
        rows, queries = positions.shape
        device = positions.device
        tokens = None
        counts = torch.full((rows,), queries, dtype=torch.int32, device="cpu")
        if mask is not None:
            new = mask[:, record.length :]
            counts = new.sum(1, dtype=torch.int32)
            if not new.all():
                tokens = new.flatten().nonzero().squeeze(1).to(device)
        positions = positions.flatten() if tokens is None else positions.flatten()[tokens]

        starts = torch.zeros(rows + 1, dtype=torch.int32, device="cpu")
        starts[1:] = counts.cumsum(0)
        lens = record.lens + counts if record.length else counts
        table = record.reserve(rows, max(lens.tolist(), default=0))
        slots = ops.slot_mapping(starts, lens, table, record.block_size, positions.shape[0])
        common = ops.CommonAttentionMetadata.make(starts, lens, table.to(device), slots.to(device), record.block_size)
        workspace = options.workspace_tokens
        if workspace is None:
            longest = self.base.config.max_position_embeddings
            workspace = ops.chunked_prefill_workspace_size(longest, max(rows, 1), record.block_size)
            most = self.base.layers[0].self_attn.forward.attention.workspace_tokens
            workspace = min(workspace, max(most // record.block_size, 1) * record.block_size)
        metadata = ops.build_mla_metadata(
            common, record.block_size, workspace, options.decode_threshold, options.config, options.costs,
            **options.planning,
        )  # fmt: skip

        entries = [layer.self_attn.forward.entry for layer in self.base.layers]
        if layers is None:
            entry = entries[0]
            shared = ops.allocate_kv_cache(table.numel(), record.block_size, entry.columns, entry.dtype, entry.device)
            kv_caches = [shared] * len(entries)
        else:
            kv_caches = [
                layer.reserve(ops, rows, table.shape[1], entry) for layer, entry in zip(layers, entries, strict=True)
            ]
        return Step(metadata, positions, tokens, kv_caches), lens


def use_mla(
    model: PreTrainedModel,
    ops: ModuleType = fast,
    *,
    block_size: int = 64,
    workspace_tokens: int | None = None,
    decode_threshold: int = 1,
    costs: PathCosts | None = None,
    context_parallel: ContextParallel | None = None,
    cache_format: CacheFormat | str = COMPUTE_FORMAT,
    kv_scales: Mapping[str, float | Tensor] | str | os.PathLike | None = None,
    fp8_mode: str = CONVERTED,
    q_scales: Mapping[str, float | Tensor] | str | os.PathLike | None = None,
    **options: Any,
) -> PreTrainedModel:
    """Replace the attention of a DeepSeek model of transformers by `ops.MLAAttention`, in place and for inference only.

    `model.generate` works as before, but keeps latents in a paged cache: the first forward puts `LatentCacheLayer`s
    into the `DynamicCache`. The model also accepts a packed batch of T tokens:

        model(input_ids, position_ids=positions, use_cache=False, mla_metadata=plan, mla_kv_caches=caches)

    `input_ids` and `positions` have the shape [1, T], `plan` is the result of `ops.build_mla_metadata`, and `caches`
    has one paged cache for each layer.

    Args:
        model: a DeepseekV2 or DeepseekV3 model, in eval mode; it may have any output head (such as a language model).
        ops: `fast`, `reference`, or another module with the same functions.
        block_size: tokens per block of the cache.
        workspace_tokens: largest number of context tokens that a prefill expands at once, at least `block_size`. None
            means the result of `ops.chunked_prefill_workspace_size`, but at most `workspace_tokens` of the layers.
        decode_threshold: a request with at most this number of query tokens takes the absorbed path, whatever
            `choose_path` returns for it.
        costs: costs from which `ops.choose_path` chooses the path of every other request; None means the defaults of
            `PathCosts`.
        context_parallel: groups of the ranks that divide heads and sequences, or None. Every rank loads the whole
            model, and its layers use views of those weights that belong to the heads of this rank. Load and move the
            model before this call: the model raises ValueError if its weights are replaced later. With such groups,
            the model accepts packed batches only, and their plans must be for `context_parallel.ownership`.
        cache_format: format of the caches, as a `CacheFormat` or by its name, such as "fp8_e4m3".
        kv_scales: scales of the caches, only for a format with one scale for each layer. The value is a mapping from
            the name of a layer, such as "layers.0.self_attn", to its scale, or the path of a file of `save_kv_scales`.
            `calibrate_model` computes the scales. Each layer takes its scale from the first of these sources that has
            one: mapping, checkpoint, file, first prefill. Without a source, the scale is 1.0, with a warning.
        fp8_mode: fp8 mode of the decodes (`ops.mla_decode`).
        q_scales: scales of queries in e4m3, in the same forms as `kv_scales`. None means the scales of queries in
            `kv_scales`, if `kv_scales` comes from a calibration. Each layer takes its scale from the first of these
            sources that has one: mapping, checkpoint, file. Without a source, the scale is 1.0, with a warning.
        options: keyword arguments for `ops.MLAAttention.from_hf` (for example `backend` of `fast`).

    Returns:
        The same model.

    Raises:
        UnsupportedConfiguration: the model has no Multi-head Latent Attention, or its rotary embedding, scaling or bias
            is not implemented; the error lists every reason.
        ValueError: the model is in training mode or already under `use_mla`; the `forward` of a module was replaced on
            the instance; an option is invalid; the format does not support the model. The model is unchanged then.
    """
    base = base_of(model)
    needed = NEEDED if context_parallel is None else (*NEEDED, "dcp_decode", "dcp_slot_mapping", "verify_group")
    missing = [name for name in needed if not hasattr(ops, name)]
    check(not missing, "ops", "a module that keeps the contract of reference and fast",
          f"{getattr(ops, '__name__', type(ops).__name__)} without {', '.join(missing)}")  # fmt: skip
    check(not isinstance(base.__dict__.get("forward"), ModelAdapter), "model", "a model that is not under use_mla",
          "a model under use_mla; call restore(model) first")  # fmt: skip
    modules = attention_modules(model)
    for module in (base, *modules.values()):
        check("forward" not in module.__dict__, "model", "modules that use their class's forward",
              f"a {type(module).__name__} whose forward was replaced")  # fmt: skip
    check(not model.training, "model", "eval mode (inference only); call model.eval()", "training mode")
    for name, value in (("block_size", block_size), ("decode_threshold", decode_threshold)):
        check_int(name, value, 1, "an int of at least 1")
    if workspace_tokens is not None:
        check_int("workspace_tokens", workspace_tokens, block_size, f"at least one block of {block_size}")
    check_costs(costs)
    check_groups(context_parallel)
    cache_format = read_format(cache_format)
    for module in modules.values():
        entry_of(module, cache_format)  # raises if the format does not support the dims or the dtype
    scales = read_scales(kv_scales, cache_format, modules)
    check(not scales or "kv_scale" not in options, "kv_scale", "no argument beside kv_scales", options.get("kv_scale"))
    check_mode_of_format(fp8_mode, cache_format)
    given = "q_scale" in options
    check(not given or q_scales is None, "q_scale", "no argument beside q_scales", options.get("q_scale"))
    q_scale_of = {} if given else read_query_scales(q_scales, kv_scales, fp8_mode, modules)

    options |= {"cache_format": cache_format, **({} if fp8_mode == CONVERTED else {"fp8_mode": fp8_mode})}
    if context_parallel is not None:
        options["context_parallel"] = context_parallel
    if workspace_tokens is not None:
        options["workspace_tokens"] = workspace_tokens  # layers raise for plans with larger chunks
    adapters = []
    for name, module in modules.items():
        scale = {"kv_scale": scales[name]} if name in scales else {}
        q_scale = {"q_scale": q_scale_of[name]} if name in q_scale_of else {}
        adapters.append(AttentionAdapter(module, ops.MLAAttention.from_hf(module, **options, **scale, **q_scale)))
    config = adapters[0].attention.config
    planning = planning_options(ops, adapters[0].attention)
    served = Options(ops, block_size, workspace_tokens, decode_threshold, config, costs, context_parallel, planning)
    for adapter in adapters:
        adapter.module.forward = adapter
    base.forward = ModelAdapter(base, served)
    return model


def restore(model: PreTrainedModel) -> PreTrainedModel:
    """Undo `use_mla`: remove the replaced forwards, and return the same model.

    Raises:
        UnsupportedConfiguration: the model has no Multi-head Latent Attention.
        ValueError: the model is not under `use_mla`, or a `forward` was replaced again after `use_mla`.
    """
    base = base_of(model)
    under = isinstance(base.__dict__.get("forward"), ModelAdapter)
    check(under, "model", "a model under use_mla", "a model that is not under use_mla")
    modules = [layer.self_attn for layer in base.layers]
    for module in modules:
        ours = isinstance(module.__dict__.get("forward"), AttentionAdapter)
        check(ours, "model", "the forwards that use_mla set", f"a {type(module).__name__} with another forward")
    for module in modules:
        del module.forward
    del base.forward
    return model
