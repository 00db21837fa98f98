"""Merge of attention states over the D ranks of a group.

Each rank has an attention state of all N heads over its own keys: the output `out` [T, N, Dv] and the log-sum-exp of
the scores `lse` [N, T], for T query tokens. The merge gives the state over the keys of all ranks. Each rank gets N / D
heads of the merged state; it is the owner rank of these heads.
`reference.distributed.merge` defines an attention state and a row.
"""

from __future__ import annotations

import torch

from reference.distributed.arguments import check_merge_over_group
from reference.distributed.groups import Group
from reference.interfaces import (
    AttentionState,
    GraphSupport,
    check_type,
    wide_dtype,
)

from .. import backends
from ..backends import BackendChoice

MESSAGE_ALIGNMENT = 16  # bytes; LSEs and outputs in a message of `cp_lse_a2a` begin at multiples of 16 for vector loads


def cp_lse_ag_out_rs(
    state: AttentionState,
    group: Group,
    *,
    graph: GraphSupport = GraphSupport.NONE,
    backend: BackendChoice = None,
) -> AttentionState:
    """Merge the states of all ranks: all-gather the LSEs, multiply the outputs by weights, reduce-scatter the products.

    The softmax weight of a rank's state follows from the LSEs of all ranks.

    Args:
        state: out [T, N, Dv] and lse [N, T] of all N heads over the keys of this rank.
        group: the D ranks; rank r is the owner rank of heads [r N / D, (r + 1) N / D).
        graph: kind of the CUDA graph that contains the call; NONE if no graph contains the call.
        backend: name of a backend, mapping from op to backend name, or None for an automatic choice (`fast.backends`).

    Returns:
        out [T, N / D, Dv] in the dtype of `state.out` and lse [N / D, T], over the keys of all ranks.
        `reference.distributed.merge.cp_lse_ag_out_rs` explains the case of ranks without keys.

    Raises:
        ValueError: shapes or dtypes do not match, or D does not divide the number of heads.
        GroupError: an exchange failed.
        UnsupportedConfiguration: no backend that `backend` allows can serve the call.
    """
    check_type("group", group, Group)
    check_merge_over_group(state, group.size)
    chosen = backends.select(backends.state_request("weight_attn_out", state.out, graph), backend).name
    lses = group.all_gather(state.lse)
    by_owner, lse = _WEIGHTS(state.out, lses, group.rank, chosen)
    return AttentionState(group.reduce_scatter(by_owner), lse)


def _launch_weights(out, lses, rank, backend):
    return backends.kernel(backend, "weight_attn_out")(out, lses, rank)


_weight_attn_out = torch.library.custom_op(
    "mla_twins::weight_attn_out",
    _launch_weights,
    mutates_args=(),
    schema="(Tensor out, Tensor lses, SymInt rank, str backend) -> (Tensor, Tensor)",
)


_WEIGHTS = backends.DirectCalls(torch.ops.mla_twins.weight_attn_out, _launch_weights)


@_weight_attn_out.register_fake
def _(out, lses, rank, backend):
    size, heads, tokens = lses.shape
    return out.new_empty(size, tokens, heads // size, out.shape[2]), lses.new_empty(heads // size, tokens)


def cp_lse_a2a(
    state: AttentionState,
    group: Group,
    *,
    graph: GraphSupport = GraphSupport.NONE,
    backend: BackendChoice = None,
) -> AttentionState:
    """Merge the states of all ranks: one all-to-all sends outputs and LSEs to the owner ranks, which merge them.

    See `reference.distributed.merge.cp_lse_a2a` for the rounding. `cp_lse_ag_out_rs` rounds in another way.

    Args:
        state: out [T, N, Dv] and lse [N, T] of all N heads over the keys of this rank.
        group: the D ranks; rank r is the owner rank of heads [r N / D, (r + 1) N / D).
        graph: kind of the CUDA graph that contains the call; NONE if no graph contains the call.
        backend: name of a backend, mapping from op to backend name, or None for an automatic choice (`fast.backends`).

    Returns:
        out [T, N / D, Dv] in the dtype of `state.out` and lse [N / D, T], over the keys of all ranks.

    Raises:
        ValueError: shapes or dtypes do not match, or D does not divide the number of heads.
        GroupError: the exchange failed.
        UnsupportedConfiguration: no backend that `backend` allows can serve the call.
    """
    check_type("group", group, Group)
    check_merge_over_group(state, group.size)
    tokens, heads, value = state.out.shape
    request = backends.state_request("pack_attn_state", state.out, graph)
    chosen = backends.select(request, backend).name
    message = _PACKS(state.out, state.lse, group.size, chosen)
    received = group.all_to_all(message)
    out, lse = _MERGES(received, tokens, heads // group.size, value, state.out.dtype, chosen)
    return AttentionState(out, lse)


def _message_bytes(tokens, heads, value, dtype):  # under `torch.compile`, the three sizes may be symbolic
    """Return two numbers of bytes: of the LSEs, with which a message to one rank begins, and of the whole message."""

    def aligned(size):
        return -(-size // MESSAGE_ALIGNMENT) * MESSAGE_ALIGNMENT

    lse_bytes = aligned(tokens * heads * wide_dtype(dtype).itemsize)
    return lse_bytes, lse_bytes + aligned(tokens * heads * value * dtype.itemsize)


def _launch_pack(out, lse, size, backend):
    tokens, heads, value = out.shape
    lse_bytes, total = _message_bytes(tokens, heads // size, value, out.dtype)
    message = torch.empty(size, total, dtype=torch.uint8, device=out.device)
    backends.kernel(backend, "pack_attn_state")(out, lse, message, lse_bytes)
    return message


_pack_attn_state = torch.library.custom_op(
    "mla_twins::pack_attn_state",
    _launch_pack,
    mutates_args=(),
    schema="(Tensor out, Tensor lse, SymInt size, str backend) -> Tensor",
)


_PACKS = backends.DirectCalls(torch.ops.mla_twins.pack_attn_state, _launch_pack)


@_pack_attn_state.register_fake
def _(out, lse, size, backend):
    tokens, heads, value = out.shape
    total = _message_bytes(tokens, heads // size, value, out.dtype)[1]
    return out.new_empty(size, total, dtype=torch.uint8)


def _launch_merge(message, tokens, heads, value, dtype, backend):
    lse_bytes = _message_bytes(tokens, heads, value, dtype)[0]
    out = torch.empty(tokens, heads, value, dtype=dtype, device=message.device)
    lse = torch.empty(heads, tokens, dtype=wide_dtype(dtype), device=message.device)
    backends.kernel(backend, "merge_packed_attn_states")(message, lse_bytes, out, lse)
    return out, lse


_merge_packed_attn_states = torch.library.custom_op(
    "mla_twins::merge_packed_attn_states",
    _launch_merge,
    mutates_args=(),
    schema="(Tensor message, SymInt tokens, SymInt heads, SymInt value, ScalarType dtype, str backend)"
    " -> (Tensor, Tensor)",
)


_MERGES = backends.DirectCalls(torch.ops.mla_twins.merge_packed_attn_states, _launch_merge)


@_merge_packed_attn_states.register_fake
def _(message, tokens, heads, value, dtype, backend):
    out = message.new_empty(tokens, heads, value, dtype=dtype)
    return out, message.new_empty(heads, tokens, dtype=wide_dtype(dtype))


MERGE_OVER_RANKS = {"ag_rs": cp_lse_ag_out_rs, "a2a": cp_lse_a2a}
