"""Loop that serves requests with a paged latent cache for each layer, in batches of decodes and prefills.

The main job and a long-running test use the loop. `BatchLoop` (fast.demo.batch_loop) explains how it schedules.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from types import ModuleType

from torch import nn

from reference.distributed.arguments import check_groups
from reference.distributed.groups import ContextParallel
from reference.interfaces import (
    COMPUTE_FORMAT,
    CONVERTED,
    ONE_RANK,
    CommonAttentionMetadata,
    MLAConfig,
    PathCosts,
    check,
    check_config,
    check_costs,
    check_int,
    check_interleave,
    check_type,
    context_unit,
)

from .batch_loop import BatchLoop, StepPlan, check_ops, read_eos
from .deadline import deadline


def _layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the `MLAAttention` layers that `use_mla` installed in a model; an empty list for any other model."""
    forwards = (module.__dict__.get("forward") for module in model.modules())
    layers = (getattr(forward, "attention", None) for forward in forwards)
    return [layer for layer in layers if hasattr(layer, "workspace_tokens")]


class ServingLoop(BatchLoop):
    """Loop that serves requests together, in mixed batches of decodes and prefills.

    Args:
        model: causal language model under `fast.integrations.transformers.use_mla`. The caches have the device of the
            model, and the cache format that `use_mla` got. The plans have the fp8 mode that `use_mla` got.
        config: config of the model's attention layers.
        ops: module that plans and allocates: `reference`, `fast`, or another module with the same functions.
        num_blocks: blocks of the cache of each layer.
        block_size: tokens per block.
        max_num_seqs: largest number of requests that run at the same time.
        token_budget: largest number of tokens in one step; at least `max_num_seqs`, so that every running request can
            decode.
        workspace_tokens: largest number of context tokens that a prefill expands at once; at least `context_unit`,
            which is `block_size` without context parallelism.
        decode_threshold: a request with at most this number of query tokens takes the absorbed path, whatever
            `choose_path` returns for it.
        eos: token or tokens that end a request, or None.
        block_order: order in which blocks are first used; None means the ascending order.
        costs: costs from which `ops.choose_path` chooses the path of a request with more query tokens; None means the
            defaults of `PathCosts`.
        context_parallel: groups of the ranks that share heads and sequences, or None. `use_mla` must have got the same
            groups. Every rank creates the loop, adds the same requests and runs the same steps. The caches of D ranks
            that share sequences hold D times as many tokens as one cache.

    Raises:
        ValueError: a number is too small, or the ranks have different arguments (`verify_group`). Nothing has been
            allocated then.
    """

    def __init__(
        self,
        model: nn.Module,
        config: MLAConfig,
        ops: ModuleType,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        token_budget: int,
        workspace_tokens: int,
        decode_threshold: int = 1,
        eos: int | Collection[int] | None = None,
        block_order: Sequence[int] | None = None,
        costs: PathCosts | None = None,
        context_parallel: ContextParallel | None = None,
    ):
        check_type("model", model, nn.Module, "a model under use_mla")
        check_ops(ops, ("allocate_kv_cache", "build_mla_metadata", "slot_mapping"))
        check_groups(context_parallel)
        ends = read_eos(eos)
        layers = _layers_of(model)
        self.cache_format = getattr(layers[0], "cache_format", COMPUTE_FORMAT) if layers else COMPUTE_FORMAT
        fp8_mode = getattr(layers[0], "fp8_mode", CONVERTED) if layers else CONVERTED
        # The ranks compare their arguments first: if one rank raised alone, the other ranks would wait for it.
        if context_parallel is not None:
            with deadline(context_parallel, ()):
                ops.verify_group(
                    context_parallel, block_size=block_size, num_blocks=num_blocks, dtype=model.dtype, config=config,
                    max_num_seqs=max_num_seqs, token_budget=token_budget, workspace_tokens=workspace_tokens,
                    decode_threshold=decode_threshold, eos=sorted(ends), costs=costs, block_order=block_order,
                    num_layers=model.config.num_hidden_layers, ops=getattr(ops, "__name__", type(ops).__name__),
                    device=model.device.type, vocab_size=model.config.vocab_size, cache_format=self.cache_format.name,
                    fp8_mode=fp8_mode,
                )  # fmt: skip
        check_config(config)
        check_costs(costs)
        super().__init__(
            model, ops, num_blocks, block_size, max_num_seqs, token_budget, ends, block_order, context_parallel
        )
        check_int("decode_threshold", decode_threshold, 1, "at least 1")
        owned = ONE_RANK if self.ownership is None else self.ownership
        check_interleave(owned.interleave, block_size)
        unit = context_unit(block_size, owned.size, owned.interleave)
        check_int("workspace_tokens", workspace_tokens, unit, f"at least one unit of {unit} tokens")
        takes_backend = "backend" in inspect.signature(ops.build_mla_metadata).parameters  # `reference` has no backends
        self._planning = {"dtype": model.dtype, "cache_format": self.cache_format}
        if fp8_mode != CONVERTED:
            self._planning["fp8_mode"] = fp8_mode
        for attention in layers:
            if takes_backend:
                self._planning["backend"] = getattr(attention, "backend", None)
            check(workspace_tokens <= attention.workspace_tokens, "workspace_tokens",
                  f"at most {attention.workspace_tokens}, the workspace_tokens of the model's layers (see use_mla)",
                  workspace_tokens)  # fmt: skip
        self.config, self.workspace_tokens = config, workspace_tokens
        self.decode_threshold, self.costs = decode_threshold, costs
        dims = config.kv_lora_rank, config.qk_rope_head_dim
        columns, dtype = self.cache_format.columns(*dims), self.cache_format.dtype_for(model.dtype)
        self.kv_caches = [
            ops.allocate_kv_cache(num_blocks, block_size, columns, dtype, self.device)
            for _ in range(model.config.num_hidden_layers)
        ]
        self._block_bytes = block_size * self.cache_format.entry_bytes(*dims, model.dtype) * len(self.kv_caches)

    def _plan(self, common: CommonAttentionMetadata) -> StepPlan:
        metadata = self.ops.build_mla_metadata(
            common, self.block_size, self.workspace_tokens, self.decode_threshold, self.config, self.costs,
            ownership=self.ownership, **self._planning,
        )  # fmt: skip
        arguments = {"mla_metadata": metadata, "mla_kv_caches": self.kv_caches}
        chunks = len(metadata.prefill.context_chunks)
        return StepPlan(arguments, metadata.num_decodes, metadata.num_prefills, chunks)
