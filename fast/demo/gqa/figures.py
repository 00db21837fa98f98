"""Figures of the main job that depend on the attention family, for grouped-query attention."""

from __future__ import annotations

from typing import Any

import torch

from reference.interfaces import CAUSAL, element_bytes

from ... import backends
from ...parity import Parity
from ..kernel_summary import REFERENCE_ALONE, summarize_kernels
from ..parity_inputs import make_batch
from .activations import capture_activations
from .job import GQAJob
from .op_parity import KeyValueStorage, compare_layers


def compare_ops(job: GQAJob, num_tokens: int) -> list[Parity]:
    """Compare `fast` with `reference` op by op, with the inputs of the first layer of each group of layers.

    Args:
        job: the job.
        num_tokens: tokens of the batch with which ops are compared.
    """
    batch, oracle = make_batch(num_tokens, job.args.block_size, 2, job.device), job.packages["reference"]
    layers, storages = capture_activations(job, oracle, batch), []
    for layer in layers:
        scales = (None, None) if job.kv_scales is None else job.kv_scales[layer.layer]
        scales = (None if scale is None else torch.tensor(scale, device=job.device) for scale in scales)
        storages.append(KeyValueStorage(job.cache_format, *scales))
    return compare_layers(layers, storages, batch, job.packages["fast"], oracle, job.args.backend)


def cache_figures(job: GQAJob) -> dict[str, Any]:
    """Return the bytes that a cache of all layers needs for 1000 tokens.

    `grouped_bytes_per_1000_tokens` is for the cache of this model, with the KV heads that query heads share.
    `every_head_bytes_per_1000_tokens` is for a cache in the dtype of the model with a key and a value for every query
    head, as in multi-head attention.
    """
    grouped = every_head = 0
    stored = job.cache_format.dtype_for(job.dtype)
    for config in job.layer_configs():
        numbers = 2 * 1000 * config.head_dim  # of one head: keys and values of 1000 tokens
        every_head += numbers * config.num_heads * element_bytes(job.dtype)
        if config.kv_sharing_layer is None:
            grouped += numbers * config.num_kv_heads * stored.itemsize
    return {
        "grouped_bytes_per_1000_tokens": grouped,
        "every_head_bytes_per_1000_tokens": every_head,
        "ratio": every_head / grouped,
    }


def kernels(job: GQAJob) -> dict[str, list[str]]:
    """Return which backend serves each op of the package `fast` (`summarize_kernels`)."""
    if "fast" not in job.packages:
        return {"lines": REFERENCE_ALONE, "summary": REFERENCE_ALONE}
    block, lines = job.args.block_size, []
    for config in job.config:
        lines += backends.explain(
            config, device=job.device, dtype=job.dtype, block_size=block, cache_format=job.cache_format,
            backend=job.args.backend,
        ).splitlines()  # fmt: skip
    decode = backends.paged_attention_request(
        job.config[0], job.device, job.dtype, block, cache_format=job.cache_format, mask=CAUSAL
    )
    return summarize_kernels(lines, decode)
