"""What each op asks of its arguments together: shapes, dtypes and devices; values where they lie on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .checks import (
    FLOAT_DTYPES,
    check,
    check_blocks,
    check_flag,
    check_int,
    check_number,
    check_offsets,
    check_readable,
    check_slots,
    check_tensor,
    check_type,
    is_positive_int,
    wide_dtype,
)
from .config import MLAConfig, QueryLenSupport
from .costs import PathCosts
from .errors import UnsupportedConfiguration
from .groups import ContextParallel
from .metadata import (
    AttentionState,
    CascadeMetadata,
    CommonAttentionMetadata,
    ContextChunk,
    ContextParallelChunk,
    ContextParallelMetadata,
    DecodeMetadata,
    DecodeSchedule,
    MLAMetadata,
    PrefillMetadata,
)
from .shares import SequenceShare, get_dcp_local_seq_lens
from .sizes import ScheduleChoice

CPU = torch.device("cpu")


def check_common(common: CommonAttentionMetadata) -> None:
    """Shapes, dtypes and devices of a batch that was perhaps not made by `make`; reads no values."""
    check_type("common", common, CommonAttentionMetadata)
    int32 = (torch.int32,)
    check_tensor("common.seq_lens_cpu", common.seq_lens_cpu, ("B",), int32, CPU)
    requests = common.seq_lens_cpu.shape[0]
    check_tensor("common.query_start_loc_cpu", common.query_start_loc_cpu, (requests + 1,), int32, CPU)
    check_tensor("common.block_table", common.block_table, (requests, "W"), int32)
    device = common.block_table.device
    check_tensor("common.seq_lens", common.seq_lens, (requests,), int32, device)
    check_tensor("common.query_start_loc", common.query_start_loc, (requests + 1,), int32, device)
    check_tensor("common.slot_mapping", common.slot_mapping, ("slots",), (torch.int64,), device)
    check_int("common.max_query_len", common.max_query_len, 0)
    check_int("common.num_actual_tokens", common.num_actual_tokens, 0)
    check_int("common.max_seq_len", common.max_seq_len, 0)
    if common.block_size is not None:
        check_int("common.block_size", common.block_size, 1, "a positive int or None")


def check_config(config: MLAConfig | None, optional: bool = False) -> None:
    """Check that a config is one, or None where that is legal."""
    if config is not None or not optional:
        check_type("config", config, MLAConfig, "an MLAConfig or None" if optional else None)


def check_costs(costs: PathCosts | None) -> None:
    """Check that the constants of `choose_path` are such, or None."""
    if costs is not None:
        check_type("costs", costs, PathCosts, "a PathCosts or None")


def check_groups(context_parallel: ContextParallel | None) -> None:
    """Check that groups are a `ContextParallel`, or None where one rank serves."""
    if context_parallel is not None:
        check_type("context_parallel", context_parallel, ContextParallel, "a ContextParallel or None")


def check_sequence_share(share: SequenceShare | None) -> None:
    """Check that the share of a rank is one, or None where one rank serves."""
    if share is not None:
        check_type("share", share, SequenceShare, "a SequenceShare or None")


def check_modules(**modules: object) -> None:
    """Check that projections are modules; whether a query projection may be None is for `check_projections`."""
    for name, module in modules.items():
        if module is not None or not name.startswith("q_"):
            check_type(name, module, nn.Module, "a module")


def check_captured(captured: MLAMetadata, plan: MLAMetadata) -> None:
    """Check that the tensors of a captured plan take those of another plan; reads no values."""
    pairs = [("decode.seq_lens", captured.decode.seq_lens, plan.decode.seq_lens),
             ("decode.visible_lens", captured.decode.visible_lens, plan.decode.visible_lens)]  # fmt: skip
    if captured.schedule is not None:
        check_schedule(captured.schedule, captured.num_decodes, plan.decode.seq_lens.device, "captured.schedule")
        check(plan.schedule is not None, "captured.schedule", "None as in the plan of the batch", "a schedule")
        if captured.schedule.tile_ranges is not None:
            pairs += [("schedule.tile_ranges", captured.schedule.tile_ranges, plan.schedule.tile_ranges)]
    for name, held, made in pairs:
        check_tensor(f"captured.{name}", held, tuple(made.shape), (made.dtype,), made.device)


def check_no_prefill_padding(common: CommonAttentionMetadata, num_decodes: int) -> None:
    """Check on the CPU that no padding row with query tokens stands among the prefills."""
    if num_decodes == common.num_reqs or int(common.seq_lens_cpu[num_decodes:].min()) > 0:
        return
    query_lens = common.query_start_loc_cpu.diff()[num_decodes:]
    wrong = ((query_lens > 0) & (common.seq_lens_cpu[num_decodes:] == 0)).nonzero()
    if wrong.numel():
        check(False, "seq_lens", "padding rows among the decodes only", f"0 at request {num_decodes + int(wrong[0])}")


def check_chunking(policy: str, workspace_tokens: int, unit: int) -> None:
    """Check how context is to be cut into chunks."""
    check(isinstance(policy, str) and policy in ("packed", "even"), "policy", '"packed" or "even"', repr(policy))
    check_int("workspace_tokens", workspace_tokens, unit, f"at least one unit of {unit} tokens")


def check_threshold(decode_threshold: int, query_len_support: QueryLenSupport) -> None:
    """Check that queries up to a threshold are what the decode kernel takes."""
    check_int("decode_threshold", decode_threshold, 1, "at least 1")
    check_type("query_len_support", query_len_support, QueryLenSupport)
    single = query_len_support is QueryLenSupport.SINGLE_ONLY
    check(decode_threshold == 1 or not single, "decode_threshold", "1 with SINGLE_ONLY", decode_threshold)


def check_common_prefix(common: CommonAttentionMetadata, common_prefix_len: int, num_decodes: int) -> None:
    """Check on the CPU that a shared prefix lies within the context of every decode that is no padding."""
    contexts, lengths = common.num_computed_tokens_cpu[:num_decodes], common.seq_lens_cpu[:num_decodes]
    wrong = ((contexts < common_prefix_len) & (lengths > 0)).nonzero()
    if wrong.numel():
        request = int(wrong[0])
        check(False, "common_prefix_len", f"at most the context {int(contexts[request])} of request {request}",
              common_prefix_len)  # fmt: skip


def check_batch_block_size(common: CommonAttentionMetadata, block_size: int) -> None:
    """Check that the slots of a batch were made for a block size, where the batch records one."""
    check_type("common", common, CommonAttentionMetadata)
    if common.block_size is not None:
        check_int("common.block_size", common.block_size, 1, "a positive int or None")
    check(common.block_size in (None, block_size), "common.block_size", f"{block_size}, the block size of the plan",
          common.block_size)  # fmt: skip


def check_table_width(common: CommonAttentionMetadata, block_size: int) -> None:
    """Check on the CPU that the block table has a column for every block of every request."""
    check_common(common)
    check_int("block_size", block_size)
    width = common.block_table.shape[1]
    longest = int(common.seq_lens_cpu.max()) if common.num_reqs else 0
    check(longest <= common.max_seq_len, "common.max_seq_len", f"at least the longest request, {longest}",
          common.max_seq_len)  # fmt: skip
    if longest > width * block_size:
        request = int((common.seq_lens_cpu > width * block_size).nonzero()[0])
        needed = -(-int(common.seq_lens_cpu[request]) // block_size)
        check(False, "block_table", f"at least {needed} columns for request {request}", width)


def check_cache(kv_cache: Tensor, head_size: int | str = "Lkv + R", dtype: torch.dtype | None = None,
                device: torch.device | None = None) -> None:  # fmt: skip
    """Check a paged latent cache's rank, entry width, dtype and device."""
    check_tensor("kv_cache", kv_cache, ("num_blocks", "block_size", head_size),
                 FLOAT_DTYPES if dtype is None else (dtype,), device)  # fmt: skip
    check(kv_cache.shape[1] >= 1, "kv_cache", "a block size of at least 1", kv_cache.shape[1])


