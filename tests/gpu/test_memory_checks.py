"""Tests of the checks that run on a GPU; these tests need no GPU.

The arguments of every sample of `tests.memory_checks` fit the op, and decodes with other bits are described.
"""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode

from .. import memory_checks
from ..support.decode_inputs import differences
from ..support.triton_mode import DEVICE
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


def test_decodes_that_differ_are_described(capsys):
    """One row differs in the calls 2 and 4, and is NaN in call 2 -> all differing numbers, both calls, and this row."""
    first = torch.ones(3, 2, 4, dtype=torch.bfloat16, device=DEVICE), torch.zeros(2, 3, device=DEVICE)
    results = iter(range(6))

    def decode():
        number, out, lse = next(results), *(each.clone() for each in first)
        if number in (2, 4):
            out[1, 0], lse[0, 1] = (torch.nan if number == 2 else 3.0), 0.5
        return out, lse

    assert differences(decode, (), first, 6) == 10
    said = capsys.readouterr().out
    assert "2 of 6 calls differ: [2, 4]" in said and "[(1, 0, nan, 0.5)]" in said
