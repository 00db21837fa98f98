"""Argument checks of the attention functions: queries, keys, attention states and plans.

"Read no values" means that a check looks at shapes, dtypes and devices alone, so it does not wait for a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .cache_arguments import check_block_size, check_chunk, check_formatted_cache, check_stored_cache
from .cache_format import E4M3, CacheFormat
from .checks import (
    FLOAT_DTYPES,
    check,
    check_blocks,
    check_dtype,
    check_flag,
    check_int,
    check_number,
    check_offsets,
    check_tensor,
    check_type,
    wide_dtype,
)
from .context_chunk import ChunkRows, ChunkRun, ContextChunk
from .decode_schedule import DecodeSchedule, InvariantSplitRule
from .metadata import AttentionState, DecodeMetadata
from .ownership import TokenOwnership, get_dcp_local_seq_lens
from .prefill_metadata import PrefillMetadata, PrefillPart
from .quantization import CONVERTED, check_mode_of_format, check_scale
from .support import CAUSAL_OVER_RANKS, DECODE_MASKS, GraphSupport

CPU = torch.device("cpu")


def check_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, k_pe: Tensor | None = None
) -> None:
    """Check shapes, dtypes and devices of the arguments of `flash_attn_varlen`; read no values.

    Args:
        q: [T, N, P + R].
        k: [S, N, P + R], or [S, N, P] if `k_pe` is given.
        v: [S, N, V].
        cu_seqlens_q: [B + 1].
        cu_seqlens_k: [B + 1].
        k_pe: [S, R], rope parts of the keys, which all heads share; None if `k` contains the rope parts.
    """
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
    """Check the arguments of `flash_attn_varlen` that are numbers."""
    check_int("max_seqlen_q", max_seqlen_q, 0)
    check_int("max_seqlen_k", max_seqlen_k, 0)
    check_number("softmax_scale", softmax_scale)
    check_flag("causal", causal)


def check_state(argument: str, state: AttentionState) -> None:
    """Check shapes, dtypes and devices of an attention state; read no values."""
    check_type(argument, state, AttentionState)
    check_tensor(f"{argument}.out", state.out, ("T", "N", "Dv"))
    tokens, heads, _ = state.out.shape
    check_tensor(f"{argument}.lse", state.lse, (heads, tokens), (wide_dtype(state.out.dtype),), state.out.device)


def check_merge(prefix: AttentionState, suffix: AttentionState) -> None:
    """Check that two attention states have equal shapes, dtypes and devices, for a merge; read no values."""
    check_state("prefix", prefix)
    check_state("suffix", suffix)
    check_tensor("suffix.out", suffix.out, tuple(prefix.out.shape), (prefix.out.dtype,), prefix.out.device)


def check_decode(
    ql_nope: Tensor,
    q_pe: Tensor,
    kv_cache: Tensor,
    metadata: DecodeMetadata,
    cache_format: CacheFormat,
    schedule: DecodeSchedule | None = None,
    kv_scale: Tensor | None = None,
    fp8_mode: str = CONVERTED,
    q_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    ranks: int = 1,
) -> None:
    """Check shapes, dtypes and devices of the arguments of `mla_decode`; read no values.

    `ranks` is the number of ranks whose queries will be gathered. If `q_scale` has one element for each head, it must
    have N * `ranks` elements: one for each head of the gathered queries.
    """
    check_mode_of_format(fp8_mode, cache_format)
    in_e4m3 = fp8_mode != CONVERTED
    check_tensor("ql_nope", ql_nope, ("T", "N", "Lkv"), (E4M3,) if in_e4m3 else FLOAT_DTYPES)
    tokens, heads, latent = ql_nope.shape
    check_tensor("q_pe", q_pe, (tokens, heads, "R"), (ql_nope.dtype,), ql_nope.device)
    dtype = ql_nope.dtype
    if in_e4m3:
        check(out_dtype is not None, "out_dtype", f"a dtype for fp8_mode {fp8_mode}", None)
        check_dtype("out_dtype", out_dtype)
        check_scale("q_scale", q_scale, heads * ranks, ql_nope.device)
        dtype = out_dtype
    else:
        check(q_scale is None, "q_scale", f"None for fp8_mode {CONVERTED}", "a scale")
    check_formatted_cache(kv_cache, cache_format, latent, q_pe.shape[2], dtype, ql_nope.device, kv_scale)
    check_decode_plan(metadata, tokens, ql_nope.device)
    check_block_size("metadata.block_size", metadata.block_size, kv_cache)
    if schedule is not None:
        check_schedule(schedule, metadata.seq_lens.shape[0], ql_nope.device)


def check_schedule(
    schedule: DecodeSchedule, num_requests: int, device: torch.device, argument: str = "schedule"
) -> None:
    """Check shapes, dtypes and devices of a decode schedule; read no values."""
    int32 = (torch.int32,)
    check_type(argument, schedule, DecodeSchedule)
    ranges, splits = f"{argument}.tile_ranges", f"{argument}.split_offsets"
    check_flag(f"{argument}.batch_invariant", schedule.batch_invariant)
    check_type(f"{argument}.split_rule", schedule.split_rule, InvariantSplitRule)
    if schedule.tile_ranges is None:
        check(schedule.batch_invariant, ranges, "[programs, 5] unless batch_invariant", None)
        check(schedule.split_offsets is None, splits, "None without tile_ranges", "a tensor")
        return
    check_tensor(ranges, schedule.tile_ranges, ("programs", 5), int32, device)
    check(schedule.tile_ranges.shape[0] >= 1, ranges, "at least one program", 0)
    check_tensor(splits, schedule.split_offsets, (num_requests + 1,), int32, device)


def _check_ranks(metadata: DecodeMetadata, requests: int, device: torch.device, argument: str) -> None:
    """Check what the plan of a decode says about context parallelism, and that it has what its mask promises."""
    owned, totals = metadata.ownership, metadata.total_seq_lens
    check_type(f"{argument}.ownership", owned, (TokenOwnership, type(None)), "a TokenOwnership or None")
    if totals is not None:
        check_tensor(f"{argument}.total_seq_lens", totals, (requests,), (torch.int32,), device)
    if metadata.mask == CAUSAL_OVER_RANKS:
        check(owned is not None and owned.interleave == 1, f"{argument}.ownership",
              f"a TokenOwnership with interleave 1 for the mask {CAUSAL_OVER_RANKS}", owned)  # fmt: skip
        check(totals is not None, f"{argument}.total_seq_lens", f"a tensor for the mask {CAUSAL_OVER_RANKS}", None)


def check_decode_plan(
    metadata: DecodeMetadata, num_tokens: int, device: torch.device, argument: str = "metadata"
) -> None:
    """Check shapes, dtypes and devices of the plan of a decode; read no values. Messages name it `argument`."""
    int32 = (torch.int32,)
    check_type(argument, metadata, DecodeMetadata)
    check_type(f"{argument}.graph", metadata.graph, GraphSupport)
    check(metadata.mask in DECODE_MASKS, f"{argument}.mask", f"one of {', '.join(DECODE_MASKS)}", metadata.mask)
    check_type(f"{argument}.backend", metadata.backend, (str, type(None)), "the name of a backend or None")
    check_type(f"{argument}.prepared", metadata.prepared, tuple, "a tuple of tensors")
    for tensor in metadata.prepared:
        check_type(f"{argument}.prepared", tensor, Tensor, "a tuple of tensors")
    check_tensor(f"{argument}.seq_lens", metadata.seq_lens, ("B",), int32, device)
    requests = metadata.seq_lens.shape[0]
    _check_ranks(metadata, requests, device, argument)
    check_tensor(f"{argument}.block_table", metadata.block_table, (requests, "W"), int32, device)
    check_tensor(f"{argument}.query_start_loc", metadata.query_start_loc, (requests + 1,), int32, device)
    check_tensor(f"{argument}.visible_lens", metadata.visible_lens, (num_tokens,), int32, device)
    longest = metadata.max_query_len
    check_int(f"{argument}.max_query_len", longest, 0)
    check(num_tokens <= requests * longest, f"{argument}.max_query_len",
          f"an upper bound of the query lengths of {requests} requests with {num_tokens} tokens",
          longest)  # fmt: skip
    check_int(f"{argument}.max_seq_len", metadata.max_seq_len, 0)
    check_int(f"{argument}.block_size", metadata.block_size)


def check_prefix_split(metadata: DecodeMetadata, common_prefix_len: int, block_size: int, row: int) -> int:
    """Check the arguments of `split_shared_prefix`, and return the number of blocks of the prefix; read no values."""
    check_type("metadata", metadata, DecodeMetadata)
    check_tensor("metadata.visible_lens", metadata.visible_lens, ("T",), (torch.int32,))
    check_decode_plan(metadata, metadata.visible_lens.shape[0], metadata.visible_lens.device)
    check_int("block_size", block_size)
    wanted = f"a positive multiple of the block size {block_size}"
    check_int("common_prefix_len", common_prefix_len, 1, wanted)
    whole = common_prefix_len >= block_size >= 1 and common_prefix_len % block_size == 0
    check(block_size == metadata.block_size, "block_size", f"{metadata.block_size}, as in metadata", block_size)
    check(whole, "common_prefix_len", wanted, common_prefix_len)
    blocks, requests = common_prefix_len // block_size, metadata.seq_lens.shape[0]
    check(blocks <= metadata.block_table.shape[1], "common_prefix_len",
          f"at most the {metadata.block_table.shape[1]} blocks of the table", f"{blocks} blocks")  # fmt: skip
    check_int("row", row, 0, f"a request in [0, {requests})")
    check(0 <= row < requests, "row", f"a request in [0, {requests})", row)
    return blocks


def check_decode_values(metadata: DecodeMetadata, num_tokens: int, block_size: int, num_blocks: int) -> None:
    """Check the values of the plan of a decode: offsets, lengths, `visible_lens` and blocks.

    A request may have fewer keys than query tokens: under context parallelism, `seq_lens` counts the keys of one rank.
    """
    mixed = metadata.graph is GraphSupport.ANY  # if True, tokens behind the last request are padding
    check_offsets("metadata.query_start_loc", metadata.query_start_loc, None if mixed else num_tokens, num_tokens)
    used = int(metadata.query_start_loc[-1])
    lengths = metadata.seq_lens.tolist()
    check(min(lengths, default=0) >= 0, "metadata.seq_lens", "lengths >= 0", min(lengths, default=0))
    longest = max(lengths, default=0)
    check(longest <= metadata.max_seq_len, "metadata.seq_lens", f"lengths up to max_seq_len {metadata.max_seq_len}",
          longest)  # fmt: skip
    check_blocks(metadata.block_table, lengths, block_size, num_blocks, "metadata.block_table")
    bounds = torch.repeat_interleave(metadata.seq_lens, metadata.query_start_loc.diff())
    bounds = torch.nn.functional.pad(bounds, (0, num_tokens - used))
    wrong = ((metadata.visible_lens < 0) | (metadata.visible_lens > bounds)).nonzero()
    if wrong.numel():
        row = int(wrong[0])
        check(False, "metadata.visible_lens", f"a value in [0, {int(bounds[row])}] at row {row}",
              int(metadata.visible_lens[row]))  # fmt: skip


def check_causal_mask(metadata: DecodeMetadata) -> None:
    """Check that `visible_lens` is the causal mask that the plan promises, for a kernel that has no other mask.

    Args:
        metadata: plan of a decode on the CPU, whose values have passed `check_decode_values`. Tokens behind the last
            request are padding, and are not checked. With `ownership` and `total_seq_lens`, the mask is the causal mask
            over whole sequences, of whose tokens this rank owns some.
    """
    num_tokens, owned = int(metadata.query_start_loc[-1]), metadata.ownership
    query_lens = metadata.query_start_loc.diff()
    lens = metadata.seq_lens if owned is None else metadata.total_seq_lens
    first_seen = lens - query_lens + 1  # number of keys that the first query token of a request sees
    places = torch.arange(num_tokens) - torch.repeat_interleave(metadata.query_start_loc[:-1], query_lens)
    causal = (torch.repeat_interleave(first_seen, query_lens) + places).clamp(min=0)
    if owned is not None:
        causal = get_dcp_local_seq_lens(causal.int(), owned.size, owned.rank, owned.interleave)
    wrong = (metadata.visible_lens[:num_tokens] != causal).nonzero()
    if wrong.numel():
        row = int(wrong[0])
        check(False, "metadata.visible_lens", f"{int(causal[row])}, the causal mask, at row {row}",
              int(metadata.visible_lens[row]))  # fmt: skip


def check_prefill(q: Tensor, kv_c_normed: Tensor, k_pe: Tensor, kv_cache: Tensor, metadata: PrefillMetadata,
                  w_uk: Tensor, w_uv: Tensor, cache_format: CacheFormat,
                  kv_scale: Tensor | None = None) -> None:  # fmt: skip
    """Check shapes, dtypes and devices of the arguments of `forward_prefill`; read no values."""
    check_tensor("q", q, ("T", "N", "P + R"))
    tokens, heads, width = q.shape
    check_tensor("k_pe", k_pe, (tokens, "R"), (q.dtype,), q.device)
    rope = k_pe.shape[1]
    check_tensor("kv_c_normed", kv_c_normed, (tokens, "Lkv"), (q.dtype,), q.device)
    latent = kv_c_normed.shape[1]
    check_tensor("w_uk", w_uk, (latent, heads, width - rope), (q.dtype,), q.device)
    check_tensor("w_uv", w_uv, (latent, heads, "V"), (q.dtype,), q.device)
    check_formatted_cache(kv_cache, cache_format, latent, rope, q.dtype, q.device, kv_scale)
    check_prefill_plan(metadata, tokens, q.device)
    check_block_size("metadata.block_size", metadata.block_size, kv_cache)


def check_prefill_requests(metadata: PrefillMetadata, device: torch.device, argument: str = "metadata") -> int:
    """Check shapes, dtypes and devices of the plan of a prefill, except its chunks; read no values.

    Returns:
        B, the number of requests of the plan.
    """
    int32 = (torch.int32,)
    check_type(argument, metadata, PrefillMetadata)
    check_tensor(f"{argument}.block_table", metadata.block_table, ("B", "W"), int32, device)
    requests = metadata.block_table.shape[0]
    check_tensor(f"{argument}.query_start_loc", metadata.query_start_loc, (requests + 1,), int32, device)
    check_int(f"{argument}.max_query_len", metadata.max_query_len, 0)
    check_int(f"{argument}.block_size", metadata.block_size)
    check_type(f"{argument}.backend", metadata.backend, (str, type(None)), "a str or None")
    check_flag(f"{argument}.batch_invariant", metadata.batch_invariant)
    return requests


def check_prefill_plan(
    metadata: PrefillMetadata, num_tokens: int, device: torch.device, argument: str = "metadata"
) -> None:
    """Check shapes, dtypes and devices of the plan of a prefill of `num_tokens` query tokens; read no values."""
    requests = check_prefill_requests(metadata, device, argument)
    check_type(f"{argument}.context_chunks", metadata.context_chunks, (tuple, list), "a tuple of chunks")
    for chunk in metadata.context_chunks:
        check_chunk(chunk, requests, device, f"{argument}.context_chunks")
    without = [chunk.run is None for chunk in metadata.context_chunks]
    check(len(set(without)) < 2, f"{argument}.context_chunks.run", "a run of every chunk, or of no chunk",
          f"no run of chunk {without.index(True) if True in without else 0}")  # fmt: skip
    finished: list[tuple[int, int]] = []  # first and end query token of which an earlier chunk has written the output
    for run in ChunkRun.of_chunks(metadata.context_chunks, requests, num_tokens, metadata.max_query_len):
        check(run.end_token <= num_tokens, f"{argument}.context_chunks.run", f"at most {num_tokens} query tokens",
              run.end_token)  # fmt: skip
        for first, end in finished:
            check(run.end_token <= max(first, run.first_token) or end <= run.first_token,
                  f"{argument}.context_chunks.run", f"no query tokens of [{first}, {end}), whose output is final",
                  f"[{run.first_token}, {run.end_token})")  # fmt: skip
        if run.first_token < run.finished_token:
            finished.append((run.first_token, run.finished_token))
    check_type(f"{argument}.parts", metadata.parts, (tuple, list), "a tuple of parts")
    if metadata.parts:
        check_prefill_parts(metadata, num_tokens, device, f"{argument}.parts")


def check_prefill_parts(metadata: PrefillMetadata, num_tokens: int, device: torch.device, argument: str) -> None:
    """Check the parts of the plan of a prefill; read no values.

    A part (`PrefillPart`) has consecutive requests and a plan of its own. All parts together must have all requests and
    query tokens, in their order. The tokens of each chunk of a part are consecutive rows of one chunk of `metadata`:
    `rows` has the index of this chunk and the range of these rows (`ChunkRows`).
    """
    token, requests = 0, 0
    for part in metadata.parts:
        check_type(argument, part, PrefillPart)
        check_int(f"{argument}.first_token", part.first_token, 0)
        check_int(f"{argument}.end_token", part.end_token, 0)
        check(token == part.first_token <= part.end_token, argument,
              f"a first token of {token}, and an end not below it",
              f"{part.first_token} and {part.end_token}")  # fmt: skip
        check_type(f"{argument}.plan", part.plan, PrefillMetadata)
        check_type(f"{argument}.plan.parts", part.plan.parts, (tuple, list), "an empty tuple")
        check(len(part.plan.parts) == 0, f"{argument}.plan.parts", "an empty tuple", f"{len(part.plan.parts)} parts")
        check_prefill_plan(part.plan, part.end_token - part.first_token, device, f"{argument}.plan")
        check(part.plan.block_size == metadata.block_size, f"{argument}.plan.block_size", metadata.block_size,
              part.plan.block_size)  # fmt: skip
        check_type(f"{argument}.rows", part.rows, (tuple, list), "a tuple of ChunkRows")
        chunks = part.plan.context_chunks
        check(len(part.rows) == len(chunks), f"{argument}.rows", f"one entry for each of {len(chunks)} chunks",
              len(part.rows))  # fmt: skip
        for rows, chunk in zip(part.rows, chunks, strict=True):
            check_type(f"{argument}.rows", rows, ChunkRows)
            for value in rows:
                check_int(f"{argument}.rows", value, 0)
            check(rows.chunk < len(metadata.context_chunks), f"{argument}.rows", "the index of a chunk", rows.chunk)
            most = metadata.context_chunks[rows.chunk].num_tokens
            check(rows.first + chunk.num_tokens == rows.end <= most, f"{argument}.rows",
                  f"{chunk.num_tokens} rows of a chunk with {most} rows",
                  f"rows [{rows.first}, {rows.end})")  # fmt: skip
        token, requests = part.end_token, requests + part.plan.block_table.shape[0]
    check(token == num_tokens, argument, f"{num_tokens} query tokens in all", token)
    check(requests == metadata.block_table.shape[0], argument, f"{metadata.block_table.shape[0]} requests in all",
          requests)  # fmt: skip


def check_expanded(
    q: Tensor, k_nope: Tensor, k_pe: Tensor, v: Tensor, metadata: PrefillMetadata, *chunks: ContextChunk
) -> None:
    """Check shapes, dtypes and devices of the arguments of attention over expanded keys; read no values.

    Args:
        q: [T, N, P + R].
        k_nope: [S, N, P].
        k_pe: [S, R].
        v: [S, N, V].
        metadata: plan of the prefill.
        chunks: empty if the queries attend the new tokens; otherwise the one chunk of context that they attend.
    """
    check_tensor("q", q, ("T", "N", "P + R"))
    requests = check_prefill_requests(metadata, q.device)
    ends = metadata.query_start_loc
    for chunk in chunks:
        check_chunk(chunk, requests, q.device, "chunk")
        ends = chunk.cu_seq_lens
    check_tensor("k_pe", k_pe, ("S", "R"), (q.dtype,), q.device)
    check_attention(q, k_nope, v, metadata.query_start_loc, ends, k_pe)


def check_expanded_pair(made: object, latents: Tensor, w_uk: Tensor, w_uv: Tensor) -> tuple[Tensor, Tensor]:
    """Return the pair k_nope [S, N, P] and v [S, N, V] that `expand` made of latents [S, Lkv]; read no values.

    Raises:
        TypeError: `made` is neither a tuple nor a list, or its elements are no tensors.
        ValueError: `made` is no pair, or the shape, dtype or device of a tensor is wrong.
    """
    check_type("expand", made, (tuple, list), "a pair of tensors")
    check(len(made) == 2, "expand", "a pair of tensors", f"{len(made)} elements")
    k_nope, v = made
    for name, tensor, weight in (("k_nope", k_nope, w_uk), ("v", v, w_uv)):
        shape = (latents.shape[0], *weight.shape[1:])
        check_tensor(f"expand: {name}", tensor, shape, (latents.dtype,), latents.device)
    return k_nope, v


def check_context(
    kv_cache: Tensor,
    metadata: PrefillMetadata,
    chunk: ContextChunk,
    cache_format: CacheFormat,
    out_dtype: torch.dtype | None,
    kv_scale: Tensor | None = None,
) -> tuple[int, torch.dtype]:
    """Check shapes, dtypes and devices of a chunk and of the cache that contains the chunk; read no values.

    Returns:
        The number of elements of a gathered entry, and its dtype.
    """
    gathered = check_stored_cache(kv_cache, cache_format, out_dtype, kv_scale)
    check_chunk(chunk, check_prefill_requests(metadata, kv_cache.device), kv_cache.device, "chunk")
    check_block_size("metadata.block_size", metadata.block_size, kv_cache)
    return gathered