def check_cache_write(kv_c_normed: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Shapes, dtypes and devices of a cache write; reads no values."""
    check_tensor("kv_c_normed", kv_c_normed, ("T", "Lkv"))
    device = kv_c_normed.device
    tokens, latent = kv_c_normed.shape
    check_tensor("k_pe", k_pe, (tokens, "R"), (kv_c_normed.dtype,), device)
    check_cache(kv_cache, latent + k_pe.shape[1], kv_c_normed.dtype, device)
    check_tensor("slot_mapping", slot_mapping, ("slots",), (torch.int64,), device)
    check(slot_mapping.shape[0] >= tokens, "slot_mapping", f"at least {tokens} slots", slot_mapping.shape[0])


def check_gather(kv_cache: Tensor, block_table: Tensor, cu_seq_lens: Tensor, starts: Tensor, num_tokens: int) -> None:
    """Shapes, dtypes and devices of a gather; reads no values."""
    check_cache(kv_cache)
    device = kv_cache.device
    check_tensor("block_table", block_table, ("B", "W"), (torch.int32,), device)
    requests = block_table.shape[0]
    check_tensor("cu_seq_lens", cu_seq_lens, (requests + 1,), (torch.int32,), device)
    check_tensor("starts", starts, (requests,), (torch.int32,), device)
    check_int("num_tokens", num_tokens, 0)


def check_swap(source: Tensor, target: Tensor, block_mapping: Tensor) -> None:
    """Shapes, dtypes and storage of two caches between which blocks are copied; reads no values."""
    check_tensor("source", source, ("source_blocks", "block_size", "head_size"))
    check_tensor("target", target, ("target_blocks", *source.shape[1:]), (source.dtype,))
    check_tensor("block_mapping", block_mapping, ("pairs", 2), (torch.int64,))
    for name, tensor in (("source", source), ("target", target), ("block_mapping", block_mapping)):
        check_readable(name, tensor)
    shared = source.numel() and source.untyped_storage().data_ptr() == target.untyped_storage().data_ptr()
    alike = (source.data_ptr(), source.shape, source.stride()) == (target.data_ptr(), target.shape, target.stride())
    check(alike or not shared, "target", "the very cache of source, or one with its own storage", "an overlapping view")


def check_projections(config: MLAConfig, direct: object, *low_rank: object) -> None:
    """Check that exactly the query projections are given that the config's q_lora_rank asks for."""
    check_config(config)
    given = ["q_proj"] * (direct is not None)
    names = ("q_a_proj", "q_a_layernorm", "q_b_proj")
    given += [name for name, module in zip(names, low_rank, strict=True) if module is not None]
    wanted = ["q_proj"] if config.q_lora_rank is None else list(names)
    wanted_names = f"{', '.join(wanted)} for q_lora_rank {config.q_lora_rank}"
    check(given == wanted, "q_proj", wanted_names, ", ".join(given) or None)


def check_output_projection(o_proj: object, context_parallel: ContextParallel | None) -> None:
    """Check that an output projection adds its own bias and can be summed over the ranks that share its heads.

    `linear_output` would refuse a bias that is returned, but only after the cache was written.
    """
    check_groups(context_parallel)
    skipped = getattr(o_proj, "skip_bias_add", False) and getattr(o_proj, "bias", None) is not None
    check(not skipped, "o_proj", "a module that adds its own bias", "one with skip_bias_add and a bias")
    summed = context_parallel is not None and context_parallel.tp_group.size > 1
    check(not summed or getattr(o_proj, "bias", None) is None, "o_proj",
          "no bias where heads are shared (each rank would add it)", "one with a bias")  # fmt: skip


def check_norm(argument: str, norm: object, width: int) -> None:
    """Check a latent norm: a module with a weight and no hooks, for its weight is read, its forward not called."""
    check_type(argument, norm, nn.Module, "a module with a weight")
    weight = getattr(norm, "weight", None)
    check(weight is not None, argument, "a module with a weight", type(norm).__name__)
    check_tensor(f"{argument}.weight", weight, (width,))
    hooked = norm._forward_hooks or norm._forward_pre_hooks or "forward" in norm.__dict__
    check(not hooked, argument, "a module without hooks", "one with a forward hook")


def latent_norm_eps(kv_a_layernorm: object, q_a_layernorm: object | None) -> float:
    """Return the epsilon of a transformers module's latent norms (`variance_epsilon`); a config has one for both.

    Raises:
        UnsupportedConfiguration: the two differ.
    """
    eps = kv_a_layernorm.variance_epsilon
    other = eps if q_a_layernorm is None else q_a_layernorm.variance_epsilon
    if other != eps:
        wanted = f"q_a_layernorm.variance_epsilon: expected {eps}, that of kv_a_layernorm"
        raise UnsupportedConfiguration([f"{wanted}, got {other}"])
    return eps


def check_block_mapping(block_mapping: Tensor, source_blocks: int, target_blocks: int, same_cache: bool) -> None:
    """Check the values of (source, target) block pairs on the CPU; none written twice or read and written."""
    pairs = block_mapping.tolist()
    for source, target in pairs:
        check(0 <= source < source_blocks, "block_mapping", f"source blocks in [0, {source_blocks})", source)
        check(0 <= target < target_blocks, "block_mapping", f"target blocks in [0, {target_blocks})", target)
    targets = [target for _, target in pairs]
    check(len(set(targets)) == len(targets), "block_mapping", "distinct target blocks", targets)
    overlap = set(targets) & {source for source, _ in pairs}
    check(not (same_cache and overlap), "block_mapping", "no block that is both source and target", sorted(overlap))


def check_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, k_pe: Tensor | None = None
) -> None:
    """Shapes, dtypes and devices of varlen attention, the shared rope key apart or not; reads no values."""
    check_tensor("q", q, ("T", "N", "P + R"))
    _, heads, width = q.shape
    if k_pe is None:
        check_tensor("k", k, ("S", heads, width), (q.dtype,), q.device)
    else:
        check_tensor("k_pe", k_pe, ("S", "R"), (q.dtype,), q.device)
        keys, rope = k_pe.shape
        check_tensor("k_nope", k, (keys, heads, width - rope), (q.dtype,), q.device)
    check_tensor("v", v, (k.shape[0], heads, "V"), (q.dtype,), q.device)
    check_tensor("cu_seqlens_q", cu_seqlens_q, ("B + 1",), (torch.int32,), q.device)
    check_tensor("cu_seqlens_k", cu_seqlens_k, (cu_seqlens_q.shape[0],), (torch.int32,), q.device)


