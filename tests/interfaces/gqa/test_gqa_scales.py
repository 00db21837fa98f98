"""Tests of scales with one element for each request and KV head, for kernels that take scales of this shape."""

from __future__ import annotations

import pytest
import torch

from reference.interfaces import FP8_E4M3, KVScale, QueryScale
from reference.interfaces.gqa import GQAConfig, expand_scale

CONFIG = GQAConfig(6, 2, 32)
ONE = torch.tensor(1.0)


@pytest.mark.parametrize("requests, heads", [(3, 2), (1, 1), (0, 2), (5, 8)])
def test_expanded_scales(requests, heads):
    """The result has the value of the scale everywhere and is its memory, so it shows each later value."""
    for scale in (KVScale(0.25), QueryScale(0.25, 6), QueryScale(torch.tensor([0.25]), 1)):
        found = expand_scale("k_scale", scale.value, requests, heads)
        assert found.shape == (requests, heads) and found.dtype is torch.float32 and found.stride() == (0, 0)
        assert found.data_ptr() == scale.value.data_ptr() or requests == 0
        assert found.untyped_storage().data_ptr() == scale.value.untyped_storage().data_ptr()
        assert found.tolist() == [[0.25] * heads] * requests
        scale.choose(0.5)
        assert found.tolist() == [[0.5] * heads] * requests


@pytest.mark.parametrize(
    "changed, error, message",
    [
        (dict(scale=None), TypeError, "k_scale: expected a tensor, got NoneType"),
        (dict(scale=0.5), TypeError, "k_scale: expected a tensor, got float"),
        (dict(scale=torch.ones(1)), ValueError, "k_scale: expected shape [], got [1]"),
        (dict(scale=torch.ones(6)), ValueError, "k_scale: expected shape [], got [6]"),
        (dict(scale=torch.ones(3, 2)), ValueError, "k_scale: expected shape [], got [3, 2]"),
        (dict(scale=ONE.double()), ValueError, "k_scale: expected dtype torch.float32, got torch.float64"),
        (dict(num_requests=-1), ValueError, "num_requests: expected an int >= 0, got -1"),
        (dict(num_requests=2.0), ValueError, "num_requests: expected an int >= 0, got 2.0"),
        (dict(num_kv_heads=0), ValueError, "num_kv_heads: expected a positive int, got 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_expanded_scales_refuse(changed, error, message, plain_errors):
    with pytest.raises(error) as got:
        expand_scale(**dict(argument="k_scale", scale=ONE, num_requests=3, num_kv_heads=2) | changed)
    assert str(got.value) == message


def test_descales_of_a_layer(ops, plain_errors):
    """A layer gives its three scales, each as its own buffer expanded to [B, Nkv]."""
    layer = ops.GQAAttention(CONFIG, FP8_E4M3, k_scale=0.5, v_scale=0.25, q_scale=0.125)
    found = layer.descales(4)
    for expanded, scale, value in zip(found, (layer.q_scale, layer.k_scale, layer.v_scale), (0.125, 0.5, 0.25),
                                      strict=True):  # fmt: skip
        assert expanded.tolist() == [[value] * 2] * 4 and expanded.stride() == (0, 0)
        assert expanded.data_ptr() == scale.value.data_ptr()
    converted = ops.GQAAttention(CONFIG, FP8_E4M3).descales(4)
    assert converted.q_descale is None
    assert converted.k_descale.tolist() == converted.v_descale.tolist() == [[1.0] * 2] * 4
    assert tuple(ops.GQAAttention(CONFIG).descales(4)) == (None, None, None)
    for each in (layer, ops.GQAAttention(CONFIG)):
        with pytest.raises(ValueError, match="^num_requests: expected an int >= 0, got -1$"):
            each.descales(-1)


def test_descales_of_a_rank(ops):
    """A rank's scales have the KV heads of its cache."""
    config = GQAConfig(24, 4, 32)

    def program(ranks):
        layer = ops.GQAAttention(config, FP8_E4M3, ranks, k_scale=0.5, v_scale=0.25)
        assert layer.local_config.num_kv_heads == 2
        found = layer.descales(3)
        return [tuple(scale.shape) for scale in (found.k_descale, found.v_descale)]

    assert ops.simulate(1, 1, program, 2) == [[(3, 2)] * 2] * 2
