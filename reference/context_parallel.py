"""Decode context parallelism: D ranks share every sequence, each attends its own keys, the results merge by LSE.

Token i of a request lies on rank (i // I) mod D, behind those that lie there already: local token (i // (D I)) I + i
mod I. All ranks have the same block table; column j of it holds local tokens [j x block, (j + 1) x block).

    decode   gather the heads' queries -> attend the keys that lie here -> merge over the ranks, heads go home
    prefill  gather each piece of the context from all ranks, in the order of its tokens; the rest is as on one rank

Every function runs on one rank and is called on all of them. `simulate` runs them in one process.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from einops import rearrange
from jaxtyping import Float, Int32, Int64
from torch import Tensor

from .cache import gather_and_maybe_dequant_cache
from .decode import mla_decode
from .interfaces import (
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
    verify_group,
)

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
    share = SequenceShare(context_parallel_size, rank, interleave)
    check_interleave(interleave, block_size)
    check_int("rank", rank, 0, f"an int in [0, {context_parallel_size})")
    check_int("num_tokens", num_tokens, 0)
    check_tensor("block_table", block_table, ("B", "W"), (torch.int32,))
    requests = block_table.shape[0]
    check_tensor("seq_lens", seq_lens, (requests,), (torch.int32,), block_table.device)
    check_tensor("query_start_loc", query_start_loc, (requests + 1,), (torch.int32,), block_table.device)
    check_lengths(query_start_loc, seq_lens)
    starts, lengths, tables = query_start_loc.tolist(), seq_lens.tolist(), block_table.tolist()
    check(num_tokens >= starts[-1], "num_tokens", f"at least {starts[-1]}", num_tokens)
    check_blocks(block_table, lengths, block_size * share.size, num_blocks=2**31)
    slots = [-1] * num_tokens
    for request, length in enumerate(lengths):
        for token in range(starts[request], starts[request + 1]):
            position = length - (starts[request + 1] - token)
            if length == 0:
                continue
            if share.count(position + 1) > share.count(position):  # one more lies here than before this token
                column, offset = divmod(share.count(position), block_size)
                slots[token] = tables[request][column] * block_size + offset
    return torch.tensor(slots, dtype=torch.int64, device=block_table.device)


def reorg_kvcache(
    gathered: Float[Tensor, "D padded head_size"], chunk: ContextParallelChunk
) -> Float[Tensor, "S head_size"]:
    """What all ranks handed in of a piece of context, in request order and in the order of the tokens.

    Each rank's tokens stand one request after another, rows past its last one are padding. The result equals the gather
    of one rank that holds everything, bit for bit. (vLLM's function of this name leaves the tokens of a request rank
    after rank: enough for unmasked attention.)

    Args:
        gathered: [D, padded_tokens, Lkv + R], the cache entries that each rank handed in.
        chunk: the plan of the piece.

    Returns:
        [num_tokens, Lkv + R].

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; offsets that are not those of the pieces.
    """
    check_reorg(gathered, chunk)
    local, interleave = chunk.local_cu_seq_lens, chunk.share.interleave
    check_rank_offsets(chunk.cu_seq_lens, local, interleave, chunk.num_tokens, chunk.padded_tokens)
    offsets, size = local.tolist(), chunk.share.size
    rows = [gathered.new_empty(0, gathered.shape[2])]
    for request, length in enumerate(chunk.cu_seq_lens.diff().tolist()):
        unread = [offsets[rank][request] for rank in range(size)]
        token, rank = 0, 0
        while token < length:  # the ranks in turn, a run of I tokens each
            run = min(interleave, length - token)
            rows.append(gathered[rank, unread[rank] : unread[rank] + run])
            unread[rank] += run
            token, rank = token + run, (rank + 1) % size
    return torch.cat(rows)


def dcp_gather_context(
    kv_cache: Float[Tensor, "num_blocks block_size head_size"],
    metadata: PrefillMetadata,
    chunk: ContextParallelChunk,
    context_parallel: ContextParallel,
) -> Float[Tensor, "S head_size"]:
    """The cache entries of one chunk from all ranks, in the order of the tokens: the gather of a prefill.

    Args:
        kv_cache: of this rank.
        metadata: the requests that prefill.
        chunk: the plan of the piece.
        context_parallel: the groups.

    Returns:
        [num_tokens, Lkv + R].

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; a piece of another share; a block outside the cache.
            Nothing has been exchanged then.
        GroupError: the exchange failed.
    """
    check_context(kv_cache, metadata, chunk)
    check_chunk_share(chunk, context_parallel)
    starts, offsets = chunk.held
    held = chunk.local_tokens
    handed_in = kv_cache.new_zeros(chunk.padded_tokens, kv_cache.shape[2])
    handed_in[:held] = gather_and_maybe_dequant_cache(kv_cache, metadata.block_table, offsets, starts, held)
    return reorg_kvcache(context_parallel.cp_group.all_gather(handed_in), chunk)


def _counted(out: Tensor, share: Tensor, lse: Tensor) -> Tensor:
    """Outputs [.., T, N, Dv] times their shares [.., N, T]; those of a rank without keys are not read."""
    per_row = "... heads tokens -> ... tokens heads 1"
    return torch.where(rearrange(lse, per_row) == -torch.inf, 0, rearrange(share, per_row) * out.to(share.dtype))


def _shares_of(lses: Tensor) -> tuple[Tensor, Tensor]:
    """What each rank's output counts in the whole [D, N, T], and the LSE of the whole [N, T]."""
    largest = lses.amax(0)
    shift = largest.masked_fill(largest == -torch.inf, 0)  # no rank has a key: exp(-inf - 0) = 0, not NaN
    weights = torch.exp(lses - shift)
    total = weights.sum(0)
    return weights / total.masked_fill(total == 0, 1), shift + torch.log(total)