def check_attention_settings(max_seqlen_q: int, max_seqlen_k: int, softmax_scale: float, causal: bool) -> None:
    """Check the numbers of varlen attention."""
    check_int("max_seqlen_q", max_seqlen_q, 0)
    check_int("max_seqlen_k", max_seqlen_k, 0)
    check_number("softmax_scale", softmax_scale)
    check_flag("causal", causal)


def check_state(argument: str, state: AttentionState) -> None:
    """Shapes, dtypes and devices of an attention state; reads no values."""
    check_type(argument, state, AttentionState)
    check_tensor(f"{argument}.out", state.out, ("T", "N", "Dv"))
    tokens, heads, _ = state.out.shape
    check_tensor(f"{argument}.lse", state.lse, (heads, tokens), (wide_dtype(state.out.dtype),), state.out.device)


def check_merge(prefix: AttentionState, suffix: AttentionState) -> None:
    """Shapes, dtypes and devices of two states to merge; reads no values."""
    check_state("prefix", prefix)
    check_state("suffix", suffix)
    check_tensor("suffix.out", suffix.out, tuple(prefix.out.shape), (prefix.out.dtype,), prefix.out.device)


def check_decode(
    ql_nope: Tensor, q_pe: Tensor, kv_cache: Tensor, metadata: DecodeMetadata, schedule: DecodeSchedule | None = None
) -> None:
    """Shapes, dtypes and devices of absorbed decode; reads no values."""
    check_tensor("ql_nope", ql_nope, ("T", "N", "Lkv"))
    tokens, heads, latent = ql_nope.shape
    check_tensor("q_pe", q_pe, (tokens, heads, "R"), (ql_nope.dtype,), ql_nope.device)
    check_cache(kv_cache, latent + q_pe.shape[2], ql_nope.dtype, ql_nope.device)
    check_decode_plan(metadata, tokens, ql_nope.device)
    check_block_size("metadata.block_size", metadata.block_size, kv_cache)
    if schedule is not None:
        check_schedule(schedule, metadata.seq_lens.shape[0], ql_nope.device)


