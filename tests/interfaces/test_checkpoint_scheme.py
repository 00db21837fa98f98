"""Tests of scales of checkpoints that were quantised for another scheme than e4m3 (8 bits) with one static scale."""

from __future__ import annotations

import copy
import enum
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from reference.interfaces import FP8_E4M3, ScaleSource
from reference.interfaces.gqa import checkpoint_key_value_scales

from ..support.format_caches import SMALL
from ..support.hf_modules import hf_module

E4M3 = dict(num_bits=8, type="float", strategy="tensor", dynamic=False, symmetric=True)  # compressed-tensors
PATH = "model.layers.0.self_attn"


class Kind(enum.StrEnum):
    """Kinds of numbers, as members of an enum like those of compressed-tensors."""

    FLOAT, INT = "float", "int"


class Saved:
    """A config object with `to_dict`, like those of transformers."""

    def __init__(self, **fields):
        self.fields = fields

    def to_dict(self):
        return self.fields


def scheme(**changes):
    """Return a `quantization_config` of compressed-tensors whose `kv_cache_scheme` is that of e4m3 with changes."""
    return {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": {**E4M3, **changes}}


def group(target, **changes):
    """Return a `quantization_config` of compressed-tensors with a scheme of the inputs of attention."""
    groups = {"group_0": {"targets": ["Linear"], "input_activations": dict(E4M3, type="int")},
              "group_1": {"targets": [target], "input_activations": {**E4M3, **changes}}}  # fmt: skip
    return {"quant_method": "compressed-tensors", "config_groups": groups, "kv_cache_scheme": None}


def quantised(config, **scales):
    """Return an attention module of a checkpoint with this `quantization_config` and these scales."""
    module = hf_module(SMALL, **scales)
    module.config.quantization_config = config
    return module


LEGAL = {
    "compressed-tensors": scheme(),
    "without a strategy": {"kv_cache_scheme": dict(num_bits=8, type="float", dynamic=False)},  # ModelOpt
    "enum": scheme(type=Kind.FLOAT),
    "object": Saved(quant_method="compressed-tensors", kv_cache_scheme=SimpleNamespace(**E4M3)),
    "AutoFP8": dict(quant_method="fp8", activation_scheme="static", kv_cache_scheme="static"),
    "no scheme": dict(quant_method="fp8", weight_block_size=[128, 128]),
    "scheme None": dict(quant_method="fbgemm_fp8", kv_cache_scheme=None),
    "weights of int8": {**scheme(), "config_groups": {"a": {"targets": ["Linear"], "weights": dict(E4M3, type="int")}}},
    "ModelOpt": dict(quant_method="modelopt", quant_algo="FP8", kv_cache_quant_algo="FP8"),
    "dtype": {"kv_cache_scheme": dict(dtype="fp8_e4m3")},
    "name": {"kv_cache_scheme": "torch.float8_e4m3fn"},
    "group": group("Attention"),
    "group in place of the scheme": {**group("Attention"), "kv_cache_scheme": dict(E4M3, type="int")},
    "projections by expression": group(r"re:.*self_attn.*", dynamic=True, strategy="token"),
    "all modules": group("re:.*", type="int"),
    "ignored": {**group("Attention", type="int"), "ignore": ["re:.*self_attn$"]},
    "auto": {"kv_cache_dtype": "auto", "kv_cache_quant_algo": "None"},
    "upper case": scheme(type="FLOAT", strategy="TENSOR"),
    "None": None,
}

REFUSED = {
    "int8": (scheme(type="int"), "type float in its scheme, got int"),
    "type left out": ({"kv_cache_scheme": dict(num_bits=8)}, "type float in its scheme, got int"),
    "int8 as enum": (scheme(type=Kind.INT), "type float in its scheme, got int"),
    "int8 of an object": (Saved(kv_cache_scheme=SimpleNamespace(**{**E4M3, "type": "int"})),
                          "type float in its scheme, got int"),
    "fp4": (scheme(num_bits=4, strategy="tensor_group", group_size=16), "num_bits 8 in its scheme, got 4"),
    "channel": (scheme(strategy="channel"), "strategy tensor in its scheme, got channel"),
    "head": (scheme(strategy="attn_head"), "strategy tensor in its scheme, got attn_head"),
    "token": (scheme(strategy="token"), "strategy tensor in its scheme, got token"),
    "group size": (scheme(strategy=None, group_size=128), "group_size None in its scheme, got 128"),
    "asymmetric": (scheme(symmetric=False), "symmetric True in its scheme, got False"),
    "dynamic": (scheme(dynamic=True), "dynamic False in its scheme, got True"),
    "locally dynamic": (scheme(dynamic="local"), "dynamic False in its scheme, got local"),
    "e5m2": (scheme(dtype="fp8_e5m2"), "dtype fp8_e4m3, got fp8_e5m2"),
    "FNUZ": (scheme(dtype=torch.float8_e4m3fnuz), "dtype fp8_e4m3, got torch.float8_e4m3fnuz"),
    "named FNUZ": ({"kv_cache_scheme": "float8_e4m3fnuz"}, "kv_cache_scheme fp8_e4m3, got float8_e4m3fnuz"),
    "e5m2 of FNUZ": ({"kv_cache_dtype": "fp8_e5m2fnuz"}, "kv_cache_dtype fp8_e4m3, got fp8_e5m2fnuz"),
    "named e5m2": ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype fp8_e4m3, got fp8_e5m2"),
    "NVFP4 of ModelOpt": ({"kv_cache_quant_algo": "NVFP4"}, "kv_cache_quant_algo fp8_e4m3, got NVFP4"),
    "INT8 of ModelOpt": ({"quantization": {"kv_cache_quant_algo": "INT8"}}, "kv_cache_quant_algo fp8_e4m3, got INT8"),
    "dynamic in a word": ({"kv_cache_scheme": "dynamic"}, "kv_cache_scheme fp8_e4m3, got dynamic"),
    "no mapping": ({"kv_cache_scheme": 8}, "a mapping as its scheme, got int"),
    "group": (group("Attention", type="int"), "type float in its scheme, got int"),
    "group after a group of weights": (
        {"config_groups": {"a": {"targets": ["Attention"]}, **group("Attention", type="int")["config_groups"]}},
        "type float in its scheme, got int",
    ),
    "group against the scheme": ({**group("Attention", type="int"), "kv_cache_scheme": E4M3},
                                 "type float in its scheme, got int"),
    "group by name": (group(PATH, num_bits=4), "num_bits 8 in its scheme, got 4"),
    "group by expression": (group(r"re:.*self_attn$", dynamic=True), "dynamic False in its scheme, got True"),
}  # fmt: skip


@pytest.mark.parametrize("case", LEGAL)
def test_schemes_of_e4m3(ops, case):
    """A layer takes the scales of a checkpoint that was quantised for e4m3 with static scales."""
    module = quantised(LEGAL[case], k_scale=0.5, q_scale=0.25)
    layer = ops.MLAAttention.from_hf(module, cache_format=FP8_E4M3, fp8_mode="fp8_query")
    for scale, number in ((layer.kv_scale, 0.5), (layer.q_scale, 0.25)):
        assert scale.value.item() == number and scale.source is ScaleSource.CHECKPOINT
    module.v_scale = 2.0
    assert checkpoint_key_value_scales(module) == (0.5, 2.0)


@pytest.mark.parametrize("name", ["k_scale", "kv_scale"])
@pytest.mark.parametrize("case", REFUSED)
def test_other_schemes(ops, case, name, plain_errors):
    """The scale of a checkpoint for another scheme is refused; a scale from an argument is legal."""
    config, message = REFUSED[case]
    module = quantised(config, **{name: 0.5})
    wanted = f"{name}: expected a scale of a checkpoint with {message}"
    for read in (lambda: ops.MLAAttention.from_hf(module, cache_format=FP8_E4M3),
                 lambda: checkpoint_key_value_scales(module)):  # fmt: skip
        with pytest.raises(ValueError) as caught:
            read()
        assert str(caught.value) == wanted
    layer = ops.MLAAttention.from_hf(module, cache_format=FP8_E4M3, kv_scale=2.0)
    assert layer.kv_scale.source is ScaleSource.ARGUMENT
    assert ops.MLAAttention.from_hf(module).kv_scale is None
    assert ops.MLAAttention.from_hf(quantised(config), cache_format=FP8_E4M3).kv_scale.source is None


def test_queries(ops, plain_errors):
    """The scheme of the inputs of attention belongs to the queries; their scales may be one for each head."""
    options = dict(cache_format=FP8_E4M3, fp8_mode="fp8_query")
    both = {**group("Attention", type="int"), "kv_cache_scheme": E4M3}
    for config, message in ((both, "type float in its scheme, got int"),
                            (scheme(num_bits=4), "num_bits 8 in its scheme, got 4"),
                            (scheme(strategy="channel"), "strategy tensor in its scheme, got channel"),
                            ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype fp8_e4m3, got fp8_e5m2")):  # fmt: skip
        with pytest.raises(ValueError, match=f"^q_scale: expected a scale of a checkpoint with {message}$"):
            ops.MLAAttention.from_hf(quantised(config, q_scale=0.5), kv_scale=1.0, **options)
    heads = torch.arange(1.0, SMALL.num_heads + 1)
    by_head = {**group("Attention", strategy="attn_head"), "kv_cache_scheme": E4M3}
    module = quantised(by_head, q_scale=heads[:, None, None])
    assert torch.equal(ops.MLAAttention.from_hf(module, kv_scale=1.0, **options).q_scale.value, heads)


def test_illegal_expression(ops, plain_errors):
    module = quantised(group("re:*("), k_scale=0.5)
    with pytest.raises(ValueError, match=r"^k_scale: expected legal expressions in config_groups, got 're:\*\(': "):
        ops.MLAAttention.from_hf(module, cache_format=FP8_E4M3)


def test_a_scale_that_is_not_used():
    """A module has a `k_scale` and a `v_scale` -> an illegal `kv_scale` is not read."""
    module = quantised(scheme(), k_scale=0.5, v_scale=2.0, kv_scale=0.0)
    assert checkpoint_key_value_scales(module) == (0.5, 2.0)


SIZES = {
    "empty": (torch.empty(0), "one scale for each layer, got shape [0]"),
    "heads": (torch.ones(2), "one scale for each layer, got shape [2]"),
    "channels": (torch.ones(1, 8), "one scale for each layer, got shape [1, 8]"),
    "integers": (torch.ones(1, dtype=torch.int8), "dtype "),
    "on meta": (torch.ones(1, device="meta"), "a tensor "),
    "zero": (0.0, "a finite number above 0, got 0.0"),
}


@pytest.mark.parametrize("name", ["k_scale", "v_scale", "kv_scale"])
@pytest.mark.parametrize("case", SIZES)
def test_bad_scales(ops, case, name, plain_errors):
    """A scale of a checkpoint with no element, with several elements or without a valid number is refused."""
    value, message = SIZES[case]
    reads = [lambda: checkpoint_key_value_scales(module)]
    module = quantised(scheme(), **{name: value})
    if name != "v_scale":
        reads.append(lambda: ops.MLAAttention.from_hf(module, cache_format=FP8_E4M3))
    for read in reads:
        with pytest.raises(ValueError) as caught:
            read()
        assert str(caught.value).startswith(f"{name}: expected {message}") and "\n" not in str(caught.value)


@pytest.mark.parametrize("shape", [(0,), (SMALL.num_heads + 1,), (1, SMALL.num_heads)], ids=str)
def test_bad_scales_of_queries(ops, shape, plain_errors):
    module = quantised(scheme(), q_scale=torch.ones(shape), k_scale=1.0)
    with pytest.raises(ValueError, match=r"^q_scale: expected .*, got "):
        ops.MLAAttention.from_hf(module, cache_format=FP8_E4M3, fp8_mode="fp8_query")


@pytest.mark.parametrize("family", ["mla", "gqa"])
def test_models_stay_unchanged(ops, family, plain_errors):
    """Serve a model of transformers whose scales were made for int8 -> an error, and the model is unchanged."""
    pytest.importorskip("transformers", reason="the integration runs transformers models")
    from fast.integrations.transformers import use_attention, use_mla

    if family == "mla":
        from ..support.transformers_models import attributes, build

        model, serve = build("v3-yarn"), use_mla
    else:
        from ..support.gqa_models import attributes, stock

        model, serve = copy.deepcopy(stock("llama")), use_attention
    model.config.quantization_config = scheme(type="int")
    for layer in model.model.layers:
        layer.self_attn.register_parameter("k_scale", nn.Parameter(torch.tensor([0.5]), requires_grad=False))
    before = attributes(model)
    with pytest.raises(ValueError, match="^k_scale: expected a scale of a checkpoint with type float in its scheme"):
        serve(model, ops=ops, cache_format="fp8_e4m3")
    assert attributes(model) == before
