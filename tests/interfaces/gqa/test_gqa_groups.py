"""Tests of the parameters of each layer, of the groups of layers, and of the values that all layers must share."""

from __future__ import annotations

from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch

from reference.interfaces import (
    COMPUTE_FORMAT,
    FP8_DS_MLA,
    FP8_E4M3,
    UnsupportedConfiguration,
    infer_global_hyperparameters,
)
from reference.interfaces.gqa import (
    AttentionType,
    GQAConfig,
    GQAHyperparameters,
    LayerParameters,
    get_per_layer_parameters,
    group_layers,
)

from ...support.factories import DIRECT

FULL = GQAConfig(8, 2, 64)
WINDOW = replace(FULL, sliding_window=5)


class Layer(torch.nn.Module):
    """A layer with a config and a cache format."""

    def __init__(self, config, cache_format=COMPUTE_FORMAT):
        super().__init__()
        self.config, self.cache_format = config, cache_format


def test_parameters_of_each_layer():
    config = replace(FULL, sliding_window=7, logits_soft_cap=30.0, attention_sinks=True, scale=0.25)
    layers = {
        "a": Layer(config, FP8_E4M3),
        "b": torch.nn.Linear(2, 2),
        "c": Layer(replace(FULL, attention_chunk_size=32)),
    }
    found = get_per_layer_parameters(layers, Layer)
    assert list(found) == ["a", "c"]
    assert found["a"] == LayerParameters(7, 30.0, True, 0.25, None, FP8_E4M3)
    assert found["c"] == LayerParameters(None, None, False, 0.125, 32, COMPUTE_FORMAT)
    assert all(type(each) is LayerParameters for each in found.values())
    assert get_per_layer_parameters({"x": FULL}, GQAConfig) == {
        "x": LayerParameters(None, None, False, 0.125, None, COMPUTE_FORMAT)
    }