def check_block_size(argument: str, block_size: int, kv_cache: Tensor) -> None:
    """Check that a plan was made for the block size of a cache."""
    check_int(argument, block_size)
    check(block_size == kv_cache.shape[1], argument, f"{kv_cache.shape[1]}, the block size of kv_cache", block_size)


def check_schedule(
    schedule: DecodeSchedule, num_requests: int, device: torch.device, argument: str = "schedule"
) -> None:
    """Shapes, dtypes and devices of a decode schedule; reads no values."""
    int32 = (torch.int32,)
    check_type(argument, schedule, DecodeSchedule)
    ranges, splits = f"{argument}.tile_ranges", f"{argument}.split_offsets"
    check_flag(f"{argument}.batch_invariant", schedule.batch_invariant)
    if schedule.tile_ranges is None:
        check(schedule.batch_invariant, ranges, "[programs, 5] unless batch_invariant", None)
        check(schedule.split_offsets is None, splits, "None without tile_ranges", "a tensor")
        return
    check_tensor(ranges, schedule.tile_ranges, ("programs", 5), int32, device)
    check(schedule.tile_ranges.shape[0] >= 1, ranges, "at least one program", 0)
    check_tensor(splits, schedule.split_offsets, (num_requests + 1,), int32, device)


def check_decode_plan(metadata: DecodeMetadata, num_tokens: int, device: torch.device) -> None:
    """Shapes, dtypes and devices of the tensors of a decode plan; reads no values."""
    int32 = (torch.int32,)
    check_type("metadata", metadata, DecodeMetadata)
    check_tensor("metadata.seq_lens", metadata.seq_lens, ("B",), int32, device)
    requests = metadata.seq_lens.shape[0]
    check_tensor("metadata.block_table", metadata.block_table, (requests, "W"), int32, device)
    check_tensor("metadata.query_start_loc", metadata.query_start_loc, (requests + 1,), int32, device)
    check_tensor("metadata.visible_lens", metadata.visible_lens, (num_tokens,), int32, device)
    longest = metadata.max_query_len
    check_int("metadata.max_query_len", longest, 0)
    check(num_tokens <= requests * longest, "metadata.max_query_len",
          f"a bound: {num_tokens} tokens of {requests} requests", longest)  # fmt: skip
    check_int("metadata.max_seq_len", metadata.max_seq_len, 0)
    check_int("metadata.block_size", metadata.block_size)


