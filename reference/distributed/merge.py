"""Merge attention states over the ranks of a group, where each rank attended different keys.

An attention state is the output of attention and its log-sum-exp (LSE). A row is one (query token, head) pair.
"""

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
    """Return outputs [.., T, N, Dv] times their weights [.., N, T]; 0 in rows without keys, where `lse` is -inf.

    The argument `out` may be NaN in a row without keys, and NaN times a weight of 0 would be NaN.
    """
    per_row = "... heads tokens -> ... tokens heads 1"
    return torch.where(rearrange(lse, per_row) == -torch.inf, 0, rearrange(weights, per_row) * out.to(weights.dtype))


def _merge_weights(lses: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weight of each rank's output in the merged output, [D, N, T], and the merged LSE, [N, T].

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

    1. All-gather the LSE, and compute the weight of each rank's output from it.
    2. Multiply this rank's output by its weight.
    3. Reduce-scatter the products over the heads: each rank receives the sums for N / D heads.

    Args:
        state: out [T, N, Dv] and lse [N, T] of all N heads over the rank-local keys.
        group: the D ranks. Rank r gets the merged heads [r N / D, (r + 1) N / D).

    Returns:
        out [T, N / D, Dv] in the dtype of `state.out` and lse [N / D, T] of the merged heads of this rank. A row that
        has no key on any rank has out = 0 and lse = -inf.

    Raises:
        ValueError: shapes, dtypes or devices do not match; N is not a multiple of D.
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

    Each rank receives the outputs and the LSE of N / D heads from every rank, and merges these states. It computes the
    weighted sum of the outputs in float32 (float64 if `state.out` is float64) and rounds once. In contrast,
    `cp_lse_ag_out_rs` rounds each rank's weighted output before the sum.

    Args:
        state: out [T, N, Dv] and lse [N, T] of all N heads over the rank-local keys.
        group: the D ranks. Rank r gets the merged heads [r N / D, (r + 1) N / D).

    Returns:
        The merged state, with the shapes and dtypes that `cp_lse_ag_out_rs` returns.

    Raises:
        ValueError: shapes, dtypes or devices do not match; N is not a multiple of D.
        GroupError: the exchange failed.
    """
    check_type("group", group, Group)
    check_merge_over_group(state, group.size)
    tokens, heads, value = state.out.shape
    outs = rearrange(state.out, "tokens (ranks heads) value -> ranks tokens heads value", ranks=group.size)
    lses = rearrange(state.lse, "(ranks heads) tokens -> ranks heads tokens", ranks=group.size)
    # send outputs and LSE as bytes in one message, because their dtypes may differ
    message = torch.cat([_as_bytes(outs), _as_bytes(lses)], dim=1)
    arrived = group.all_to_all(message)
    out_bytes = tokens * heads // group.size * value * state.out.element_size()
    outs = _from_bytes(arrived[:, :out_bytes], outs)
    lses = _from_bytes(arrived[:, out_bytes:], lses)
    weights, lse = _merge_weights(lses)
    return AttentionState(_weighted(outs, weights, lses).sum(0).to(state.out.dtype), lse)


def _as_bytes(x: Tensor) -> Tensor:
    """Return a tensor [D, ...] as bytes: uint8 [D, bytes of x[0]]."""
    return x.contiguous().view(x.shape[0], -1).view(torch.uint8)


def _from_bytes(x: Tensor, like: Tensor) -> Tensor:
    """Return bytes [D, bytes] as a tensor with the dtype and shape of `like`."""
    return x.flatten().clone().view(like.dtype).view(like.shape)


MERGE_OVER_RANKS: dict[str, Callable[[AttentionState, Group], AttentionState]] = {
    "ag_rs": cp_lse_ag_out_rs,
    "a2a": cp_lse_a2a,
}