@pytest.mark.parametrize(
    "layers, kind, error, message",
    [
        ([FULL], GQAConfig, TypeError, "layers: expected a Mapping, got list"),
        ({"a": FULL}, "GQAConfig", TypeError, "kind: expected a class, got str"),
        ({3: FULL}, GQAConfig, TypeError, "layers: expected names of layers as keys, got int"),
        ({}, GQAConfig, ValueError, "layers: expected at least one GQAConfig, got none"),
        ({"a": FULL}, Layer, ValueError, "layers: expected at least one Layer, got none"),
        ({"a": Layer(DIRECT)}, Layer, ValueError,
         "layers: expected a GQAConfig, or a layer with a GQAConfig, at 'a', got Layer"),
        ({"a": Layer(FULL, FP8_DS_MLA)}, Layer, UnsupportedConfiguration,
         "cache_format: expected compute_dtype or fp8_e4m3 for a key/value cache, got fp8_ds_mla"),
        ({"a": Layer(FULL, "fp8_e4m3")}, Layer, TypeError, "cache_format: expected a CacheFormat, got str"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_parameters_refuse(layers, kind, error, message, plain_errors):
    with pytest.raises(error) as got:
        get_per_layer_parameters(layers, kind)
    assert str(got.value) == message


def check_groups(ops):
    """Group layers with equal and with different configs; the shared cache of a layer does not count."""
    shared = replace(WINDOW, kv_sharing_layer="0")
    layers = {"0": WINDOW, "1": Layer(FULL), "2": shared, "3": FULL, "4": replace(FULL, logits_soft_cap=5.0)}
    found = ops.group_layers(layers)
    assert list(found.items()) == [
        (WINDOW, ("0", "2")),
        (FULL, ("1", "3")),
        (replace(FULL, logits_soft_cap=5.0), ("4",)),
    ]
    assert list(ops.group_layers({"2": shared, "0": WINDOW}).items()) == [(WINDOW, ("2", "0"))]
    assert ops.group_layers({}) == {}


def check_a_field_makes_a_group(ops, change):
    """Group two layers that differ in one field."""
    found = ops.group_layers({"a": FULL, "b": replace(FULL, **change)})
    assert list(found.values()) == [("a",), ("b",)]


def test_groups(ops):
    """Layers with equal configs are one group, in order of first appearance."""
    check_groups(ops)


@pytest.mark.parametrize(
    "change",
    [dict(num_heads=4), dict(num_kv_heads=4), dict(head_dim=128), dict(scale=0.5), dict(sliding_window=6),
     dict(logits_soft_cap=2.0), dict(alibi_slopes=(0.5,) * 8), dict(attention_sinks=True),
     dict(attention_chunk_size=16), dict(attention_type=AttentionType.ENCODER)],
    ids=str,
)  # fmt: skip
def test_every_field_makes_a_group(ops, change):
    """Layers that differ in a field are two groups, and have no hyperparameters in common."""
    check_a_field_makes_a_group(ops, change)
    with pytest.raises(ValueError, match="^layers: expected .* of 'a' in all layers, got .* at 'b'$"):
        ops.infer_global_hyperparameters({"a": FULL, "b": replace(FULL, **change)})


def test_formats_of_a_group():
    """Layers of one group must have one cache format, because one plan is for one format; groups may differ."""
    layers = {"a": Layer(FULL), "b": Layer(WINDOW, FP8_E4M3), "c": Layer(FULL, FP8_E4M3)}
    wanted = "^layers: expected cache_format compute_dtype of 'a' in all layers of its group, got fp8_e4m3 at 'c'$"
    with pytest.raises(ValueError, match=wanted):
        group_layers(layers)
    del layers["c"]
    assert list(group_layers(layers).values()) == [("a",), ("b",)]


@pytest.mark.parametrize(
    "layers, error, message",
    [
        ([FULL], TypeError, "layers: expected a Mapping, got list"),
        ({3: FULL}, TypeError, "layers: expected names of layers as keys, got int"),
        ({"a": 3}, ValueError, "layers: expected a GQAConfig, or a layer with a GQAConfig, at 'a', got int"),
        ({"a": DIRECT}, ValueError, "layers: expected a GQAConfig, or a layer with a GQAConfig, at 'a', got MLAConfig"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_groups_refuse(layers, error, message, plain_errors):
    with pytest.raises(error) as got:
        group_layers(layers)
    assert str(got.value) == message


def test_fields_of_a_config_are_hyperparameters():
    """Every field of a config is a hyperparameter, except the name of a shared cache and the dim of the value heads.

    Value heads have the dim of the other heads.
    """
    names = {field.name for field in fields(GQAConfig)} - {"kv_sharing_layer", "v_head_dim", "scale"}
    assert {field.name for field in fields(GQAHyperparameters)} == names | {"softmax_scale", "cache_format"}


SHARED = replace(FULL, kv_sharing_layer="a")


@pytest.mark.parametrize(
    "layers, message",
    [
        ({"b": SHARED}, "a layer 'a', the kv_sharing_layer of 'b', got no such layer"),
        ({"A": FULL, "b": SHARED}, "a layer 'a', the kv_sharing_layer of 'b', got no such layer"),
        ({"a": SHARED}, "a cache of its own at 'a', the kv_sharing_layer of 'a', got kv_sharing_layer 'a'"),
        ({"c": FULL, "a": replace(FULL, kv_sharing_layer="c"), "b": SHARED},
         "a cache of its own at 'a', the kv_sharing_layer of 'b', got kv_sharing_layer 'c'"),
        ({"a": replace(FULL, num_kv_heads=4), "b": SHARED},
         "num_kv_heads 4 of 'a' at 'b', which reads its cache, got 2"),
        ({"a": FULL, "b": Layer(replace(SHARED, head_dim=32))},
         "head_dim 64 of 'a' at 'b', which reads its cache, got 32"),
        ({"b": Layer(SHARED, FP8_E4M3), "a": Layer(FULL)},
         "cache_format compute_dtype of 'a' at 'b', which reads its cache, got fp8_e4m3"),
        ({"a": replace(FULL, attention_type=AttentionType.CROSS), "b": SHARED},
         "attention_type cross of 'a' at 'b', which reads its cache, got decoder"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_shared_caches_refuse(layers, message, plain_errors):
    with pytest.raises(ValueError) as error:
        group_layers(layers)
    assert str(error.value) == f"layers: expected {message}"


def test_shared_caches():
    """A layer may differ from the layer whose cache it reads in what it attends; the order of layers is free."""
    layers = {"b": replace(SHARED, sliding_window=5, num_heads=4), "a": FULL, "c": Layer(SHARED)}
    assert list(group_layers(layers).values()) == [("b",), ("a", "c")]


# `infer_global_hyperparameters`, for this family.


def test_common_hyperparameters():
    layers = {"a": WINDOW, "b": Layer(replace(WINDOW, kv_sharing_layer="a")), "c": SimpleNamespace(config=WINDOW)}
    found = infer_global_hyperparameters(layers)
    assert found == GQAHyperparameters(5, None, False, 0.125, None, COMPUTE_FORMAT, 8, 2, 64, "decoder", None)
    assert infer_global_hyperparameters({"a": Layer(FULL, FP8_E4M3)}).cache_format is FP8_E4M3


@pytest.mark.parametrize(
    "change, field, wanted, got",
    [
        (dict(sliding_window=None), "sliding_window", 5, None),
        (dict(sliding_window=4), "sliding_window", 5, 4),
        (dict(logits_soft_cap=3.0), "logits_soft_cap", None, 3.0),
        (dict(attention_sinks=True), "attention_sinks", False, True),
        (dict(scale=0.5), "softmax_scale", 0.125, 0.5),
        (dict(attention_chunk_size=16), "attention_chunk_size", None, 16),
        (dict(num_heads=4), "num_heads", 8, 4),
        (dict(num_kv_heads=4), "num_kv_heads", 2, 4),
        (dict(head_dim=128, scale=0.125), "head_dim", 64, 128),
        (dict(attention_type=AttentionType.ENCODER), "attention_type", "decoder", "encoder"),
        (dict(alibi_slopes=(0.5,) * 8), "alibi_slopes", None, "(0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5)"),
    ],
    ids=str,
)
def test_a_layer_that_differs_is_named(change, field, wanted, got):
    layers = {"layers.0": WINDOW, "layers.1": WINDOW, "layers.2": Layer(replace(WINDOW, **change))}
    with pytest.raises(ValueError) as error:
        infer_global_hyperparameters(layers)
    message = f"layers: expected {field} {wanted} of 'layers.0' in all layers, got {got} at 'layers.2'"
    assert str(error.value) == message


def test_slopes_that_differ_are_named():
    """Layers that differ in their slopes alone are refused; the message has the begin of a long tuple."""
    slopes = tuple(0.5 / (head + 1) for head in range(32))
    layers = {name: GQAConfig(32, 8, 64, alibi_slopes=each) for name, each in
              (("layers.0", slopes), ("layers.1", slopes), ("layers.2", slopes[::-1]))}  # fmt: skip
    with pytest.raises(ValueError) as error:
        infer_global_hyperparameters(layers)
    assert str(error.value).startswith("layers: expected alibi_slopes (0.5, 0.25, 0.1666")
    assert "... of 'layers.0' in all layers, got (0.015625," in str(error.value)
    assert str(error.value).endswith("... at 'layers.2'") and len(str(error.value)) < 220
    del layers["layers.2"]
    assert infer_global_hyperparameters(layers).alibi_slopes == slopes


def test_a_format_that_differs_is_named():
    wanted = "^layers: expected cache_format compute_dtype of 'a' in all layers, got fp8_e4m3 at 'b'$"
    with pytest.raises(ValueError, match=wanted):
        infer_global_hyperparameters({"a": FULL, "b": Layer(FULL, FP8_E4M3)})


@pytest.mark.parametrize("first, second", [(FULL, DIRECT), (DIRECT, FULL)], ids=["GQA first", "MLA first"])
def test_mixed_families(first, second):
    names = {FULL: "GQAHyperparameters", DIRECT: "GlobalHyperparameters"}
    with pytest.raises(ValueError) as error:
        infer_global_hyperparameters({"a": first, "b": second})
    assert str(error.value) == (
        f"layers: expected {names[first]} of 'a' in all layers (one family), got {names[second]} at 'b'"
    )