def check_prefill(q: Tensor, kv_c_normed: Tensor, k_pe: Tensor, kv_cache: Tensor, metadata: PrefillMetadata,
                  w_uk: Tensor, w_uv: Tensor) -> None:  # fmt: skip
    """Shapes, dtypes and devices of a prefill; reads no values."""
    check_tensor("q", q, ("T", "N", "P + R"))
    tokens, heads, width = q.shape
    check_tensor("k_pe", k_pe, (tokens, "R"), (q.dtype,), q.device)
    rope = k_pe.shape[1]
    check_tensor("kv_c_normed", kv_c_normed, (tokens, "Lkv"), (q.dtype,), q.device)
    latent = kv_c_normed.shape[1]
    check_tensor("w_uk", w_uk, (latent, heads, width - rope), (q.dtype,), q.device)
    check_tensor("w_uv", w_uv, (latent, heads, "V"), (q.dtype,), q.device)
    check_cache(kv_cache, latent + rope, q.dtype, q.device)
    check_prefill_plan(metadata, q.device)
    check_block_size("metadata.block_size", metadata.block_size, kv_cache)


def check_prefill_requests(metadata: PrefillMetadata, device: torch.device, argument: str = "metadata") -> int:
    """Shapes, dtypes and devices of a prefill's requests, without the chunks of their context; reads no values.

    Returns:
        B.
    """
    int32 = (torch.int32,)
    check_type(argument, metadata, PrefillMetadata)
    check_tensor(f"{argument}.block_table", metadata.block_table, ("B", "W"), int32, device)
    requests = metadata.block_table.shape[0]
    check_tensor(f"{argument}.query_start_loc", metadata.query_start_loc, (requests + 1,), int32, device)
    check_int(f"{argument}.max_query_len", metadata.max_query_len, 0)
    check_int(f"{argument}.block_size", metadata.block_size)
    return requests


def check_prefill_plan(metadata: PrefillMetadata, device: torch.device, argument: str = "metadata") -> None:
    """Shapes, dtypes and devices of a prefill's plan; reads no values."""
    requests = check_prefill_requests(metadata, device, argument)
    check_type(f"{argument}.context_chunks", metadata.context_chunks, (tuple, list), "a tuple of chunks")
    for chunk in metadata.context_chunks:
        check_chunk(chunk, requests, device, f"{argument}.context_chunks")


def check_expanded(
    q: Tensor, k_nope: Tensor, k_pe: Tensor, v: Tensor, metadata: PrefillMetadata, *chunks: ContextChunk
) -> None:
    """Shapes, dtypes and devices of attention over expanded keys, of new tokens or of a chunk; reads no values."""
    check_tensor("q", q, ("T", "N", "P + R"))
    requests = check_prefill_requests(metadata, q.device)
    ends = metadata.query_start_loc
    for chunk in chunks:
        check_chunk(chunk, requests, q.device, "chunk")
        ends = chunk.cu_seq_lens
    check_tensor("k_pe", k_pe, ("S", "R"), (q.dtype,), q.device)
    check_attention(q, k_nope, v, metadata.query_start_loc, ends, k_pe)


def check_context(kv_cache: Tensor, metadata: PrefillMetadata, chunk: ContextChunk) -> None:
    """Shapes, dtypes and devices of one chunk of context and of the cache that holds it; reads no values."""
    check_cache(kv_cache)
    check_chunk(chunk, check_prefill_requests(metadata, kv_cache.device), kv_cache.device, "chunk")
    check_block_size("metadata.block_size", metadata.block_size, kv_cache)


