"""Comparison of two packages op by op for grouped-query attention, on the activations of a real model.

`fast.demo.op_parity` explains how ops are compared. docs/glossary.md explains the terms and the letters of shapes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from reference.interfaces import COMPUTE_FORMAT, CacheFormat, CommonAttentionMetadata
from reference.interfaces.gqa import GQAConfig, PagedAttentionMetadata, supports_cascade

from ...backends import BackendChoice, bind
from ...parity import Parity
from ...planning.visible_lens import scheduled_lens
from ..op_parity import PROGRAMS, Comparison, WithBackend
from ..parity_inputs import GARBAGE, Batch
from .activations import Activations


@dataclasses.dataclass(frozen=True, eq=False)
class KeyValueStorage:
    """How the cache of a compared layer stores its keys and values.

    Attributes:
        cache_format: format of the cache.
        k_scale: float32 scale of the keys, a tensor []; None if the format has no such scale.
        v_scale: float32 scale of the values, like `k_scale`.
    """

    cache_format: CacheFormat = COMPUTE_FORMAT
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of an op for this cache."""
        return {"cache_format": self.cache_format, "k_scale": self.k_scale, "v_scale": self.v_scale}

    @property
    def both_scales(self) -> Tensor | None:
        """Return the two scales in one tensor [2], as `swap_blocks` takes them; None if the format has no scales."""
        return None if self.k_scale is None else torch.stack((self.k_scale, self.v_scale))

    def empty(self, batch: Batch, like: Tensor) -> Tensor:
        """Return a cache full of NaN (the poison byte of the format), so that a wrong read changes the result."""
        dtype = self.cache_format.dtype_for(like.dtype)
        shape = (2, batch.num_blocks, batch.block_size, *like.shape[1:-1], like.shape[-1] * dtype.itemsize)
        poisoned = torch.full(shape, self.cache_format.poison, dtype=torch.uint8)
        return poisoned.view(dtype).to(like.device)


