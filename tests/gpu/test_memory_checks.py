"""Tests of `tests.memory_checks` that need no GPU: the arguments of every sample fit the op."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode

from .. import memory_checks
from ..twins.test_ops import overload


@pytest.mark.filterwarnings("ignore")
def test_samples_fit_their_ops():
    """Call the fake implementation of every op with its samples -> the ops accept the arguments, in this order."""
    called = set()
    for name, arguments in memory_checks.samples(hopper=True, device="cpu"):
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            given = [mode.from_tensor(each) if isinstance(each, torch.Tensor) else each for each in arguments]
            overload(name)(*given)
        called |= {(name, each) for each in arguments if isinstance(each, str)}
    assert {("mla_twins::flash_attn_varlen", "hopper"), ("mla_twins::mla_decode", "fp8_product")} <= called