def check_decode_values(metadata: DecodeMetadata, num_tokens: int, block_size: int, num_blocks: int) -> None:
    """Check on the CPU the values of a decode plan: offsets, lengths, visible lengths and blocks.

    Lengths are those of the keys that lie here (under context parallelism a rank holds fewer than the query is long),
    so only the mask bounds them.
    """
    check_offsets("metadata.query_start_loc", metadata.query_start_loc, num_tokens)
    lengths = metadata.seq_lens.tolist()
    check(min(lengths, default=0) >= 0, "metadata.seq_lens", "lengths >= 0", min(lengths, default=0))
    longest = max(lengths, default=0)
    check(longest <= metadata.max_seq_len, "metadata.seq_lens", f"lengths up to max_seq_len {metadata.max_seq_len}",
          longest)  # fmt: skip
    check_blocks(metadata.block_table, lengths, block_size, num_blocks, "metadata.block_table")
    bounds = torch.repeat_interleave(metadata.seq_lens, metadata.query_start_loc.diff())
    wrong = ((metadata.visible_lens < 0) | (metadata.visible_lens > bounds)).nonzero()
    if wrong.numel():
        row = int(wrong[0])
        check(False, "metadata.visible_lens", f"a value in [0, {int(bounds[row])}] at row {row}",
              int(metadata.visible_lens[row]))  # fmt: skip


def check_forward_attention(
    config: MLAConfig, weight: Tensor, q: Tensor, kv_c_normed: Tensor, k_pe: Tensor, kv_cache: Tensor, output: Tensor
) -> None:
    """Shapes, dtypes and devices of a layer's attention, all tied to its up-projection; reads no values."""
    dtypes, device = (weight.dtype,), weight.device
    check_tensor("q", q, ("T", config.num_heads, config.qk_head_dim), dtypes, device)
    tokens = q.shape[0]
    check_tensor("kv_c_normed", kv_c_normed, (tokens, config.kv_lora_rank), dtypes, device)
    check_tensor("k_pe", k_pe, (tokens, config.qk_rope_head_dim), dtypes, device)
    check_cache(kv_cache, config.head_size, weight.dtype, device)
    check_tensor("output", output, (tokens, config.num_heads, config.v_head_dim), dtypes, device)


def check_step(metadata: MLAMetadata, num_tokens: int, kv_cache: Tensor, workspace_tokens: int) -> None:
    """Check a whole step's plan before its first write: counts everywhere, values where they lie on the CPU.

    No chunk of context may be larger than the `workspace_tokens` that the layer was profiled with.

    Compiled code has no place for reading values here; there each op checks its own before it writes.
    """
    check(isinstance(metadata, MLAMetadata), "metadata", "an MLAMetadata or None", type(metadata).__name__)
    end, split = metadata.num_actual_tokens, metadata.num_decode_tokens
    for name, count in (("num_actual_tokens", end), ("num_decode_tokens", split)):
        check_int(f"metadata.{name}", count, 0)
    check(0 <= split <= end <= num_tokens, "metadata", f"0 <= num_decode_tokens <= num_actual_tokens <= {num_tokens}",
          f"{split} and {end}")  # fmt: skip
    device, prefill = kv_cache.device, metadata.prefill
    check_tensor("metadata.slot_mapping", metadata.slot_mapping, ("slots",), (torch.int64,), device)
    check(metadata.slot_mapping.shape[0] >= end, "metadata.slot_mapping", f"at least {end} slots",
          metadata.slot_mapping.shape[0])  # fmt: skip
    check_decode_plan(metadata.decode, split, device)
    check_int("metadata.num_decodes", metadata.num_decodes, 0)
    check(metadata.num_decodes == metadata.decode.seq_lens.shape[0], "metadata.num_decodes",
          f"the {metadata.decode.seq_lens.shape[0]} requests of metadata.decode", metadata.num_decodes)  # fmt: skip
    check_block_size("metadata.decode.block_size", metadata.decode.block_size, kv_cache)
    if metadata.schedule is not None:
        check_schedule(metadata.schedule, metadata.num_decodes, device, "metadata.schedule")
    if metadata.cascade is not None:
        check_type("metadata.cascade", metadata.cascade, CascadeMetadata)
        for name, part in (("prefix", metadata.cascade.prefix), ("suffix", metadata.cascade.suffix)):
            check_decode_plan(part, split, device)
            check_block_size(f"metadata.cascade.{name}.block_size", part.block_size, kv_cache)
    check_prefill_plan(prefill, device, "metadata.prefill")
    check_block_size("metadata.prefill.block_size", prefill.block_size, kv_cache)
    check_int("metadata.workspace_tokens", metadata.workspace_tokens, 0)
    check_type("metadata.schedule_choice", metadata.schedule_choice, ScheduleChoice)
    for chunk in prefill.context_chunks:
        check(chunk.num_tokens <= workspace_tokens, "metadata.workspace_tokens",
              f"chunks of at most {workspace_tokens} tokens, the layer's workspace_tokens",
              f"one of {chunk.num_tokens} in a plan for {metadata.workspace_tokens}")  # fmt: skip
    if device.type != "cpu" or torch.compiler.is_compiling():
        return
    num_blocks, block_size, _ = kv_cache.shape
    check_slots(metadata.slot_mapping[:end], num_blocks * block_size, "metadata.slot_mapping")
    check_decode_values(metadata.decode, split, block_size, num_blocks)
    if metadata.cascade is not None:
        check_decode_values(metadata.cascade.prefix, split, block_size, num_blocks)
        check_decode_values(metadata.cascade.suffix, split, block_size, num_blocks)
    check_offsets("metadata.prefill.query_start_loc", prefill.query_start_loc, end - split)
    for chunk in prefill.context_chunks:
        check_offsets("metadata.prefill.context_chunks.cu_seq_lens", chunk.cu_seq_lens, chunk.num_tokens)
        held_starts, held_offsets = chunk.held
        first, lengths = held_starts.tolist(), held_offsets.diff().tolist()
        earliest = min(first, default=0)
        check(earliest >= 0, "metadata.prefill.context_chunks.starts", "values >= 0", earliest)
        ends = (start + length if length else 0 for start, length in zip(first, lengths, strict=True))
        check_blocks(prefill.block_table, ends, block_size, num_blocks, "metadata.prefill.block_table")


