"""Comparison of results of `fast` with the reference, within an error budget that is computed for each comparison.

- *Gold* is the result of the reference in float64, on inputs that were rounded to the kernel's dtype.
- *Low* is the result of the reference in the kernel's dtype. The error of low shows how large the error of an accurate
  kernel is.
- The *budget* is twice the error of low, plus the rounding unit (eps) of the dtype times the absolute value of gold.
  There are two budgets. The budget of the largest error is computed from largest values, and the budget of the mean
  error from mean values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from reference.interfaces import AttentionState, check

LSE_RELATIVE = 2.0**-13  # more than the rounding error of kernels that compute with exp2 and multiply the LSE by ln 2


@dataclass(frozen=True)
class Parity:
    """Comparison of one result with gold.

    Attributes:
        op: name of the op and of the result, such as "mla_decode: out".
        max_error: largest absolute error.
        mean_error: mean absolute error.
        max_budget: upper bound of `max_error`.
        mean_budget: upper bound of `mean_error`.
        same_infinities: whether the result and gold have NaN, inf and -inf at the same elements. Also False if low is
            not finite at an element at which gold is finite.
    """

    op: str
    max_error: float
    mean_error: float
    max_budget: float
    mean_budget: float
    same_infinities: bool = True

    @property
    def passed(self) -> bool:
        """Return whether both errors are within their budgets and the infinities agree; False if an error is NaN."""
        return self.same_infinities and self.max_error <= self.max_budget and self.mean_error <= self.mean_budget


def compare(op: str, value: Tensor, low: Tensor, gold: Tensor, relative: float = 0.0) -> Parity:
    """Compare one result of a kernel with `gold`, within a budget that is computed from the error of `low`.

    Args:
        op: name of the op and of the result.
        value: the kernel's result.
        low: the reference's result in the kernel's dtype.
        gold: the reference's result in float64.
        relative: additional relative error that the budget allows; this number is added to the rounding unit.

    Returns:
        The comparison. Where `gold` is NaN, inf or -inf, `value` must be the same; these elements do not count in the
        errors.

    Raises:
        ValueError: shapes differ, or `value` and `low` have different dtypes.
    """
    check(value.shape == gold.shape == low.shape, "value", f"shape {list(gold.shape)}", list(value.shape))
    check(value.dtype == low.dtype, "value", f"dtype {low.dtype}, the dtype of `low`", value.dtype)
    finite = gold.isfinite()
    # if `low` is infinite where `gold` is finite, the budget would be infinite: the comparison fails instead
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


def compare_states(
    op: str,
    value: AttentionState,
    low: AttentionState,
    gold: AttentionState,
    relative: float = 0.0,
    lse_relative: float = LSE_RELATIVE,
) -> list[Parity]:
    """Compare the output and the LSE (log-sum-exp) of an attention state.

    Args:
        op: name of the op.
        value: the kernel's state.
        low: the reference's state in the kernel's dtype.
        gold: the reference's state in float64.
        relative: additional relative error that the budget of the output allows.
        lse_relative: additional relative error that the budget of the LSE allows. Kernels that compute with exp and
            log need less than the default.

    Returns:
        The comparisons of the output and of the LSE.
    """
    return [
        compare(f"{op}: out", value.out, low.out, gold.out, relative),
        compare(f"{op}: lse", value.lse, low.lse, gold.lse, relative=lse_relative),
    ]


def compare_exact(op: str, value: Tensor, expected: Tensor) -> Parity:
    """Compare two tensors bit by bit, including the bits of NaNs and the signs of zeros; the budget is zero.

    Raises:
        ValueError: shapes or dtypes differ.
    """
    check(value.shape == expected.shape, "value", f"shape {list(expected.shape)}", list(value.shape))
    check(value.dtype == expected.dtype, "value", f"dtype {expected.dtype}", value.dtype)
    same = torch.equal(*(x.contiguous().flatten().view(torch.uint8) for x in (value, expected)))
    error = (value.double() - expected.double()).abs().nan_to_num()
    return Parity(op, error.max().item() if error.numel() else 0.0, error.mean().item() if error.numel() else 0.0,
                  0.0, 0.0, same)  # fmt: skip
