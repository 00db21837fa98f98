"""Merge of two attention states over disjoint keys, in PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from reference.interfaces import to_e4m3


def merge_attn_states(
    prefix_out: Tensor,
    prefix_lse: Tensor,
    suffix_out: Tensor,
    suffix_lse: Tensor,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    output_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Merge two attention states over disjoint keys; return `out` [T, N, Dv] and `lse` [N, T].

    If `out` and `lse` are given, the result is written there. `out` and `lse` may be the tensors of one of the states.
    If `output_scale` is given, the merged output is divided by this scale and rounded to e4m3.
    """
    target_out, target_lse = out, lse
    prefix_lse, suffix_lse = _with_gaps(prefix_lse), _with_gaps(suffix_lse)
    # the weights come from the difference of the LSEs: exp(prefix_lse - lse) would magnify the rounding error of `lse`
    difference = _with_gaps(prefix_lse - suffix_lse)
    prefix_weight, suffix_weight = torch.sigmoid(difference).T[..., None], torch.sigmoid(-difference).T[..., None]
    out = (prefix_out * prefix_weight).add_(suffix_out * suffix_weight)
    if output_scale is None:
        out = out.to(prefix_out.dtype)
    else:
        prefix_out, suffix_out = prefix_out.to(out.dtype), suffix_out.to(out.dtype)
    lse = torch.logaddexp(prefix_lse, suffix_lse)
    # If one state has no keys (LSE -inf), return the exact bits of the other state. The formulas above would turn -0.0
    # into 0.0 and round the LSE.
    keep_prefix = (suffix_lse == -torch.inf) & (prefix_lse < torch.inf)
    keep_suffix = (prefix_lse == -torch.inf) & (suffix_lse < torch.inf)
    invalid = torch.maximum(prefix_lse, suffix_lse) == torch.inf
    out = out.masked_fill(invalid.T[..., None], torch.nan)
    out = torch.where(keep_suffix.T[..., None], suffix_out, torch.where(keep_prefix.T[..., None], prefix_out, out))
    lse = torch.where(keep_suffix, suffix_lse, torch.where(keep_prefix, prefix_lse, lse))
    lse = lse.masked_fill(invalid, torch.nan)
    if output_scale is not None:
        out = to_e4m3(out, output_scale)
    if target_out is None:
        return out.contiguous(), lse.contiguous()
    return target_out.copy_(out), target_lse.copy_(lse)


def _with_gaps(x: Tensor) -> Tensor:
    """Return a copy of `x` with gaps in memory between its elements.

    PyTorch computes exp and log of numbers without gaps in vectors, and of the last numbers one by one, with other
    bits. With gaps, it computes each number in the same way. So the bits of a row do not depend on the other rows.
    """
    return torch.stack((x, x), dim=-1)[..., 0]