def check_chunk(chunk: ContextChunk, requests: int, device: torch.device, name: str = "chunk") -> None:
    """Shapes, dtypes and devices of the tensors of a piece of context; reads no values."""
    int32 = (torch.int32,)
    check_type(name, chunk, ContextChunk)
    check_int(f"{name}.num_tokens", chunk.num_tokens, 0)
    check_int(f"{name}.max_seq_len", chunk.max_seq_len, 0)
    check_tensor(f"{name}.starts", chunk.starts, (requests,), int32, device)
    check_tensor(f"{name}.cu_seq_lens", chunk.cu_seq_lens, (requests + 1,), int32, device)
    if isinstance(chunk, ContextParallelChunk):
        check_type(f"{name}.share", chunk.share, SequenceShare)
        check_int(f"{name}.padded_tokens", chunk.padded_tokens, 0)
        check_int(f"{name}.local_tokens", chunk.local_tokens, 0)
        check_tensor(f"{name}.local_starts", chunk.local_starts, (requests,), int32, device)
        shape = (chunk.share.size, requests + 1)
        check_tensor(f"{name}.local_cu_seq_lens", chunk.local_cu_seq_lens, shape, int32, device)


def check_step_share(metadata: MLAMetadata, context_parallel: ContextParallel | None) -> None:
    """Check that a step was planned for the very share of the sequences that a layer's rank holds."""
    share = metadata.share if isinstance(metadata, ContextParallelMetadata) else None
    wanted = None if context_parallel is None else context_parallel.share
    if share != wanted:
        check(False, "metadata", f"a plan for {wanted or 'one rank (no context_parallel)'}",
              f"one for {share or 'one rank (no share)'}")  # fmt: skip
    if share is None:
        return
    check(metadata.cascade is None, "metadata.cascade", "None where ranks share sequences", "a cascade")
    for chunk in metadata.prefill.context_chunks:
        check_chunk_share(chunk, context_parallel, "metadata.prefill.context_chunks")


def check_chunk_share(chunk: ContextChunk, context_parallel: ContextParallel, argument: str = "chunk") -> None:
    """Check that a piece of context was planned for a rank's share."""
    check_type("context_parallel", context_parallel, ContextParallel)
    is_shared = isinstance(chunk, ContextParallelChunk)
    check(is_shared, argument, "a ContextParallelChunk (`share_chunk`)", type(chunk).__name__)
    check(
        chunk.share == context_parallel.share, argument, f"one for {context_parallel.share}", f"one for {chunk.share}"
    )


def check_slots_of_share(common: CommonAttentionMetadata, share: SequenceShare) -> None:
    """Check on the CPU that a batch has no more slots than a rank has new tokens: those of one rank are too many."""
    starts, tokens = common.num_computed_tokens_cpu, common.num_actual_tokens
    own = (get_dcp_local_seq_lens(lens, share.size, share.rank, share.interleave).sum() for lens in
           (common.seq_lens_cpu, starts))  # fmt: skip
    most = int(next(own)) - int(next(own))
    got = int((common.slot_mapping[:tokens] >= 0).sum())
    wanted = f"slots for at most the {most} new tokens of this rank (`dcp_slot_mapping`)"
    check(got <= most, "common.slot_mapping", wanted, got)


