"""Merge softmax attention over disjoint sets of keys (FlashInfer, arXiv 2501.01005, section 2.2).

An attention state is the output of attention and its LSE: the logarithm of the sum of exp(score) over the keys.
"""

from __future__ import annotations

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from ..interfaces import AttentionState, check_merge, check_output_scale, check_scale_values, to_e4m3


def merge_attn_states(
    prefix: AttentionState,
    suffix: AttentionState,
    *,
    output_scale: Float[Tensor, ""] | None = None,
    output_block_scale: Tensor | None = None,
) -> AttentionState:
    """Merge two attention states over disjoint sets of keys into the state over all of these keys.

    Let a be `prefix`, b be `suffix`, m = max(lse_a, lse_b), w_a = exp(lse_a - m) and w_b = exp(lse_b - m). Then

        out = (w_a out_a + w_b out_b) / (w_a + w_b)
        lse = m + log(w_a + w_b)

    The merge has these properties (a row is one query token and head):

    - The merge is associative and commutative, up to rounding.
    - If one state attended no keys in a row (lse = -inf), this row of the merged state is a copy of the row of the
      other state.
    - If one state has lse = +inf or NaN in a row, the merged output and LSE are NaN in this row.

    Args:
        prefix: one state, with `out` [T, N, Dv] and `lse` [N, T].
        suffix: the other state, with the shapes and dtypes of `prefix`.
        output_scale: float32 scale of an output in e4m3 (8 bits); None for an output in the dtype of the arguments. The
            merged output is not rounded before it is divided by the scale.
        output_block_scale: must be None, because an output with one scale for each group of elements is not supported.

    Returns:
        The merged state, in the dtypes of the arguments. If `output_scale` is given, the output is in e4m3.

    Raises:
        ValueError: shapes, dtypes or devices do not match; the scale is not finite and positive.
        UnsupportedConfiguration: `output_block_scale` is given.
    """
    check_merge(prefix, suffix)
    check_output_scale(output_scale, output_block_scale, prefix.out.device)
    check_scale_values("output_scale", output_scale)
    largest = torch.maximum(prefix.lse, suffix.lse)
    shift = largest.masked_fill(largest == -torch.inf, 0)  # 0 if neither state has keys: exp(-inf - 0) is 0, not NaN
    weight_a, weight_b = torch.exp(prefix.lse - shift), torch.exp(suffix.lse - shift)
    total = weight_a + weight_b
    lse = shift + torch.log(total)

    def per_row(x):
        return rearrange(x, "heads tokens -> tokens heads 1")

    wide = prefix.lse.dtype
    out = per_row(weight_a / total) * prefix.out.to(wide) + per_row(weight_b / total) * suffix.out.to(wide)
    if output_scale is None:
        out = out.to(prefix.out.dtype)
    only_a = (suffix.lse == -torch.inf) & (prefix.lse < torch.inf)
    only_b = (prefix.lse == -torch.inf) & (suffix.lse < torch.inf)
    a, b = prefix.out.to(out.dtype), suffix.out.to(out.dtype)
    out = torch.where(per_row(only_b), b, torch.where(per_row(only_a), a, out))
    if output_scale is not None:
        out = to_e4m3(out, output_scale)
    lse = torch.where(only_b, suffix.lse, torch.where(only_a, prefix.lse, lse))
    return AttentionState(out, lse)