def with_freed_blocks(batch: Batch, config: GQAConfig, query_lens: list[int]) -> Batch:
    """Return the batch with GARBAGE as the block-table entries of its freed blocks.

    An engine may free all blocks in front of the window of a request's first query token.
    """
    if config.sliding_window is None:
        return batch
    table = batch.block_table.clone()
    for request, (length, count) in enumerate(zip(batch.lens, query_lens, strict=True)):
        first = max(0, length - max(count, 1) - config.sliding_window + 1)
        table[request, : first // batch.block_size] = GARBAGE
    return dataclasses.replace(batch, block_table=table)


@torch.inference_mode()
def compare_layers(
    layers: Sequence[Activations],
    storages: Sequence[KeyValueStorage],
    batch: Batch,
    ops: ModuleType,
    oracle: ModuleType,
    backend: BackendChoice = None,
) -> list[Parity]:
    """Compare two packages op by op, with the inputs of some layers.

    Args:
        layers: the inputs of the layers.
        storages: format of the cache of each layer, and its scales.
        batch: the batch of the inputs.
        ops: the package under test.
        oracle: the package that is the specification.
        backend: `backend=` of `ops`: a name, a mapping from op to name, or None.

    Returns:
        One row for each result of each op. An op that does not depend on the layer is compared once.
    """
    backend = bind(backend)
    compared = Comparison(WithBackend(ops, backend), oracle)
    options = {} if backend is None else {"backend": backend}
    compare_batches(compared, batch)
    compare_caches(compared, batch, layers[0], storages[0])
    slots = batch.common(oracle, batch.lens).slot_mapping
    for layer, storage in zip(layers, storages, strict=True):
        kv_cache = write_cache(oracle, slots, batch, layer, storage)
        compare_plans(compared, batch, layer, storage)
        compare_attention(compared, batch, layer, storage, kv_cache)
        compare_varlen(compared, batch, layer)
        if supports_cascade(layer.config):
            compare_cascade(compared, batch, layer, storage, kv_cache)
        compare_forward(compared, batch, layer, storage, kv_cache, options)
    return compared.rows


def called(layer: Activations, op: str, *words: str) -> str:
    """Return the name of a row: the op, and in parentheses the words and the label of the layer."""
    details = ", ".join(word for word in (*words, layer.label) if word)
    return f"{op} ({details})" if details else op


def compare_batches(compared: Comparison, batch: Batch) -> None:
    """Compare the functions that compute the integers of a batch: slots, visible keys, `advance_step`."""
    lens, table = torch.tensor(batch.lens, dtype=torch.int32), batch.block_table.cpu()
    starts, tokens = batch.offsets(batch.lens), sum(batch.lens)
    compared.exact("slot_mapping", lambda m: m.slot_mapping(starts, lens, table, batch.block_size, tokens + 3))
    common = batch.common(compared.oracle, batch.query_lens)
    compared.exact(
        "compute_visible_lens",
        lambda m: m.compute_visible_lens(common.query_start_loc, common.seq_lens, common.num_actual_tokens),
    )

    def advance(module: Any) -> tuple[Any, ...]:
        step = batch.common(compared.oracle, batch.query_lens)
        sampled = torch.arange(len(batch.lens), device=batch.positions.device)
        ids, positions = sampled.new_zeros(step.num_actual_tokens), sampled.new_zeros(step.num_actual_tokens)
        return module.advance_step(sampled, ids, positions, step, batch.block_size), ids, positions

    compared.exact("advance_step", advance)


def compare_plans(compared: Comparison, batch: Batch, layer: Activations, storage: KeyValueStorage) -> None:
    """Compare the functions that compute the integers of a layer: first visible keys, plans, a schedule."""
    config, block = layer.config, batch.block_size
    common = with_freed_blocks(batch, config, batch.query_lens).common(compared.oracle, batch.query_lens)
    if (window := config.sliding_window) is not None:
        compared.exact(
            called(layer, "compute_first_visible"),
            lambda m: m.compute_first_visible(
                common.query_start_loc, common.seq_lens, common.num_actual_tokens, window
            ),
        )
    compared.exact(
        called(layer, "build_gqa_metadata"),
        lambda m: m.build_gqa_metadata(
            common, block, config, num_programs=PROGRAMS, cache_format=storage.cache_format, dtype=layer.q.dtype
        ),
    )

    def build(module: Any) -> Any:
        builder = module.GQAMetadataBuilder(
            config, block, max(batch.lens), len(batch.lens), num_programs=PROGRAMS, dtype=layer.q.dtype,
            cache_format=storage.cache_format,
        )  # fmt: skip
        return builder.build(0, common)

    compared.exact(called(layer, "GQAMetadataBuilder.build"), build)
    counted = scheduled_lens(common.query_start_loc, common.seq_lens, window)
    compared.exact(called(layer, "plan_decode"), lambda m: m.plan_decode(counted, PROGRAMS))


def write_cache(module: Any, slots: Tensor, batch: Batch, layer: Activations, storage: KeyValueStorage) -> Tensor:
    """Return a cache with the keys and values of all tokens, written with `module`.

    All slots without a token are NaN, so that the comparison detects an op that reads such a slot.
    """
    kv_cache = storage.empty(batch, layer.k)
    module.reshape_and_cache(layer.k, layer.v, kv_cache, slots, **storage.options)
    return kv_cache


def compare_caches(compared: Comparison, batch: Batch, layer: Activations, storage: KeyValueStorage) -> None:
    """Compare cache writes and copies bit by bit."""
    slots = batch.common(compared.oracle, batch.lens).slot_mapping
    compared.exact("reshape_and_cache", lambda m: write_cache(m, slots, batch, layer, storage))
    kv_cache = write_cache(compared.oracle, slots, batch, layer, storage)
    pairs = torch.tensor([[0, batch.num_blocks - 1], [1, batch.num_blocks - 2]])

    def copy_within(module: Any) -> Tensor:
        copied = kv_cache.clone()
        module.copy_blocks([copied], pairs)
        return copied

    def swap(module: Any) -> Tensor:
        target = storage.empty(batch, layer.k)
        module.swap_blocks(kv_cache, target, pairs, storage.both_scales, storage.both_scales)
        return target

    compared.exact("copy_blocks", copy_within)
    compared.exact("swap_blocks", swap)


def make_plan(
    compared: Comparison, batch: Batch, layer: Activations, storage: KeyValueStorage, query_lens: list[int], most: int
) -> tuple[Any, CommonAttentionMetadata]:
    """Return the plan of a step, and its batch; a request with at most `most` query tokens decodes."""
    common = with_freed_blocks(batch, layer.config, query_lens).common(compared.oracle, query_lens)
    plan = compared.oracle.build_gqa_metadata(
        common, batch.block_size, layer.config, decode_threshold=most, cache_format=storage.cache_format
    )
    return plan, common


def compare_attention(
    compared: Comparison, batch: Batch, layer: Activations, storage: KeyValueStorage, kv_cache: Tensor
) -> None:
    """Compare attention over the cache: decodes with 1 and 3 query tokens, a decode with a schedule, prefills."""
    decodes, others = batch.num_decodes, [0] * (len(batch.lens) - batch.num_decodes)

    def attend(word: str, plan: PagedAttentionMetadata, q: Tensor, schedule: Any = None) -> None:
        compared.within_budget(
            called(layer, "gqa_paged_attention", word),
            lambda m, q, kv_cache, sinks: m.gqa_paged_attention(
                q, kv_cache, plan, layer.config, sinks, schedule, **storage.options
            ),
            q, kv_cache, layer.sinks,
        )  # fmt: skip

    for count, word in ((1, "decode"), (3, "3 tokens")):
        query_lens = [count] * decodes + others
        plan, common = make_plan(compared, batch, layer, storage, query_lens, count)
        q = layer.q[batch.rows_of_last(query_lens)]
        attend(word, plan.decode, q)
    starts, lens = common.query_start_loc[: plan.num_decodes + 1], common.seq_lens[: plan.num_decodes]
    if layer.config.attention_chunk_size is None:  # the requests of a plan with attention chunks are virtual requests
        counted = scheduled_lens(starts, lens, layer.config.sliding_window)
        attend("scheduled", plan.decode, q, compared.oracle.plan_decode(counted, PROGRAMS))
    plan, _ = make_plan(compared, batch, layer, storage, batch.query_lens, 1)
    rows = batch.rows_of_last(batch.query_lens)[plan.num_decode_tokens :]
    attend("prefill", plan.prefill, layer.q[rows])


def compare_varlen(compared: Comparison, batch: Batch, layer: Activations) -> None:
    """Compare attention without a cache: all tokens of each request, and its last tokens."""
    device = layer.q.device
    offsets, longest = batch.offsets(batch.lens).to(device), max(batch.lens)
    for word, query_lens in (("whole", batch.lens), ("suffix", batch.query_lens)):
        starts, most = batch.offsets(query_lens).to(device), max(query_lens)
        compared.within_budget(
            called(layer, "gqa_varlen_attention", word),
            lambda m, q, k, v, sinks, starts=starts, most=most: m.gqa_varlen_attention(
                q, k, v, starts, offsets, most, longest, layer.config, sinks
            ),
            layer.q[batch.rows_of_last(query_lens)], layer.k, layer.v, layer.sinks,
        )  # fmt: skip


def compare_cascade(
    compared: Comparison, batch: Batch, layer: Activations, storage: KeyValueStorage, kv_cache: Tensor
) -> None:
    """Compare a cascade over a prefix that the two decodes share: the first half of the blocks of the shorter one."""
    oracle, block = compared.oracle, batch.block_size
    shared = min(batch.lens[: batch.num_decodes]) // block // 2
    if shared == 0:
        return
    table = batch.block_table.clone()
    table[: batch.num_decodes, :shared] = table[0, :shared]
    query_lens = [1] * batch.num_decodes + [0] * (len(batch.lens) - batch.num_decodes)
    plan, _ = make_plan(compared, dataclasses.replace(batch, block_table=table), layer, storage, query_lens, 1)
    decode, requests = plan.decode, batch.num_decodes
    decode = dataclasses.replace(
        decode, block_table=decode.block_table[:requests], seq_lens=decode.seq_lens[:requests],
        query_start_loc=decode.query_start_loc[: requests + 1],
    )  # fmt: skip
    cascade = oracle.split_shared_prefix(decode, shared * block, block)
    compared.within_budget(
        called(layer, "gqa_cascade_attention"),
        lambda m, q, kv_cache, sinks: m.gqa_cascade_attention(
            q, kv_cache, cascade, layer.config, sinks, **storage.options
        ),
        layer.q[batch.rows_of_last(query_lens)], kv_cache, layer.sinks,
    )  # fmt: skip


def compare_forward(
    compared: Comparison,
    batch: Batch,
    layer: Activations,
    storage: KeyValueStorage,
    kv_cache: Tensor,
    options: dict[str, Any],
) -> None:
    """Compare a step of the layer with decodes and prefills."""
    metadata, _ = make_plan(compared, batch, layer, storage, batch.query_lens, 1)
    rows = batch.rows_of_last(batch.query_lens)
    if storage.cache_format.scaled:
        # The layer writes nothing and reads the stored entries. If it wrote entries, two keys that differ in the last
        # bit could become different e4m3 numbers. The budget does not cover such a difference.
        metadata = dataclasses.replace(metadata, slot_mapping=torch.full_like(metadata.slot_mapping, -1))

    def forward(module: Any, q: Tensor, k: Tensor, v: Tensor, kv_cache: Tensor, sinks: Tensor | None) -> Tensor:
        chosen = {**storage.options, **(options if module is compared.ops else {})}
        attention = module.GQAAttention(layer.config, sinks=sinks, **chosen)
        return attention(q, k, v, kv_cache.clone(), metadata)

    compared.within_budget(
        called(layer, "GQAAttention.forward"), forward, layer.q[rows], layer.k[rows], layer.v[rows], kv_cache,
        layer.sinks,
    )  # fmt: skip
