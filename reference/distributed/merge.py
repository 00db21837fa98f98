"""Merge attention states over the ranks of a group."""

from __future__ import annotations

from collections.abc import Callable

import torch
from einops import rearrange
from torch import Tensor

from ..interfaces import (
    AttentionState,
    check_type,
)
from .arguments import check_merge_over_group
from .groups import Group


def _weighted(out: Tensor, weights: Tensor, lse: Tensor) -> Tensor:
    """Return outputs [.., T, N, Dv] times their weights [.., N, T], and 0 where `lse` [.., N, T] is -inf.

    If `lse` is -inf, the rank has no keys for the row. The rank's output in this row is not used, so it may even be
    NaN.
    """
    per_row = "... heads tokens -> ... tokens heads 1"
    return torch.where(rearrange(lse, per_row) == -torch.inf, 0, rearrange(weights, per_row) * out.to(weights.dtype))


def _merge_weights(lses: Tensor) -> tuple[Tensor, Tensor]:
    """Return the softmax weights [D, N, T] of the ranks' outputs, and the merged LSE [N, T].

    Args:
        lses: [D, N, T], LSE of each rank.
    """
    largest = lses.amax(0)
    shift = largest.masked_fill(largest == -torch.inf, 0)  # 0 if no rank has a key: exp(-inf - 0) is 0, not NaN
    sums = torch.exp(lses - shift)  # each rank's sum of exp(score - shift)
    total = sums.sum(0)
    return sums / total.masked_fill(total == 0, 1), shift + torch.log(total)


def cp_lse_ag_out_rs(state: AttentionState, group: Group) -> AttentionState:
    """Merge attention states over ranks with an all-gather of the LSE and a reduce-scatter of the outputs.

    The steps are:

    1. All-gather the LSE, and compute each rank's softmax weights from it.
    2. Multiply this rank's outputs by its weights.
    3. Reduce-scatter the outputs over the heads: each rank receives the sums of the heads that it owns.

    Args:
        state: out [T, N, Dv] and lse [N, T] of all N heads over the rank-local keys.
        group: the D ranks. Rank r is the owner rank of heads [r N / D, (r + 1) N / D).

    Returns:
        out [T, N / D, Dv] in the dtype of `state.out` and lse [N / D, T] of this rank's heads, over the keys of all
        ranks. A rank without keys (lse = -inf) adds nothing. A row that has no keys on any rank has out = 0, lse =
        -inf.

    Raises:
        ValueError: shapes, dtypes or devices do not match; D does not divide the heads.
        GroupError: an exchange failed.
    """
    check_type("group", group, Group)
    check_merge_over_group(state, group.size)
    weights, lse = _merge_weights(group.all_gather(state.lse))
    weighted = _weighted(state.out, weights[group.rank], state.lse)
    by_owner = rearrange(weighted.to(state.out.dtype), "tokens (ranks heads) value -> ranks tokens heads value",
                        ranks=group.size)  # fmt: skip
    lse_by_owner = rearrange(lse, "(ranks heads) tokens -> ranks heads tokens", ranks=group.size)
    return AttentionState(group.reduce_scatter(by_owner), lse_by_owner[group.rank].clone())


def cp_lse_a2a(state: AttentionState, group: Group) -> AttentionState:
    """Merge attention states over ranks with one all-to-all.

    Each rank receives the outputs and LSE of its own heads from every rank, and merges these attention states itself.
    The sum is computed in float32 (float64 if `state.out` is float64) and rounded once. In contrast, `cp_lse_ag_out_rs`
    rounds each rank's output before the sum.

    Args:
        state: out [T, N, Dv] and lse [N, T] of all N heads over the rank-local keys.
        group: the D ranks. Rank r is the owner rank of heads [r N / D, (r + 1) N / D).

    Returns:
        The merged state of this rank's heads, with the shapes and dtypes that `cp_lse_ag_out_rs` returns.

    Raises:
        ValueError: shapes, dtypes or devices do not match; D does not divide the heads.
        GroupError: the exchange failed.
    """
    check_type("group", group, Group)
    check_merge_over_group(state, group.size)
    tokens, heads, value = state.out.shape
    outs = rearrange(state.out, "tokens (ranks heads) value -> ranks tokens heads value", ranks=group.size)
    lses = rearrange(state.lse, "(ranks heads) tokens -> ranks heads tokens", ranks=group.size)
    # send outputs and LSE as bytes in one message, so that the LSE keeps its dtype
    message = torch.cat([_as_bytes(outs), _as_bytes(lses)], dim=1)
    arrived = group.all_to_all(message)
    out_bytes = tokens * heads // group.size * value * state.out.element_size()
    outs = _from_bytes(arrived[:, :out_bytes], outs)
    lses = _from_bytes(arrived[:, out_bytes:], lses)
    weights, lse = _merge_weights(lses)
    return AttentionState(_weighted(outs, weights, lses).sum(0).to(state.out.dtype), lse)


def _as_bytes(x: Tensor) -> Tensor:
    """Return a tensor x of shape [D, ...] as bytes: uint8 [D, number of bytes of x[0]]."""
    return x.contiguous().view(x.shape[0], -1).view(torch.uint8)


def _from_bytes(x: Tensor, like: Tensor) -> Tensor:
    """Return bytes [D, bytes] as a tensor with the dtype and shape of `like`."""
    return x.flatten().clone().view(like.dtype).view(like.shape)


MERGE_OVER_RANKS: dict[str, Callable[[AttentionState, Group], AttentionState]] = {
    "ag_rs": cp_lse_ag_out_rs,
    "a2a": cp_lse_a2a,
}
