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
    """Return outputs [.., T, N, Dv] times their weights [.., N, T].

    An output is not read where its lse [.., N, T] is -inf: a rank without keys.
    """
    per_row = "... heads tokens -> ... tokens heads 1"
    return torch.where(rearrange(lse, per_row) == -torch.inf, 0, rearrange(weights, per_row) * out.to(weights.dtype))


def _merge_weights(lses: Tensor) -> tuple[Tensor, Tensor]:
    """Return the softmax weight of each rank's output [D, N, T], and the merged LSE [N, T].

    Args:
        lses: [D, N, T], each rank's LSE.
    """
    largest = lses.amax(0)
    shift = largest.masked_fill(largest == -torch.inf, 0)  # no rank has a key: exp(-inf - 0) = 0, not NaN
    sums = torch.exp(lses - shift)  # each rank's sum of exp(score - shift)
    total = sums.sum(0)
    return sums / total.masked_fill(total == 0, 1), shift + torch.log(total)


def cp_lse_ag_out_rs(state: AttentionState, group: Group) -> AttentionState:
    """Merge over ranks: all-gather the LSE, scale the outputs by their softmax weights, reduce-scatter the heads.

    Args:
        state: out [T, N, Dv] and lse [N, T] of all N heads over the keys that lie here.
        group: the D ranks; rank r owns heads [r N / D, (r + 1) N / D) of the result.

    Returns:
        out [T, N / D, Dv] in the dtype of `state.out`, lse [N / D, T], over the keys of all ranks. A rank without keys
        (lse -inf) contributes nothing; where none has any, the row is 0 and -inf.

    Raises:
        ValueError: shapes or dtypes that do not fit; heads that D does not divide.
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
    """Merge over ranks: one all-to-all brings outputs and LSE of the own heads from every rank, then combine.

    Args:
        state: out [T, N, Dv] and lse [N, T] of all N heads over the keys that lie here.
        group: the D ranks; rank r owns heads [r N / D, (r + 1) N / D) of the result.

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
    weights, lse = _merge_weights(lses)
    return AttentionState(_weighted(outs, weights, lses).sum(0).to(state.out.dtype), lse)


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
