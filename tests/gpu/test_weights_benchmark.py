"""Tests of the counts and errors of the benchmark of quantised weights. The tests measure no times and need no GPU."""

from __future__ import annotations

import pytest
import torch

from ..benchmarks import weights


def test_weights_counts():
    """Count the work of products with 128 heads -> the numbers computed by hand.

    W_UK and W_UV each have 128 * 128 * 512 numbers: 16.8 MB in bfloat16. `kv_b_proj` has twice as many numbers.
    """
    row = weights.Row("query_to_latent", 16, 128)
    assert row.flops == 2 * 16 * 8_388_608
    assert row.bytes_with(2, 0) == 16_777_216 + 2 * 16 * 128 * (128 + 512)
    assert row.bytes_with(1, 512) == row.bytes_with(2, 0) - 8_388_608 + 512
    assert weights.Row("latent_to_value", 16, 128).bytes_with(1, 512) == row.bytes_with(1, 512)
    expansion = weights.Row("expand_kv", 512, 128)
    assert expansion.bytes_with(2, 0) == 2 * 512 * 512 + 2 * 512 * 128 * 256 + 33_554_432
    assert expansion.flops == 2 * 512 * 512 * 128 * 256


@pytest.mark.parametrize("op", weights.OPS)
def test_weights_errors(op):
    """Check a row -> bfloat16 has a far smaller error than e4m3; outputs shifted by one head fail the check."""
    case = weights.make_case(weights.Row(op, 19, 3), None, "cpu", device="cpu")
    for contender in case.contenders.values():
        who, output = contender.view(contender.calls[0]())
        assert all(parity.passed for parity in case.check((who, output)))
        right = case.figures["errors"][who]
        assert not all(parity.passed for parity in case.check((who, output.roll(1, dims=1))))
        assert case.figures["errors"][who] > 1  # the outputs of another head are independent numbers
        case.figures["errors"][who] = right
    errors = case.figures["errors"]
    assert set(errors) == set(case.contenders) == set(case.figures["contender_bytes"])
    coarse = [weights.ROUNDING] if op == weights.EXPANSION else [weights.PER_HEAD, weights.ONE_SCALE]
    assert all(4 * errors["fast"] < errors[who] < 2**-4 for who in coarse)
    held = case.figures["held_bytes"]
    assert held["fast"] > 1.9 * held[coarse[0]]


def test_errors_of_scales(monkeypatch):
    """Give one head larger weights -> one scale for all heads loses digits of other heads; a scale per head does not.

    The benchmark measures the weights of a random layer, then the weights of every layer of the checkpoint tiny-mla.
    """
    names = [name for name, _ in weights.absorbed_weights()]
    assert names[0] == "random, query_to_latent" and names[2] == "tiny-mla, layers.0, query_to_latent"
    assert len(names) == len(set(names)) == 2 + 2 * 6
    weight = torch.randn(4, 16, 32)
    weight[2] *= 1e5
    monkeypatch.setattr(weights, "absorbed_weights", lambda: iter([("unequal", weight)]))
    (row,) = weights.scale_errors()["scales"]
    one, each = row["one scale"], row["one for each head"]
    assert (row["weight"], row["N"]) == ("unequal", 4)
    assert one["worst head"] > 0.1 > 2**-4 > each["worst head"] and one["all"] < 2**-4
