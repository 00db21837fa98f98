"""Merge of two attention states by log-sum-exp."""

from __future__ import annotations

import torch
from torch import Tensor


def merge_attn_states(
    prefix_out: Tensor, prefix_lse: Tensor, suffix_out: Tensor, suffix_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Merge out [T, N, Dv] and lse [N, T] of two disjoint sets of keys; returns the pair."""
    # weights from the difference of the two, not from a rounded total: exp(lse_a - lse) would lose |lse| ulps
    difference = prefix_lse - suffix_lse
    prefix_weight, suffix_weight = torch.sigmoid(difference).T[..., None], torch.sigmoid(-difference).T[..., None]
    out = (prefix_out * prefix_weight).add_(suffix_out * suffix_weight).to(prefix_out.dtype)
    lse = torch.logaddexp(prefix_lse, suffix_lse)
    # the identity comes back bitwise: -0.0 + 0.0 and a rounded log would not
    keep_prefix = (suffix_lse == -torch.inf) & (prefix_lse < torch.inf)
    keep_suffix = (prefix_lse == -torch.inf) & (suffix_lse < torch.inf)
    spoilt = torch.maximum(prefix_lse, suffix_lse) == torch.inf
    out = out.masked_fill(spoilt.T[..., None], torch.nan)
    out = torch.where(keep_suffix.T[..., None], suffix_out, torch.where(keep_prefix.T[..., None], prefix_out, out))
    lse = torch.where(keep_suffix, suffix_lse, torch.where(keep_prefix, prefix_lse, lse))
    return out.contiguous(), lse.masked_fill(spoilt, torch.nan).contiguous()
