"""Tests of the budget that the main job allows for an attention state."""

from __future__ import annotations

import math
from types import ModuleType

import pytest
import torch

from fast.demo.op_parity import Comparison, rounding_of_scores
from reference.interfaces import AttentionState


def state(factor, dtype=torch.float64):
    """Return a state with an LSE of 13; `factor` multiplies its output."""
    return AttentionState(torch.full((1, 2, 4), 0.5 * factor, dtype=dtype), torch.full((2, 1), 13.0, dtype=dtype))


def test_rounding_of_scores():
    """The largest finite |LSE| counts; a state without keys gives 0."""
    lse = torch.tensor([[3.0, -13.0, -math.inf]], dtype=torch.float64)
    eps = torch.finfo(torch.float32).eps
    assert rounding_of_scores(AttentionState(lse.T[..., None], lse), torch.float32) == 13 * eps
    empty = torch.full((1, 3), -math.inf)
    assert rounding_of_scores(AttentionState(empty.T[..., None], empty), torch.float32) == 0


@pytest.mark.parametrize("error, passed", [(5e-7, True), (1e-5, False)])
def test_a_state_within_its_budget(error, passed):
    """Scores near 13 may change an output by 1.6e-6 of its value -> a larger error fails."""
    ops, oracle = ModuleType("ops"), ModuleType("oracle")
    compared = Comparison(ops, oracle)
    compared.within_budget("decode", lambda module, x: state(1 + error * (module is ops), x.dtype), torch.zeros(1))
    assert compared.rows[0].passed is passed
