"""Merging softmax attention over disjoint sets of keys by log-sum-exp (FlashInfer, arXiv 2501.01005, section 2.2)."""

from __future__ import annotations

import torch
from einops import rearrange

from ..interfaces import AttentionState, check_merge


def merge_attn_states(prefix: AttentionState, suffix: AttentionState) -> AttentionState:
    """Attention over the union of two disjoint sets of keys.

    With weights w = exp(lse - max lse): out = (w_a out_a + w_b out_b) / (w_a + w_b),
    lse = max + log(w_a + w_b). Associative and commutative to rounding; a row with lse = -inf is the identity
    (the other side comes back bitwise); an lse of +inf or NaN on either side gives NaN.

    Args:
        prefix: out [T, N, Dv], lse [N, T].
        suffix: the same shapes and dtypes.

    Returns:
        The merged state, in the dtypes of the arguments.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
    """
    check_merge(prefix, suffix)
    largest = torch.maximum(prefix.lse, suffix.lse)
    shift = largest.masked_fill(largest == -torch.inf, 0)  # both empty: exp(-inf - 0) = 0, not NaN
    weight_a, weight_b = torch.exp(prefix.lse - shift), torch.exp(suffix.lse - shift)
    total = weight_a + weight_b
    lse = shift + torch.log(total)

    def per_row(x):
        return rearrange(x, "heads tokens -> tokens heads 1")

    wide = prefix.lse.dtype
    out = per_row(weight_a / total) * prefix.out.to(wide) + per_row(weight_b / total) * suffix.out.to(wide)
    out = out.to(prefix.out.dtype)
    only_a = (suffix.lse == -torch.inf) & (prefix.lse < torch.inf)
    only_b = (prefix.lse == -torch.inf) & (suffix.lse < torch.inf)
    out = torch.where(per_row(only_b), suffix.out, torch.where(per_row(only_a), prefix.out, out))
    lse = torch.where(only_b, suffix.lse, torch.where(only_a, prefix.lse, lse))
    return AttentionState(out, lse)