def cp_lse_ag_out_rs(state: AttentionState, group: Group) -> AttentionState:
    """Merge over ranks: all-gather the LSE, scale the outputs by their shares, reduce-scatter the heads.

    Args:
        state: out [T, N, Dv] and lse [N, T] of all N heads over the keys that lie here.
        group: the D ranks; rank r takes heads [r N / D, (r + 1) N / D) home.

    Returns:
        out [T, N / D, Dv] in the dtype of `state.out`, lse [N / D, T], over the keys of all ranks. A rank without keys
        (lse -inf) contributes nothing; where none has any, the row is 0 and -inf.

    Raises:
        ValueError: shapes or dtypes that do not fit; heads that D does not divide.
        GroupError: an exchange failed.
    """
    check_type("group", group, Group)
    check_merge_over_group(state, group.size)
    shares, lse = _shares_of(group.all_gather(state.lse))
    scaled = _counted(state.out, shares[group.rank], state.lse)
    by_home = rearrange(scaled.to(state.out.dtype), "tokens (ranks heads) value -> ranks tokens heads value",
                        ranks=group.size)  # fmt: skip
    homes = rearrange(lse, "(ranks heads) tokens -> ranks heads tokens", ranks=group.size)
    return AttentionState(group.reduce_scatter(by_home), homes[group.rank].clone())


def cp_lse_a2a(state: AttentionState, group: Group) -> AttentionState:
    """Merge over ranks: one all-to-all brings outputs and LSE of the own heads from every rank, then combine.

    Args:
        state: out [T, N, Dv] and lse [N, T] of all N heads over the keys that lie here.
        group: the D ranks; rank r takes heads [r N / D, (r + 1) N / D) home.

    Returns:
        As `cp_lse_ag_out_rs`; the sum is rounded once.

    Raises:
        ValueError: shapes or dtypes that do not fit; heads that D does not divide.
        GroupError: the exchange failed.
    """
    check_type("group", group, Group)
    check_merge_over_group(state, group.size)
    tokens, heads, value = state.out.shape
    outs = rearrange(state.out, "tokens (ranks heads) value -> ranks tokens heads value", ranks=group.size)
    lses = rearrange(state.lse, "(ranks heads) tokens -> ranks heads tokens", ranks=group.size)
    # both as bytes in one message: LSE stays as wide as it is
    message = torch.cat([_as_bytes(outs), _as_bytes(lses)], dim=1)
    arrived = group.all_to_all(message)
    out_bytes = tokens * heads // group.size * value * state.out.element_size()
    outs = _from_bytes(arrived[:, :out_bytes], outs)
    lses = _from_bytes(arrived[:, out_bytes:], lses)
    shares, lse = _shares_of(lses)
    return AttentionState(_counted(outs, shares, lses).sum(0).to(state.out.dtype), lse)


def _as_bytes(x: Tensor) -> Tensor:
    """[D, ...] as [D, bytes]."""
    return x.contiguous().view(x.shape[0], -1).view(torch.uint8)


def _from_bytes(x: Tensor, like: Tensor) -> Tensor:
    """[D, bytes] as a tensor like another."""
    return x.flatten().clone().view(like.dtype).view(like.shape)


MERGE_OVER_RANKS: dict[str, Callable[[AttentionState, Group], AttentionState]] = {
    "ag_rs": cp_lse_ag_out_rs,
    "a2a": cp_lse_a2a,
}


def dcp_decode(
    ql_nope: Float[Tensor, "T N Lkv"],
    q_pe: Float[Tensor, "T N R"],
    kv_cache: Float[Tensor, "num_blocks block_size Lkv+R"],
    metadata: DecodeMetadata,
    softmax_scale: float,
    context_parallel: ContextParallel,
    schedule: DecodeSchedule | None = None,
    out_dtype: torch.dtype | None = None,
) -> AttentionState:
    """Absorbed attention over keys that lie on D ranks.

    Args:
        ql_nope: [T, N / TP, Lkv], this rank's heads, with W_UK absorbed.
        q_pe: [T, N / TP, R], rotated.
        kv_cache: of this rank; its new tokens are already in it.
        metadata: the requests, by the keys that lie here: row t sees the first `visible_lens[t]` of them.
        softmax_scale: (P + R)^-1/2, with YaRN's factor.
        context_parallel: the groups and the merge.
        schedule: of the decode of the gathered heads; it changes no value.
        out_dtype: dtype of `out`, on the wire too; that of `ql_nope` where None.

    Returns:
        out [T, N / TP, Lkv], lse [N / TP, T], over the keys of all ranks.

    Raises:
        ValueError: as `mla_decode`.
        GroupError: an exchange failed.
    """
    check_decode(ql_nope, q_pe, kv_cache, metadata, schedule)
    check_type("context_parallel", context_parallel, ContextParallel)
    check_number("softmax_scale", softmax_scale)
    check_dtype("out_dtype", ql_nope.dtype if out_dtype is None else out_dtype)
    latent, group = ql_nope.shape[2], context_parallel.cp_group
    q = rearrange(torch.cat((ql_nope, q_pe), dim=-1), "tokens heads width -> heads tokens width")
    q = rearrange(group.all_gather(q), "ranks heads tokens width -> tokens (ranks heads) width")
    state = mla_decode(q[..., :latent], q[..., latent:], kv_cache, metadata, softmax_scale, schedule, out_dtype)
    return MERGE_OVER_RANKS[context_parallel.merge](state, group)
