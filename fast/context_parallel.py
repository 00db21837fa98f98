"""Decode context parallelism: D ranks share every sequence, each attends its own keys, the results merge by LSE.

Every function runs on one rank and is called on all of them; `reference.context_parallel` says what they compute.
Between the exchanges each step is one kernel: entries put in order, heads sent home, states combined.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int32, Int64
from torch import Tensor

from reference.interfaces import (
    AttentionState,
    ContextParallel,
    ContextParallelChunk,
    DecodeMetadata,
    DecodeSchedule,
    Group,
    PrefillMetadata,
    SequenceShare,
    check,
    check_blocks,
    check_chunk_share,
    check_context,
    check_decode,
    check_dtype,
    check_flag,
    check_int,
    check_interleave,
    check_lengths,
    check_merge_over_group,
    check_number,
    check_rank_offsets,
    check_reorg,
    check_share,
    check_tensor,
    check_type,
    dcp_wire_bytes,
    get_dcp_local_seq_lens,
    simulate,
    slots_of_tokens,
    verify_group,
    wide_dtype,
)

from . import backends
from .backends import BackendChoice
from .cache import gather_and_maybe_dequant_cache
from .decode import decode_in_parts, mla_decode

__all__ = [
    "cp_lse_a2a",
    "cp_lse_ag_out_rs",
    "dcp_decode",
    "dcp_gather_context",
    "dcp_slot_mapping",
    "dcp_wire_bytes",
    "get_dcp_local_seq_lens",
    "reorg_kvcache",
    "simulate",
    "verify_group",
]

MESSAGE_ALIGNMENT = 16  # bytes: both parts of a message lie where a vector load may begin


def dcp_slot_mapping(
    query_start_loc: Int32[Tensor, " offsets"],
    seq_lens: Int32[Tensor, " B"],
    block_table: Int32[Tensor, "B W"],
    block_size: int,
    num_tokens: int,
    context_parallel_size: int,
    rank: int,
    interleave: int = 1,
) -> Int64[Tensor, " num_tokens"]:
    """Cache slot of every new token that lies on a rank, -1 for those that lie elsewhere.

    Args:
        query_start_loc: [B + 1], prefix sum of the query lengths.
        seq_lens: [B], lengths of the whole sequences after this step; 0 for padding rows, whose slots are -1.
        block_table: [B, W], the same on all ranks.
        block_size: tokens a block, a multiple of I.
        num_tokens: length of the result, at least query_start_loc[-1]; the rest is -1.
        context_parallel_size: D.
        rank: of D.
        interleave: I.

    Returns:
        [num_tokens] int64.

    Raises:
        ValueError: numbers out of range; shapes or dtypes that do not fit; offsets that fall; 0 < S < Sq; too few
            columns or tokens.
    """
    check_share(context_parallel_size, rank, interleave)
    check_interleave(interleave, block_size)
    check_int("rank", rank, 0, f"an int in [0, {context_parallel_size})")
    check_int("num_tokens", num_tokens, 0)
    check_tensor("block_table", block_table, ("B", "W"), (torch.int32,))
    requests = block_table.shape[0]
    check_tensor("seq_lens", seq_lens, (requests,), (torch.int32,), block_table.device)
    check_tensor("query_start_loc", query_start_loc, (requests + 1,), (torch.int32,), block_table.device)
    if block_table.device.type == "cpu":
        check_lengths(query_start_loc, seq_lens)
        total = int(query_start_loc[-1])
        check(num_tokens >= total, "num_tokens", f"at least {total}", num_tokens)
        check_blocks(block_table, seq_lens.tolist(), block_size * context_parallel_size, num_blocks=2**31)
    share = SequenceShare(context_parallel_size, rank, interleave)
    return slots_of_tokens(query_start_loc, seq_lens, block_table, block_size, num_tokens, share)


def reorg_kvcache(
    gathered: Float[Tensor, "D padded head_size"],
    chunk: ContextParallelChunk,
    *,
    out: Float[Tensor, "S head_size"] | None = None,
    backend: BackendChoice = None,
) -> Float[Tensor, "S head_size"]:
    """What all ranks handed in of a piece of context, in request order and in the order of the tokens.

    Each rank's tokens stand one request after another, rows past its last one are padding. The result equals the gather
    of one rank that holds everything, bit for bit. (vLLM's function of this name leaves the tokens of a request rank
    after rank: enough for unmasked attention.)

    Args:
        gathered: [D, padded_tokens, Lkv + R], the cache entries that each rank handed in.
        chunk: the plan of the piece.
        out: where to put the result; shares no memory with `gathered`.
        backend: a name, a mapping from op to name, or None for the choice by capability (`fast.backends`).

    Returns:
        [num_tokens, Lkv + R]; `out` where given.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; on a CPU offsets that are not those of the pieces.
        UnsupportedConfiguration: no backend, or not the named one, can serve.
    """
    check_reorg(gathered, chunk)
    request = backends.KernelRequest("reorg_kvcache", gathered.device, gathered.dtype)
    if out is None:
        out = gathered.new_empty(chunk.num_tokens, gathered.shape[2])
    check_tensor("out", out, (chunk.num_tokens, gathered.shape[2]), (gathered.dtype,), gathered.device)
    torch.ops.mla_twins.reorg_kvcache(
        gathered, chunk.cu_seq_lens, chunk.local_cu_seq_lens, chunk.share.interleave, out,
        backends.select(request, backend).name,
    )  # fmt: skip
    return out


@torch.library.custom_op(
    "mla_twins::reorg_kvcache",
    mutates_args=("out",),
    schema="(Tensor gathered, Tensor cu_seq_lens, Tensor local_cu_seq_lens, SymInt interleave, Tensor(a!) out,"
    " str backend) -> ()",
)
def _reorg_kvcache(gathered, cu_seq_lens, local_cu_seq_lens, interleave, out, backend):
    if gathered.device.type == "cpu":
        check_rank_offsets(cu_seq_lens, local_cu_seq_lens, interleave, out.shape[0], gathered.shape[1])
    backends.kernel(backend, "reorg_kvcache")(gathered, cu_seq_lens, local_cu_seq_lens, interleave, out)


@_reorg_kvcache.register_fake
def _(gathered, cu_seq_lens, local_cu_seq_lens, interleave, out, backend):
    return None


def dcp_gather_context(
    kv_cache: Float[Tensor, "num_blocks block_size head_size"],
    metadata: PrefillMetadata,
    chunk: ContextParallelChunk,
    context_parallel: ContextParallel,
    *,
    workspace: Float[Tensor, "rows head_size"] | None = None,
    backend: BackendChoice = None,
) -> Float[Tensor, "S head_size"]:
    """The cache entries of one chunk from all ranks, in the order of the tokens: the gather of a prefill.

    Args:
        kv_cache: of this rank.
        metadata: the requests that prefill.
        chunk: the plan of the piece.
        context_parallel: the groups.
        workspace: rows for what is handed in and what arrives, at least (D + 1) padded_tokens.
        backend: a name, a mapping from op to name, or None for the choice by capability (`fast.backends`).

    Returns:
        [num_tokens, Lkv + R].

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; a piece of another share; on a CPU a block outside the
            cache. Nothing has been exchanged then.
        GroupError: the exchange failed.
        UnsupportedConfiguration: no backend, or not the named one, can serve.
    """
    check_context(kv_cache, metadata, chunk)
    check_chunk_share(chunk, context_parallel)
    backend = backends.bind(backend, ("gather_and_maybe_dequant_cache", "reorg_kvcache"))
    group, padded, width = context_parallel.cp_group, chunk.padded_tokens, kv_cache.shape[2]
    rows = (group.size + 1) * padded
    if workspace is None:
        workspace = kv_cache.new_empty(rows, width)
    check_tensor("workspace", workspace, ("rows", width), (kv_cache.dtype,), kv_cache.device)
    gaps = "" if workspace.is_contiguous() else " with gaps"
    check(workspace.shape[0] >= rows and not gaps, "workspace", f"at least {rows} rows without gaps",
          f"{workspace.shape[0]} rows{gaps}")  # fmt: skip
    arriving, handed_in = workspace[: group.size * padded], workspace[group.size * padded : rows]
    starts, offsets = chunk.held
    gather_and_maybe_dequant_cache(  # rows past those that lie here are padding, and nobody reads them
        kv_cache, metadata.block_table, offsets, starts, chunk.local_tokens, out=handed_in[: chunk.local_tokens],
        backend=backend,
    )  # fmt: skip
    gathered = group.all_gather(handed_in, out=arriving.view(group.size, padded, width))
    return reorg_kvcache(gathered, chunk, backend=backend)


def cp_lse_ag_out_rs(
    state: AttentionState,
    group: Group,
    *,
    backend: BackendChoice = None,
) -> AttentionState:
    """Merge over ranks: all-gather the LSE, scale the outputs by their shares, reduce-scatter the heads.

    Args:
        state: out [T, N, Dv] and lse [N, T] of all N heads over the keys that lie here.
        group: the D ranks; rank r takes heads [r N / D, (r + 1) N / D) home.
        backend: a name, a mapping from op to name, or None for the choice by capability (`fast.backends`).

    Returns:
        out [T, N / D, Dv] in the dtype of `state.out`, lse [N / D, T], over the keys of all ranks. A rank without keys
        (lse -inf) contributes nothing; where none has any, the row is 0 and -inf.

    Raises:
        ValueError: shapes or dtypes that do not fit; heads that D does not divide.
        GroupError: an exchange failed.
        UnsupportedConfiguration: no backend, or not the named one, can serve.
    """
    check_type("group", group, Group)
    check_merge_over_group(state, group.size)
    return _share_and_scatter(state, group.all_gather(state.lse), group, backend)


def _share_and_scatter(state: AttentionState, lses: Tensor, group: Group, backend: BackendChoice) -> AttentionState:
    """What follows once the LSE of all ranks are here."""
    request = backends.KernelRequest("share_attn_out", state.out.device, state.out.dtype)
    chosen = backends.select(request, backend).name
    by_home, lse = torch.ops.mla_twins.share_attn_out(state.out, lses, group.rank, chosen)
    return AttentionState(group.reduce_scatter(by_home), lse)


@torch.library.custom_op(
    "mla_twins::share_attn_out",
    mutates_args=(),
    schema="(Tensor out, Tensor lses, SymInt rank, str backend) -> (Tensor, Tensor)",
)
def _share_attn_out(out, lses, rank, backend):
    return backends.kernel(backend, "share_attn_out")(out, lses, rank)


@_share_attn_out.register_fake
def _(out, lses, rank, backend):
    size, heads, tokens = lses.shape
    return out.new_empty(size, tokens, heads // size, out.shape[2]), lses.new_empty(heads // size, tokens)


def cp_lse_a2a(
    state: AttentionState,
    group: Group,
    *,
    backend: BackendChoice = None,
) -> AttentionState:
    """Merge over ranks: one all-to-all brings outputs and LSE of the own heads from every rank, then combine.

    Args:
        state: out [T, N, Dv] and lse [N, T] of all N heads over the keys that lie here.
        group: the D ranks; rank r takes heads [r N / D, (r + 1) N / D) home.
        backend: a name, a mapping from op to name, or None for the choice by capability (`fast.backends`).

    Returns:
        As `cp_lse_ag_out_rs`; the sum is rounded once.

    Raises:
        ValueError: shapes or dtypes that do not fit; heads that D does not divide.
        GroupError: the exchange failed.
        UnsupportedConfiguration: no backend, or not the named one, can serve.
    """
    check_type("group", group, Group)
    check_merge_over_group(state, group.size)
    tokens, heads, value = state.out.shape
    request = backends.KernelRequest("pack_attn_state", state.out.device, state.out.dtype)
    chosen = backends.select(request, backend).name
    message = torch.ops.mla_twins.pack_attn_state(state.out, state.lse, group.size, chosen)
    out, lse = torch.ops.mla_twins.combine_attn_states(
        group.all_to_all(message), tokens, heads // group.size, value, state.out.dtype, chosen
    )
    return AttentionState(out, lse)


def _message_bytes(tokens, heads, value, dtype):  # sizes may be symbolic
    """Of the LSE, with what follows it up to the outputs, and of the whole message to one rank."""

    def aligned(size):
        return -(-size // MESSAGE_ALIGNMENT) * MESSAGE_ALIGNMENT

    lse_bytes = aligned(tokens * heads * wide_dtype(dtype).itemsize)
    return lse_bytes, lse_bytes + aligned(tokens * heads * value * dtype.itemsize)


@torch.library.custom_op(
    "mla_twins::pack_attn_state",
    mutates_args=(),
    schema="(Tensor out, Tensor lse, SymInt size, str backend) -> Tensor",
)
def _pack_attn_state(out, lse, size, backend):
    tokens, heads, value = out.shape
    lse_bytes, total = _message_bytes(tokens, heads // size, value, out.dtype)
    message = torch.empty(size, total, dtype=torch.uint8, device=out.device)
    backends.kernel(backend, "pack_attn_state")(out, lse, message, lse_bytes)
    return message


@_pack_attn_state.register_fake
def _(out, lse, size, backend):
    tokens, heads, value = out.shape
    total = _message_bytes(tokens, heads // size, value, out.dtype)[1]
    return out.new_empty(size, total, dtype=torch.uint8)


@torch.library.custom_op(
    "mla_twins::combine_attn_states",
    mutates_args=(),
    schema="(Tensor message, SymInt tokens, SymInt heads, SymInt value, ScalarType dtype, str backend)"
    " -> (Tensor, Tensor)",
)
def _combine_attn_states(message, tokens, heads, value, dtype, backend):
    lse_bytes = _message_bytes(tokens, heads, value, dtype)[0]
    out = torch.empty(tokens, heads, value, dtype=dtype, device=message.device)
    lse = torch.empty(heads, tokens, dtype=wide_dtype(dtype), device=message.device)
    backends.kernel(backend, "combine_attn_states")(message, lse_bytes, out, lse)
    return out, lse


@_combine_attn_states.register_fake
def _(message, tokens, heads, value, dtype, backend):
    out = message.new_empty(tokens, heads, value, dtype=dtype)
    return out, message.new_empty(heads, tokens, dtype=wide_dtype(dtype))


DCP_DECODE_OPS = (*backends.DECODES[:3], "share_attn_out", *backends.MESSAGES)
MERGE_OVER_RANKS = {"ag_rs": cp_lse_ag_out_rs, "a2a": cp_lse_a2a}


def dcp_decode(
    ql_nope: Float[Tensor, "T N Lkv"],
    q_pe: Float[Tensor, "T N R"],
    kv_cache: Float[Tensor, "num_blocks block_size Lkv+R"],
    metadata: DecodeMetadata,
    softmax_scale: float,
    context_parallel: ContextParallel,
    schedule: DecodeSchedule | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    overlap: bool = True,
    backend: BackendChoice = None,
) -> AttentionState:
    """Absorbed attention over keys that lie on D ranks.

    Args:
        ql_nope: [T, N / TP, Lkv], this rank's heads, with W_UK absorbed.
        q_pe: [T, N / TP, R], rotated.
        kv_cache: of this rank; its new tokens are already in it.
        metadata: the requests, by the keys that lie here: row t sees the first `visible_lens[t]` of them.
        softmax_scale: (P + R)^-1/2, with YaRN's factor.
        context_parallel: the groups and the merge.
        schedule: of the decode of the gathered heads.
        out_dtype: dtype of `out`, on the wire too; that of `ql_nope` where None.
        overlap: with "ag_rs", send the LSE while the parts of the outputs are still being merged here.
        backend: a name, a mapping from op to name, or None for the choice by capability (`fast.backends`).

    Returns:
        out [T, N / TP, Lkv], lse [N / TP, T], over the keys of all ranks.

    Raises:
        ValueError: as `mla_decode`.
        GroupError: an exchange failed.
        UnsupportedConfiguration: no backend, or not the named one, can serve.
    """
    check_decode(ql_nope, q_pe, kv_cache, metadata, schedule)
    check_flag("overlap", overlap)
    check_type("context_parallel", context_parallel, ContextParallel)
    check_number("softmax_scale", softmax_scale)
    check_dtype("out_dtype", ql_nope.dtype if out_dtype is None else out_dtype)
    backend = backends.bind(backend, DCP_DECODE_OPS)
    latent, group = ql_nope.shape[2], context_parallel.cp_group
    # heads first: what arrives from all ranks is then one tensor of all heads, without another copy
    q = torch.cat((ql_nope.transpose(0, 1), q_pe.transpose(0, 1)), dim=-1)
    q = group.all_gather(q).flatten(0, 1).transpose(0, 1)
    arguments = (q[..., :latent], q[..., latent:], kv_cache, metadata, softmax_scale, schedule, out_dtype)
    if context_parallel.merge == "ag_rs" and overlap:
        decode = decode_in_parts(*arguments, backend=backend)
        pending = group.all_gather_async(decode.lse)
        state = decode.finish()
        return _share_and_scatter(state, pending.wait(), group, backend)
    return MERGE_OVER_RANKS[context_parallel.merge](mla_decode(*arguments, backend=backend), group, backend=backend)
