"""Argument checks of a layer of grouped-query attention: its inputs, its cache and the plan of a step.

"Read no values" means that a check looks at shapes, dtypes and devices alone, so it does not wait for a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..attention_arguments import check_decode_plan, check_schedule
from ..cache_format import COMPUTE_FORMAT, E4M3, CacheFormat
from ..checks import (
    check,
    check_int,
    check_not_negative,
    check_offsets,
    check_out,
    check_slots,
    check_tensor,
    check_type,
)
from ..decode_schedule import UNDIVIDED, DecodeSchedule, ScheduleChoice
from ..metadata import CascadeMetadata, CommonAttentionMetadata
from ..ownership import TokenOwnership
from ..support import is_capturing
from .arguments import (
    check_gqa_config,
    check_key_value_cache,
    check_key_value_format,
    check_paged_plan,
    check_paged_values,
    check_plan_block_size,
)
from .attention_type import AttentionType
from .config import GQAConfig
from .metadata import CrossAttentionBatch, EncoderMetadata, GQAMetadata, PagedAttentionMetadata

PLANNED_FIELDS = ("attention_type", "sliding_window", "attention_chunk_size")  # a plan is for one value of each


def check_cross_batch(common: CommonAttentionMetadata) -> None:
    """Check that a batch has the fields of the encoder, which cross attention needs; read no values on a GPU.

    Raises:
        TypeError: the batch has no fields of the encoder.
        ValueError: a shape, dtype or device of these fields is wrong, or a length is negative.
    """
    wanted = "a CrossAttentionBatch with encoder_seq_lens, encoder_block_table and encoder_slot_mapping"
    check_type("common", common, CrossAttentionBatch, wanted)
    int32, requests, device = (torch.int32,), common.seq_lens.shape[0], common.seq_lens.device
    check_tensor("common.encoder_seq_lens", common.encoder_seq_lens, (requests,), int32, device)
    check_tensor("common.encoder_seq_lens_cpu", common.encoder_seq_lens_cpu, (requests,), int32, torch.device("cpu"))
    check_not_negative("common.encoder_seq_lens_cpu", common.encoder_seq_lens_cpu)
    check_tensor("common.encoder_block_table", common.encoder_block_table, (requests, "We"), int32, device)
    check_tensor("common.encoder_slot_mapping", common.encoder_slot_mapping, ("encoder_slots",), (torch.int64,), device)


def check_planned_config(config: GQAConfig, planned: GQAConfig) -> None:
    """Check that a step was planned for the attention type, the window and the attention chunks of a layer.

    Args:
        config: config of the layer.
        planned: config for which the step was planned.
    """
    check_gqa_config(planned, "metadata.config")
    for name in PLANNED_FIELDS:
        wanted, got = (
            value.value if isinstance(value, AttentionType) else value
            for value in (getattr(config, name), getattr(planned, name))
        )
        check(wanted == got, f"metadata.config.{name}", f"{wanted}, as in the config of the layer", got)


def has_cache(kv_cache: Tensor | None, metadata: GQAMetadata) -> bool:
    """Return whether a step writes and reads a cache.

    A step without a cache attends its own keys and values, and writes nothing. There is no cache if `kv_cache` is None
    or has no elements, or if neither block table of the plan has a column.
    """
    if kv_cache is None or kv_cache.numel() == 0:
        return False
    return metadata.decode.block_table.shape[1] > 0 or metadata.prefill.block_table.shape[1] > 0


def check_gqa_step(
    metadata: GQAMetadata | EncoderMetadata | None,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    kv_cache: Tensor | None,
    config: GQAConfig,
    cache_format: CacheFormat = COMPUTE_FORMAT,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    ownership: TokenOwnership | None = None,
) -> None:
    """Check the inputs of a layer and the plan of a step, before the layer writes anything; read no values.

    Args:
        metadata: plan of the step; None for a memory profile, in which the layer writes and attends nothing.
        q: [T, N, Dh].
        k: [S, Nkv, Dh], or None: in a layer that reads the cache of another layer, and in cross attention whose encoder
            did not run in this step. A layer that reads the cache of another layer needs the keys of that layer if the
            step has no cache.
        v: [S, Nkv, Dh], or None exactly if `k` is None.
        kv_cache: [2, num_blocks, block_size, Nkv, Dh]; None or a tensor without elements if there is no cache.
        config: config of the layer, with the heads of this rank.
        cache_format: format of the layer's cache.
        k_scale: scale of the keys, or None.
        v_scale: scale of the values, or None.
        ownership: the tokens that this context-parallel rank owns; None means one rank.

    Raises:
        TypeError: an argument has another class, such as the plan of an encoder for a decoder.
        ValueError: keys are missing or must not be given; the cache is missing or must not be given; a shape, dtype or
            device is wrong; the step was planned for another attention type, window, attention chunk, block size, cache
            format or ownership.
        UnsupportedConfiguration: the cache format is for the latent cache alone.
    """
    check_gqa_config(config)
    check_key_value_format(cache_format)
    check_tensor("q", q, ("T", config.num_heads, config.head_dim))
    shares = config.kv_sharing_layer is not None
    if not shares:
        _check_keys(q, k, v, config)
    check_type("kv_cache", kv_cache, (Tensor, type(None)), "a tensor or None")
    if not config.attention_type.cached:
        empty = kv_cache is None or kv_cache.numel() == 0
        check(empty, "kv_cache", f"None or an empty tensor for attention type {config.attention_type.value}",
              "a cache")  # fmt: skip
    elif kv_cache is not None and kv_cache.numel() > 0:
        heads, dim = config.num_kv_heads, config.head_dim
        check_key_value_cache(kv_cache, heads, dim, q.dtype, q.device, cache_format, k_scale, v_scale)
    if metadata is None:
        if shares:
            _check_keys(q, k, v, config)
        return
    if not config.attention_type.cached:
        _check_encoder_plan(metadata, q, config)
        return
    wanted = f"a GQAMetadata or None for attention type {config.attention_type.value}"
    check_type("metadata", metadata, GQAMetadata, wanted)
    check_planned_config(config, metadata.config)
    _check_cached_plan(metadata, q, config)
    if shares:
        _check_shared_keys(q, k, v, config, has_cache(kv_cache, metadata))
    check(metadata.cache_format == cache_format, "metadata.cache_format", f"{cache_format.name}, the layer's format",
          metadata.cache_format.name)  # fmt: skip
    check(metadata.ownership == ownership, "metadata.ownership", f"{ownership or 'None (one rank)'}",
          metadata.ownership)  # fmt: skip
    check(ownership is None or metadata.cascade is None, "metadata.cascade", "None if ranks share sequences",
          "a cascade")  # fmt: skip
    _check_written_keys(metadata, k, config, kv_cache)
    if has_cache(kv_cache, metadata):
        for name, part in _parts(metadata):
            check_plan_block_size(f"metadata.{name}.block_size", part.block_size, kv_cache)


def _check_keys(q: Tensor, k: Tensor | None, v: Tensor | None, config: GQAConfig) -> None:
    """Check which of keys and values are given, and their shapes, dtypes and devices."""
    for name, tensor in (("k", k), ("v", v)):
        check_type(name, tensor, (Tensor, type(None)), "a tensor or None")
    kind = config.attention_type
    if kind is not AttentionType.CROSS and config.kv_sharing_layer is None:
        check(k is not None, "k", f"a tensor for attention type {kind.value}", None)
    tokens = "S" if kind is AttentionType.CROSS else q.shape[0]
    if k is None:
        check(v is None, "v", "None, because k is None", "a tensor")
        return
    check_tensor("k", k, (tokens, config.num_kv_heads, config.head_dim), (q.dtype,), q.device)
    check(v is not None, "v", "a tensor, because k is a tensor", None)
    check_tensor("v", v, tuple(k.shape), (q.dtype,), q.device)


def _check_shared_keys(q: Tensor, k: Tensor | None, v: Tensor | None, config: GQAConfig, cached: bool) -> None:
    """Check the keys and values of a layer that reads the cache of another layer: none are given if it has the cache.

    Without the cache, such as in the first prefill of a model that keeps no cache, the layer attends the keys and
    values of the other layer, which the caller must give.
    """
    if not cached:
        return _check_keys(q, k, v, config)
    for name, tensor in (("k", k), ("v", v)):
        check_type(name, tensor, (Tensor, type(None)), "a tensor or None")
        wanted = f"None for a layer with kv_sharing_layer {config.kv_sharing_layer!r}"
        check(tensor is None, name, wanted, "a tensor")


def _check_encoder_plan(metadata: EncoderMetadata, q: Tensor, config: GQAConfig) -> None:
    """Check the plan of a step of an encoder; read no values."""
    wanted = f"an EncoderMetadata or None for attention type {config.attention_type.value}, which is not causal"
    check_type("metadata", metadata, EncoderMetadata, wanted)
    check_planned_config(config, metadata.config)
    check_tensor("metadata.query_start_loc", metadata.query_start_loc, ("B + 1",), (torch.int32,), q.device)
    check_int("metadata.max_query_len", metadata.max_query_len, 0)
    check_int("metadata.num_actual_tokens", metadata.num_actual_tokens, 0)
    tokens = metadata.num_actual_tokens
    check(tokens <= q.shape[0], "metadata.num_actual_tokens", f"at most the {q.shape[0]} tokens of q", tokens)


def _check_cached_plan(metadata: GQAMetadata, q: Tensor, config: GQAConfig) -> None:
    """Check shapes and numbers in the plan of a step over a cache; read no values."""
    end, split, device = metadata.num_actual_tokens, metadata.num_decode_tokens, q.device
    for name in ("num_actual_tokens", "num_decode_tokens", "num_decodes"):
        check_int(f"metadata.{name}", getattr(metadata, name), 0)
    check(0 <= split <= end <= q.shape[0], "metadata", f"0 <= num_decode_tokens <= num_actual_tokens <= {q.shape[0]}",
          f"{split} and {end}")  # fmt: skip
    check_tensor("metadata.slot_mapping", metadata.slot_mapping, ("slots",), (torch.int64,), device)
    check_paged_plan(metadata.decode, split, config, device, "metadata.decode")
    check_paged_plan(metadata.prefill, end - split, config, device, "metadata.prefill")
    requests, longest = metadata.decode.seq_lens.shape[0], metadata.decode.max_query_len
    check(longest <= 1 or config.attention_type is AttentionType.DECODER, "metadata.decode.max_query_len",
          f"at most 1 for attention type {config.attention_type.value}, because decodes of several query tokens are for"
          " decoders only", longest)  # fmt: skip
    check(metadata.num_decodes == requests, "metadata.num_decodes", f"the {requests} requests of metadata.decode",
          metadata.num_decodes)  # fmt: skip
    if metadata.schedule is not None:
        check_schedule(metadata.schedule, metadata.num_decodes, device, "metadata.schedule")
    undivided = metadata.prefill_schedule
    if undivided is not None:
        same = isinstance(undivided, DecodeSchedule) and undivided.split_rule == UNDIVIDED.split_rule
        same = same and undivided.batch_invariant is True
        same = same and undivided.tile_ranges is None and undivided.split_offsets is None
        check(same, "metadata.prefill_schedule", "None or UNDIVIDED", undivided)
    if metadata.cascade is not None:
        check_type("metadata.cascade", metadata.cascade, CascadeMetadata)
        for name, part in (("prefix", metadata.cascade.prefix), ("suffix", metadata.cascade.suffix)):
            check_decode_plan(part, split, device, f"metadata.cascade.{name}")
    check_type("metadata.cache_format", metadata.cache_format, CacheFormat)
    check_type("metadata.ownership", metadata.ownership, (TokenOwnership, type(None)), "a TokenOwnership or None")
    check_type("metadata.schedule_choice", metadata.schedule_choice, ScheduleChoice)
    check_type("metadata.captured", metadata.captured, (tuple, type(None)), "a tuple or None")


def _check_written_keys(metadata: GQAMetadata, k: Tensor | None, config: GQAConfig, kv_cache: Tensor | None) -> None:
    """Check the number of keys against the slots, and that a layer without keys has a cache; read no values.

    A step without a cache needs no keys if it has no query token, or if no query token attends a key: in cross
    attention, all outputs of the encoder may have length 0.
    """
    slots, end, cross = metadata.slot_mapping.shape[0], metadata.num_actual_tokens, AttentionType.CROSS
    cached, empty = has_cache(kv_cache, metadata), kv_cache is None or kv_cache.numel() == 0
    if config.kv_sharing_layer is not None:
        if k is None and not cached and end > 0:
            owner = repr(config.kv_sharing_layer)
            check(not empty, "kv_cache", f"the cache of the layer {owner}, because k is None", "no cache")
            check(False, "metadata.block_table", f"columns, because the layer reads the cache of {owner}", "no column")
    elif config.attention_type is cross and k is None:
        check(slots == 0, "k", f"the keys of the {slots} slots of metadata.slot_mapping", None)
        if not cached and end > 0 and max(metadata.decode.max_seq_len, metadata.prefill.max_seq_len) > 0:
            wanted = "the encoder's keys, because k is None"
            check(not empty, "kv_cache", f"the cache of {wanted}", "no cache")
            check(False, "encoder_block_table", f"columns for the blocks of {wanted}", "no column")
    elif config.attention_type is cross and cached:
        check(slots >= k.shape[0], "metadata.slot_mapping", f"a slot for each of the {k.shape[0]} keys", slots)
        check(k.shape[0] == slots, "k", f"a key for each of the {slots} slots of metadata.slot_mapping", k.shape[0])
    elif cached:
        check(slots >= end, "metadata.slot_mapping", f"at least {end} slots", slots)


def _parts(metadata: GQAMetadata) -> list[tuple[str, PagedAttentionMetadata]]:
    """Return the name and the plan of each part of a step."""
    parts = [("decode", metadata.decode), ("prefill", metadata.prefill)]
    if metadata.cascade is not None:
        parts += [("cascade.prefix", metadata.cascade.prefix), ("cascade.suffix", metadata.cascade.suffix)]
    return parts


def check_gqa_step_values(
    metadata: GQAMetadata | EncoderMetadata, kv_cache: Tensor | None, config: GQAConfig, num_keys: int | None = None
) -> None:
    """Check the values in the plan of a step, after `check_gqa_step`.

    The values are read on a CPU only, with one exception: a step without a cache must have no context, and this is
    checked on every device, because such a step would ignore the context. Nothing is read under torch.compile or while
    a CUDA graph is captured.

    Args:
        metadata: plan of the step.
        kv_cache: the cache, or None.
        config: config of the layer.
        num_keys: number of keys that the step writes; None means the number of tokens of the plan.

    Raises:
        ValueError: a value in the plan is out of range, or a step without a cache has context.
    """
    if torch.compiler.is_compiling():
        return
    if isinstance(metadata, EncoderMetadata):
        if metadata.query_start_loc.device.type == "cpu":
            check_offsets("metadata.query_start_loc", metadata.query_start_loc, metadata.num_actual_tokens)
            longest = int(metadata.query_start_loc.diff().max()) if metadata.query_start_loc.shape[0] > 1 else 0
            check(longest <= metadata.max_query_len, "metadata.query_start_loc",
                  f"query lengths up to max_query_len {metadata.max_query_len}", longest)  # fmt: skip
        return
    device = metadata.slot_mapping.device
    if not has_cache(kv_cache, metadata):
        if config.attention_type is AttentionType.DECODER and not is_capturing(device):
            _check_no_context(metadata)
        return
    if device.type != "cpu":
        return
    _, num_blocks, block_size, _, _ = kv_cache.shape
    if config.kv_sharing_layer is None:
        written = metadata.num_actual_tokens if num_keys is None else num_keys
        check_slots(metadata.slot_mapping[:written], num_blocks * block_size, "metadata.slot_mapping")
    for name, part in _parts(metadata):
        if part.seq_lens.shape[0] == 0 and part.visible_lens.shape[0] == 0:
            continue  # nothing reads a part without requests, and the check takes long
        check_paged_values(part, num_blocks, block_size, f"metadata.{name}")


def _check_no_context(metadata: GQAMetadata) -> None:
    """Check that no request has context: a step without a cache attends only the keys of its own tokens."""
    for name, part in (("decode", metadata.decode), ("prefill", metadata.prefill)):
        query_lens = part.query_start_loc.diff()
        wrong = (part.seq_lens > query_lens).nonzero()
        if wrong.numel():
            request = int(wrong[0])
            check(False, f"metadata.{name}.seq_lens",
                  f"at most the query length {int(query_lens[request])} in a step without a cache",
                  f"{int(part.seq_lens[request])} at request {request}")  # fmt: skip


def check_gqa_output(output: Tensor, output_scale: Tensor | None, q: Tensor, *inputs: Tensor | None) -> None:
    """Check the tensor that a layer writes; read no values.

    Args:
        output: [T, N, Dh], in e4m3 if `output_scale` is given, otherwise in the dtype of `q`.
        output_scale: scale of an output in e4m3, or None.
        q: [T, N, Dh].
        inputs: the other tensors that `output` must not overlap; None is ignored.
    """
    dtype = q.dtype if output_scale is None else E4M3
    others = [tensor for tensor in inputs if tensor is not None]
    check_out("output", output, tuple(q.shape), dtype, q.device, q, *others)
