"""Queries, keys and values of a model's layers, with which ops are compared."""

from __future__ import annotations

import dataclasses
import itertools
from types import ModuleType

import torch
from torch import Tensor, nn

from reference.interfaces import check
from reference.interfaces.gqa import GQAConfig, group_layers

from ..parity_inputs import Batch
from .job import GQAJob


@dataclasses.dataclass(frozen=True, eq=False)
class Activations:
    """The inputs of one layer for a batch of T tokens; the tokens of a request follow each other.

    Attributes:
        layer: name of the layer.
        label: what distinguishes the layer from the other layers that are compared, such as "window 48"; empty if all
            layers have the same config.
        config: config of the layer.
        q: [T, N, Dh], queries; rotated.
        k: [T, Nkv, Dh], keys; rotated.
        v: [T, Nkv, Dh], values.
        sinks: [N], or None for a config without attention sinks.
    """

    layer: str
    label: str
    config: GQAConfig
    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None


def label_of(config: GQAConfig) -> str:
    """Return which keys a token attends, in few words."""
    if config.sliding_window is not None:
        return f"window {config.sliding_window}"
    return "full" if config.attention_chunk_size is None else f"chunk {config.attention_chunk_size}"


@torch.inference_mode()
def capture_activations(job: GQAJob, oracle: ModuleType, batch: Batch) -> list[Activations]:
    """Run the model with the package `oracle` on the tokens of the prompts, and return the inputs of some layers.

    The cache has the dtype of the model. The prompts are repeated if they are too short.

    Args:
        job: the job.
        oracle: package that computes the attention.
        batch: the batch. All tokens of its requests are new in this step.

    Returns:
        For each group of layers with equal configs, the inputs of the first layer with a cache of its own.
    """
    from ...integrations.transformers import gqa_layers, restore, use_attention

    found: dict[str, tuple[Tensor, Tensor | None, Tensor | None]] = {}
    block, common = batch.block_size, batch.common(oracle, batch.lens)
    stream = itertools.islice(itertools.cycle(itertools.chain(*job.prompt_ids)), sum(batch.lens))
    ids = torch.tensor(list(stream), device=job.device)
    use_attention(job.model, ops=oracle, block_size=block)
    try:
        layers = gqa_layers(job.model)
        groups = group_layers(layers)
        plans, caches = {}, {}
        for config, names in groups.items():
            plans.update(dict.fromkeys(names, oracle.build_gqa_metadata(common, block, config)))
        for name, layer in layers.items():
            if layer.config.kv_sharing_layer is None:
                sizes = batch.num_blocks, block, layer.config.num_kv_heads, layer.config.head_dim
                caches[name] = oracle.allocate_key_value_cache(*sizes, job.dtype, job.device)

            def record(_: nn.Module, inputs: tuple, name: str = name) -> None:
                found[name] = inputs[:3]

            layer.register_forward_pre_hook(record)
        job.model(ids[None], position_ids=batch.positions[None], use_cache=False, gqa_metadata=plans,
                  gqa_kv_caches=caches, logits_to_keep=1)  # fmt: skip
    finally:
        restore(job.model)
    labels = [label_of(config) for config in groups]
    result = []
    for (config, names), label in zip(groups.items(), labels, strict=True):
        name = next((each for each in names if each in caches), None)
        check(name is not None, "--model", "layers with a cache of their own for each window", f"none for {label}")
        if labels.count(label) > 1:  # the groups differ in something else
            label = f"{label}, {name}"
        label = label if len(groups) > 1 else ""
        result.append(Activations(name, label, config, *found[name], layers[name].sinks))
    return result
