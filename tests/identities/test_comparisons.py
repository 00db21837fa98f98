"""Tests of `assert_close64`, which most identities in float64 are checked with."""

from __future__ import annotations

import math

import pytest
import torch

from ..support.factories import assert_close64

WIDE = torch.tensor([1.0, -3.0, 1000.0], dtype=torch.float64)  # the largest value allows an error of 1e-9


def changed(position: int, value: float) -> torch.Tensor:
    tensor = WIDE.clone()
    tensor[position] = value
    return tensor


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -3.0 + 0.9e-9])
def test_equal_enough(value):
    other = -3.0 if math.isfinite(value) else value
    assert_close64(changed(1, value), changed(1, other))
    assert_close64(torch.zeros(0), torch.zeros(0))


@pytest.mark.parametrize("actual, expected", [
    (-3.0 + 1.1e-9, -3.0), (math.nan, -3.0), (-3.0, math.nan), (math.inf, -3.0), (-3.0, math.inf),
    (math.inf, -math.inf), (math.nan, math.inf), (math.inf, math.nan),
])  # fmt: skip
def test_different(actual, expected):
    """Change one element beyond the bound, or put NaN or infinity at one side only -> an error."""
    with pytest.raises(AssertionError):
        assert_close64(changed(1, actual), changed(1, expected))


def test_small_values_and_shapes():
    """Below 1 the bound is 1e-12; tensors of other shapes always differ."""
    assert_close64(torch.tensor([0.9e-12], dtype=torch.float64), torch.zeros(1, dtype=torch.float64))
    for actual in (torch.tensor([1.1e-12], dtype=torch.float64), torch.zeros(2, dtype=torch.float64)):
        with pytest.raises(AssertionError):
            assert_close64(actual, torch.zeros(1, dtype=torch.float64))