def check_rank_offsets(
    cu_seq_lens: Tensor, local_cu_seq_lens: Tensor, interleave: int, num_tokens: int, padded_tokens: int
) -> None:
    """Check on the CPU that the offsets of all ranks are those of the pieces, dealt out among them."""
    check_offsets("chunk.cu_seq_lens", cu_seq_lens, num_tokens)
    dealt = get_dcp_local_seq_lens(cu_seq_lens.diff(), local_cu_seq_lens.shape[0], None, interleave).T
    fits = bool((local_cu_seq_lens[:, 0] == 0).all()) and torch.equal(local_cu_seq_lens.diff(dim=1), dealt)
    check(fits, "chunk.local_cu_seq_lens", "the prefix sums of each rank's tokens of the pieces",
          local_cu_seq_lens.tolist())  # fmt: skip
    most = int(local_cu_seq_lens[:, -1].max())
    check(most <= padded_tokens, "chunk.padded_tokens", f"at least {most}", padded_tokens)


def check_invariant_merge(context_parallel: ContextParallel | None, batch_invariant: bool) -> None:
    """Check that a promise of the same bits does not rest on a reduce-scatter, whose order the engine may choose."""
    check_groups(context_parallel)
    check_flag("batch_invariant", batch_invariant)
    breaks = batch_invariant and context_parallel is not None and context_parallel.merge != "a2a"
    check(not breaks, "batch_invariant", 'False, or groups with merge "a2a"', 'True with "ag_rs"')


def check_merge_over_group(state: AttentionState, group_size: int) -> None:
    """Shapes, dtypes and devices of a rank's attention state whose heads go home; reads no values."""
    check_state("state", state)
    heads = state.out.shape[1]
    check(heads % group_size == 0, "state.out", f"heads in a multiple of {group_size} ranks", heads)


def check_reorg(gathered: Tensor, chunk: ContextParallelChunk) -> None:
    """Shapes, dtypes and devices of a piece of context that was gathered from all ranks; reads no values."""
    check(isinstance(chunk, ContextParallelChunk), "chunk", "a ContextParallelChunk", type(chunk).__name__)
    check_tensor("gathered", gathered, ("ranks", "padded_tokens", "head_size"))
    check_tensor("chunk.starts", chunk.starts, ("B",), (torch.int32,), gathered.device)
    check_chunk(chunk, chunk.starts.shape[0], gathered.device)
    check_tensor("gathered", gathered, (chunk.share.size, chunk.padded_tokens, "head_size"))


def check_graph_sizes(
    batch_sizes: Sequence[int],
    block_size: int,
    max_blocks: int,
    query_len: int,
    num_programs: int,
) -> None:
    """Check what a decode graph is made for."""
    check_type("batch_sizes", batch_sizes, Sequence, "positive ints, at least one")
    sizes = list(batch_sizes)
    check(bool(sizes) and all(is_positive_int(size) for size in sizes), "batch_sizes", "positive ints, at least one",
          sizes)  # fmt: skip
    for name, value in (("block_size", block_size), ("max_blocks", max_blocks), ("query_len", query_len)):
        check_int(name, value)
    check_int("num_programs", num_programs, 0)
    check(
        max_blocks * block_size < 2**31, "max_blocks", f"fewer than 2^31 tokens in blocks of {block_size}", max_blocks
    )


def check_graph_batch(graph: Any, hidden_states: Tensor, positions: Tensor, common: CommonAttentionMetadata) -> None:
    """Check that a batch fits a decode graph, whose buffers never grow; reads no values of the device."""
    check_common(common)
    largest, q = graph.batch_sizes[-1], graph.query_len
    requests, tokens = common.num_reqs, common.num_actual_tokens
    check(requests <= largest, "common", f"at most {largest} requests, the largest of batch_sizes", requests)
    wrong = (common.query_start_loc_cpu.diff() != q).nonzero()
    if wrong.numel():
        request = int(wrong[0])
        got = int(common.query_start_loc_cpu[request + 1] - common.query_start_loc_cpu[request])
        check(False, "common", f"{q} tokens of each request, as captured", f"{got} at request {request}")
    check_batch_block_size(common, graph.block_size)
    width = common.block_table.shape[1]
    check(width <= graph.max_blocks, "common.block_table", f"at most {graph.max_blocks} columns, as captured", width)
    check_table_width(common, graph.block_size * graph.share.size)
    check_tensor("hidden_states", hidden_states, (tokens, graph.config.hidden_size), (graph.dtype,), graph.device)
    check_tensor("positions", positions, (tokens,), (torch.int64,), graph.device)
    check_tensor("common.block_table", common.block_table, (requests, "W"), (torch.int32,), graph.device)
    check_tensor("common.seq_lens", common.seq_lens, (requests,), (torch.int32,), graph.device)
    check_tensor("common.slot_mapping", common.slot_mapping, ("slots",), (torch.int64,), graph.device)
    check(common.slot_mapping.shape[0] >= tokens, "common.slot_mapping", f"at least {tokens} slots",
          common.slot_mapping.shape[0])  # fmt: skip
