"""How far a fast result may lie from the reference: a computed budget, never a typed one.

gold is the reference in float64 on the quantised inputs; low is the reference in the kernel's own dtype, which
rounds inputs and probabilities as a careful kernel must. The kernel's error may be twice that of low plus a
rounding floor of one unit in the last place, in its largest and in its mean.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from reference.interfaces import AttentionState, check

LSE_RELATIVE = 2.0**-13  # natural-log LSE from an exp2 kernel: one multiplication by ln 2 in float32, with room


@dataclass(frozen=True)
class Parity:
    """One comparison of a fast result with gold.

    Attributes:
        op: what was compared.
        max_error: largest absolute error.
        mean_error: mean absolute error.
        max_budget: what `max_error` may be at most.
        mean_budget: what `mean_error` may be at most.
        same_infinities: NaN and infinities stand in the same places.
    """

    op: str
    max_error: float
    mean_error: float
    max_budget: float
    mean_budget: float
    same_infinities: bool = True

    @property
    def passed(self) -> bool:
        """Within the budget; False for NaN."""
        return self.same_infinities and self.max_error <= self.max_budget and self.mean_error <= self.mean_budget


def compare(op: str, value: Tensor, low: Tensor, gold: Tensor, relative: float = 0.0) -> Parity:
    """Compare one result of a kernel with gold, on the budget that low's error sets.

    Args:
        op: what is compared.
        value: the kernel's result.
        low: the reference's result in the kernel's dtype.
        gold: the reference's result in float64.
        relative: what to allow besides, relative to gold.

    Returns:
        The comparison; elements where gold is not finite must equal it and count no error.

    Raises:
        ValueError: shapes that differ, or a value of another dtype than low (which would set a floor of its own).
    """
    check(value.shape == gold.shape == low.shape, "value", f"shape {list(gold.shape)}", list(value.shape))
    check(value.dtype == low.dtype, "value", f"dtype {low.dtype}, as low", value.dtype)
    finite = gold.isfinite()
    # a low that overflowed where gold did not would make the budget infinite
    same = (
        bool(low[finite].isfinite().all())
        and torch.equal(value.isfinite(), finite)
        and torch.equal(value[~finite].double().nan_to_num(nan=0.5), gold[~finite].double().nan_to_num(nan=0.5))
    )
    value, low, scale = value[finite], low[finite], gold[finite].double().abs()
    if value.numel() == 0:
        return Parity(op, 0.0, 0.0, 0.0, 0.0, same)
    error, low_error = (value.double() - gold[finite]).abs(), (low.double() - gold[finite]).abs()
    ulp = torch.finfo(value.dtype).eps + relative
    return Parity(
        op,
        max_error=error.max().item(),
        mean_error=error.mean().item(),
        max_budget=(2 * low_error.max() + ulp * scale.max()).item(),
        mean_budget=(2 * low_error.mean() + ulp * scale.mean()).item(),
        same_infinities=same,
    )


def compare_states(op: str, value: AttentionState, low: AttentionState, gold: AttentionState) -> list[Parity]:
    """Compare both halves of an attention state; LSE gets 2^-13 relative besides."""
    return [
        compare(f"{op}: out", value.out, low.out, gold.out),
        compare(f"{op}: lse", value.lse, low.lse, gold.lse, relative=LSE_RELATIVE),
    ]


def compare_exact(op: str, value: Tensor, expected: Tensor) -> Parity:
    """Compare bit by bit, NaN payloads and signs of zero included: the budget is zero.

    Raises:
        ValueError: shapes or dtypes that differ.
    """
    check(value.shape == expected.shape, "value", f"shape {list(expected.shape)}", list(value.shape))
    check(value.dtype == expected.dtype, "value", f"dtype {expected.dtype}", value.dtype)
    same = torch.equal(*(x.contiguous().flatten().view(torch.uint8) for x in (value, expected)))
    error = (value.double() - expected.double()).abs().nan_to_num()
    return Parity(op, error.max().item() if error.numel() else 0.0, error.mean().item() if error.numel() else 0.0,
                  0.0, 0.0, same)  # fmt: skip
