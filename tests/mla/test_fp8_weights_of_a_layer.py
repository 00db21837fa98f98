"""Tests of the option `fp8_weights` of a layer: its absorbed weights are in e4m3, with one scale for each head."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import nn

import fast
import reference
from fast.parity import compare
from reference.interfaces import CommonAttentionMetadata

from ..support.factories import CONFIGS, assert_close64, assert_same_bits, linear, make_layer, make_weights, norm


def decode_step(ops):
    """Return the plan of a step with three decodes, whose contexts have 5, 1 and 11 tokens, and the positions."""
    table = torch.tensor([[0, 1, 2], [3, 9, 9], [4, 5, 6]], dtype=torch.int32)
    common = CommonAttentionMetadata.from_lens([1, 1, 1], [6, 2, 12], table, 4)
    return ops.build_mla_metadata(common, 4, 64), torch.tensor([5, 1, 11])


def run(ops, layer, config, dtype):
    """Return the output of one step of decodes, with the same random inputs in every call."""
    torch.manual_seed(3)
    plan, positions = decode_step(ops)
    hidden, cache = torch.randn(3, config.hidden_size).to(dtype), torch.randn(10, 4, config.head_size).to(dtype)
    return layer(hidden, positions, cache, plan)


def with_rounded_weights(config, weights):
    """Return the weights with a `kv_b_proj` of e4m3 numbers up to 448 and down to -448: all scales are then 1."""
    c, rounded = config, dict(weights)
    w = torch.randn(c.num_heads, c.qk_nope_head_dim + c.v_head_dim, c.kv_lora_rank).to(torch.float8_e4m3fn).double()
    w[:, 0, 0], w[:, -1, 0] = 448, -448
    return rounded | {"kv_b_proj": w.flatten(0, 1)}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_exact_weights(ops, config):
    """If e4m3 represents the weights exactly, decodes give the output of a layer with the original weights."""
    weights = with_rounded_weights(config, make_weights(config, torch.float64))
    plain, quantised = (make_layer(ops, config, weights, torch.float64, fp8_weights=each) for each in (False, True))
    assert plain.fp8_weights is None
    assert_same_bits(quantised.fp8_weights.w_uk_t.scale, torch.ones(config.num_heads))
    assert_close64(run(ops, quantised, config, torch.float64), run(ops, plain, config, torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_packages_agree(dtype):
    """The packages differ only by small rounding errors; a layer without `fp8_weights` gives other results."""
    config = CONFIGS["low-rank"]
    weights = {name: x.to(dtype).double() for name, x in make_weights(config, torch.float64).items()}
    gold_layer, low_layer = (make_layer(reference, config, weights, each, fp8_weights=True)
                             for each in (torch.float64, dtype))  # fmt: skip
    gold, low = (run(reference, layer, config, layer.o_proj.weight.dtype) for layer in (gold_layer, low_layer))
    found = run(fast, make_layer(fast, config, weights, dtype, fp8_weights=True), config, dtype)
    if dtype == torch.float32:  # `run` rounds its inputs to the dtype, so gold has the same inputs only in float32
        parity = compare("layer", found, low, gold.float().double())
        assert parity.max_error < 1e-2
    assert (found.float() - low.float()).abs().max() <= 2 * torch.finfo(dtype).eps ** 0.5 * low.float().abs().max()
    plain = run(reference, make_layer(reference, config, weights, dtype), config, dtype)
    assert (plain.float() - low.float()).abs().max() > 1e-3 * plain.float().abs().max()


def test_refresh(ops):
    """`refresh_weights` quantises a changed weight again, into the same memory; until then the old weight is used."""
    config = CONFIGS["direct"]
    weights = make_weights(config, torch.float32)
    layer = make_layer(ops, config, weights, torch.float32, fp8_weights=True)
    before, kept = run(ops, layer, config, torch.float32), layer.fp8_weights.w_uv
    with torch.no_grad():
        layer.kv_b_proj.weight.mul_(2)
    assert_same_bits(run(ops, layer, config, torch.float32), before)
    layer.refresh_weights()
    assert layer.fp8_weights.w_uv.values.data_ptr() == kept.values.data_ptr()
    doubled = make_layer(
        ops, config, weights | {"kv_b_proj": 2 * weights["kv_b_proj"]}, torch.float32, fp8_weights=True
    )
    assert_same_bits(run(ops, layer, config, torch.float32), run(ops, doubled, config, torch.float32))


class Half(nn.Module):
    """A linear module that stores half of its weight."""

    def __init__(self, weight):
        super().__init__()
        self.register_buffer("stored", weight / 2)

    def forward(self, x):
        return x @ (2 * self.stored).T


def test_a_module_that_is_no_linear(ops):
    """A weight that is recovered in inference mode is quantised, and can be refreshed outside inference mode."""
    config = CONFIGS["direct"]
    weights = make_weights(config, torch.float32)
    modules = {name: linear(w) if w.dim() == 2 else norm(w) for name, w in weights.items()}
    wanted = run(ops, ops.MLAAttention(config, **modules, fp8_weights=True), config, torch.float32)
    modules["kv_b_proj"] = Half(weights["kv_b_proj"])
    with torch.inference_mode():
        layer = ops.MLAAttention(config, **modules, fp8_weights=True)
    assert_same_bits(run(ops, layer, config, torch.float32), wanted)
    layer.refresh_weights()
    assert_same_bits(run(ops, layer, config, torch.float32), wanted)


def test_cast_and_copy(ops):
    """A cast of the layer keeps e4m3 values and float32 scales; a copy of the layer has weights of its own."""
    config = CONFIGS["direct"]
    layer = make_layer(ops, config, make_weights(config, torch.float32), torch.float32, fp8_weights=True)
    twin = copy.deepcopy(layer)
    before = run(ops, layer, config, torch.float32)
    layer.to(torch.bfloat16)
    kept = layer.fp8_weights.w_uk_t
    assert (kept.values.dtype, kept.scale.dtype) == (torch.float8_e4m3fn, torch.float32)
    assert run(ops, layer, config, torch.bfloat16).dtype == torch.bfloat16
    twin.fp8_weights.w_uv.scale.zero_()
    assert (layer.fp8_weights.w_uv.scale > 0).all()
    assert "fp8_weights.w_uv_values" not in layer.state_dict()
    with pytest.raises(ValueError, match="^w_uv.scale: expected a finite number above 0, got 0.0$"):
        run(ops, twin, config, torch.float32)
    assert before.isfinite().all()


def test_meta(ops):
    """A layer can be made on the device meta, and gets its weights later."""
    config = CONFIGS["direct"]
    weights = make_weights(config, torch.float32)
    with torch.device("meta"):
        modules = {name: nn.Linear(w.shape[1], w.shape[0], bias=False) if w.dim() == 2 else norm(torch.ones(w.shape))
                   for name, w in weights.items()}  # fmt: skip
        layer = ops.MLAAttention(config, **modules, fp8_weights=True)
    layer.to_empty(device="cpu")
    with torch.no_grad():
        for name, weight in weights.items():
            getattr(layer, name).weight.copy_(weight)
    layer.refresh_weights()
    wanted = make_layer(ops, config, weights, torch.float32, fp8_weights=True)
    assert_same_bits(run(ops, layer, config, torch.float32), run(ops, wanted, config, torch.float32))


def test_refusals(ops, plain_errors):
    config = CONFIGS["direct"]
    with pytest.raises(TypeError, match="^fp8_weights: expected True or False, got str$"):
        make_layer(ops, config, make_weights(config, torch.float32), torch.float32, fp8_weights="fp8_e4m3")


def test_a_backend_without_the_product():
    """If the named backend of a layer has no op `multiply_heads`, the layer uses another backend for this op."""
    config = CONFIGS["direct"]
    weights = make_weights(config, torch.float32)
    layers = [make_layer(fast, config, weights, torch.float32, fp8_weights=True, backend=backend)
              for backend in (None, "cpu", {"mla_decode": "cpu"})]  # fmt: skip
    outputs = [run(fast, layer, config, torch.float32) for layer in layers for _ in range(2)]
    for output in outputs[1:]:
        assert_same_bits(output, outputs[0])
    assert dataclasses.is_dataclass(layers[0].fp8_weights.w_uv)
